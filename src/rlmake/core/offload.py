"""CPU work of an event loop in one thread beside it.

One thread, not a pool: threads that compute share the interpreter's lock, and each of them may keep the loop from it
for a switch interval. Work that waits (disk, sockets) belongs into `asyncio.to_thread`.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# The loop gives the lock away with every look at a socket; this is how long it then waits for it. Python's 5 ms would
# make it wait longer than it works.
SWITCH_SECONDS = 0.0005

_worker = ThreadPoolExecutor(1, "cpu")


async def off_loop(function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)` in the thread for computing; calls run in the order in which they are made."""
    return await asyncio.get_running_loop().run_in_executor(_worker, function, *args)


def favour_loop() -> None:
    """Let the event loop of this process have the interpreter's lock soon after it asks for it."""
    sys.setswitchinterval(SWITCH_SECONDS)
