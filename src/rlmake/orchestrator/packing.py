"""Packing of samples into rows, and of rows onto trainer ranks.

The plan is a function of lengths and the number of ranks alone. First-fit-decreasing into rows of at most `seq_len`
tokens; rows are split until each rank gets equally many; ranks are balanced by a FLOP model with the method of
Karmarkar and Karp (https://en.wikipedia.org/wiki/Largest_differencing_method) and pairwise swaps.
"""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Row = list[int]  # indices of samples, in order


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a row whose sequences have lengths n: `linear·Σn + quadratic·Σn²`."""

    linear: float = 1.0
    quadratic: float = 0.0

    def __call__(self, lengths: Sequence[int]) -> float:
        return self.linear * sum(lengths) + self.quadratic * sum(n * n for n in lengths)

    @classmethod
    def of_model(cls, name: str) -> "CostModel":
        """From a model directory's `config.json`; plain token counts where there is none."""
        path = Path(name) / "config.json"
        try:
            config = json.loads(path.read_text())
            return cls.of_config(config.get("text_config", config))
        except (OSError, ValueError, KeyError, TypeError):
            return cls()

    @classmethod
    def of_config(cls, config: dict[str, Any]) -> "CostModel":
        """Per layer: projections and feed-forward are linear in n, attention scores quadratic."""
        hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        width = config.get("intermediate_size", 0)
        if experts := config.get("num_experts_per_tok"):
            width = experts * config["moe_intermediate_size"] + config.get("shared_expert_intermediate_size", 0)
        qkv = 2 * hidden * (heads + 2 * kv_heads) * head_dim
        linear = layers * (qkv + 2 * hidden**2 + 6 * hidden * width) + 2 * hidden * config["vocab_size"]
        return cls(float(linear), float(layers * 2 * heads * head_dim))


def plan(lengths: Sequence[int], seq_len: int, ranks: int, cost: CostModel) -> list[list[Row]]:
    """Rows of each rank; equally many, an empty row standing for a dummy."""
    rows = first_fit_decreasing(lengths, seq_len)
    rows = split_to_multiple(rows, lengths, ranks, cost)
    rows += [[] for _ in range(-len(rows) % ranks)]
    costs = [cost([lengths[i] for i in row]) for row in rows]
    return [[rows[i] for i in part] for part in balance(costs, ranks)]


def first_fit_decreasing(lengths: Sequence[int], seq_len: int) -> list[Row]:
    """Longest first, each into the first row with room. O(n log n): a tree of maxima finds that row."""
    if any(n > seq_len for n in lengths):
        raise ValueError(f"a sample of {max(lengths)} tokens is longer than a row of {seq_len}")
    most = min(len(lengths), 2 * sum(lengths) // seq_len + 2)  # any two rows together hold more than seq_len
    size = 1 << max(0, most - 1).bit_length()
    room = [seq_len] * (2 * size)  # room[1] is the root, leaf i is room[size + i]: what row i can still take
    rows: list[Row] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        need, node = lengths[index], 1
        while node < size:
            node *= 2
            if room[node] < need:
                node += 1
        row = node - size
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        room[node] -= need
        while node > 1:
            left, right, node = room[node & ~1], room[node | 1], node // 2
            most_room = left if left > right else right
            if room[node] == most_room:
                break
            room[node] = most_room
    return rows


def split_to_multiple(rows: list[Row], lengths: Sequence[int], ranks: int, cost: CostModel) -> list[Row]:
    """Split the costliest row that holds several samples, longest to the lighter half, until ranks divide the count."""
    heap = [(-cost([lengths[i] for i in row]), number, row) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    done: list[tuple[int, Row]] = []  # rows of one sample can't be split
    number = len(rows)
    while heap and (len(heap) + len(done)) % ranks:
        _, place, row = heapq.heappop(heap)
        if len(row) == 1:
            done.append((place, row))
            continue
        halves: tuple[Row, Row] = ([], [])
        loads = [0.0, 0.0]
        for index in sorted(row, key=lambda i: -lengths[i]):
            lighter = loads.index(min(loads))
            halves[lighter].append(index)
            loads[lighter] += cost([lengths[index]])
        for half, at in zip(halves, (place, number), strict=True):
            heapq.heappush(heap, (-cost([lengths[i] for i in half]), at, half))
        number += 1
    done += [(place, row) for _, place, row in heap]
    return [row for _, row in sorted(done)]


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Partition into `ranks` parts of equal count and nearly equal cost; the indices of each, ascending."""
    if len(costs) % ranks:
        raise ValueError(f"{len(costs)} rows for {ranks} ranks")
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap = []
    for number, start in enumerate(range(0, len(order), ranks)):
        parts = [(costs[i], i, i) for i in order[start : start + ranks]]  # cost, first index, tree of indices
        heap.append((parts[-1][0] - parts[0][0], number, parts))  # minus the spread
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        # heaviest with lightest: the spreads of the two cancel as far as they can
        right = sorted(right, key=lambda part: (part[0], part[1]))
        left = sorted(left, key=lambda part: (-part[0], part[1]))
        merged = [(a + b, first, (x, y)) for (a, first, x), (b, _, y) in zip(left, right, strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    parts = [_leaves(tree) for _, _, tree in heap[0][2]] if heap else [[] for _ in range(ranks)]
    _swap(parts, costs)
    return [sorted(part) for part in sorted(parts, key=lambda part: min(part, default=0))]


def _leaves(tree: Any) -> list[int]:
    """Indices of nested pairs, from left to right; lists joined at each merge would cost O(n²)."""
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack += (node[1], node[0])
        else:
            found.append(node)
    return found


def _swap(parts: list[list[int]], costs: Sequence[float], rounds: int = 100, limit: int = 2048) -> None:
    """Swap one row between the heaviest and the lightest part while that lowers their difference."""
    loads = [sum(costs[i] for i in part) for part in parts]
    for _ in range(rounds):
        heavy, light = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[heavy] - loads[light]
        if gap <= 0 or len(parts[heavy]) > limit:
            return
        own, other = (np.array([costs[i] for i in parts[k]]) for k in (heavy, light))
        a, b, after = _best_swap(own, other, gap)
        if after >= gap:
            return
        parts[heavy][a], parts[light][b] = parts[light][b], parts[heavy][a]
        loads[heavy] -= own[a] - other[b]
        loads[light] += own[a] - other[b]


def _best_swap(own: np.ndarray, other: np.ndarray, gap: float) -> tuple[int, int, float]:
    """The pair whose exchange leaves the least difference of two parts that now differ by `gap`; that difference.

    Of equally good pairs the first counts, as if all were tried. O(n log n): each of `own` looks for its two nearest.
    """
    order = np.argsort(other, kind="stable")
    values = other[order]
    above = np.minimum(np.searchsorted(values, own - gap / 2), len(values) - 1)
    below = np.searchsorted(values, values[np.maximum(above - 1, 0)])  # the first of those equal to it
    candidates = np.stack([order[above], order[below]])
    after = np.abs(gap - 2 * (own - other[candidates]))
    first = np.where(after[0] == after[1], candidates.min(0), np.where(after[0] < after[1], *candidates))
    best = after.min(0)
    a = int(best.argmin())
    return a, int(first[a]), float(best[a])
