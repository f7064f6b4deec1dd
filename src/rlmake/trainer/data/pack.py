"""Best-fit packing of documents into rows of fixed capacity, with a look-ahead pool.

A row starts with the oldest document of the pool, so none waits for ever; what is left of the row is filled with the
subset of the pool that fills it best (subset sum over the pool's lengths, exact, microseconds as bit operations on
integers). The plan depends only on the order of the documents: not on ranks, workers or micro-batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

POOL_SIZE = 64


@dataclass(eq=False)
class Document:
    """One training sample, shifted: `ids[i]` predicts `targets[i]`, which counts where `mask[i]`. All [L], L ≥ 1."""

    epoch: int
    index: int  # of the row in the data set
    part: int  # of the data set's parts (subset/split)
    ids: np.ndarray = field(repr=False)  # int32
    targets: np.ndarray = field(repr=False)  # int32
    mask: np.ndarray = field(repr=False)  # bool
    cut: bool = False  # the row was longer than `seq_len`

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sample_id(self) -> str:
        return f"{self.epoch}/{self.index}"


def best_subset(lengths: list[int], capacity: int) -> list[int]:
    """Indices of the subset with the largest sum ≤ `capacity`; among equal sums the earliest indices."""
    window = (1 << (capacity + 1)) - 1
    reach = [1]  # reach[-1 - i]: bit s is set when the items i, i+1, … reach the sum s
    for length in reversed(lengths):
        reach.append((reach[-1] | reach[-1] << length) & window)
    left, chosen = reach[-1].bit_length() - 1, []
    for i, length in enumerate(lengths):
        if length <= left and reach[-2 - i] >> (left - length) & 1:
            chosen.append(i)
            left -= length
    return chosen


class Packer:
    """Rows of documents from a stream of documents that are no longer than `capacity` tokens."""

    def __init__(self, documents: Iterator[Document], capacity: int, pool_size: int = POOL_SIZE):
        self._documents, self._capacity, self._pool_size = documents, capacity, pool_size
        self.pool: list[Document] = []

    def row(self) -> list[Document] | None:
        """The next row, in order of arrival; None when stream and pool are empty."""
        self._refill()
        if not self.pool:
            return None
        row = [self.pool.pop(0)]
        left = self._capacity - len(row[0])
        self._refill()
        # While the pool could fill the rest twice over only by luck, take documents as they come.
        while self.pool and len(self.pool[0]) <= left and 2 * left > sum(map(len, self.pool)):
            row.append(self.pool.pop(0))
            left -= len(row[-1])
            self._refill()
        chosen = set(best_subset([len(document) for document in self.pool], left))
        row += [document for i, document in enumerate(self.pool) if i in chosen]
        self.pool = [document for i, document in enumerate(self.pool) if i not in chosen]
        return row

    def _refill(self) -> None:
        while len(self.pool) < self._pool_size and (document := next(self._documents, None)) is not None:
            self.pool.append(document)
