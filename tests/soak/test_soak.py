"""The soak's own harness at its smallest: two kills of SFT, with everything that has a state; moments that exist."""

import importlib
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import compare  # noqa: E402
import moments  # noqa: E402


@pytest.mark.timeout(600)
def test_two_kills_pass_and_a_difference_would_be_seen(tmp_path):
    command = [
        sys.executable,
        str(HERE / "soak.py"),
        "sft",
        "--kills",
        "2",
        "--seed",
        "3",
        "--keep",
        str(tmp_path / "s"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "2 passed, 0 failed", done.stdout
    reference, run, last = tmp_path / "s" / "sft-full-reference", tmp_path / "s" / "sft-full-killed", 8
    assert compare.whole(reference, run, last) == []
    for record in (run / "ledger").glob("attempt_*.jsonl"):
        record.write_text(record.read_text().replace('"samples":["', '"samples":["x'))
    assert compare.whole(reference, run, last) == ["ledger of samples"]
    shutil.copy(
        reference / "checkpoints" / f"step_{last - 2}" / "COMPLETE", run / "checkpoints" / f"step_{last}" / "COMPLETE"
    )
    assert "ledger" in compare.differences(reference, run, last)


@pytest.mark.parametrize("name", ["sft", "rl"])
def test_every_moment_is_a_function_that_is_there(name):
    found = importlib.import_module(name).MOMENTS
    assert {"forward", "save", "publish", "evaluation", "export"} <= {moment.kind for moment in found}
    for moment in found:
        module, _, attribute = moment.target.partition(":")
        place = importlib.import_module(module)
        for part in attribute.split("."):
            place = getattr(place, part)
        assert callable(place)
        kill = moment.draw(random.Random(1))
        assert 1 <= kill.call <= moment.calls and 0 <= kill.delay <= moment.seconds


def test_a_process_kills_itself_and_what_bears_its_mark(tmp_path):
    kill = moments.Kill("forward", "json.encoder:JSONEncoder.encode", 2, 0.0)
    code = "import json, time\nfor n in range(9): json.JSONEncoder().encode([n]); print(n, flush=True); time.sleep(0.2)"
    env = moments.environment(kill, "soak-test-mark")
    done = subprocess.run([sys.executable, "-c", code], env={"PATH": "/usr/bin", **env}, capture_output=True, text=True)
    assert done.returncode == -9 and done.stdout.split() == ["0", "1"]
    assert moments.members("soak-test-mark") == []
