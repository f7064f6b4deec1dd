"""The RL trainer: `torchrun … -m rlmake.trainer.rl @ <resolved>/trainer.json`. It knows no algorithm.

A step: receive the batch, divide by its global counts, forward and backward per micro-batch, clip, step, broadcast the
new version, save. Batch s trains v(s−1) into v(s); before the first wait, v(s−1) is offered, so that the engines serve
what is trained from here, also after a resume.
"""

import time
from typing import Any

import numpy as np
import torch
from loguru import logger

from rlmake.config import TrainerConfig
from rlmake.core.errors import RunFailed, UserError, entry_point
from rlmake.core.rundir import RunContext
from rlmake.models import exact, lora
from rlmake.monitors import Monitors
from rlmake.trainer import losses, process
from rlmake.trainer import world as worlds
from rlmake.trainer.batch import PackedRow, of_micro_batch
from rlmake.trainer.broadcast import Sender
from rlmake.trainer.fake import FakeReceiver
from rlmake.trainer.metrics import TokenStatistics, performance
from rlmake.trainer.model import load_model
from rlmake.trainer.parallel import flops_per_token, peak_flops
from rlmake.trainer.training import SAVED_AND_LEFT, Training
from rlmake.trainer.views import TokenViews
from rlmake.transport import Batch, open_receiver

HALVES = ("trainer", "orchestrator")
BY_ENV = ("mismatch_kl", "entropy", "ref_kl", "nll")
PLAIN = ("is_masked", "is_clamped", "masked_mismatch_kl", "unmasked_mismatch_kl")


def train(config: TrainerConfig, ctx: RunContext, world: worlds.World, monitors: Monitors) -> int:
    """Run to `max_steps`; returns the exit code. Raises `Diverged`, `UserError`, `RunFailed`."""
    model, facts = load_model(config)
    if config.deterministic and config.model.attn == "exact":
        report_exactness(model)
    training = Training(config, ctx, world, model, facts)
    training.resume()
    rl_loss, token_wise = losses.build(config.loss)
    if world.context is not None and not token_wise:
        raise UserError("loss.type: 'custom' sees whole sequences, which no rank has with model.cp above 1")
    receiver, halves = open_batches(training)
    sender = None if config.data.fake else Sender(training)  # nobody samples for made-up batches
    views = TokenViews(monitors.recorder(ctx.run_id))
    if sender:
        sender.send()
    while not training.done():
        start = time.perf_counter()
        with training.clock.measure("wait_for_batch"):
            batch = receiver.receive(training.step + 1)
        metrics = step(training, batch, rl_loss, token_wise, views)
        if sender:
            with training.clock.measure("broadcast_weights"):
                sender.send()
        views.write(training.step)
        warn_of_waiting(training.clock.times["wait_for_batch"], time.perf_counter() - start)
        if training.end_step(metrics, start, monitors, dict, halves):
            return SAVED_AND_LEFT
    training.saver.wait()
    receiver.close()
    return 0


def step(
    training: Training, batch: Batch, rl_loss: losses.registry.RLLoss, token_wise: bool, views: TokenViews
) -> dict[str, float]:
    """One optimizer step over a batch."""
    world, device, clock = training.world, training.world.device, training.clock
    start = time.perf_counter()
    with clock.measure("load_data"):
        check_tokens(batch, training.model_config.vocab_size)
        rows = [mine(training, *of_micro_batch(micro_batch)) for micro_batch in batch.micro_batches]
        counts = global_counts(world, batch, rows)
    statistics, scalars = TokenStatistics(), []
    with clock.measure("forward_backward"):
        total = torch.zeros(5, dtype=torch.float64, device=device)  # rl, ce, ref_kl sums; tokens that are NaN; tokens
        for micro_batch, (row, here, envs) in zip(batch.micro_batches, rows, strict=True):
            streams = here.to(device)
            logprobs, entropy = training.policy(row.to(device))
            outputs = losses.compute(logprobs, streams, counts, rl_loss, token_wise)
            outputs.loss.backward()
            total[:3] += outputs.sums
            total[3] += not_a_number(logprobs, streams)
            total[4] += len(row.input_ids)
            statistics.add("entropy", entropy, streams.loss_mask, envs)
            for name, (values, mask) in outputs.tokens.items():
                statistics.add(name, values, mask, envs)
            scalars.append(outputs.scalars)
            if world.context is None:
                views.add(row, micro_batch.sample_ids, logprobs, entropy, outputs)
        *sums, bad, tokens = world.sum(total).tolist()
    parts = {name: sums[i] / max(counts[i].item(), 1.0) for i, name in enumerate(losses.NAMES) if counts[i] > 0}
    with clock.measure("optimizer"):
        metrics = training.update(sum(parts.values()), int(bad))
    training.record(batch.sample_ids)
    rate = tokens / (time.perf_counter() - start)
    flops = flops_per_token(training.plan, training.model_config, mean_context(rows))
    metrics |= {"loss/mean": sum(parts.values())} | {f"loss/{name}": value for name, value in parts.items()}
    metrics |= statistics.describe(world, BY_ENV, PLAIN) | means(scalars)
    if metrics.get("entropy/all/mean"):
        metrics["kl_ent_ratio/mean"] = metrics.get("mismatch_kl/all/mean", 0.0) / metrics["entropy/all/mean"]
    return metrics | performance(rate, flops, peak_flops(device), world)


def check_tokens(batch: Batch, size: int) -> None:
    """Every token must be one of the model's. Raises `UserError`."""
    largest = max((int(np.max(rows.input_ids, initial=0)) for rows in batch.micro_batches), default=0)
    if largest >= size:
        raise UserError(
            f"batch of step {batch.step}: token {largest} is beyond the model's vocabulary of {size}; rollouts must "
            "come from a model with the same tokenizer (algo.sampling.source), and the renderer must use it too"
        )


def mine(training: Training, row: PackedRow, streams: losses.Streams, envs: np.ndarray) -> tuple:
    """This rank's share of a row (all of it without context parallelism), and what belongs to its tokens."""
    piece, chosen = training.policy.piece(row)
    if chosen is None:
        return row, streams, envs
    return piece, streams.take(chosen, piece.empty), envs[chosen.numpy()]


def global_counts(world: worlds.World, batch: Batch, rows: list) -> torch.Tensor:
    """float64 [3]: N of rl, ce, ref_kl over all ranks and micro-batches; must be what the orchestrator counted."""
    mine = sum((streams.counts() for _, streams, _ in rows), torch.zeros(3, dtype=torch.float64))
    counts = world.sum(mine.to(world.device))
    said = torch.tensor([batch.counts.rl, batch.counts.ce, batch.counts.ref_kl], dtype=torch.float64)
    if not torch.allclose(counts.cpu(), said, rtol=1e-4):
        raise RunFailed(
            f"batch of step {batch.step}: its counts {said.tolist()} are not those of its rows {counts.tolist()}"
        )
    return counts


def not_a_number(logprobs: torch.Tensor, streams: losses.Streams) -> torch.Tensor:
    """How many tokens that count have a log-probability that is NaN, on either side (a mask test would hide them)."""
    return ((logprobs.detach().isnan() | streams.inference_logprobs.isnan()) & streams.loss_mask).sum()


def open_batches(training: Training) -> tuple[Any, tuple[str, ...]]:
    """Where batches come from, and the halves that a checkpoint of the run has: made-up ones know no orchestrator."""
    config, ctx, world = training.config, training.ctx, training.world
    if config.data.fake is None:
        return open_receiver(config.rollout_transport, ctx, *world.rows), HALVES
    return FakeReceiver(config, ctx, training.model_config.vocab_size, *world.rows), HALVES[:1]


def report_exactness(model: torch.nn.Module) -> None:
    """The start-up self-test: trainer and engine agree bit for bit on this machine, or it is said that they do not."""
    with lora.stirred(model):
        result = exact.establish(model)
    (logger.info if result.ok else logger.warning)(f"forward on this machine: {result}")


def mean_context(rows: list) -> float:
    lens = [length for row, _, _ in rows for length in row.lens]
    return sum(lens) / max(len(lens), 1)


def means(scalars: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """A custom loss's scalars, averaged over this rank's micro-batches."""
    names = {name for found in scalars for name in found}
    return {name: sum(f[name].item() for f in scalars if name in f) / len(scalars) for name in sorted(names)}


def warn_of_waiting(waited: float, step: float) -> None:
    active = step - waited
    if waited > max(active, 1.0):
        logger.warning(f"waited {waited:.1f} s for the batch, worked {active:.1f} s: inference is the bottleneck")


if __name__ == "__main__":
    entry_point(process.run)(TrainerConfig, train)
