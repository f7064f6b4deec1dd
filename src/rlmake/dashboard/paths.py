"""Which part of `/api/runs/<run>/<rest>` is the run. Names of runs have slashes, and may end like a route or hold any
other character, so this is settled by which runs there are, before the routes are looked at."""

import re
from collections.abc import Callable, Iterable
from urllib.parse import quote, unquote

from starlette.concurrency import run_in_threadpool
from starlette.convertors import Convertor, register_url_convertor
from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/api/runs/"
MOST_SLASHES = 64


class RunConvertor(Convertor[str]):
    """`{run:run}` in a route: the name as one quoted part, which `RunPaths` makes of it."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return quote(value, safe="")


register_url_convertor("run", RunConvertor())


class RunPaths:
    """Quotes the run in a path. `known` says whether there is a run of a name; `patterns` are those of the routes."""

    def __init__(self, app: ASGIApp, known: Callable[[str], bool], patterns: Callable[[], Iterable[re.Pattern[str]]]):
        self.app, self._known, self._patterns = app, known, patterns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            raw = scope.get("raw_path", b"").partition(b"?")[0].decode("latin-1") or quote(scope["path"])
            scope = {**scope, "path": await run_in_threadpool(self._quoted, unquote(raw), raw)}
        await self.app(scope, receive, send)

    def _quoted(self, path: str, raw: str) -> str:
        """Of all splits at which a route follows, one whose run is there: the first raw part before longer names."""
        rest, patterns = path.removeprefix(PREFIX), list(self._patterns())
        parts = rest.split("/")
        splits = [("/".join(parts[:n]), "/".join(parts[n:])) for n in range(1, min(len(parts), MOST_SLASHES))]
        fitting = [s for s in splits if s[0] and any(pattern.match(f"{PREFIX}x/{s[1]}") for pattern in patterns)]
        if not fitting:
            return path
        first = unquote(raw.removeprefix(PREFIX).partition("/")[0])  # of a client that quotes slashes too
        there = [split for split in fitting if self._known(split[0])]
        run, tail = next((split for split in there if split[0] == first), (there or fitting)[-1])
        return f"{PREFIX}{quote(run, safe='')}/{tail}"
