"""docs/algorithms.md, "A new algorithm": its file and its line, taken from the page, in a copy of the package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECK = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from conftest import episode, simple
from rlmake.algorithms import AlgorithmContext, Endpoint, build
from rlmake.config import OrchestratorConfig, parse
from rlmake.core.errors import ConfigError

source = {{"env": {{"taskset": {{"id": "reverse-text"}}}}}}
def config(name):
    train = {{"algo": {{"type": name}}, "group_size": 2, "source": [source]}}
    return parse(OrchestratorConfig, {{"train": train, "batch_size": 8, "renderer": {{"name": "qwen3"}}}})

algo = config("rloo").train.source[0].algo
instance = build(algo, AlgorithmContext("env", Endpoint("http://127.0.0.1:9/v1", "m"), ""))
episodes = [episode(simple(reward, 1)) for reward in (1.0, 0.0, 0.5)]
asyncio.run(instance.finish(episodes))
assert [e.traces[0].nodes[1].advantages for e in episodes] == [[0.75], [-0.75], [0.0]]
try:
    config("rlooo")
except ConfigError as error:
    assert "did you mean 'rloo'?" in str(error), error
print("works")
"""


def test_the_page_s_file_and_line_are_all_it_takes(tmp_path):
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    file, line = re.findall(r"```(?:python)?\n(.*?)```", page.partition("## A new algorithm")[2], re.DOTALL)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    package = tmp_path / "src" / "rlmake"
    (package / "algorithms" / "rloo.py").write_text(file, encoding="utf-8")
    registry = package / "config" / "algo.py"
    text = registry.read_text(encoding="utf-8")
    end = text.index("\n)\nAlgo = ") + 1
    registry.write_text(text[:end] + line + text[end:], encoding="utf-8")
    command = [sys.executable, "-c", CHECK.format(tests=str(ROOT / "tests" / "algorithms"))]
    env = {"PYTHONPATH": str(tmp_path / "src"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == "works\n", done.stderr[-3000:]
    linted = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"),
         str(package / "algorithms"), str(registry)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert linted.returncode == 0, linted.stdout
