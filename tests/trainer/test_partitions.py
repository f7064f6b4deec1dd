"""One step's gradient, whatever the packing: every algorithm in one batch, rows of any size, any number of ranks."""

import numpy as np
import pytest
import torch

from rlmake.config.loss import IPOConfig
from rlmake.models import exact, loading
from rlmake.orchestrator.batches import loss_counts, micro_batch
from rlmake.orchestrator.packing import CostModel, plan
from rlmake.trainer import losses
from rlmake.trainer.batch import of_micro_batch
from rlmake.trainer.policy import Policy
from rlmake.transport import TrainingSample

KINDS = ("grpo", "grpo-per-prompt", "echo", "opd", "sft")


def batch() -> list[TrainingSample]:
    """Two samples of each kind, lengths from 5 to 40; the signals are random."""
    rng = np.random.default_rng(0)
    samples = []
    for number, kind in enumerate(KINDS * 2):
        length = int(rng.integers(5, 40))
        mask = np.arange(length) >= max(1, length // 3)
        floats = {name: rng.normal(size=length).astype(np.float32) for name in ("advantages", "ref_logprobs")}
        ones = mask.astype(np.float32)
        streams = {
            "grpo": {"advantages": floats["advantages"]},
            "grpo-per-prompt": {"advantages": floats["advantages"], "rl_weights": ones / 7},
            "echo": {"advantages": floats["advantages"], "ce_weights": 0.1 * (np.arange(length) == 1)},
            "opd": {"rl_weights": 0 * ones, "ref_kl_weights": ones, "ref_logprobs": -abs(floats["ref_logprobs"])},
            "sft": {"rl_weights": 0 * ones, "ce_weights": ones},
        }[kind]
        samples.append(
            TrainingSample(
                sample_id=str(number),
                env_name=kind,
                token_ids=rng.integers(0, 300, length).astype(np.int32),
                mask=mask,
                logprobs=-5.7 + 0.1 * rng.normal(size=length).astype(np.float32),
                temperatures=np.ones(length, np.float32),
                **{name: values.astype(np.float32) for name, values in streams.items()},
            )
        )
    return samples


@pytest.fixture(scope="module")
def policy(model_dir):
    return Policy(loading.load(model_dir, attn=exact.NAME), exact=True, head_chunk=1 << 40)


def gradient(policy, samples, rows, padding=1) -> torch.Tensor:
    """Sum over all rows (of all ranks) of the gradient of their share of the step's loss."""
    policy.zero_grad()
    said = loss_counts(samples)
    counts = torch.tensor([said.rl, said.ce, said.ref_kl], dtype=torch.float64)
    rl_loss, token_wise = losses.build(IPOConfig())
    seen = torch.zeros(3, dtype=torch.float64)
    for indices in rows:
        row, streams, _ = of_micro_batch(micro_batch([samples[i] for i in indices], padding))
        logprobs, _ = policy(row)
        losses.compute(logprobs, streams, counts, rl_loss, token_wise).loss.backward()
        seen += streams.counts()
    if sum(map(len, rows)) == len(samples):
        torch.testing.assert_close(seen, counts, rtol=1e-6, atol=0)
    return torch.cat([p.grad.double().flatten() for p in policy.parameters()])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_every_partition_gives_the_same_gradient(policy):
    samples = batch()
    lengths = [len(sample) for sample in samples]
    alone = gradient(policy, samples, [[i] for i in range(len(samples))])
    assert alone.norm() > 0
    cost = CostModel(1.0, 0.01)
    for seq_len, ranks in ((64, 1), (64, 2), (100, 3), (1000, 1), (1000, 4)):
        rows = [row for part in plan(lengths, seq_len, ranks, cost) for row in part]
        assert distance(gradient(policy, samples, rows), alone) < 1e-5
    backwards = [list(reversed(range(len(samples)))), []]  # and a rank that has nothing
    assert distance(gradient(policy, samples, backwards, padding=8), alone) < 1e-5
    assert distance(gradient(policy, samples, [[0, 1], [2, 3], [4, 5]]), alone) > 1e-2  # the rest does count


def test_each_kind_feeds_its_component_and_no_other(policy):
    """A batch of one kind has the gradient that the same samples have in the mixed batch, up to the normaliser."""
    samples = batch()
    for kind in KINDS:
        own = [sample for sample in samples if sample.env_name == kind]
        counts = loss_counts(own)
        component = {"opd": counts.ref_kl, "sft": counts.ce}.get(kind, counts.rl)
        assert component > 0 and sum(value > 0 for value in (counts.rl, counts.ce, counts.ref_kl)) == (
            2 if kind == "echo" else 1
        )
        assert gradient(policy, own, [list(range(len(own)))]).norm() > 0
    total = loss_counts(samples)
    assert total.rl == pytest.approx(sum(loss_counts([s]).rl for s in samples))


def test_no_signal_anywhere_is_a_zero_gradient(policy):
    """All advantages zero: finite, and exactly nothing."""
    samples = [s for s in batch() if s.env_name == "grpo"]
    for sample in samples:
        sample.advantages[:] = 0.0
    assert gradient(policy, samples, [[0, 1]]).abs().max() == 0.0
