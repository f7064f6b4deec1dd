"""The trainer's side: `python -m rlmake.parity.score @ parity.json`, when the engine's answers are there.

The trainer itself, not a bare model: its loading, its attention, and FSDP2 over one rank with its mixed precision (on a
GPU the copies in the type of the products that stand in FSDP's place there). More ranks gather the same parameters.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from setproctitle import setproctitle
from torch.distributed.fsdp import register_fsdp_forward_method

from rlmake.config.parity import pairs_of, trainer_of, trainer_with
from rlmake.core import log, procs
from rlmake.core.errors import RunFailed, UserError, entry_point
from rlmake.core.jsonio import write_json
from rlmake.models.text import decode, load_tokenizer
from rlmake.parity import report
from rlmake.parity.order import Answer, Order, load
from rlmake.trainer import world as worlds
from rlmake.trainer.batch import PackedRow
from rlmake.trainer.families import plan_of
from rlmake.trainer.model import load_model
from rlmake.trainer.parallel import parallelise
from rlmake.trainer.policy import Policy, make_policy
from rlmake.trainer.rl import report_exactness
from rlmake.trainer.training import prepare


@entry_point
def main(argv: list[str] | None = None) -> None:
    procs.die_with_parent()
    setproctitle("PRL::Parity")
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "@":
        raise UserError("usage: python -m rlmake.parity.score @ parity.json")
    order = Order.read(Path(argv[1]))
    config = trainer_of(order.run)
    log.setup("parity", config.log.level)
    prepare(config)
    world = worlds.start(gpu=config.device == "cuda", threads=config.cpu_threads)
    try:
        write_json(order.folder / report.NAME, compare(order, world))
    finally:
        world.close()


def compare(order: Order, world: worlds.World) -> dict[str, Any]:
    """The content of report.json. Raises `RunFailed` when not one pair can be run."""
    tokenizer = load_tokenizer(order.model)
    pairs, left_out = pairs_of(order.run)
    rows, version = [], None
    for dtype, attention in pairs:
        answers, version = load(order.answers(dtype))
        config = trainer_with(order.run, str(order.model), dtype, attention)
        try:
            policy = build(config, world)
        except UserError as error:
            left_out.append({"dtype": dtype, "attention": attention, "reason": str(error)})
            continue
        scored = [scores for row in packed(answers, config.model.seq_len) for scores in score(policy, row, world)]
        rows.append(report.pair(dtype, attention, answers, scored, lambda token: decode(tokenizer, [token])))
        logger.success(report.line(rows[-1]))
    for one in left_out:
        logger.info(f"not run: {one['dtype']}, {one['attention']}: {one['reason']}")
    if not rows:
        raise RunFailed(f"nothing could be compared: {left_out[0]['reason']}")
    return report.make(order, version, rows, left_out)


def build(config: Any, world: worlds.World) -> Policy:
    """The policy as a training of this configuration has it before its first step."""
    model, _ = load_model(config)
    if config.deterministic and config.model.attn == "exact" and config.model.compute_dtype == "float32":
        report_exactness(model)
    policy = make_policy(model, config.model, config.model.seq_len, world)
    policy.masters = parallelise(policy, plan_of(model.config.model_type), model, config.model, world)
    register_fsdp_forward_method(policy, "distribution")
    return policy


def packed(answers: list[Answer], longest: int) -> list[list[Answer]]:
    """The sequences in rows of at most `longest` tokens, in their order."""
    rows: list[list[Answer]] = []
    room = 0
    for one in answers:
        size = len(one.prompt) + len(one.completion)
        if size > room or not rows:
            rows.append([])
            room = longest
        rows[-1].append(one)
        room -= size
    return rows


@torch.no_grad()
def score(policy: Policy, answers: list[Answer], world: worlds.World) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each sequence of a row: the logprobs of its completion's tokens, fp32 [n], and of all tokens, fp32 [n, V]."""
    row = row_of(answers).to(world.device)
    chosen, _ = policy(row)
    whole = policy.distribution(row)
    counts = [len(one.completion) for one in answers]
    parts = zip(chosen.cpu().split(counts), whole.cpu().split(counts), strict=True)
    return [(a.numpy(), b.numpy()) for a, b in parts]


def row_of(answers: list[Answer]) -> PackedRow:
    """A packed row whose scored tokens are those of the completions."""
    ids = [np.concatenate([one.prompt, one.completion]) for one in answers]
    lens = [len(part) for part in ids]
    starts = np.cumsum([0, *lens[:-1]])
    at = [
        start + len(one.prompt) - 1 + np.arange(len(one.completion)) for start, one in zip(starts, answers, strict=True)
    ]
    return PackedRow(
        input_ids=torch.from_numpy(np.concatenate(ids)),
        position_ids=torch.cat([torch.arange(length) for length in lens]),
        lens=lens,
        at=torch.from_numpy(np.concatenate(at)),
        targets=torch.from_numpy(np.concatenate([one.completion for one in answers])),
        temperatures=None,
    )


if __name__ == "__main__":
    main()
