"""The trace stream: whole lines through kills, rotation, several writers and a full disk; annotations."""

import json
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from trace_samples import episode
from trace_writer import append_150

from rlmake.core.rundir import RunContext
from rlmake.monitors import setup
from rlmake.monitors.traces import Recorder, TraceStream, Work, disk, layout, read, records, seal, spans, trace_id
from rlmake.monitors.traces.chunks import Chunks, to_line

CONFIG = SimpleNamespace(path=None, chunk_bytes=5 << 30, compress=True, float_decimals=4)


def work(name="toy/0/0", kind="train", **more):
    fixed = {"env": "toy", "group": "toy/0", "step": 1, "version": 0, "dispatched": 5.0}
    return Work(**(fixed | {"kind": kind, "name": name} | more))


def open_stream(root: Path, producer="orch", attempt=1, **config) -> tuple[Recorder, TraceStream]:
    stream = TraceStream(root, producer, "run", attempt, SimpleNamespace(**(vars(CONFIG) | config)))
    return Recorder([stream], "run", attempt), stream


def index(root: Path) -> list[dict]:
    return [row for _, row in read.Tail(layout.index(root)).rows()]


def test_an_episode_its_row_and_what_is_learnt_later(tmp_path):
    recorder, stream = open_stream(tmp_path)
    made = episode(reward=0.5)
    recorder.arrived(work(), made, version=1)
    made.traces[0].nodes[1].advantages = [0.25, -0.5]
    recorder.credited("toy/0/0", made)
    recorder.shipped(["toy/0/0"], step=1, version=1)
    stream.close()
    (row,) = index(tmp_path)
    identity = trace_id("run", "toy/0/0")
    assert row["trace_ids"] == [identity] and row["reward"] == 1.0 and row["rewards"] == {"exact": 0.5}
    assert (row["turns"], row["branches"], row["nodes"], row["input_tokens"], row["output_tokens"]) == (1, 1, 2, 4, 2)
    assert (row["env"], row["group"], row["task"]) == ("toy", "toy/0", "task-3")
    assert (row["ok"], row["truncated"]) == (True, False)
    assert row["dispatch"] == {"step": 1, "version": 0, "time": 5.0} and row["arrival"]["version"] == 1
    record = read.record_at(layout.stream(tmp_path), row["chunk"], row["offset"], row["length"])
    assert record["traces"][0]["nodes"][1]["logprobs"] == [-0.1235, -0.5], "four decimals"
    assert record["traces"][0]["id"] == identity and row["live_ids"] == [made.traces[0].id]
    notes = [note for _, note in read.Tail(layout.annotation_index(tmp_path, "orch")).rows()]
    assert [note["streams"] for note in notes] == [["advantages"], []]
    assert notes[0]["info"]["advantage"] == -0.125 and notes[1]["info"]["ship"]["step"] == 1
    note = read.record_at(layout.annotations(tmp_path, "orch"), 0, notes[0]["offset"], notes[0]["length"])
    assert note["branches"] == [{"index": 0, "spans": [[4, 6]], "advantages": [0.25, -0.5]}]


def test_arrays_of_the_trainer_become_rounded_lists(tmp_path):
    recorder, stream = open_stream(tmp_path, "trainer")
    streams = {"entropies": np.array([0.123456, 2], np.float32), "is_masked": np.array([True, False])}
    recorder.trained("toy/0/0", 3, [{"index": 0, "spans": [[4, 6]], **streams}])
    stream.close()
    (line,) = (layout.annotations(tmp_path, "trainer") / "00000.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert row["branches"] == [{"index": 0, "spans": [[4, 6]], "entropies": [0.1235, 2.0], "is_masked": [1, 0]}]
    assert row["info"] == {"trained": {"step": 3}} and row["trace_id"] == trace_id("run", "toy/0/0")


def test_chunks_fill_are_sealed_and_read_the_same(tmp_path):
    chunks = Chunks(tmp_path / "stream", tmp_path / "index.jsonl", 100_000, compress=True)
    lines = [to_line({"n": n, "text": os.urandom(4000).hex()}) for n in range(60)]
    for n, line in enumerate(lines):
        chunks.append(line, {"n": n})
    chunks.seal_last()
    chunks.close()
    files = layout.chunks(tmp_path / "stream")
    assert list(files) == list(range(len(files))) and len(files) > 4
    assert all(path.suffix == ".zst" for path in files.values())
    for _, row in read.Tail(tmp_path / "index.jsonl").rows():
        assert read.line_at(tmp_path / "stream", row["chunk"], row["offset"], row["length"]) + b"\n" == lines[row["n"]]
        assert read.line_at(tmp_path / "stream", row["chunk"], row["offset"]) + b"\n" == lines[row["n"]]


def test_a_chunk_that_is_sealed_while_one_looks_is_full(tmp_path):
    chunks = Chunks(tmp_path / "stream", tmp_path / "index.jsonl", 100_000, compress=True)
    assert chunks._full(tmp_path / "stream" / "00000.jsonl")
    chunks.close()


def test_a_sealed_chunk_of_many_frames_is_read_in_the_middle(tmp_path):
    path = tmp_path / "00000.jsonl"
    text = b"".join(to_line({"n": n, "text": "x" * 1_000_000}) for n in range(13))
    path.write_bytes(text)
    sealed = seal.seal(path)
    assert not path.exists() and len(seal.frames(sealed)) == 4
    offset = text.index(b'{"n":9')
    assert read.record_at(tmp_path, 0, offset)["n"] == 9
    os.truncate(sealed, sealed.stat().st_size - 3)
    with pytest.raises(read.Torn):
        read.record_at(tmp_path, 0, offset)


def test_a_frame_that_says_it_is_huge_is_given_no_memory(tmp_path, monkeypatch):
    """A few bytes of a foreign file may stand for terabytes."""
    path = tmp_path / "00000.jsonl"
    path.write_bytes(to_line({"n": "x" * (5 << 20)}))
    with monkeypatch.context() as larger:
        larger.setattr(seal, "FRAME_BYTES", 8 << 20)
        seal.seal(path)
    with pytest.raises(read.Torn, match="a frame of more than 4194304 bytes"):
        read.record_at(tmp_path, 0, 0, 10)


def test_several_writers_lose_and_mix_nothing(tmp_path):
    processes = [
        multiprocessing.get_context("spawn").Process(target=append_150, args=(str(tmp_path), k)) for k in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    rows = [row for _, row in read.Tail(tmp_path / "index.jsonl").rows()]
    assert len({(row["writer"], row["n"]) for row in rows}) == len(rows) == 300
    for row in rows:
        line = read.record_at(tmp_path / "stream", row["chunk"], row["offset"], row["length"])
        assert (line["writer"], line["n"]) == (row["writer"], row["n"])


def test_a_torn_last_line_is_skipped_and_ended_by_the_next_writer(tmp_path):
    recorder, stream = open_stream(tmp_path)
    recorder.arrived(work("toy/0/0"), episode(), 0)
    stream.close()
    for path in (layout.stream(tmp_path) / "00000.jsonl", layout.index(tmp_path)):
        with open(path, "ab") as file:
            file.write(b'{"torn": ')
    tail = read.Tail(layout.index(tmp_path))
    assert [row["name"] for _, row in tail.rows()] == ["toy/0/0"] and tail.torn == 0
    recorder, stream = open_stream(tmp_path, attempt=2)
    recorder.arrived(work("toy/0/1"), episode(), 0)
    stream.close()
    assert [row["name"] for _, row in tail.rows()] == ["toy/0/1"] and tail.torn == 1
    (last,) = [row for row in index(tmp_path) if row["name"] == "toy/0/1"]
    assert read.record_at(layout.stream(tmp_path), last["chunk"], last["offset"], last["length"])["name"] == "toy/0/1"


def test_a_tail_gives_whole_lines_as_they_come(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = read.Tail(path)
    assert list(tail.rows()) == []
    path.write_bytes(b'{"a":1}\n{"a"')
    assert [row for _, row in tail.rows()] == [{"a": 1}]
    with open(path, "ab") as file:
        file.write(b':2}\n[1]\nnot json\n{"a":3}\n')
    assert [(at, row["a"]) for at, row in tail.rows()] == [(8, 2), (29, 3)] and tail.torn == 2
    path.write_bytes(b'{"b":1}\n')
    assert [row for _, row in tail.rows()] == [{"b": 1}], "a file that was made anew is read from its start"


def test_numbers_that_are_not_finite_are_null_and_counted(tmp_path, warnings):
    recorder, stream = open_stream(tmp_path)
    recorder.arrived(work(), episode(logprobs=(float("nan"), float("-inf")), reward=float("inf")), 0)
    stream.close()
    (row,) = index(tmp_path)
    assert row["non_finite"] == stream.non_finite == 3 and row["reward"] is None
    record = read.record_at(layout.stream(tmp_path), 0, row["offset"])
    assert record["traces"][0]["nodes"][1]["logprobs"] == [None, None]
    assert len(warnings) == 1 and "not finite" in warnings[0]


def test_any_text_goes_through(tmp_path):
    text = "naïve 🧪 \u202e bidi \x00 </script> \ud83d half"
    recorder, stream = open_stream(tmp_path)
    made = episode()
    made.traces[0].nodes[0].message.content = text
    recorder.arrived(work(), SimpleNamespace(to_record=lambda _: _python_record(made)), 0)
    stream.close()
    (row,) = index(tmp_path)
    found = read.record_at(layout.stream(tmp_path), 0, row["offset"], row["length"])
    assert found["traces"][0]["nodes"][0]["message"]["content"] == text


def _python_record(made):
    record = made.model_dump(mode="python", exclude_none=True)
    record["traces"][0]["nodes"] = record["traces"][0]["nodes"][:1]
    return record


def test_a_full_disk_costs_records_never_the_run(tmp_path, warnings, monkeypatch):
    left = [1 << 40]
    monkeypatch.setattr(disk, "CHECK_SECONDS", 0.0)
    recorder, stream = open_stream(tmp_path)
    stream._guard._free = lambda _: left[0]
    for n, free in enumerate((1 << 40, 1 << 20, 1 << 40)):
        left[0] = free
        recorder.arrived(work(f"toy/0/{n}"), episode(), 0)
        deadline = time.monotonic() + 10
        while stream._waiting and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)
    stream.close()
    assert [row["name"] for row in index(tmp_path)] == ["toy/0/0", "toy/0/2"] and stream.lost == 1
    assert sum("no longer written" in line and "--no-monitors.file" in line for line in warnings) == 1


def test_a_write_that_fails_leaves_no_half_line(tmp_path, monkeypatch, warnings):
    recorder, stream = open_stream(tmp_path)
    recorder.arrived(work("toy/0/0"), episode(), 0)
    stream.close()
    recorder, stream = open_stream(tmp_path)
    real, count = os.write, [0]

    def write(fd, data):
        if len(data) > 1000 and count[0] < 2:
            count[0] += 1
            if count[0] == 2:
                raise OSError(28, "No space left on device")
            return real(fd, bytes(data)[:100])
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    recorder.arrived(work("toy/0/1"), episode(), 0)
    recorder.arrived(work("toy/0/2"), episode(), 0)
    stream.close()
    assert [row["name"] for row in index(tmp_path)] == ["toy/0/0", "toy/0/2"] and stream.lost == 1
    tail = read.Tail(layout.stream(tmp_path) / "00000.jsonl")
    assert len(list(tail.rows())) == 2 and tail.torn == 0
    assert any("No space left" in line for line in warnings)


def test_a_line_that_the_index_has_no_room_for_is_taken_back(tmp_path, monkeypatch):
    chunks = Chunks(tmp_path / "stream", tmp_path / "index.jsonl", 100_000, compress=True)
    chunks.append(b'{"n":0}\n', {"n": 0})
    real = chunks._index.append

    def full(line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(chunks._index, "append", full)
    with pytest.raises(OSError, match="No space"):
        chunks.append(b'{"n":1}\n', {"n": 1})
    monkeypatch.setattr(chunks._index, "append", real)
    chunks.append(b'{"n":2}\n', {"n": 2})
    chunks.close()
    assert (tmp_path / "stream/00000.jsonl").read_bytes() == b'{"n":0}\n{"n":2}\n'
    assert [row["n"] for _, row in read.Tail(tmp_path / "index.jsonl").rows()] == [0, 2]


def test_live_files_come_and_go(tmp_path):
    recorder, stream = open_stream(tmp_path)
    delta = {
        "trace": "abc123", "open": {"id": "abc123", "task": {"type": "Toy"}},
        "nodes": [{"message": {"role": "user", "content": "hello"}, "token_ids": [1, 2], "mask": [False] * 2}],
    }  # fmt: skip
    with recorder.episode(work("toy/0/0")) as on_delta, recorder.episode(work("toy/0/1")):
        on_delta(msgspec.msgpack.encode(delta))
        wait_for(lambda: (layout.live(tmp_path) / "abc123.jsonl").exists())
        wait_for(lambda: (layout.pending(tmp_path) / "toy+0+1.json").exists())
        head, first = (json.loads(x) for x in (layout.live(tmp_path) / "abc123.jsonl").read_text().splitlines())
        assert head["name"] == "toy/0/0" and first["nodes"] == [{"message": {"role": "user", "content": "hello"}}]
        assert not (layout.pending(tmp_path) / "toy+0+0.json").exists()
    recorder.arrived(work("toy/0/0"), episode(), 0)
    recorder.arrived(work("toy/0/1"), episode(), 0)
    stream.close()
    assert not [path for path in layout.live(tmp_path).rglob("*") if path.is_file()]


def wait_for(what):
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cancelled_episode_and_a_killed_attempt_leave_nothing_in_flight(tmp_path):
    (tmp_path / "live").mkdir()
    (tmp_path / "live/0123.jsonl").write_text("{}\n")
    recorder, stream = open_stream(tmp_path)
    with pytest.raises(RuntimeError), recorder.episode(work()) as on_delta:
        on_delta(msgspec.msgpack.encode({"trace": "abc", "open": {"task": {}}}))
        wait_for(lambda: (tmp_path / "live/abc.jsonl").exists())
        raise RuntimeError
    stream.close()
    assert not list((tmp_path / "live").rglob("*.json*"))


def test_without_the_file_monitor_nothing_is_written(tmp_path):
    ctx = RunContext(tmp_path, "run", "run", 1, None, tmp_path / "configs", tmp_path / "logs")
    monitors = setup(SimpleNamespace(file=None), "orch", ctx)
    recorder = monitors.recorder("run")
    with recorder.episode(work()) as on_delta:
        assert on_delta is None
    recorder.arrived(work(), episode(), 0)
    recorder.credited("toy/0/0", episode())
    recorder.shipped(["x"], 1, 1)
    monitors.close()
    assert not list(tmp_path.iterdir())


def test_other_ranks_annotate_and_log_nothing(tmp_path):
    ctx = RunContext(tmp_path, "run", "run", 1, None, tmp_path / "configs", tmp_path / "logs")
    monitors = setup(SimpleNamespace(file=CONFIG), "trainer", ctx, rank=3)
    monitors.log(1, {"loss": 1.0})
    monitors.recorder("run").trained("toy/0/0", 1, [{"index": 0, "spans": [[1, 2]], "entropies": [1.0]}])
    monitors.close()
    root = tmp_path / "monitors/file"
    assert (root / "traces/annotations/trainer.3/00000.jsonl").read_text().count("\n") == 1
    assert not (root / "metrics.jsonl").exists()


def test_branches_and_spans():
    assert spans([3, 4, 5, 9, 11, 12]) == [[3, 6], [9, 10], [11, 13]] and spans([]) == []
    nodes = [{}, {"parent": 0}, {"parent": 1}, {"parent": 0}]
    assert records.leaves(nodes) == [2, 3] and records.paths(nodes) == [[0, 1, 2], [0, 3]]
    attempt = {"parent": 0, "semantic_parents": [{"node": 1, "type": "compaction_attempt"}]}
    assert records.trainable([{}, {"parent": 0}, attempt]) == [0], "a compaction that nothing went on from"
    accepted = {"parent": None, "semantic_parents": [{"node": 2, "type": "compaction"}]}
    assert records.trainable([{}, {"parent": 0}, attempt, accepted]) == [0, 1, 2]
    broken = [{"parent": 1}, {"parent": 0}, {"parent": 7}, {"parent": "x"}]
    assert all(len(path) <= 2 for path in records.paths(broken))
