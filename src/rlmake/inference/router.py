"""A router in front of several engines of one model: `python -m rlmake.inference.router [--port N] URL URL …`.

It passes requests through unchanged, so it has the engines' contract. Requests of one session (`X-Session-ID`) go to
one engine, by rendezvous hashing, so prefixes stay where they are cached; others go to the least busy one. What changes
an engine (`/pause`, `/update_weights`, …) goes to all of them. An engine that does not answer is left out for a
request that has brought nothing yet; `/health` is that of all.
"""

import argparse
import asyncio
import re
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from blake3 import blake3
from loguru import logger

from rlmake.core import log
from rlmake.core.errors import entry_point
from rlmake.core.jsonio import write_bytes
from rlmake.core.procs import claim_port, die_with_parent

TO_ALL = ("/pause", "/resume", "/update_weights", "/load_lora_adapter", "/init_broadcaster", "/reset_prefix_cache")
OF_ALL = ("/health", "/liveness")
HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*(?:\{.*\})?)\s+(\S+)\s*$")
MOST = ("perc", "usage", "config", "max")  # of gauges whose names say so the greatest counts, others are summed


class Router:
    """`engines`: base URLs without /v1."""

    def __init__(self, engines: Sequence[str]):
        self.engines = [url.rstrip("/").removesuffix("/v1") for url in engines]
        self.busy = dict.fromkeys(self.engines, 0)
        self.session: ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        app.on_startup.append(self._open)
        app.on_cleanup.append(self._close)
        return app

    async def _open(self, _: web.Application) -> None:
        self.session = ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None, sock_connect=10)
        )

    async def _close(self, _: web.Application) -> None:
        assert self.session is not None
        await self.session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path in TO_ALL or request.path in OF_ALL:
            return await self._to_all(request, body)
        if request.path == "/metrics":
            return await self._metrics()
        return await self._to_one(request, body)

    def order(self, session: str | None) -> list[str]:
        """The engines in the order in which a request tries them."""
        if session is None:
            return sorted(self.engines, key=lambda url: self.busy[url])
        return sorted(self.engines, key=lambda url: blake3(f"{url}\0{session}".encode()).digest())

    async def _to_one(self, request: web.Request, body: bytes) -> web.StreamResponse:
        failed = ""
        for url in self.order(request.headers.get("X-Session-ID")):
            self.busy[url] += 1
            try:
                return await self._pass(request, body, url)
            except ClientError as error:  # nothing was answered yet: another engine may
                failed = f"{url}: {error!r}"
                logger.warning(f"engine {failed}")
            finally:
                self.busy[url] -= 1
        return web.json_response({"error": {"message": f"no engine answers; the last: {failed}"}}, status=503)

    async def _pass(self, request: web.Request, body: bytes, url: str) -> web.StreamResponse:
        """Raises `ClientError` only before the first byte of the answer went out."""
        assert self.session is not None
        headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP}
        async with self.session.request(request.method, url + request.path_qs, data=body, headers=headers) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in HOP}
            kept.pop("Content-Encoding", None)  # aiohttp has decoded it
            out = web.StreamResponse(status=answer.status, headers=kept)
            first = await answer.content.readany()
            await out.prepare(request)
            try:
                await out.write(first)
                async for chunk in answer.content.iter_any():
                    await out.write(chunk)
                await out.write_eof()
            except ClientError as error:
                logger.warning(f"engine {url} broke off: {error!r}")
                if request.transport is not None:
                    request.transport.close()
            return out

    async def _to_all(self, request: web.Request, body: bytes) -> web.Response:
        """The same to every engine; the answer is the first bad one, else the first."""

        async def one(url: str) -> tuple[int, bytes, str]:
            assert self.session is not None
            headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP}
            try:
                path = url + request.path_qs
                async with self.session.request(request.method, path, data=body, headers=headers) as answer:
                    return answer.status, await answer.read(), answer.content_type
            except ClientError as error:
                return 503, f"engine {url}: {error!r}".encode(), "text/plain"

        answers = await asyncio.gather(*(one(url) for url in self.engines))
        status, data, kind = next((a for a in answers if a[0] >= 400), answers[0])
        return web.Response(status=status, body=data, content_type=kind)

    async def _metrics(self) -> web.Response:
        """The engines' metrics as if they were one engine."""
        assert self.session is not None
        texts = []
        for url in self.engines:
            async with self.session.get(f"{url}/metrics", timeout=ClientTimeout(total=5)) as answer:
                texts.append(await answer.text())
        return web.Response(text=merged(texts), content_type="text/plain")


def merged(texts: Sequence[str]) -> str:
    """Prometheus texts of several engines as one: samples of one name and labels summed, of a share the greatest."""
    samples: dict[str, float] = {}
    lines: list[str] = []
    for number, text in enumerate(texts):
        for line in text.splitlines():
            match = SAMPLE.match(line)
            if match is None:
                lines += [line] if number == 0 else []
                continue
            name, value = match[1], float(match[2])
            if name not in samples:
                lines.append(name)
                samples[name] = value
            else:
                most = any(word in name.partition("{")[0] for word in MOST)
                samples[name] = max(samples[name], value) if most else samples[name] + value
    return "\n".join(f"{line} {samples[line]:.17g}" if line in samples else line for line in lines) + "\n"


async def serve(router: Router, sock: socket.socket) -> None:
    """Until SIGTERM or SIGINT."""
    runner = web.AppRunner(router.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    done = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    await done.wait()
    await runner.cleanup()


@entry_point
def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(prog="rlmake.inference.router", description=__doc__)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--address-file", type=Path)
    args = parser.parse_args()
    log.setup("router")
    sock = claim_port(args.host, args.port, "inference.server.port")
    host = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host
    address = f"http://{host}:{sock.getsockname()[1]}"
    logger.info(f"routing {address} to {', '.join(args.engines)}")
    if args.address_file:
        write_bytes(args.address_file, address.encode())
    asyncio.run(serve(Router(args.engines), sock))


if __name__ == "__main__":
    main()
