"""A main coroutine with others beside it: whatever fails first ends all, with its own error."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def run_with(main: Coroutine[Any, Any, None], others: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Until `main` ends; an error of any of them cancels the rest and is raised. `others` run for ever."""
    first = asyncio.create_task(main)
    tasks = [first, *(asyncio.create_task(other) for other in others)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        while not first.done() and not any(task.done() and task.exception() for task in tasks):
            await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and task.exception() is not None:
            raise _single(task.exception())


def _single(error: BaseException) -> BaseException:
    """The first error of a group of them: users get one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
