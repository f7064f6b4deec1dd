"""Packing: nothing lost or doubled, documents whole, next to no padding, the plan a function of the order alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmake.trainer.data.pack import Document, Packer, best_subset


def document(index: int, length: int) -> Document:
    ids = np.full(length, index, dtype=np.int32)
    return Document(0, index, 0, ids, ids, np.ones(length, dtype=bool))


def pack(lengths: list[int], capacity: int, pool: int = 64) -> list[list[Document]]:
    packer = Packer(iter([document(i, n) for i, n in enumerate(lengths)]), capacity, pool)
    return list(iter(packer.row, None))


@given(st.lists(st.integers(1, 30), max_size=9), st.integers(0, 80))
def test_the_best_subset_is_the_best(lengths, capacity):
    best = max(
        sum(part)
        for n in range(len(lengths) + 1)
        for part in itertools.combinations(lengths, n)
        if sum(part) <= capacity
    )
    chosen = best_subset(lengths, capacity)
    assert sum(lengths[i] for i in chosen) == best and chosen == sorted(set(chosen))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 64), max_size=60), st.integers(1, 12))
def test_every_document_is_packed_once_and_no_row_overflows(lengths, pool):
    packed = pack(lengths, 64, pool)
    assert sorted(d.index for row in packed for d in row) == list(range(len(lengths)))
    assert all(0 < sum(map(len, row)) <= 64 for row in packed)


@pytest.mark.parametrize(
    ("low", "high", "capacity", "most"),
    [
        (60, 100, 1024, 0.002),
        (60, 100, 2048, 0.002),
        (20, 400, 1024, 0.002),
        (5, 2000, 4096, 0.01),
        (90, 110, 8192, 0.01),
    ],
)
def test_padding_of_an_endless_stream(low, high, capacity, most):
    generator = np.random.default_rng(0)
    stream = (document(i, int(generator.integers(low, high + 1))) for i in itertools.count())
    packer = Packer(stream, capacity)
    filled = [sum(map(len, packer.row())) for _ in range(60)]
    assert 1 - sum(filled) / (60 * capacity) <= most


def test_none_waits_for_ever():
    """The oldest document opens the next row, however badly it fits."""
    lengths = [100, *([33, 34, 33] * 400)]
    packer = Packer(iter([document(i, n) for i, n in enumerate(lengths)]), 100)
    assert [d.index for d in packer.row()] == [0]
    rows = [[d.index for d in packer.row()] for _ in range(300)]
    for at, row in enumerate(rows):
        assert row[0] <= 1 + 3 * at + 64


def test_documents_as_long_as_the_row_take_one_each():
    assert [len(row) for row in pack([16] * 5, 16)] == [1] * 5
