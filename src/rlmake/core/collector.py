"""When Python's cyclic collector may run in a process with an event loop.

A collection looks at every container there is, with the interpreter's lock: with 2,000 episodes in flight a tenth to a
quarter of a second in which nothing else happens. In such a process next to nothing is garbage that only the collector
finds. So it runs when there is more and more, not after a number of allocations.
"""

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

GROWTH = 250_000  # containers beyond those of the last collection: 2,000 episodes in flight hold some 150,000

_forget = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


@contextmanager
def collected_on_growth() -> Iterator[None]:
    """Within, the collector runs only in `collect_grown`; what exists before is not looked at any more."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_grown() -> None:
    """Collect if there are `GROWTH` more containers than after the last collection."""
    if gc.get_count()[0] > GROWTH:
        gc.collect()


def without_cycles(values: list) -> None:
    """Numbers only: the collector need not look at each of them, which is most of what it does where there are tokens.

    A list that a container is put into later is still freed when its last reference goes, but not as part of a cycle.
    """
    _forget(values)
