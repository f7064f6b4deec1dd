"""inproc-tools: a chat that calls MCP tools, run by the env server's own process.

Like `inproc-chat` it starts and fetches nothing itself. The tool servers are those of the taskset; a call that fails,
or names no tool, is answered with the reason, for the model to see. The turns end with a reply that calls nothing, or
with `max_tool_turns`.
"""

import functools
import json
import ssl
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import verifiers.v1 as vf
from pydantic import Field

from rlmake.envs.harnesses.inproc_chat import conversation, post


class InprocToolsConfig(vf.HarnessConfig):
    """How long it goes on."""

    max_tool_turns: int = Field(16, ge=1)


class InprocTools(vf.Harness[InprocToolsConfig]):
    """Sends the task's messages, runs the calls of the reply, sends their results, until a reply calls nothing."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        """A refused or failed call (a `@vf.stop`, the engine) is a non-zero exit; verifiers knows which it was."""
        request = {"model": ctx.model, "messages": conversation(*self.resolve_prompt(data))}
        async with AsyncExitStack() as stack:
            tools = Tools(stack)
            await tools.connect(mcp_urls)
            if tools.schemas:
                request["tools"] = tools.schemas
            for _ in range(self.config.max_tool_turns):
                status, reply = await post(endpoint, secret, request)
                if status >= 400:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=f"HTTP {status}: {str(reply)[:2000]}")
                message = reply["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                if not calls:
                    break
                request["messages"] += [message, *[await tools.answer(call) for call in calls]]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once a process: for each connection anew, as the client does by itself, it was half of an episode's CPU."""
    return httpx2.create_ssl_context()


def _http() -> httpx2.AsyncClient:
    """What `mcp` makes for a URL, but for the certificates."""
    return httpx2.AsyncClient(follow_redirects=True, timeout=httpx2.Timeout(30.0, read=300.0), verify=_certificates())


class Tools:
    """The tools of all servers of an episode. Connections end with `stack`."""

    def __init__(self, stack: AsyncExitStack):
        self.schemas: list[dict[str, Any]] = []
        self._stack, self._clients = stack, {}

    async def connect(self, urls: dict[str, str]) -> None:
        """Ask every server what it has. A name that two of them have is a fault of the taskset."""
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        for server, url in urls.items():
            http = await self._stack.enter_async_context(_http())
            client = await self._stack.enter_async_context(Client(streamable_http_client(url, http_client=http)))
            for tool in (await client.list_tools()).tools:
                name = f"{server}_{tool.name}" if server else tool.name
                if name in self._clients:
                    raise ValueError(f"two tool servers have a tool '{name}'")
                self._clients[name] = (client, tool.name)
                function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                self.schemas.append({"type": "function", "function": function})

    async def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        """The tool message that answers one call."""
        return {"role": "tool", "tool_call_id": call["id"], "content": await self._run(call["function"])}

    async def _run(self, function: dict[str, Any]) -> str:
        if function["name"] not in self._clients:
            return f"there is no tool '{function['name']}'"
        client, name = self._clients[function["name"]]
        try:
            arguments = json.loads(function.get("arguments") or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("arguments must be an object")
        except ValueError as error:
            return f"arguments of '{function['name']}': {error}"
        result = await client.call_tool(name, arguments)
        return "\n".join(part.text for part in result.content if getattr(part, "text", None) is not None)


__all__ = ["InprocTools"]
