"""What is put off at import is whole once it is asked for; the light tokenizer is the general one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_unused_packages_stay_unloaded_until_asked_for():
    out = run(
        "import sys, rlmake.envs\n"
        "import verifiers.v1 as vf\n"
        "print('sympy' in sys.modules, 'torch' in sys.modules, 'anthropic.resources' in sys.modules)\n"
        "from verifiers.v1.utils import score\n"
        "print(score.verify(score.parse('$1/2$'), score.parse('$0.5$')), 'sympy' in sys.modules)\n"
        "import anthropic, math_verify\n"
        "from anthropic import AsyncAnthropic\n"
        "print(AsyncAnthropic.__name__, anthropic.types.ToolUseBlock.__name__, math_verify.parse.__module__)\n"
        "print(hasattr(anthropic, 'nothing_of_the_kind'))\n"
    )
    first, second, third, fourth = out.splitlines()
    assert first == "False False False"
    assert second == "True True"
    assert third.split()[:2] == ["AsyncAnthropic", "ToolUseBlock"] and third.split()[2].startswith("math_verify")
    assert fourth == "False"


def test_a_plain_tokenizer_is_read_alike_and_without_transformers(tokenizer_dir):
    """Ids, text, offsets and what renderers make of them equal those of transformers' tokenizer."""
    script = str(Path(__file__).with_name("compare_tokenizers.py"))
    done = subprocess.run(
        [sys.executable, script, tokenizer_dir], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["equal"], done.stderr[-2000:]


LOGS = """
import logging, sys
from rlmake.envs import plugins
plugins.start_worker(*sys.argv[1:])
log = logging.getLogger("verifiers.v1.rollout")
log.info("rollout start: id=%s", 1)
log.info("rollout done: id=%s", 1)
log.info("rollout %s: %s timeout", 1, "setup")
"""


@pytest.mark.parametrize(("asked", "count"), [((), 1), (("info",), 3), (("warning",), 0)])
def test_each_rollout_is_logged_only_when_asked_for(asked, count):
    environ = {key: value for key, value in os.environ.items() if key != "PRIME_VF_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", LOGS, *asked], env=environ, stdout=subprocess.PIPE, text=True, check=True
    )
    assert len([line for line in done.stdout.splitlines() if "verifiers.v1.rollout" in line]) == count
