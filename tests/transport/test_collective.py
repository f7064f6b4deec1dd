"""Weight transfer by a group, over gloo: the code that NCCL runs, but for the communicator itself."""

import threading
import time

import pytest
import torch

from rlmake.core.errors import RunFailed, UserError
from rlmake.transport import collective
from rlmake.transport.collective import Receiver, Sender, buckets, plan_of

CPU = torch.device("cpu")


def named(seed: int, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (1,), (64, 33), (5, 2, 2), (200, 10)]
    return [(f"layer.{i}", torch.randn(shape, generator=g).to(dtype)) for i, shape in enumerate(shapes)]


def test_buckets_keep_the_order_and_the_limit(monkeypatch):
    plan = [{"name": str(i), "shape": [size]} for i, size in enumerate([10, 20, 30, 100, 5, 5])]
    cut = [[entry["name"] for entry in bucket] for bucket in buckets(plan, 4, limit=200)]
    assert cut == [["0", "1"], ["2"], ["3"], ["4", "5"]]
    assert list(buckets([], 4)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_receiver_gets_every_version_bit_for_bit(monkeypatch, dtype):
    monkeypatch.setattr(collective, "BUCKET_BYTES", 4096)
    sender = Sender("gloo", CPU, "localhost", 0, 20)
    got: dict[tuple[int, int], dict] = {}
    plan = plan_of(named(0))

    def receive(rank: int) -> None:
        receiver = Receiver(sender.rendezvous, rank, 3, CPU, 20)
        for version in range(3):
            got[rank, version] = {name: tensor.clone() for name, tensor in receiver.receive(version, plan, dtype)}

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    sender.form(["a", "b"])
    for version in range(3):
        sender.send(version, named(version), plan, dtype)
    for thread in threads:
        thread.join(20)
    for version in range(3):
        for name, tensor in named(version):
            for rank in (1, 2):
                assert torch.equal(got[rank, version][name], tensor.to(dtype)), (rank, version, name)


def test_who_does_not_come_is_named():
    sender = Sender("gloo", CPU, "localhost", 0, 1)
    with pytest.raises(RunFailed, match="after 1 s 'joined' is missing from worker 0 of A, worker 0 of B"):
        sender.form(["worker 0 of A", "worker 0 of B"])


def test_who_leaves_half_way_is_named_and_nothing_is_repeated():
    sender = Sender("gloo", CPU, "localhost", 0, 3)
    plan = plan_of(named(0))
    stopped = threading.Event()

    def receive(rank: int) -> None:
        receiver = Receiver(sender.rendezvous, rank, 3, CPU, 3)
        if rank == 1:
            list(receiver.receive(0, plan, torch.float32))
        stopped.wait(20)  # rank 2 joined and takes nothing

    threads = [threading.Thread(target=receive, args=(rank,), daemon=True) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    sender.form(["good", "gone"])
    start = time.monotonic()
    with pytest.raises(RunFailed) as error:
        sender.send(0, named(0), plan, torch.float32)
    assert "gone" in str(error.value) and "good" not in str(error.value) and time.monotonic() - start < 15
    with pytest.raises(RunFailed, match="the group is spent"):
        sender.send(1, named(1), plan, torch.float32)
    stopped.set()


def test_another_nccl_is_refused_before_anything_is_joined(monkeypatch):
    sender = Sender("gloo", CPU, "localhost", 0, 2)
    meeting = sender.rendezvous | {"backend": "nccl", "nccl": "2.28.9"}
    monkeypatch.setattr(collective, "nccl_version", lambda: "2.29.7")
    with pytest.raises(UserError, match=r"NCCL 2\.29\.7 here, 2\.28\.9 in the trainer"):
        Receiver(meeting, 1, 2, CPU, 2)
    assert not sender.store.check([f"{sender.session}/joined/1"])


def test_a_port_in_use_and_a_trainer_that_is_gone_are_one_line():
    sender = Sender("gloo", CPU, "localhost", 0, 2)
    with pytest.raises(UserError, match=r"weight_broadcast\.port"):
        Sender("gloo", CPU, "localhost", sender.rendezvous["port"], 2)
    gone = sender.rendezvous | {"port": 1}
    with pytest.raises(UserError, match="the trainer is not at"):
        Receiver(gone, 1, 2, CPU, 1)
