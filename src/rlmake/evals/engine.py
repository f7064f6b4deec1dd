"""The engine that an evaluation asks: wait until it answers, and learn under which name it serves the model."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
from loguru import logger

from rlmake.core.errors import RunFailed, UserError, nearest

POLL_S = 0.25


async def published_url(client: Any, address_file: Path) -> str:
    """`client.base_url`, or the URL (with /v1) that the engine of this run writes into `address_file` once it answers.

    Raises `RunFailed` when it does not within `client.wait_for_ready_timeout`.
    """
    if client.base_url is not None:
        return client.base_url.rstrip("/")
    deadline = time.monotonic() + client.wait_for_ready_timeout
    while not address_file.exists():
        if time.monotonic() > deadline:
            raise RunFailed(f"client.base_url is not given, and no engine has published itself in {address_file}")
        await asyncio.sleep(POLL_S)
    return address_file.read_text().strip().rstrip("/") + "/v1"


async def await_model(client: Any, base_url: str, model: str | None, run_id: str | None = None) -> str:
    """The name of the model at `base_url` (ending in /v1), once the engine answers.

    `client`: a `ClientConfig`. `run_id`: the run that started the engine, where it must be that one and says who it is.
    Raises `RunFailed` when none answers within `client.wait_for_ready_timeout`, `UserError` for a stranger's engine or
    one that does not serve `model`.
    """
    listed = await _models(client, base_url)
    served = [card["id"] for card in listed]
    owner = next((card["run_id"] for card in listed if card.get("run_id")), None)
    if run_id is not None and owner is not None and owner != run_id:
        raise UserError(f"client.base_url: the engine at {base_url} belongs to run '{owner}', not to '{run_id}'")
    if model in served:
        return model
    if model is None and len(served) == 1:
        return served[0]
    if client.skip_model_check and model is not None:
        return model
    names = ", ".join(served) or "no model"
    raise UserError(f"model: {base_url} does not serve '{model}' but {names}{nearest(str(model), served)}")


def headers_of(client: Any) -> dict[str, str]:
    """The headers of every request of a `ClientConfig`, its key among them."""
    headers = dict(client.headers)
    headers |= {name: os.environ[var] for name, var in client.headers_from_env.items() if var in os.environ}
    if key := os.environ.get(client.api_key_var):
        headers.setdefault("Authorization", f"Bearer {key}")
    return headers


def roots(client: Any, base_url: str) -> list[httpx.AsyncClient]:
    """Connections to the engines themselves, at their roots (without /v1)."""
    urls = client.admin_base_url or [base_url]
    given = {"headers": headers_of(client), "timeout": 10.0, "trust_env": False}
    return [httpx.AsyncClient(base_url=url.rstrip("/").removesuffix("/v1"), **given) for url in urls]


def _unlisted(base_url: str, status: int) -> str:
    end = "" if base_url.endswith("/v1") else "expected a URL that ends in /v1; "
    return (
        f"client.base_url: {base_url}/models is not there ({status}); {end}for a server that lists no models give "
        "client.skip_model_check = true and the model's name"
    )


async def _models(client: Any, base_url: str) -> list[dict[str, Any]]:
    deadline = time.monotonic() + client.wait_for_ready_timeout
    told = False
    async with httpx.AsyncClient(headers=headers_of(client), timeout=10.0, trust_env=False) as http:
        while True:
            try:
                reply = await http.get(f"{base_url}/models")
                if reply.status_code in (401, 403):
                    raise UserError(f"client: {base_url} refuses the key in ${client.api_key_var}: {reply.status_code}")
                if reply.status_code in (404, 405):  # it answers, and waiting changes nothing
                    if client.skip_model_check:
                        return []
                    raise UserError(_unlisted(base_url, reply.status_code))
                reply.raise_for_status()
                return [card for card in reply.json()["data"] if isinstance(card.get("id"), str)]
            except (httpx.HTTPError, ValueError, KeyError, AttributeError, TypeError) as error:
                fault = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise RunFailed(f"client.base_url: no engine answers at {base_url} ({fault})")
            if not told:
                logger.info(f"waiting for the engine at {base_url}")
                told = True
            await asyncio.sleep(POLL_S)
