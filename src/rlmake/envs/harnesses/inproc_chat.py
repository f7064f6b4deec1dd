"""inproc-chat: one chat-completions request per segment, made by the env server's own process.

For tasks that need neither tools nor a program. It starts nothing and fetches nothing, so an episode costs
milliseconds. A later user turn of an exchange replays the whole conversation, as verifiers' default `resume` does.
"""

import asyncio
import weakref
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

# One connection pool per event loop: a client per episode would cost more than the episode.
_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncIterator] = weakref.WeakKeyDictionary()


async def _pool() -> AsyncIterator[aiohttp.ClientSession]:
    """Yields one session again and again, until the loop ends (`asyncio.run` closes generators) and it is closed.

    For the interception server, which is on loopback: no proxies, and no limits of its own.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        while True:
            yield session


async def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        _pools[loop] = _pool()
    return await anext(_pools[loop])


def conversation(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The messages that open an exchange: `prompt` is the user's text, or messages, or nothing."""
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return messages + [message_to_wire(message) for message in prompt or []]


async def post(endpoint: str, secret: str, request: dict[str, Any]) -> tuple[int, Any]:
    """One chat completion by way of the interception server: HTTP status, and the reply (its text if not JSON)."""
    headers = {"Authorization": f"Bearer {secret}"}
    url = f"{endpoint.rstrip('/')}/chat/completions"
    async with (await _session()).post(url, json=request, headers=headers) as reply:
        return reply.status, await (reply.json() if reply.status < 400 else reply.text())


class InprocChatConfig(vf.HarnessConfig):
    """No settings of its own."""


class InprocChat(vf.Harness[InprocChatConfig]):
    """Sends the task's messages once and leaves the reply to the trace."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        """A refused or failed call (a `@vf.stop`, the engine) is a non-zero exit; verifiers knows which it was."""
        request = {"model": ctx.model, "messages": conversation(*self.resolve_prompt(data))}
        status, reply = await post(endpoint, secret, request)
        if status < 400:
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        return vf.ProgramResult(exit_code=1, stdout="", stderr=f"HTTP {status}: {str(reply)[:2000]}")


__all__ = ["InprocChat"]
