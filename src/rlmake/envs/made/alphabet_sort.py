"""Alphabet-sort: names come in over several turns, and each reply is all names so far in the order of the alphabet.

The fault of a warm start: names stand in the order in which they came.
"""

import difflib
from collections.abc import Sequence
from random import Random

from rlmake.envs import made

TASK = "alphabet-sort"
NAMES = (
    "Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jan", "Kim", "Leo", "Mia",
    "Nia", "Ola", "Pia", "Quin", "Ray", "Sue", "Tom", "Uma", "Val", "Wes", "Xia", "Yan", "Zoe",
)  # fmt: skip


def questions(turns: Sequence[Sequence[str]]) -> list[str]:
    """The user's message of each turn."""
    return [f"{'Add' if number else 'Sort'}: {' '.join(names)}" for number, names in enumerate(turns)]


def answers(turns: Sequence[Sequence[str]]) -> list[str]:
    """The right reply of each turn."""
    return [" ".join(sorted(names)) for names in _so_far(turns)]


def _so_far(turns: Sequence[Sequence[str]]) -> list[list[str]]:
    """All names up to each turn, as they came."""
    return [[name for names in turns[: number + 1] for name in names] for number in range(len(turns))]


def score(replies: Sequence[str], turns: Sequence[Sequence[str]]) -> float:
    """Mean over the turns of the similarity of reply and answer, word by word, in [0, 1]; a reply that is missing: 0.

    Similarity is the Ratcliff–Obershelp ratio, 2·matches/(lengths) (difflib).
    """
    rated = [
        difflib.SequenceMatcher(None, reply.split(), answer.split(), autojunk=False).ratio()
        for reply, answer in zip(replies, answers(turns), strict=False)
    ]
    return sum(rated) / len(turns)


def rows(number: int, heldout: bool, seed: int, fault_share: float) -> list[made.Row]:
    """Two or three turns: two to four names, then one or two more each time."""

    def draw(chance: Random) -> tuple[str, list[list[str]]]:
        sizes = [chance.randint(2, 4), *(chance.randint(1, 2) for _ in range(chance.randint(1, 2)))]
        names = chance.sample(NAMES, sum(sizes))
        turns = [[names.pop() for _ in range(size)] for size in sizes]
        return "; ".join(map(" ".join, turns)), turns

    found = []
    for key, turns in made.distinct(TASK, draw, number, heldout, seed):
        replies = answers(turns)
        if made.faulty(TASK, key, seed, fault_share):
            replies = [" ".join(names) for names in _so_far(turns)]
        talk = zip(questions(turns), replies, strict=True)
        messages = [message for ask, reply in talk for message in (made.user(ask), made.assistant(reply))]
        found.append({"id": made.identity(TASK, key), "turns": turns, "messages": messages})
    return found
