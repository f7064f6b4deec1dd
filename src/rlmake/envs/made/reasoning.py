"""Tasks of the package `reasoning-gym` (https://arxiv.org/abs/2505.24760): generated, scored by rule.

The fault of a warm start: the answer of another task.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

from rlmake.core.errors import UserError, nearest
from rlmake.envs import made

TASK = "reasoning-gym"
SIZE = 2**31 - 1  # entries are made when asked for
LOOKAHEAD = 50  # of so many entries in a row one must be new


def dataset(name: str, options: Mapping[str, Any], size: int, seed: int) -> Any:
    """The package's data set. Raises `UserError` for an unknown name or option, and where the package is missing."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("the package reasoning-gym is not installed: pip install 'rlmake[reasoning-gym]'") from None
    if name not in DATASETS:
        raise UserError(f"dataset: reasoning-gym has no '{name}'{nearest(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"options: reasoning-gym's '{name}': {error}") from None


@functools.cache
def _dataset(name: str, options: str, seed: int) -> Any:
    return dataset(name, json.loads(options), SIZE, seed)


def entry(name: str, options: Mapping[str, Any], seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """The data set, kept for the next time, and its entry `index` as it was generated."""
    data = _dataset(name, json.dumps(options, sort_keys=True), seed)
    return data, data[index]


def entries(name: str, options: Mapping[str, Any], seed: int, heldout: bool | None) -> Iterator[tuple[int, dict]]:
    """`(index, entry)` without end, or until nothing new comes: distinct questions of one side (None: both)."""
    seen: set[str] = set()
    misses = 0
    data = dataset(name, options, SIZE, seed)
    for index in count():
        entry = data[index]
        key, misses = entry["question"], misses + 1
        if key not in seen and heldout in (None, made.is_heldout(f"{TASK}:{name}", key)):
            seen.add(key)
            misses = 0
            yield index, entry
        if misses > LOOKAHEAD * made.HELDOUT_SHARE:
            return


def take(name: str, options: Mapping[str, Any], seed: int, heldout: bool | None, number: int) -> list[tuple[int, dict]]:
    """The first `number` of them. Raises `UserError` where there are not so many."""
    found = list(islice(entries(name, options, seed, heldout), number))
    if len(found) < number:
        raise UserError(f"reasoning-gym's '{name}' with these options has about {len(found)} tasks here, not {number}")
    return found


def rows(source: Any, heldout: bool) -> list[made.Row]:
    """`source`: `.dataset`, `.options`, `.num_train`, `.num_heldout`, `.fault_share`, `.seed`."""
    number = source.num_heldout if heldout else source.num_train
    taken = take(source.dataset, source.options, source.seed, heldout, number)
    answers = [str(entry["answer"]) for _, entry in taken]
    found = []
    for index, (_, entry) in enumerate(taken):
        key = entry["question"]
        wrong = not heldout and made.faulty(TASK, key, source.seed, source.fault_share)
        answer = answers[index - 1] if wrong else answers[index]
        found.append({"id": made.identity(TASK, key), "messages": [made.user(key), made.assistant(answer)]})
    return found
