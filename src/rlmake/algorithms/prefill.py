"""Log-probabilities that a served model gives to known tokens: one prefill request per sequence."""

import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any

import httpx
from loguru import logger

from rlmake.algorithms.base import Endpoint
from rlmake.core.errors import RunFailed

ATTEMPTS = 6
ROUNDING = 1e-3  # by which a log-probability may be above 0
PASSING = (408, 429)  # refusals that a later request may not meet


class Prefill:
    """Scores token sequences at temperature 1 on one server. `who` names the server's part in error messages."""

    def __init__(self, endpoint: Endpoint, who: str, max_connections: int = 64):
        self.endpoint, self.who = endpoint, who
        key = os.environ.get(endpoint.api_key_var)
        self._client = httpx.AsyncClient(
            base_url=endpoint.base_url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(600.0, connect=10.0),
            limits=httpx.Limits(max_connections=max_connections),
        )

    async def logprobs(self, token_ids: Sequence[int], cache_salt: str | None = None) -> list[float]:
        """One value per token; the first has no context and gets 0. Retries while the server is away; then `RunFailed`.

        `cache_salt` keeps a live policy's prefix cache apart by version.
        """
        body = {
            "model": self.endpoint.model,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1},
        }
        if cache_salt is not None:
            body["cache_salt"] = cache_salt
        for attempt in range(ATTEMPTS):
            try:
                reply = await self._client.post("/inference/v1/generate", json=body)
                reply.raise_for_status()
                return _given_tokens(reply.json()["prompt_logprobs"], token_ids)
            except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
                detail, refused = repr(error), False
                if isinstance(error, httpx.HTTPStatusError):
                    status = error.response.status_code
                    detail = f"{status} {error.response.text[:200]}"
                    refused = status < 500 and status not in PASSING
                if refused or attempt == ATTEMPTS - 1:
                    raise RunFailed(
                        f"{self.who} at {self.endpoint.base_url} did not score {len(token_ids)} tokens: {detail}"
                    ) from error
                logger.warning(f"{self.who} at {self.endpoint.base_url}: {detail}; trying again")
                await asyncio.sleep(min(10.0, 2.0**attempt))
        raise AssertionError

    async def close(self) -> None:
        await self._client.aclose()


def _given_tokens(rows: Any, token_ids: Sequence[int]) -> list[float]:
    """The given token's value per position, of rows `{id: {"logprob": x, …}}`; the first position counts as 0."""
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        found = len(rows) if isinstance(rows, list) else "no"
        raise ValueError(f"{found} positions scored, {len(token_ids)} sent")
    values = [0.0] * len(rows)
    for position, (token, row) in enumerate(zip(token_ids, rows, strict=True)):
        if position == 0:
            continue
        entry = row.get(str(token)) if isinstance(row, dict) else None
        value = entry.get("logprob") if isinstance(entry, dict) else entry
        if not isinstance(value, int | float) or not math.isfinite(value) or value > ROUNDING:
            raise ValueError(f"no log-probability of token {token} at position {position}: {str(row)[:100]}")
        values[position] = float(value)
    return values
