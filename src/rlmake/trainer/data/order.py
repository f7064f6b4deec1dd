"""The order in which an epoch visits the rows of a data set's parts: global, and a pure function of seed and epoch."""

from collections.abc import Sequence

import numpy as np

from rlmake.core.seeds import derive


def epoch_order(
    sizes: Sequence[int],
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    probabilities: Sequence[float] | None = None,
    stopping_strategy: str = "all_exhausted",
) -> np.ndarray:
    """int64 indices into the concatenated parts of `sizes` rows. One part: each row exactly once.

    Several parts are interleaved, in turn or by `probabilities`, until the first or all of them are exhausted
    (an exhausted part starts over in a new order).
    """
    if len(sizes) == 1:
        return _permutation(sizes[0], seed, epoch, 0, 0, shuffle)
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    parts = _interleave(sizes, probabilities, stopping_strategy, derive(seed, "mix", epoch))
    order = np.empty(len(parts), dtype=np.int64)
    for part, size in enumerate(sizes):
        at = np.flatnonzero(parts == part)
        rounds = -(-len(at) // size)
        visits = [_permutation(size, seed, epoch, part, lap, shuffle) for lap in range(rounds)]
        order[at] = offsets[part] + (np.concatenate(visits)[: len(at)] if visits else 0)
    return order


def _permutation(size: int, seed: int, epoch: int, part: int, lap: int, shuffle: bool) -> np.ndarray:
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    generator = np.random.Generator(np.random.PCG64(derive(seed, "order", epoch, part, lap)))
    return generator.permutation(size).astype(np.int64)


def _interleave(sizes: Sequence[int], probabilities: Sequence[float] | None, stopping: str, seed: int) -> np.ndarray:
    """Which part each position draws from: up to the draw that exhausts the first part, or the last one."""
    generator = np.random.Generator(np.random.PCG64(seed))
    block, parts = max(1024, 2 * sum(sizes)), np.empty(0, dtype=np.int64)
    pick = min if stopping == "first_exhausted" else max
    active = [i for i in range(len(sizes)) if probabilities is None or probabilities[i] > 0]
    while True:
        if probabilities is None:
            more = np.arange(len(parts), len(parts) + block) % len(sizes)
        else:
            more = generator.choice(len(sizes), size=block, p=np.asarray(probabilities) / np.sum(probabilities))
        parts = np.concatenate([parts, more])
        ends = []  # position after the draw that exhausts each part
        for part in active:
            at = np.flatnonzero(parts == part)
            ends.append(int(at[sizes[part] - 1]) + 1 if len(at) >= sizes[part] else len(parts) + 1)
        if (end := pick(ends)) <= len(parts):
            return parts[:end]
