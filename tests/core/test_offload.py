"""`off_loop`: order, results and errors of many calls at once, cancellation, several loops."""

import asyncio
import threading
import time

import pytest

from rlmake.core.offload import off_loop


async def test_calls_run_in_order_in_one_thread_and_the_loop_goes_on():
    ran, threads = [], set()

    def work(number):
        ran.append(number)
        threads.add(threading.get_ident())
        time.sleep(0.002)
        return number * number

    turns = 0

    async def tick():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    results = await asyncio.gather(*(off_loop(work, number) for number in range(50)))
    ticking.cancel()
    assert results == [number * number for number in range(50)]
    assert ran == list(range(50))
    assert len(threads) == 1 and threads != {threading.get_ident()}
    assert turns > 20


async def test_an_error_belongs_to_its_call_alone():
    def fail():
        raise ValueError("this one")

    results = await asyncio.gather(off_loop(int, "1"), off_loop(fail), off_loop(int, "3"), return_exceptions=True)
    assert (results[0], results[2]) == (1, 3)
    assert isinstance(results[1], ValueError)
    with pytest.raises(ValueError, match="this one"):
        await off_loop(fail)


async def test_what_is_cancelled_while_it_waits_is_not_run():
    ran = []
    first = asyncio.create_task(off_loop(time.sleep, 0.1))
    second = asyncio.create_task(off_loop(ran.append, 2))
    third = asyncio.create_task(off_loop(ran.append, 3))
    await asyncio.sleep(0.02)
    second.cancel()
    await asyncio.gather(first, third)
    assert ran == [3] and second.cancelled()


def test_a_loop_that_ended_meanwhile_disturbs_no_other():
    async def leave():
        left = asyncio.create_task(off_loop(time.sleep, 0.1))
        await asyncio.sleep(0.01)
        assert not left.done()

    asyncio.run(leave())
    assert asyncio.run(off_loop(int, "7")) == 7
