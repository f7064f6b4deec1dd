"""CPU work of an event loop in one thread beside it.

One thread, not a pool: threads that compute share the interpreter's lock, and each of them may keep the loop from it
for a switch interval. What has gathered while the thread works goes back to the loop together: each hand-over costs
about as much as a small piece of work. Work that waits (disk, sockets) belongs into `asyncio.to_thread`.
"""

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

# The loop gives the lock away with every look at a socket; this is how long it then waits for it. Python's 5 ms would
# make it wait longer than it works.
SWITCH_SECONDS = 0.0005

HAND_OVER_SECONDS = 0.01  # results wait no longer than this for others

_thread = ThreadPoolExecutor(1, "cpu")
_guard = threading.Lock()
_waiting: deque[tuple[asyncio.Future, Callable[..., Any], tuple]] = deque()
_working = False


async def off_loop(function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)` in the thread for computing; calls run in the order in which they are made."""
    global _working
    future = asyncio.get_running_loop().create_future()
    with _guard:
        _waiting.append((future, function, args))
        start, _working = not _working, True
    if start:
        _thread.submit(_work)
    return await future


def _work() -> None:
    """Until nothing waits."""
    global _working
    done: list[tuple[asyncio.Future, Any, BaseException | None]] = []
    handed = time.monotonic()
    while True:
        with _guard:
            task = _waiting.popleft() if _waiting else None
            _working = task is not None
        if done and (
            task is None
            or task[0].get_loop() is not done[0][0].get_loop()
            or time.monotonic() - handed > HAND_OVER_SECONDS
        ):
            _hand_over(done)
            done, handed = [], time.monotonic()
        if task is None:
            return
        future, function, args = task
        if future.cancelled():
            continue
        try:
            done.append((future, function(*args), None))
        except BaseException as error:
            done.append((future, None, error))
        del task, future, function, args  # while the next is waited for


def _hand_over(done: list[tuple[asyncio.Future, Any, BaseException | None]]) -> None:
    loop = done[0][0].get_loop()
    try:
        loop.call_soon_threadsafe(_settle, done)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass


def _settle(done: list[tuple[asyncio.Future, Any, BaseException | None]]) -> None:
    for future, result, error in done:
        if future.cancelled():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def favour_loop() -> None:
    """Let the event loop of this process have the interpreter's lock soon after it asks for it."""
    sys.setswitchinterval(SWITCH_SECONDS)
