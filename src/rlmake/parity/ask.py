"""Completions from an engine: `python -m rlmake.parity.ask @ parity.json <dtype> <URL with /v1>`.

All prompts are sent at once, so that they are generated in one batch. Each token comes with the logprobs of the whole
vocabulary (`logprobs: -1`).
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from loguru import logger
from setproctitle import setproctitle

from rlmake.config.parity import ASKED, VALUES, trainer_of
from rlmake.core import log, procs
from rlmake.core.errors import RunFailed, UserError, entry_point
from rlmake.core.seeds import derive
from rlmake.parity import prompts
from rlmake.parity.order import Answer, Order, save

TIMEOUT_S = 600.0


@entry_point
def main(argv: list[str] | None = None) -> None:
    procs.die_with_parent()
    setproctitle("PRL::Parity")
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 4 or argv[0] != "@":
        raise UserError("usage: python -m rlmake.parity.ask @ parity.json <dtype> <URL>")
    order = Order.read(Path(argv[1]))
    log.setup("parity", trainer_of(order.run).log.level)
    answers, version = asyncio.run(ask(order, argv[3]))
    save(order.answers(argv[2]), answers, version)


async def ask(order: Order, base_url: str) -> tuple[list[Answer], str]:
    """Answers and version of the engine at `base_url`. Raises `RunFailed` for one that answers otherwise."""
    from rlmake.models.loading import load_config

    vocab = load_config(order.model).vocab_size
    async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1"), timeout=TIMEOUT_S, trust_env=False) as client:
        version = await _json(client.get("/version"))
        card = (await _json(client.get("/v1/models")))["data"][0]
        longest = min(card["max_model_len"], trainer_of(order.run).model.seq_len)
        tokens = min(ASKED["tokens"], max(1, VALUES // (vocab * ASKED["sequences"])))
        asked = await asyncio.to_thread(prompts.of_run, order.run, order.model, vocab, ASKED["sequences"], longest - 1)
        done = await asyncio.gather(
            *(
                _complete(client, card["id"], prompt, min(tokens, longest - len(prompt)), vocab, index)
                for index, prompt in enumerate(asked)
            )
        )
    logger.info(f"{len(done)} sequences, {sum(len(one.completion) for one in done)} tokens x {vocab}")
    return done, str(version["version"])


async def _complete(
    client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int, vocab: int, index: int
) -> Answer:
    sampling = {"max_tokens": tokens, "temperature": 1.0, "top_p": 1.0, "logprobs": -1, "skip_special_tokens": False}
    sampling["seed"] = derive(ASKED["seed"], "parity", index)
    body = {"model": model, "token_ids": prompt, "sampling_params": sampling}
    choice = (await _json(client.post("/inference/v1/generate", json=body)))["choices"][0]
    entries = choice["logprobs"]["content"]
    logprobs = np.full((len(entries), vocab), np.nan, dtype=np.float32)
    for row, entry in zip(logprobs, entries, strict=True):
        for found in entry["top_logprobs"]:
            row[int(found["token"].removeprefix("token_id:"))] = found["logprob"]
    if not np.isfinite(logprobs).all():
        raise RunFailed(f"the engine left out logprobs of {np.isnan(logprobs).sum()} of {logprobs.size} tokens")
    sampled = np.array([entry["logprob"] for entry in entries], dtype=np.float32)
    return Answer(np.array(prompt), np.array(choice["token_ids"]), sampled, logprobs)


async def _json(request: Any) -> Any:
    try:
        reply = await request
    except httpx.HTTPError as error:
        raise RunFailed(f"the engine does not answer: {type(error).__name__}: {error}") from None
    if reply.status_code != 200:
        raise RunFailed(f"the engine refuses {reply.request.url.path}: {reply.text[:300]}")
    return reply.json()


if __name__ == "__main__":
    main()
