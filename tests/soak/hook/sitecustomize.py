"""Python imports this at its start: a process of a soak run learns here when it is to be killed."""

import json
import os
import sys

if plan := os.environ.get("RLMAKE_SOAK_KILL"):
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    import moments

    moments.install(moments.Kill(**json.loads(plan)))
