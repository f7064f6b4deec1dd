"""Driving open pages from outside: what `POST /api/view` takes, and the events that carry it to every tab.

A command is an address: it names what to show and carries nothing else.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

TABS = ("overview", "metrics", "config", "traces", "logs", "report")
KEYS = ("run", "tab", "step", "kind", "subset", "episode", "line", "trace", "branch", "report", "highlight")
HIGHLIGHT_KEYS = ("node", "quote", "prefix", "suffix", "reason", "field")
MOST = 1 << 53  # the largest whole number that a page holds exactly
LONGEST = 1_000_000  # characters of an address: browsers take two million
MOST_HIGHLIGHTS, QUEUE, PING_SECONDS, RETRY_MS = 50, 32, 15.0, 2000


class Refused(ValueError):
    """A command that is not carried out. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def validated(body: Any) -> dict[str, Any]:
    """The command, checked as far as that goes without looking at the run. Raises `Refused`."""
    if not isinstance(body, dict):
        raise Refused("expected a JSON object")
    if unknown := [key for key in body if key not in KEYS]:
        raise Refused(f"{unknown[0]}: unknown key; known are {', '.join(KEYS)}")
    command = {key: value for key, value in body.items() if value is not None}
    if not isinstance(command.get("run"), str) or not command["run"]:
        raise Refused("run: is required, the name of a run")
    _among(command, "tab", TABS)
    _among(command, "kind", ("train", "eval"))
    _among(command, "subset", ("all", "effective"))
    for key, least in (("step", 0), ("line", 0), ("trace", 0), ("branch", -1)):
        value = command.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST):
            raise Refused(f"{key}: expected a whole number from {least} on, at most {MOST}")
    for key in ("episode", "report"):
        if key in command and (not isinstance(command[key], str) or not command[key]):
            raise Refused(f"{key}: expected text")
    triple = [key for key in ("step", "kind", "subset") if key in command]
    if triple and len(triple) < 3:
        raise Refused("step, kind and subset address a cohort together: give all three or none")
    addressed = "episode" in command or "line" in command
    if addressed and not triple:
        raise Refused("an episode needs its cohort: step, kind and subset")
    for key in ("trace", "branch", "highlight"):
        if key in command and not addressed:
            raise Refused(f"{key}: needs an episode or a line")
    _highlights(command)
    return command


def _among(command: dict[str, Any], key: str, values: tuple[str, ...], where: str = "") -> None:
    if key in command and command[key] not in values:
        raise Refused(f"{where}{key}: expected one of {', '.join(values)}")


def _highlights(command: dict[str, Any]) -> None:
    if "highlight" not in command:
        return
    items = command["highlight"]
    if not isinstance(items, list) or len(items) > MOST_HIGHLIGHTS:
        raise Refused(f"highlight: expected a list of at most {MOST_HIGHLIGHTS}")
    for number, item in enumerate(items):
        where = f"highlight.{number}"
        if not isinstance(item, dict):
            raise Refused(f"{where}: expected an object")
        if unknown := [key for key in item if key not in HIGHLIGHT_KEYS]:
            raise Refused(f"{where}.{unknown[0]}: unknown key; known are {', '.join(HIGHLIGHT_KEYS)}")
        node = item.get("node")
        if not isinstance(node, int) or isinstance(node, bool) or node < 0:
            raise Refused(f"{where}.node: expected the number of a message")
        if not isinstance(item.get("quote"), str) or not item["quote"].strip():
            raise Refused(f"{where}.quote: expected text that is not blank")
        for key in ("prefix", "suffix", "reason"):
            if key in item and not isinstance(item[key], str):
                raise Refused(f"{where}.{key}: expected text")
        _among(item, "field", ("content", "reasoning"), f"{where}.")


def address(command: Mapping[str, Any]) -> str:
    """The command as a deep link, without the host. Raises `Refused` for one that is longer than browsers take."""
    pairs = {key: value for key, value in command.items() if key not in ("highlight", "seq", "ts", "replayed")}
    if "highlight" in command:
        pairs["highlight"] = msgspec.json.encode(command["highlight"]).decode()
    if len(found := "/?" + urlencode(pairs)) > LONGEST:
        raise Refused(
            f"highlight: the address would have {len(found)} characters, {LONGEST} at most; shorten the quotes"
        )
    return found


class Hub:
    """The open tabs. Each has a queue of commands, of which the oldest are dropped when it does not keep up."""

    def __init__(self) -> None:
        self._queues: list[deque[dict[str, Any]]] = []
        self._wake: dict[int, asyncio.Event] = {}
        self._last: dict[str, Any] | None = None
        self._waiting = False  # the last command reached nobody yet
        self.seq = 0
        self.closed = False

    @property
    def clients(self) -> int:
        return len(self._queues)

    def send(self, command: dict[str, Any]) -> dict[str, Any]:
        """To every tab, or kept for the next one that opens."""
        self.seq += 1
        event = {**command, "seq": self.seq, "ts": time.time()}
        self._last, self._waiting = event, not self._queues
        for queue in self._queues:
            queue.append(event)
            self._wake[id(queue)].set()
        return event

    def close(self) -> None:
        self.closed = True
        for event in self._wake.values():
            event.set()

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events of one tab, until it goes away."""
        queue: deque[dict[str, Any]] = deque(maxlen=QUEUE)
        wake = self._wake[id(queue)] = asyncio.Event()
        if self._last is not None and self._waiting:
            queue.append({**self._last, "replayed": True})
            self._waiting = False
        self._queues.append(queue)
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            while not self.closed:
                while queue:
                    event = queue.popleft()
                    yield b"id: %d\nevent: view\ndata: %s\n\n" % (event["seq"], msgspec.json.encode(event))
                wake.clear()
                try:
                    await asyncio.wait_for(wake.wait(), PING_SECONDS)
                except TimeoutError:
                    yield b": ping\n\n"
        finally:
            self._queues = [one for one in self._queues if one is not queue]
            self._wake.pop(id(queue), None)
