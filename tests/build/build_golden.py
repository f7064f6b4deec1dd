"""Writes golden.json: `python tests/build/build_golden.py`. Only when identities are meant to change for everybody."""

import json
import os
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("golden.json")


def identities() -> dict[str, str]:
    """Fingerprints of every run, evaluation and report of the toy project (build_toys.FILES)."""
    sys.path.insert(0, str(Path(__file__).parent))
    from build_toys import FILES

    from rlmake.build.experiments import load
    from rlmake.build.registry import Registry

    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, text in FILES.items():
                path = Path("experiments") / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            Path("rows.jsonl").write_text('{"prompt": "abc", "completion": "cba"}\n')
            registry = Registry(load())  # without a look at the rows: those of the first day are no tasks
            found = {name: registry.work(name).fingerprint for name in registry.runs}
            found |= {f"{name} evals": registry.evaluation("held", name).fingerprint for name in ("t/sft", "t/rl")}
            found |= {f"{name} report": registry.reports.of_run(name).fingerprint for name in ("t/sft", "t/rl")}
        finally:
            os.chdir(before)
    return found


def keys() -> dict[str, list[str]]:
    """Semantic keys of every kind's schema."""
    from rlmake.build.experiments import CLASSES
    from rlmake.config import EvalConfig, classify

    schemas = {**CLASSES, "eval": EvalConfig}
    return {
        kind: sorted(key for key, sort in classify(cls).items() if sort == "semantic") for kind, cls in schemas.items()
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps({"fingerprints": identities(), "keys": keys()}, indent=1, sort_keys=True) + "\n")
    print(FILE)
