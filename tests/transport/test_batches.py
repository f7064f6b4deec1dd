"""Batches: bit-exact, and refused when they are not the asked ones."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from rlmake.core.errors import UserError
from rlmake.core.rundir import RunContext
from rlmake.transport import Batch, LossCounts, MicroBatch, TrainingSample, open_receiver, open_sender
from rlmake.transport.types import decode_batch, decode_samples, encode_batch, encode_samples


def context(tmp_path, run_id="run", attempt=1):
    configs = tmp_path / "configs" / f"attempt_{attempt}"
    return RunContext(tmp_path, run_id, "run", attempt, None, configs, tmp_path / "logs")


def row(n=5, seed=0):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((3, n)).astype(np.float32)
    numbers[0, 0] = np.float32(1e-42)  # a denormal survives
    numbers[1, 0] = -0.0
    return MicroBatch(
        input_ids=rng.integers(0, 2**31 - 1, n).astype(np.int32),
        position_ids=np.arange(n, dtype=np.int32),
        loss_mask=rng.integers(0, 2, n).astype(bool),
        advantages=numbers[0],
        inference_logprobs=numbers[1],
        temperatures=numbers[2],
        sequence_lengths=[2, n - 2],
        env_names=["a", "b"],
        sample_ids=["a/0/0", "b/1/0"],
        rl_weights=np.ones(n, np.float32),
    )


def batches(ctx, step, world=2):
    return [
        Batch(1, ctx.run_id, ctx.attempt, step, rank, world, LossCounts(7.0), ["a/0/0", "b/1/0"], [row(seed=rank)])
        for rank in range(world)
    ]


def same(left: MicroBatch, right: MicroBatch) -> bool:
    for name in MicroBatch.__struct_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True


def test_bytes_are_exact_and_compact(tmp_path):
    batch = batches(context(tmp_path), 3)[0]
    data = encode_batch(batch)
    back = decode_batch(data, run_id="run", attempt=1, step=3, rank=0, world=2, origin="here")
    assert same(batch.micro_batches[0], back.micro_batches[0])
    assert back.counts == batch.counts and back.sample_ids == batch.sample_ids
    assert encode_batch(back) == data


def test_samples_round_trip():
    sample = TrainingSample(
        "e/0/0", "e", np.arange(3, dtype=np.int32), np.array([False, True, True]),
        np.array([0, -0.5, -1e-38], np.float32), np.ones(3, np.float32), advantages=np.zeros(3, np.float32),
    )  # fmt: skip
    (back,) = decode_samples(encode_samples([sample]))
    assert encode_samples([back]) == encode_samples([sample]) and back.ce_weights is None
    with pytest.raises(TypeError):
        encode_samples([TrainingSample("e", "e", np.arange(3), *([np.zeros(3)] * 3))])  # int64 is no wire type


@pytest.mark.parametrize("change", [{"run_id": "x"}, {"attempt": 2}, {"step": 4}, {"rank": 1}, {"world": 1}])
def test_foreign_batch_is_refused_and_named(tmp_path, change):
    data = encode_batch(batches(context(tmp_path), 3)[0])
    asked = {"run_id": "run", "attempt": 1, "step": 3, "rank": 0, "world": 2} | change
    with pytest.raises(UserError, match=f"here: foreign batch refused: {next(iter(change))}"):
        decode_batch(data, **asked, origin="here")


def test_damage_is_noticed(tmp_path):
    data = bytearray(encode_batch(batches(context(tmp_path), 3)[0]))
    data[-3] ^= 1
    with pytest.raises(UserError, match="checksum"):
        decode_batch(bytes(data), run_id="run", attempt=1, step=3, rank=0, world=2, origin="here")
    with pytest.raises(UserError, match="not a batch"):
        decode_batch(b"\x00\x01", run_id="run", attempt=1, step=3, rank=0, world=2, origin="here")


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_transport(tmp_path, kind):
    ctx = context(tmp_path)
    transport = SimpleNamespace(type=kind, host="localhost", port=0, hwm=10)
    sender = open_sender(transport, ctx)
    receivers = [open_receiver(transport, ctx, rank, 2) for rank in range(2)]
    try:
        got = {0: [], 1: []}

        def consume(rank, step):
            got[rank].append(receivers[rank].receive(step, timeout=20))

        sender.send(batches(ctx, 1))  # before anyone asks; step 2 and 3 while they ask
        for step in (1, 2, 3):
            threads = [threading.Thread(target=consume, args=(rank, step)) for rank in range(2)]
            for thread in threads:
                thread.start()
            if step > 1:
                sender.send(batches(ctx, step))
            for thread in threads:
                thread.join(20)
        for rank in range(2):
            assert [batch.step for batch in got[rank]] == [1, 2, 3]
            assert all(same(batch.micro_batches[0], row(seed=rank)) for batch in got[rank])
        assert sender.fetched()
        sender.send(batches(ctx, 4))
        assert sender.fetched() == (kind == "filesystem")
        with pytest.raises(UserError, match=r"waited 0\.2 s in vain for .*step 5.* from the orchestrator"):
            receivers[0].receive(5, timeout=0.2)
        stranger = open_receiver(transport, context(tmp_path, attempt=2) if kind == "filesystem" else ctx, 0, 3)
        receivers.append(stranger)
        with pytest.raises(UserError, match="rank"):
            stranger.receive(4, timeout=10)
    finally:
        sender.close()
        for receiver in receivers:
            receiver.close()


def test_zmq_port_in_use_is_one_line(tmp_path):
    first = open_sender(SimpleNamespace(type="zmq", host="localhost", port=0, hwm=10), context(tmp_path))
    try:
        with pytest.raises(UserError, match=f"rollout_transport.port {first.port}: Address already in use"):
            open_sender(SimpleNamespace(type="zmq", host="localhost", port=first.port, hwm=10), context(tmp_path))
    finally:
        first.close()


def test_zmq_refuses_another_attempt(tmp_path):
    sender = open_sender(SimpleNamespace(type="zmq", host="localhost", port=0, hwm=10), context(tmp_path))
    late = SimpleNamespace(type="zmq", host="localhost", port=sender.port, hwm=10)
    receiver = open_receiver(late, context(tmp_path, attempt=2), 0, 2)
    try:
        with pytest.raises(UserError, match="attempt 1, not run, 2"):
            receiver.receive(1, timeout=10)
    finally:
        receiver.close()
        sender.close()


def test_file_sender_removes_trained_batches(tmp_path):
    ctx = context(tmp_path)
    sender = open_sender(SimpleNamespace(type="filesystem"), ctx)
    for step in (1, 2, 3):
        sender.send(batches(ctx, step))
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == ["step_2", "step_3"]
