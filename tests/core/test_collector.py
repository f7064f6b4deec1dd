"""The collector runs on growth alone, and lists of numbers are none of its business."""

import gc
import weakref

from rlmake.core import collector


class Node:
    def __init__(self):
        self.me = self


def test_cycles_are_collected_when_there_are_many(monkeypatch):
    monkeypatch.setattr(collector, "GROWTH", 5_000)
    with collector.collected_on_growth():
        first = weakref.ref(Node())
        collector.collect_grown()
        assert first() is not None, "a few are left where they are"
        for _ in range(10_000):
            Node()
        collector.collect_grown()
        assert first() is None
        kept = [{"n": [number]} for number in range(10_000)]
        del kept
        second = weakref.ref(Node())
        collector.collect_grown()
        assert second() is not None, "what went by itself is no growth"
    assert gc.isenabled()


def test_a_list_of_numbers_is_freed_without_the_collector():
    class Numbers(list):
        pass

    values = Numbers([1.5] * 1000)
    collector.without_cycles(values)
    assert not gc.is_tracked(values)
    collector.without_cycles(values)  # twice is no harm
    values.append(2.5)
    gone = weakref.ref(values)
    del values
    assert gone() is None
