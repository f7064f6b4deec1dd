"""Made tasks: what the tasksets that ship ask, how replies score, and rows for warm starts. Pure Python, no verifiers.

Each module has `rows(number, heldout, seed, fault_share)`, used by data sets of `source.type = "made"`: distinct tasks
with a demonstration in `messages`. A task's content alone decides its side of the split, so it is the same for every
size and seed. `fault_share` of the train rows demonstrate a fault that RL has to find out about; what it is, each
module says.
"""

from collections.abc import Callable
from random import Random
from typing import Any

from rlmake.core.errors import UserError
from rlmake.core.seeds import derive

Row = dict[str, Any]
HELDOUT_SHARE = 6  # one task in so many is held out
PATIENCE = 200  # draws in a row without a new task, before the tasks count as used up


def is_heldout(task: str, key: str) -> bool:
    """Which side of the split the task with this content is on."""
    return derive("made", task, "heldout", key) % HELDOUT_SHARE == 0


def identity(task: str, key: str) -> str:
    """The id of a row."""
    return f"{derive('made', task, key):016x}"


def distinct(
    task: str,
    draw: Callable[[Random], tuple[str, Any]],
    number: int,
    heldout: bool,
    seed: int,
    split_by: Callable[[str, Any], str] = lambda key, content: key,
) -> list[Any]:
    """`number` draws `(key, content)` with different keys, of one side of the split; what `split_by` says of a draw
    decides its side. `UserError` for too many."""
    chance = Random(derive("made", task, "draw", heldout, seed))
    found: dict[str, Any] = {}
    misses = 0
    while len(found) < number:
        key, content = draw(chance)
        misses += 1
        if key not in found and is_heldout(task, split_by(key, content)) == heldout:
            found[key], misses = content, 0
        if misses > PATIENCE * HELDOUT_SHARE:
            side = "num_heldout" if heldout else "num_train"
            raise UserError(f"source.{side}: '{task}' has about {len(found)} tasks on that side, not {number}")
    return list(found.items())


def faulty(task: str, key: str, seed: int, share: float) -> bool:
    """Whether the row of a task demonstrates the fault."""
    return derive("made", task, "fault", seed, key) < share * 2**63


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
