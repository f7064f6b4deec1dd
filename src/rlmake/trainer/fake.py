"""Made-up RL batches (`data.fake`), to try and to time the trainer alone: no orchestrator, no engine.

Every row is full. All three components of the loss have members, and log-probabilities are those of a policy that knows
nothing, `−log V`, so that the trust region masks little.
"""

import math
from typing import Any

import numpy as np

from rlmake.core.rundir import RunContext
from rlmake.core.seeds import derive
from rlmake.transport import Batch, LossCounts, MicroBatch


class FakeReceiver:
    """Stands where the receiver of real batches does; the batch of a step depends on seed and step alone."""

    def __init__(self, config: Any, ctx: RunContext, vocab_size: int, rank: int, world: int):
        self.config, self.ctx, self.vocab, self.rank, self.world = config, ctx, vocab_size, rank, world

    def receive(self, step: int, timeout: float | None = None) -> Batch:
        rows = [self._row(step, index) for index in range(self.config.data.fake.batch_size)]
        rows += [_emptied(rows[-1])] * (-len(rows) % self.world)
        counts = LossCounts(
            rl=float(sum(row.loss_mask.sum() for row in rows)),
            ce=float(sum((row.ce_weights != 0).sum() for row in rows)),
            ref_kl=float(sum((row.ref_kl_weights != 0).sum() for row in rows)),
        )
        ids = [sample for row in rows for sample in row.sample_ids if sample]
        mine, context = rows[self.rank :: self.world], self.ctx
        return Batch(1, context.run_id, context.attempt, step, self.rank, self.world, counts, ids, mine)

    def _row(self, step: int, index: int) -> MicroBatch:
        generator = np.random.Generator(np.random.PCG64(derive(self.config.seed, "fake", step, index)))
        total = self.config.model.seq_len
        lens = [total]
        if self.config.data.fake.generate_samples:
            ends = np.unique(generator.integers(1, total, max(total // 512, 1)))
            lens = np.diff(np.concatenate([[0], ends, [total]])).tolist()
        positions = np.concatenate([np.arange(length) for length in lens]).astype(np.int32)
        answer = positions >= np.repeat([max(length // 4, 1) for length in lens], lens)
        score = np.float32(-math.log(self.vocab))
        return MicroBatch(
            input_ids=generator.integers(0, self.vocab, total).astype(np.int32),
            position_ids=positions,
            loss_mask=answer,
            advantages=generator.standard_normal(total).astype(np.float32) * answer,
            inference_logprobs=np.where(answer, score, np.float32(0)),
            temperatures=np.ones(total, dtype=np.float32),
            sequence_lengths=lens,
            env_names=["fake"] * len(lens),
            sample_ids=[f"fake/{step}/{index}/{i}" for i in range(len(lens))],
            ce_weights=np.where(answer, np.float32(0), np.float32(0.1)) * (positions > 0),
            ref_kl_weights=answer.astype(np.float32),
            ref_logprobs=np.where(answer, score, np.float32(0)),
        )

    def close(self) -> None:
        pass


def _emptied(row: MicroBatch) -> MicroBatch:
    """The same tokens with nothing that counts, so that all ranks have equally many rows."""
    zeros = np.zeros(len(row.input_ids), dtype=np.float32)
    return MicroBatch(
        input_ids=row.input_ids,
        position_ids=row.position_ids,
        loss_mask=np.zeros(len(zeros), dtype=bool),
        advantages=zeros,
        inference_logprobs=zeros,
        temperatures=row.temperatures,
        sequence_lengths=row.sequence_lengths,
        env_names=[""] * len(row.sequence_lengths),
        sample_ids=[""] * len(row.sequence_lengths),
        ce_weights=zeros,
        ref_kl_weights=zeros,
        ref_logprobs=zeros,
    )
