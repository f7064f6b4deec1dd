"""The tables of docs/configuration.md are those of the schema, and `--help` says the same at once."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from config_samples import SAMPLES, schema

from rlmake.config.describe import help_text, sections
from rlmake.config.docs import MARKER, page
from rlmake.core.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run: python -m rlmake.config.docs docs/configuration.md"


def test_a_page_without_a_marker_is_refused():
    with pytest.raises(UserError, match="has no line"):
        page("prose")
    assert page(f"prose\n{MARKER}\nold").startswith(f"prose\n{MARKER}\n")


@pytest.mark.parametrize("name", SAMPLES)
def test_help_names_every_key(name):
    text = help_text(schema(name), "x")
    for section in sections(schema(name)):
        for row in section.rows:
            if row.key != "type":
                assert f"--{section.path}.{row.key}".replace("--.", "--").replace("_", "-") + " " in text


@pytest.mark.parametrize("name", ["RLConfig", "SFTConfig", "InferenceConfig", "EvalConfig", "TrainerConfig"])
@pytest.mark.parametrize("argv", [["--help"], ["--no-such-key", "1"]], ids=["help", "error"])
def test_help_and_errors_come_within_a_second_and_without_torch(name, argv):
    code = (
        "import sys\n"
        f"from rlmake.config import parse_argv, {name}\n"
        "from rlmake.core.errors import ConfigError\n"
        f"try: parse_argv({name}, {argv!r})\n"
        "except (ConfigError, SystemExit): pass\n"
        "bad = set('torch transformers datasets verifiers renderers snakemake vllm'.split()) & set(sys.modules)\n"
        "assert not bad, bad"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < 1.0, f"{spent:.2f} s of processor time"
