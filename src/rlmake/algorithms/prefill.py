"""Log-probabilities that a served model gives to known tokens: one prefill request per sequence."""

import asyncio
import os
from collections.abc import Sequence

import httpx
from loguru import logger

from rlmake.algorithms.base import Endpoint
from rlmake.core.errors import RunFailed

ATTEMPTS = 6


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
                return _first_entries(reply.json()["prompt_logprobs"], len(token_ids))
            except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
                refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if refused or attempt == ATTEMPTS - 1:
                    detail = error.response.text[:200] if isinstance(error, httpx.HTTPStatusError) else repr(error)
                    raise RunFailed(
                        f"{self.who} at {self.endpoint.base_url} did not score {len(token_ids)} tokens: {detail}"
                    ) from error
                logger.warning(f"{self.who} at {self.endpoint.base_url}: {error!r}, trying again")
                await asyncio.sleep(min(10.0, 2.0**attempt))
        raise AssertionError

    async def close(self) -> None:
        await self._client.aclose()


def _first_entries(rows: list, expected: int) -> list[float]:
    """Per position the first entry is the given token's; it is `{id: {"logprob": x, …}}`, or null for the first."""
    if len(rows) != expected:
        raise ValueError(f"{len(rows)} positions scored, {expected} sent")
    values = []
    for row in rows:
        entry = next(iter(row.values())) if row else 0.0
        values.append(float(entry["logprob"] if isinstance(entry, dict) else entry))
    return values
