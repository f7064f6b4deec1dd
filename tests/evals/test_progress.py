"""An evaluation's records on disk: cursors, kills, resumes, and what must not be gone on with."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmake.config.eval import EvalCkptConfig, EvalResumeConfig
from rlmake.core.errors import UserError
from rlmake.core.rundir import numbered
from rlmake.evals.progress import Journal, folder, read_whole
from rlmake.evals.records import EpisodeRecord
from rlmake.evals.runner import evaluate

CONFIG = {"seed": 0, "sampling": {"temperature": 1.0}}


def record(task, sample, env="a", error=None):
    return EpisodeRecord(env, task, f"k{task}", sample, 7, "p", "reply", 0.5, False, False, error)


def journal(run_dir, resume=None, config=CONFIG, planned=None, **ckpt):
    made = Journal(run_dir, EvalCkptConfig(**ckpt), planned or {"a": (4, 2), "b": (3, 1)})
    made.open(config, resume)
    return made


def steps(run_dir):
    return list(numbered(run_dir / "checkpoints"))


async def test_the_cursor_counts_the_completed_prefix(tmp_path):
    made = journal(tmp_path)
    for task, sample in ((1, 0), (1, 1), (2, 0), (2, 1), (0, 0)):
        await made.add(record(task, sample))
    assert made.cursor == 0 and steps(tmp_path) == []
    await made.add(record(0, 1))
    assert made.cursor == 3 and steps(tmp_path) == [3]
    await made.add(record(0, 0, env="b"))
    progress = json.loads((tmp_path / "checkpoints/step_4/eval/progress.json").read_text())
    assert steps(tmp_path) == [4], "keep_last is 1"
    assert progress["cursors"] == {"a": 3, "b": 1} and progress["episodes"] == 7
    made.close()


async def test_a_kill_loses_and_repeats_nothing(tmp_path):
    made = journal(tmp_path)
    for place in ((3, 0), (3, 1), (0, 0)):
        await made.add(record(*place))
    await made.add(record(1, 1, error="Broken: engine gone"))
    with open(folder(tmp_path) / "episodes.jsonl", "ab") as file:
        file.write(b'{"env": "a", "ta')  # the kill came in the middle of a row
    again = journal(tmp_path, EvalResumeConfig())
    keys = ["k0", "k1", "k2", "k3"]
    assert {(one.task, one.sample) for one in again.of("a", keys, 2)} == {(3, 0), (3, 1), (0, 0)}
    assert again.of("b", ["k0"], 1) == []
    assert again.of("a", ["k0", "k1", "k2", "another"], 2) == again.of("a", keys[:3], 2), "a task that is another now"
    await again.add(record(1, 1))
    assert len(read_whole(folder(tmp_path) / "episodes.jsonl", None)) == 5, "the torn row is gone"
    third = journal(tmp_path, EvalResumeConfig())
    assert len(third.of("a", keys, 2)) == 4, "the episode that failed first has ended well since"


async def test_back_to_a_checkpoint_and_a_fork_of_another_run(tmp_path):
    made = journal(tmp_path / "one", keep_last=None)
    for task in range(3):
        for sample in range(2):
            await made.add(record(task, sample))
    assert steps(tmp_path / "one") == [1, 2, 3]
    fork = journal(tmp_path / "two", EvalResumeConfig(dir=str(tmp_path / "one/checkpoints/step_2")))
    assert len(fork.done) == 4 and len(read_whole(folder(tmp_path / "two") / "episodes.jsonl", None)) == 4
    assert len(read_whole(folder(tmp_path / "one") / "episodes.jsonl", None)) == 6
    back = journal(tmp_path / "one", EvalResumeConfig(step=1))
    assert len(back.done) == 2


async def test_another_configuration_is_refused_in_one_line(tmp_path):
    journal(tmp_path).close()
    other = {"seed": 0, "sampling": {"temperature": 0.5}}
    with pytest.raises(UserError, match=r"sampling.temperature: 0.5 now, 1 when .*--clean .*resume.skip_checks"):
        journal(tmp_path, EvalResumeConfig(), other)
    assert journal(tmp_path, EvalResumeConfig(skip_checks=True), other).done == []
    with pytest.raises(UserError, match="holds no evaluation to go on from"):
        journal(tmp_path / "empty", EvalResumeConfig())
    with pytest.raises(UserError, match=r"step_9.*no such file"):
        journal(tmp_path, EvalResumeConfig(step=9), other)


async def test_an_evaluation_goes_on_where_it_was(tmp_path, make):
    run = {"sampling": {}, "seed": 5, "group_size": 2, "max_inflight": 3}
    whole = await evaluate(make.env(5, lambda task, seed: make.episode([make.trace(seed % 7)])), None, "m", **run)
    calls, stop = [], asyncio.Event()

    def script(task, seed):
        calls.append((task.index, seed))
        if len(calls) == 6:
            stop.set()
        return make.episode([make.trace(seed % 7)])

    planned = {"rev": (5, 2)}
    first = journal(tmp_path, planned=planned)
    stopped = await evaluate(make.env(5, script), None, "m", on_episode=first.add, stop=stop, **run)
    first.close()
    assert stopped.partial
    ended = len(read_whole(folder(tmp_path) / "episodes.jsonl", None))
    second, env = journal(tmp_path, EvalResumeConfig(), planned=planned), make.env(5, script)
    calls.extend([None] * 10)
    keys = [env.task(index).key for index in range(5)]
    result = await evaluate(env, None, "m", done=second.of("rev", keys, 2), on_episode=second.add, **run)
    assert result.records == whole.records and len(env.calls) == 10 - ended
    assert second.cursor == 5


def test_the_table_of_the_configuration():
    assert SimpleNamespace(**EvalCkptConfig().model_dump()) == SimpleNamespace(interval=1, keep_last=1)
    with pytest.raises(ValueError, match="either step or dir"):
        EvalResumeConfig(step=1, dir=str(Path("x/step_1")))
