"""Supervised fine-tuning: `torchrun … -m rlmake.trainer.sft @ <resolved>/sft.json`.

Loss: `Σ −log p(target) over trained tokens / their number in the whole step`, all ranks and micro-batches together.
"""

import math
import time
from typing import Any

import torch

from rlmake.config import SFTConfig
from rlmake.core.errors import UserError, entry_point
from rlmake.core.rundir import RunContext
from rlmake.monitors import Monitors
from rlmake.trainer import process
from rlmake.trainer import world as worlds
from rlmake.trainer.broadcast import Sender
from rlmake.trainer.data.loader import SFTLoader
from rlmake.trainer.metrics import performance
from rlmake.trainer.model import load_model
from rlmake.trainer.parallel import flops_per_token, peak_flops
from rlmake.trainer.training import SAVED_AND_LEFT, Training

HALVES = ("trainer",)


def train(config: SFTConfig, ctx: RunContext, world: worlds.World, monitors: Monitors) -> int:
    """Run to `max_steps`; returns the exit code. Raises `Diverged`, `UserError`."""
    model, facts = load_model(config)
    training = Training(config, ctx, world, model, facts, rows=config.data.micro_batch_size)
    loader = make_loader(config, config.data, training)
    validation = make_loader(config, config.val.data, training, epochs=1) if config.val else None
    state = training.resume()
    if state is not None and not training.skips("dataloader"):
        loader.load(state["loader"], totals=not training.skips("progress"))
    sender = Sender(training) if config.eval else None
    if sender:
        sender.send()  # at the start, also after a resume: it fails now rather than at the first evaluation
    if validation is not None and config.val.eval_on_start and training.step == 0:
        monitors.log(0, validate(training, validation))
    while not training.done():
        start = time.perf_counter()
        metrics = step(training, loader)
        if validation is not None and training.step % config.val.interval == 0:
            metrics |= validate(training, validation)
        if sender and evaluation_due(config, training.step):
            with training.clock.measure("broadcast_weights"):
                sender.send()
        if training.end_step(metrics, start, monitors, lambda: saved(loader), HALVES):
            return SAVED_AND_LEFT
    training.saver.wait()
    loader.close()
    return 0


def evaluation_due(config: SFTConfig, step: int) -> bool:
    """Whether any source of the online evaluation measures this step; the last one always counts."""
    return step == config.max_steps or any(step % source.interval == 0 for source in config.eval.source)


def saved(loader: SFTLoader) -> dict[str, Any]:
    """What a checkpoint's `state.json` holds beside what every trainer has."""
    return {"loader": loader.state(), "progress": loader.metrics()}


def step(training: Training, loader: SFTLoader) -> dict[str, float]:
    """One optimizer step over the next `batch_size` packed rows."""
    clock, world = training.clock, training.world
    start = time.perf_counter()
    with clock.measure("load_data"):
        data = loader.step()
    with clock.measure("forward_backward"):
        total = torch.zeros(2, dtype=torch.float64, device=world.device)  # Σ −log p, rows whose loss is not a number
        for row in data.rows:
            loss = negative_log_likelihood(training, row)
            (loss / data.trained_tokens).backward()
            total += torch.stack([loss.detach().double(), (~loss.detach().isfinite()).double()])
        if training.step + 1 != training.config.max_steps:
            loader.look_ahead()
        nll, bad = world.sum(total).tolist()
    mean = nll / data.trained_tokens
    with clock.measure("optimizer"):
        metrics = training.update(mean, int(bad))
    training.record(data.sample_ids)
    rate = clock.throughput(data.tokens, time.perf_counter() - start)
    flops = flops_per_token(training.plan, training.model_config, data.tokens / len(data.sample_ids))
    return {
        "loss/mean": mean,
        "loss/perplexity": math.exp(min(mean, 20.0)),
        "loss/nan_count": int(bad),
        "packing/fill": data.fill,
        **metrics,
        **loader.metrics(),
        **performance(rate, flops, peak_flops(world.device), world),
    }


def negative_log_likelihood(training: Training, row: Any) -> torch.Tensor:
    """Σ −log p over the row's trained tokens; exactly 0, with a gradient, for a dummy row."""
    row, _ = training.policy.piece(row)
    logprobs, _ = training.policy(row.to(training.world.device), entropies=False)
    return logprobs.sum() * 0.0 if row.empty else -logprobs.sum()


@torch.no_grad()
def validate(training: Training, loader: SFTLoader) -> dict[str, float]:
    """One pass over the held-out data: the mean over all its trained tokens. All ranks run equally many rows."""
    total = torch.zeros(1, dtype=torch.float64, device=training.world.device)
    tokens = 0
    loader.restart()
    training.policy.eval()
    for data in loader:
        tokens += data.trained_tokens
        for row in data.rows:
            total += negative_log_likelihood(training, row).double()
    training.policy.train()
    loss = training.world.sum(total).item() / tokens
    return {"val/loss": loss, "val/perplexity": math.exp(min(loss, 20.0))}


def make_loader(config: SFTConfig, data: Any, training: Training, epochs: int | None = None) -> SFTLoader:
    """The loader of this rank. A row is micro_batch_size · ranks at least, so `batch_size` must be a multiple."""
    (share, shares), vocab = training.world.rows, training.model_config.vocab_size
    if epochs is None and data.batch_size % (shares * data.micro_batch_size):
        raise UserError(f"data.batch_size {data.batch_size} is no multiple of {shares} ranks × micro_batch_size")
    return SFTLoader(data, config.renderer, config.tokenizer, vocab, share, shares, epochs)


if __name__ == "__main__":
    entry_point(process.run)(SFTConfig, train)
