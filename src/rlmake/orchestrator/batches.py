"""From the traces of a step to what each trainer rank is sent: micro-batches of packed rows."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlmake.core.rundir import RunContext
from rlmake.orchestrator.packing import CostModel, plan
from rlmake.orchestrator.records import Unit
from rlmake.orchestrator.samples import rl_members
from rlmake.transport import Batch, LossCounts, MicroBatch, TrainingSample
from rlmake.transport.types import SCHEMA

PAD_TOKEN = 1
FILLS = {"rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0, "ref_logprobs": 0.0}


class Packer:
    """Packs for `config.num_train_workers` ranks into rows of `config.seq_len`."""

    def __init__(self, config: Any, ctx: RunContext):
        self.ctx, self.seq_len = ctx, config.seq_len
        self.ranks, self.multiple = config.num_train_workers, config.pad_to_multiple_of
        self.cost = CostModel.of_model(config.model.name)

    def pack(self, step: int, units: Sequence[Unit]) -> list[Batch]:
        """One batch per rank. CPU work; call it off the event loop."""
        samples = [sample for unit in units for sample in unit.samples]
        if not samples:
            raise ValueError(f"batch of step {step} is empty")
        rows = plan([len(sample) for sample in samples], self.seq_len, self.ranks, self.cost)
        counts, names = loss_counts(samples), [sample.sample_id for sample in samples]
        return [
            Batch(
                schema=SCHEMA,
                run_id=self.ctx.run_id,
                attempt=self.ctx.attempt,
                step=step,
                rank=rank,
                world=self.ranks,
                counts=counts,
                sample_ids=names,
                micro_batches=[micro_batch([samples[i] for i in row], self.multiple) for row in part],
            )
            for rank, part in enumerate(rows)
        ]


def loss_counts(samples: Sequence[TrainingSample]) -> LossCounts:
    """N of each component over the step: the sum of rl weights, the number of ce and of ref_kl tokens."""

    def weight(sample: TrainingSample) -> float:
        members = rl_members(sample)
        return float(members.sum()) if sample.rl_weights is None else math.fsum(sample.rl_weights[members].tolist())

    def members(name: str) -> float:
        streams = (getattr(sample, name) for sample in samples)
        return float(sum(int(np.count_nonzero(stream)) for stream in streams if stream is not None))

    return LossCounts(math.fsum(map(weight, samples)), members("ce_weights"), members("ref_kl_weights"))


def micro_batch(samples: Sequence[TrainingSample], multiple: int) -> MicroBatch:
    """Concatenate samples into one row and pad it to a multiple; no samples give a row that trains nothing.

    A stream that only some samples have is filled with 1 for rl weights and 0 for all else.
    """
    if not samples:
        samples = [_dummy()]
    for sample in samples:
        if sample.advantages is None and rl_members(sample).any():
            raise ValueError(f"sample {sample.sample_id} feeds the rl loss but has no advantages")
    lengths = [len(sample) for sample in samples]
    pad = -sum(lengths) % multiple

    def joined(arrays: list[np.ndarray], fill: Any) -> np.ndarray:
        return np.concatenate([*arrays, np.full(pad, fill, arrays[0].dtype)])

    def stream(name: str, fill: float) -> np.ndarray | None:
        given = [getattr(sample, name) for sample in samples]
        if all(array is None for array in given):
            return None
        filled = [np.full(n, fill, np.float32) if a is None else a for a, n in zip(given, lengths, strict=True)]
        return joined(filled, 0.0)

    zeros = [np.zeros(n, np.float32) for n in lengths]
    advantages = [z if s.advantages is None else s.advantages for s, z in zip(samples, zeros, strict=True)]
    positions = [np.arange(n, dtype=np.int32) for n in lengths]
    return MicroBatch(
        input_ids=joined([sample.token_ids for sample in samples], PAD_TOKEN),
        position_ids=np.concatenate([*positions, np.arange(pad, dtype=np.int32)]),
        loss_mask=joined([sample.mask for sample in samples], False),
        advantages=joined(advantages, 0.0),
        inference_logprobs=joined([sample.logprobs for sample in samples], 0.0),
        temperatures=joined([sample.temperatures for sample in samples], 1.0),
        sequence_lengths=[*lengths[:-1], lengths[-1] + pad],
        env_names=[sample.env_name for sample in samples],
        sample_ids=[sample.sample_id for sample in samples],
        **{name: stream(name, fill) for name, fill in FILLS.items()},
    )


def _dummy() -> TrainingSample:
    one = np.ones(1, np.float32)
    return TrainingSample("", "", np.full(1, PAD_TOKEN, np.int32), np.zeros(1, bool), 0 * one, one)
