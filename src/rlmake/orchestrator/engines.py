"""The inference server as the orchestrator sees it: is it there, pause, new weights, resume, metrics."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
from loguru import logger

from rlmake.core import jsonio
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.rundir import RunContext
from rlmake.transport.weights import RECORD, Record

ATTEMPTS = 10
PAUSE_SECONDS, UPDATE_SECONDS, ADAPTER_SECONDS = 300.0, 720.0, 60.0


class Engines:
    """`base_url` (with /v1) is for rollouts; `admin` are the engines themselves, past any router."""

    def __init__(self, config: Any, base: str, ctx: RunContext, adapter: str | None = None):
        """`base`: the model that the servers must serve. `adapter`: what is sampled from, once it was loaded."""
        if config.base_url is None:
            raise UserError("orchestrator.model.client.base_url is missing: which inference server?")
        self.config, self.base, self.adapter, self.ctx = config, base, adapter, ctx
        self.model = adapter or base
        self.joined: str | None = None  # session of the trainer's group that the engines are in
        self.receivers: list[str] = []  # their workers, in the order of their ranks in a group
        self.workers: list[list[dict]] = []
        self.check_files = False  # each is one of ours, which load no file before its hash is right
        self.base_url = config.base_url.rstrip("/")
        self.max_model_len: int | None = None  # tokens, once the engines have told it
        urls = config.admin_base_url or [self.base_url]
        headers = dict(config.headers)
        headers |= {name: os.environ[var] for name, var in config.headers_from_env.items() if var in os.environ}
        if key := os.environ.get(config.api_key_var):
            headers.setdefault("Authorization", f"Bearer {key}")
        self.admin = [
            httpx.AsyncClient(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=30.0)
            for url in urls
        ]

    async def wait_ready(self) -> None:
        """Until every engine is healthy; then make sure that it serves our model, and our run.

        Raises `RunFailed` after `wait_for_ready_timeout`, `UserError` for a server of another run or model.
        """
        deadline = time.monotonic() + self.config.wait_for_ready_timeout
        ours = []
        for client in self.admin:
            while not await self._healthy(client):
                if time.monotonic() > deadline:
                    raise RunFailed(
                        f"inference server {client.base_url} is not healthy after "
                        f"{self.config.wait_for_ready_timeout:g} s; see inference.log"
                    )
                await asyncio.sleep(0.25)
            ours.append(not self.config.skip_model_check and await self._check_identity(client))
        self.check_files = all(ours)

    async def _healthy(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def _check_identity(self, client: httpx.AsyncClient) -> bool:
        """Whether it is an inference server of ours."""
        reply = (await self._call(client, "GET", "/v1/models", 30.0)).json()
        names = [entry["id"] for entry in reply["data"]]
        self.max_model_len = next((entry.get("max_model_len") for entry in reply["data"]), None)
        run_id = reply.get("run_id", reply["data"][0].get("run_id") if reply["data"] else None)
        if run_id is not None and run_id != self.ctx.run_id:
            raise UserError(f"inference server {client.base_url} belongs to run {run_id!r}, not to {self.ctx.run_id!r}")
        if self.base not in names:
            raise UserError(f"inference server {client.base_url} serves {', '.join(names)}, not {self.base}")
        return all(entry.get("owned_by") == "rlmake" for entry in reply["data"])

    async def pause(self) -> None:
        """Freeze running requests; they go on after `resume`."""
        await self._all("/pause", PAUSE_SECONDS)

    async def resume(self) -> None:
        await self._all("/resume", PAUSE_SECONDS)

    async def update_weights(self, folder: Path, version: int) -> dict[str, float]:
        """Load a version from files on every engine, at the same time. From files this may be repeated safely.

        Seconds by part, as far as engines tell them, of the slowest in each.
        """
        body = {"weight_dir": str(folder), "version": version}
        if self.check_files:  # without its record nobody would know what it must hold
            body["checksum"] = jsonio.read_record(folder / RECORD, Record)["checksum"]
        replies = await self._all("/update_weights", UPDATE_SECONDS, body)
        told = [reply.json().get("seconds", {}) for reply in replies] if self.check_files else []
        return {part: max(seconds.get(part, 0.0) for seconds in told) for seconds in told for part in seconds}

    async def load_adapter(self, folder: Path) -> None:
        """Put the adapter in a folder in place of the one before, on every engine; nothing has to be paused."""
        body = {"lora_name": self.adapter, "lora_path": str(folder), "load_inplace": True}
        await self._all("/load_lora_adapter", ADAPTER_SECONDS, body)

    async def refusal(self, rendezvous: dict) -> str | None:
        """Why the engines cannot take weights from the trainer's group, None where they can. Fills `receivers`."""
        if self.joined == rendezvous["session"]:
            return None
        self.workers = [
            (await self._call(client, "GET", "/broadcaster", 60.0)).json()["workers"] for client in self.admin
        ]
        self.receivers = [
            f"worker {worker['rank']} of {client.base_url}"
            for client, workers in zip(self.admin, self.workers, strict=True)
            for worker in workers
        ]
        for name, worker in zip(self.receivers, [w for workers in self.workers for w in workers], strict=True):
            if worker["nccl"] != rendezvous["nccl"] and rendezvous["backend"] == "nccl":
                return f"{name} has NCCL {worker['nccl']}, the trainer {rendezvous['nccl']}"
        return None

    async def join(self, rendezvous: dict, timeout: float) -> None:
        """Make every worker of every engine join the trainer's group, once."""
        if self.joined == rendezvous["session"]:
            return
        first, calls = 1, []
        for client, workers in zip(self.admin, self.workers, strict=True):
            body = {
                "host": rendezvous["host"], "port": rendezvous["port"], "rank_offset": first, "timeout": timeout,
                "inference_world_size": len(self.receivers), "session_id": rendezvous["session"],
                "backend": rendezvous["backend"], "nccl_version": rendezvous["nccl"],
            }  # fmt: skip
            calls.append(self._call(client, "POST", "/init_broadcaster", 2 * timeout, body, attempts=1))
            first += len(workers)
        await asyncio.gather(*calls)
        self.joined = rendezvous["session"]

    async def receive_weights(self, version: int, group: dict) -> None:
        """Make every engine take a version from the group, at the same time. Never repeated: half of the group would
        wait for a transfer that the other half has behind it."""
        body = {"weight_dir": None, "version": version} | {key: group[key] for key in ("plan", "dtype", "digests")}
        await asyncio.gather(
            *(self._call(client, "POST", "/update_weights", UPDATE_SECONDS, body, attempts=1) for client in self.admin)
        )

    async def _all(self, path: str, timeout: float, body: dict | None = None) -> list[httpx.Response]:
        return await asyncio.gather(*(self._call(client, "POST", path, timeout, body) for client in self.admin))

    async def _call(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        timeout: float,
        body: dict | None = None,
        attempts: int = ATTEMPTS,
    ) -> httpx.Response:
        """One admin call, repeated while the server is away or says 5xx; at most twice `timeout` in all."""
        deadline = time.monotonic() + 2 * timeout
        for attempt in range(1, attempts + 1):
            try:
                reply = await client.request(method, path, json=body, timeout=httpx.Timeout(timeout, connect=10.0))
                reply.raise_for_status()
                return reply
            except httpx.HTTPError as error:
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
                detail = _reason(error.response) if status else repr(error)
                if (status and status < 500) or attempt == attempts or time.monotonic() > deadline:
                    raise RunFailed(f"inference server {client.base_url}: {path} failed: {detail}") from error
                logger.warning(f"inference server {client.base_url}: {path}: {detail}; trying again")
                await asyncio.sleep(min(10.0, 2.0 ** (attempt - 1)))
        raise AssertionError

    async def close(self) -> None:
        await asyncio.gather(*(client.aclose() for client in self.admin))


async def await_answer(key: str, url: str, timeout: float) -> None:
    """Until something answers HTTP at `url` (ending in /v1), whatever it says: the server of a frozen model, which may
    still be starting. Raises `RunFailed` after `timeout` seconds."""
    deadline, told = time.monotonic() + timeout, False
    async with httpx.AsyncClient(timeout=10.0) as client:
        while True:
            try:
                await client.get(f"{url.rstrip('/')}/models")
                return
            except httpx.HTTPError as error:
                if time.monotonic() > deadline:
                    raise RunFailed(f"{key}: no server answers at {url} ({error!r})") from error
            if not told:
                logger.info(f"waiting for the server of {key} at {url}")
                told = True
            await asyncio.sleep(0.25)


def _reason(reply: httpx.Response) -> str:
    """What an engine says of a call that failed: the message of OpenAI's shape, else the beginning of the text."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:300]
