"""report.json of a comparison: how far the trainer's logprobs lie from the engine's."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlmake.config.parity import ASKED, DTYPES, engine_of, trainer_of
from rlmake.parity.order import Answer, Order

SCHEMA = 1
NAME = "report.json"
IDENTITY = ("run", "model_fingerprint", "model_step", "model_content")


def pair(
    dtype: str,
    attention: str,
    answers: Sequence[Answer],
    scored: Sequence[tuple[np.ndarray, np.ndarray]],
    text: Callable[[int], str],
) -> dict[str, Any]:
    """The row of one type and attention path. `scored`: the trainer's logprobs of the tokens chosen [n] and of all
    [n, V], of each answer.

    `mean_abs`, `max_abs`: |trainer - engine| over all tokens of the vocabulary at all positions. `kl_mean`: Kullback
    and Leibler's divergence of engine from trainer, Σ p_engine (log p_engine - log p_trainer), mean of the positions.
    `chosen_…`: over the sampled tokens alone. `worst`: the token that is furthest off, null where none is.
    """
    total = kl = chosen_total = 0.0
    values = tokens = 0
    largest, chosen_largest, worst = 0.0, 0.0, None
    for index, (answer, (chosen, whole)) in enumerate(zip(answers, scored, strict=True)):
        engine, trainer = answer.logprobs.astype(np.float64), whole.astype(np.float64)
        gaps = np.abs(trainer - engine)
        total, values = total + gaps.sum(), values + gaps.size
        kl += (np.exp(engine) * (engine - trainer)).sum()
        near = np.abs(chosen.astype(np.float64) - answer.sampled)
        chosen_total, tokens = chosen_total + near.sum(), tokens + near.size
        chosen_largest = max(chosen_largest, near.max())
        if gaps.max() > largest:
            at, token = np.unravel_index(int(gaps.argmax()), gaps.shape)
            largest = gaps.max()
            worst = {
                "sequence": index,
                "position": len(answer.prompt) + int(at),
                "token": int(token),
                "text": text(int(token)),
                "trainer": float(trainer[at, token]),
                "engine": float(engine[at, token]),
            }
    return {
        "dtype": dtype,
        "attention": attention,
        "sequences": len(answers),
        "tokens": tokens,
        "vocab": answers[0].logprobs.shape[1],
        "mean_abs": float(total / values),
        "max_abs": float(largest),
        "kl_mean": float(kl / tokens),
        "chosen_mean_abs": float(chosen_total / tokens),
        "chosen_max_abs": float(chosen_largest),
        "worst": worst,
    }


def make(order: Order, version: str | None, rows: list[dict[str, Any]], left_out: list[dict[str, str]]) -> dict:
    """The content of report.json; `version`: of the engine."""
    engine, trainer = engine_of(order.run), trainer_of(order.run)
    return {
        "schema": SCHEMA,
        **{key: order.identity.get(key) for key in IDENTITY},
        "engine": {"type": engine.engine, "version": version, "device": engine.device},
        "trainer": {"torch": torch.__version__, "device": trainer.device},
        "configured": {"dtype": trainer.model.compute_dtype, "attention": trainer.model.attn},
        "seed": ASKED["seed"],
        "pairs": sorted(rows, key=lambda row: (row["attention"], DTYPES.index(row["dtype"]))),
        "not_run": left_out,
    }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    worst = row["worst"]
    where = ""
    if worst is not None:
        where = f"; worst token {worst['token']} {worst['text']!r} at {worst['sequence']}.{worst['position']}: "
        where += f"{worst['trainer']:.6f}, engine {worst['engine']:.6f}"
    return (
        f"{row['dtype']}, {row['attention']}: |difference| mean {row['mean_abs']:.2g}, max {row['max_abs']:.2g}, "
        f"KL {row['kl_mean']:.2g} over {row['tokens']} tokens x {row['vocab']}{where}"
    )
