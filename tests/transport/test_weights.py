"""The four markers: order, time-outs that name who is missing, retention, foreign and damaged versions."""

import threading

import pytest

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.core.rundir import RunContext
from rlmake.transport import WeightReceiver, WeightSender, broadcast
from rlmake.transport.weights import newest_version


def context(tmp_path, run_id="run", attempt=1):
    return RunContext(tmp_path, run_id, "run", attempt, None, tmp_path, tmp_path)


def publish(tmp_path, version, ctx=None, content=b"weights"):
    ctx = ctx or context(tmp_path)
    sender = WeightSender(tmp_path, ctx)

    def write(folder):
        (folder / "model.safetensors").write_bytes(content)

    broadcast(sender, version, write, lambda action: action(), timeout=10)


def accept(receiver, after, got):
    while (version := receiver.poll(after)) is None:
        pass
    assert not receiver.finished(version)  # the trainer waits for us
    receiver.ack(version)
    got.append((version, receiver.wait_finished(version, 10)))


def test_handshake_and_retention(tmp_path):
    receiver, got = WeightReceiver(tmp_path, context(tmp_path)), []
    assert receiver.poll(-1) is None
    for version in range(4):
        thread = threading.Thread(target=accept, args=(receiver, version - 1, got))
        thread.start()
        publish(tmp_path, version, content=b"v%d" % version)
        thread.join(10)
    assert [version for version, _ in got] == [0, 1, 2, 3]
    assert (got[-1][1] / "model.safetensors").read_bytes() == b"v3"
    assert sorted(path.name for path in (tmp_path / "broadcasts").iterdir()) == ["step_2", "step_3"]
    record = read_json(got[-1][1] / "version.json")
    assert [record[key] for key in ("schema", "run_id", "attempt", "version", "kind")] == [1, "run", 1, 3, "full"]
    assert [file["path"] for file in record["files"]] == ["model.safetensors"]


def test_record_is_there_before_the_offer(tmp_path):
    sender = WeightSender(tmp_path, context(tmp_path))
    folder = sender.prepare(1)
    (folder / ".sender_ready").touch()  # as if the order were wrong
    assert WeightReceiver(tmp_path, context(tmp_path)).poll(0) is None


def test_timeouts_name_the_missing_side(tmp_path):
    sender = WeightSender(tmp_path, context(tmp_path))
    sender.offer(2)
    with pytest.raises(UserError, match=r"the orchestrator .* to accept weights v2"):
        sender.wait_receiver(0.1)
    receiver = WeightReceiver(tmp_path, context(tmp_path))
    receiver.ack(2)
    with pytest.raises(UserError, match="the trainer to finish sending weights v2"):
        receiver.wait_finished(2, 0.1)


@pytest.mark.parametrize("foreign", [{"run_id": "other"}, {"attempt": 2}])
def test_foreign_offer_is_not_served(tmp_path, foreign):
    WeightSender(tmp_path, context(tmp_path, **foreign)).offer(5)
    assert WeightReceiver(tmp_path, context(tmp_path)).poll(0) is None


def test_damaged_file_is_named(tmp_path):
    receiver = WeightReceiver(tmp_path, context(tmp_path))
    thread = threading.Thread(target=accept, args=(receiver, 0, []))
    thread.start()
    publish(tmp_path, 1)
    thread.join(10)
    (tmp_path / "broadcasts/step_1/model.safetensors").write_bytes(b"weightz")
    with pytest.raises(UserError, match=r"model\.safetensors: missing or damaged, weights v1"):
        receiver.verify(1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], r"version\.json: schema None is unknown, expected 1"),
        ({}, r"version\.json: schema None is unknown, expected 1"),
        ({"schema": 1}, r"version\.json: damaged: .*run_id"),
        ({"checksum": None}, r"version\.json: damaged: .*checksum"),
        ({"files": [{"path": "model.safetensors"}]}, r"version\.json: damaged: .*size.*files\[0\]"),
    ],
)
def test_a_record_that_says_less_than_it_must_is_named(tmp_path, content, said):
    receiver, sender = WeightReceiver(tmp_path, context(tmp_path)), WeightSender(tmp_path, context(tmp_path))
    sender.offer(1)
    path = tmp_path / "broadcasts/step_1/version.json"
    if isinstance(content, dict) and content.keys() & {"checksum", "files"}:
        content = read_json(path) | content
    write_json(path, content)
    for act in (lambda: receiver.poll(0), lambda: receiver.record(1), lambda: receiver.verify(1)):
        with pytest.raises(UserError, match=said):
            act()
    sender.finish()
    with pytest.raises(UserError, match=said):
        newest_version(context(tmp_path))


def test_a_record_that_is_not_there_yet_is_waited_for_and_a_foreign_one_left_alone(tmp_path, warnings):
    receiver, sender = WeightReceiver(tmp_path, context(tmp_path)), WeightSender(tmp_path, context(tmp_path))
    sender.offer(1)
    path = tmp_path / "broadcasts/step_1/version.json"
    assert receiver.poll(0) == 1
    write_json(path, read_json(path) | {"schema": 2})
    assert receiver.poll(0) is None and len(warnings) == 1 and "foreign weights refused" in warnings[0]
    path.unlink()
    assert receiver.poll(0) is None
    with pytest.raises(UserError, match=r"version\.json: no such file"):
        receiver.verify(1)
    path.mkdir()
    assert receiver.poll(0) is None
    with pytest.raises(UserError, match=r"version\.json: not readable as JSON: .*directory"):
        receiver.verify(1)


def test_reoffer_holds_only_new_files(tmp_path):
    stale = tmp_path / "broadcasts/step_9"
    stale.mkdir(parents=True)
    for shard in range(3):
        (stale / f"model-{shard}.safetensors").write_bytes(b"old")
    sender = WeightSender(tmp_path, context(tmp_path))
    (sender.prepare(9) / "model.safetensors").write_bytes(b"new")
    sender.offer(9)
    assert sorted(path.name for path in stale.iterdir()) == [".sender_ready", "model.safetensors", "version.json"]


def test_all_ranks_are_held_until_the_receiver_accepts(tmp_path):
    """Ranks other than the master reach the end of `broadcast` only after the acknowledgement (and fail with it)."""
    barrier, errors, ended = threading.Barrier(2), [], []

    def on_master(rank):
        def run(action):
            if rank == 0:
                try:
                    action()
                except UserError as error:
                    errors.append(error)
            barrier.wait(10)
            if errors:
                raise UserError("the master failed")

        return run

    def work(rank, sender):
        try:
            broadcast(sender, 1, lambda folder: None, on_master(rank), timeout=0.3)
        except UserError as error:
            ended.append((rank, str(error)))

    threads = [
        threading.Thread(target=work, args=(r, WeightSender(tmp_path, context(tmp_path)) if r == 0 else None))
        for r in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(ended) == [(0, "the master failed"), (1, "the master failed")]
    assert "to accept weights v1" in str(errors[0])
