"""inproc-chat: one chat-completions request per segment, made by the env server's own process.

For tasks that need neither tools nor a program. It starts nothing and fetches nothing, so an episode costs
milliseconds. A later user turn of an exchange replays the whole conversation, as verifiers' default `resume` does.
"""

import asyncio
import weakref

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

# One connection pool per event loop: a client per episode would cost more than the episode.
_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


def _client() -> httpx.AsyncClient:
    loop = asyncio.get_running_loop()
    if loop not in _clients:
        # The interception server listens on loopback without TLS, and no proxy must stand in between.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        _clients[loop] = httpx.AsyncClient(timeout=None, limits=limits, verify=False, trust_env=False)
    return _clients[loop]


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
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        reply = await _client().post(
            f"{endpoint.rstrip('/')}/chat/completions",
            json={"model": ctx.model, "messages": messages},
            headers={"Authorization": f"Bearer {secret}"},
        )
        if reply.is_success:
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        return vf.ProgramResult(exit_code=1, stdout="", stderr=f"HTTP {reply.status_code}: {reply.text[:2000]}")


__all__ = ["InprocChat"]
