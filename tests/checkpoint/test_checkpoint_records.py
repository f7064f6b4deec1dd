"""Halves, COMPLETE, damage, retention, and what a resume takes away (fault cases C01, C03, C10)."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from loguru import logger

from rlmake import checkpoint as ck
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import canonical, hash_bytes
from rlmake.core.rundir import RunContext, step_dir

HALVES = ("trainer", "orchestrator")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def lines():
    """Log lines of the test, `LEVEL message`."""
    out: list[str] = []
    handle = logger.add(lambda message: out.append(message.strip()), format="{level} {message}", level="INFO")
    yield out
    logger.remove(handle)


def half(run: Path, step: int, name: str, text: str = "x" * 1000) -> None:
    with ck.writing(step_dir(run, step), name) as folder:
        (folder / "state.json").write_text(json.dumps({"step": step, "text": text}))
        (folder / "sub").mkdir()
        (folder / "sub" / "data.bin").write_bytes(text.encode())


def save(run: Path, step: int, halves=HALVES, text: str = "x" * 1000) -> Path:
    for name in halves:
        half(run, step, name, text)
    ck.publish(run, step, halves, policy_version=step, world_size=1, ledger="ab" * 32, ctx=RunContext.from_env(run))
    return step_dir(run, step)


def test_record_names_every_file_of_both_halves(run):
    folder = save(run, 3)
    record = json.loads((folder / "COMPLETE").read_text())
    assert {file["path"] for file in record["files"]} == {
        f"{name}/{file}" for name in HALVES for file in ("state.json", "sub/data.bin")
    }
    assert {file["half"] for file in record["files"]} == set(HALVES)
    keys = {"schema", "run_id", "fingerprint", "step", "policy_version", "attempt", "world_size", "files", "ledger"}
    assert record.keys() >= keys
    assert (record["step"], record["policy_version"], record["attempt"]) == (3, 3, 1)
    assert ck.verify(folder) == [] and ck.newest(run) == 3 and not list(folder.glob("*.tmp-*"))


def test_publish_waits_for_the_other_half(run):
    half(run, 2, "trainer")
    thread = threading.Timer(0.2, half, (run, 2, "orchestrator"))
    thread.start()
    ctx = RunContext.from_env(run)
    ck.publish(run, 2, HALVES, policy_version=2, world_size=1, ledger=None, ctx=ctx, timeout=20)
    thread.join()
    assert ck.newest(run) == 2


def test_publish_names_the_half_that_is_missing(run):
    half(run, 2, "trainer")
    ctx = RunContext.from_env(run)
    with pytest.raises(RunFailed, match=r"step_2: not complete.*orchestrator half \(orchestrator.json\)$"):
        ck.publish(run, 2, HALVES, policy_version=2, world_size=1, ledger=None, ctx=ctx, timeout=0.1)
    assert ck.steps(run) == [] and ck.newest(run) is None


def truncate(path: Path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["trainer/sub/data.bin", "orchestrator/state.json", "COMPLETE"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damaged_is_skipped_with_one_line_that_names_the_file(run, lines, name, damage):
    save(run, 10)
    save(run, 20)
    damage(step_dir(run, 20) / name)
    assert ck.newest(run) == 10
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 1 and f"step_20/{name}" in warnings[0] and "skipped" in warnings[0]
    with pytest.raises(UserError, match=f"step_20/{name}"):
        ck.resume_point(run, step=20)
    assert ck.resume_point(run) == step_dir(run, 10)


def test_a_launch_that_looks_twice_warns_once(run, lines):
    """A look at names and sizes comes before anything is started, the reading of every byte follows."""

    def warnings() -> list[str]:
        return [line for line in lines if line.startswith("WARNING")]

    for step in (10, 20):
        save(run, step)
    (step_dir(run, 20) / "trainer" / "state.json").unlink()
    assert ck.resume_point(run, hashes=False) == step_dir(run, 10) and not warnings()
    assert ck.resume_point(run) == step_dir(run, 10) and len(warnings()) == 1
    truncate(step_dir(run, 10) / "trainer" / "state.json")
    with pytest.raises(UserError, match="no complete checkpoint"):
        ck.resume_point(run, hashes=False)
    assert len(warnings()) == 3 and "step_20" in warnings()[1] and "step_10" in warnings()[2]


def test_what_verify_took_back_is_said_to_be_damaged(run, lines):
    """Not that it was never finished."""
    for step in (1, 2):
        save(run, step)
    os.rename(step_dir(run, 2) / "COMPLETE", step_dir(run, 2) / "COMPLETE.damaged")  # as rlmake.build.store does
    assert ck.newest(run) == 1 and "found damaged by `rlmake verify`" in lines[-1]
    ck.prune_future(run, 1)
    assert lines[-1] == "INFO damaged, removed: checkpoints/step_2"


def test_every_bit_of_the_record_counts(run):
    path = save(run, 1) / "COMPLETE"
    record = json.loads(path.read_text())
    record["policy_version"] = 7
    path.write_text(json.dumps(record))
    assert ck.verify(path.parent) and ck.newest(run) is None
    del record["checksum"]
    for files in (record["files"], [], None):
        path.write_text(json.dumps(record | {"files": files}))
        assert "not a checkpoint record" in ck.verify(path.parent)[0]


def test_sizes_only_is_cheap_and_blind_to_flips(run):
    folder = save(run, 1)
    flip(folder / "trainer" / "sub" / "data.bin")
    assert ck.verify(folder, hashes=False) == [] and len(ck.verify(folder)) == 1


def test_files_outside_are_refused(run):
    folder = save(run, 1)
    record = json.loads((folder / "COMPLETE").read_text())
    del record["checksum"]
    record["files"][0]["path"] = "../../../etc/passwd"
    record["checksum"] = hash_bytes(canonical(record))
    (folder / "COMPLETE").write_text(json.dumps(record))
    assert "outside" in ck.verify(folder)[0]


def test_a_copied_folder_under_another_number_is_not_that_step(run):
    shutil.copytree(save(run, 1), step_dir(run, 9))
    assert ck.newest(run) == 1


def test_newest_upto_and_numeric_order(run):
    for step in (9, 90, 100):
        save(run, step)
    assert ck.steps(run) == [9, 90, 100] and ck.newest(run) == 100
    assert ck.newest(run, upto=99) == 90 and ck.newest(run, upto=8) is None


def test_rewriting_a_half_takes_complete_back(run):
    folder = save(run, 4)
    half(run, 4, "trainer", "new")
    assert ck.steps(run) == [] and (folder / "trainer" / "sub" / "data.bin").read_text() == "new"


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ({"keep_last": 2}, [90, 100]),
        ({"keep_last": 1}, [100]),
        ({"keep_last": 2, "keep_interval": 50}, [50, 90, 100]),
        ({"keep_interval": 50}, [50, 100]),
        ({}, [9, 10, 50, 90, 100]),
        ({"keep_last": 1, "protect": [10]}, [10, 100]),
    ],
)
def test_retention_by_number(run, rule, left):
    for step in (100, 9, 90, 50, 10):
        save(run, step)
    ck.retain(run, **rule)
    assert ck.steps(run) == left and not list((run / "checkpoints").glob(".*"))


def test_a_step_that_a_target_names_stays(run):
    for step in (10, 20, 30):
        save(run, step)
    (run / "manifests").mkdir()
    (run / "manifests" / "done_10.json").write_text("{}")
    assert ck.retain(run, keep_last=1) == [20] and ck.steps(run) == [10, 30]


@pytest.mark.parametrize("rule", [{"keep_last": 0}, {"keep_last": -1}, {"keep_interval": 0}])
def test_zero_and_negative_are_refused_and_delete_nothing(run, rule):
    save(run, 1)
    save(run, 2)
    with pytest.raises(UserError, match="at least 1"):
        ck.retain(run, **rule)
    assert ck.steps(run) == [1, 2]


def test_the_last_whole_one_stays_when_the_newest_is_damaged(run):
    for step in (1, 2, 3):
        save(run, step)
    truncate(step_dir(run, 3) / "trainer" / "state.json")
    ck.retain(run, keep_last=1)
    assert ck.steps(run) == [2, 3] and ck.newest(run) == 2


def test_a_living_reader_holds_a_checkpoint_a_dead_one_does_not(run):
    for step in (1, 2, 3):
        save(run, step)
    code = "import sys,time\nfrom pathlib import Path\nfrom rlmake.checkpoint import reading\n"
    code += "with reading(Path(sys.argv[1])):\n print('held', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code, str(step_dir(run, 2))], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"held\n"
        with ck.reading(step_dir(run, 1)):
            assert ck.retain(run, keep_last=1) == []
        assert ck.retain(run, keep_last=1) == [1]
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert ck.retain(run, keep_last=1) == [2]


def test_full_disk_frees_its_own_half_and_says_so(run):
    save(run, 1)
    with pytest.raises(RunFailed, match=r"step_2: no space left.*trainer half.*earlier checkpoints are untouched"):
        with ck.writing(step_dir(run, 2), "trainer") as folder:
            (folder / "part").write_bytes(b"0" * 4096)
            raise OSError(errno.ENOSPC, "No space left on device")
    assert list(step_dir(run, 2).iterdir()) == [] and ck.newest(run) == 1


def test_full_disk_is_found_in_what_dcp_raises():
    class CheckpointException(BaseException):
        failures = {0: (OSError(errno.ENOSPC, "full"), None)}

    assert ck.disk_full(CheckpointException())
    wrapped = RuntimeError("save failed")
    wrapped.__cause__ = OSError(errno.EDQUOT, "quota")
    assert ck.disk_full(wrapped) and not ck.disk_full(ValueError("no")) and not ck.disk_full(None)


def test_going_back_and_a_later_plain_resume(run):
    """C03: resume.step 20 with 50 there, interval 10, keep_last 1, stop at 40; then a plain resume."""
    for step in (10, 20, 30, 40, 50):
        save(run, step)
    assert ck.resume_point(run, step=20) == step_dir(run, 20)
    ck.prune_future(run, 20, explicit=True)
    for step in (30, 40):
        save(run, step, text="second life")
        ck.retain(run, keep_last=1)
    for path in (run / "checkpoints").glob("abandoned-*"):
        os.utime(path, (time.time() + 1e6,) * 2)
    assert ck.newest(run) == 40 and ck.steps(run) == [40]
    names = sorted(path.name.partition("-step_")[2] for path in (run / "checkpoints").glob("abandoned-*"))
    assert names == ["30", "40", "50"]


def test_prune_future(run, lines):
    """C10: going back to step 5 with batches and broadcasts of 6 to 9 there."""
    for step in (5, 10):
        save(run, step)
    half(run, 12, "trainer")
    (step_dir(run, 5) / "trainer.tmp-dead").mkdir()
    for step in range(4, 10):
        for kind in ("batches", "broadcasts"):
            (run / kind / f"step_{step}").mkdir(parents=True)
            (run / kind / f"step_{step}" / "shard").write_text("old")
    (run / "logs" / "attempt_1").mkdir(parents=True)
    ck.prune_future(run, 5, explicit=True)
    assert sorted(path.name for path in (run / "batches").iterdir()) == ["step_4", "step_5"]
    assert sorted(path.name for path in (run / "broadcasts").iterdir()) == ["step_4"]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_5", "abandoned-1-step_10"}
    assert ck.verify(step_dir(run, 5)) == [] and not list(step_dir(run, 5).glob("*.tmp-*"))
    assert (run / "logs" / "attempt_1").is_dir()
    text = "\n".join(lines)
    for name in ("batches/step_6", "broadcasts/step_5", "broadcasts/step_9", "abandoned-1-step_10", "step_12"):
        assert name in text


def test_a_whole_later_checkpoint_is_never_put_aside_unasked(run):
    save(run, 5)
    save(run, 10)
    with pytest.raises(UserError, match=r"step_10 is complete"):
        ck.prune_future(run, 5)
    truncate(step_dir(run, 10) / "trainer" / "state.json")
    ck.prune_future(run, 5)
    assert ck.newest(run) == 5 and (run / "checkpoints" / "abandoned-1-step_10").is_dir()


def test_resume_points(run, tmp_path):
    with pytest.raises(UserError, match="no complete checkpoint"):
        ck.resume_point(run)
    save(run, 5)
    with pytest.raises(UserError, match=r"step_7.*complete steps there: 5"):
        ck.resume_point(run, step=7)
    with pytest.raises(UserError, match="ends in step_<n>"):
        ck.resume_point(run, fork=tmp_path)
    assert ck.resume_point(tmp_path / "other", fork=step_dir(run, 5)) == step_dir(run, 5)


def test_no_torch(tmp_path):
    code = "import rlmake.checkpoint, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
