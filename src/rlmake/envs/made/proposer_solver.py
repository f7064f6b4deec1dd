"""Proposer–solver: one agent proposes a word, the other writes it backwards, several times over.

The fault of a warm start: the solver writes the word as it stands.
"""

import difflib
import string
from collections.abc import Sequence
from random import Random

from rlmake.envs import made

TASK = "proposer-solver"
LETTERS = string.ascii_lowercase
MIN_CHARS, MAX_CHARS = 3, 8


def proposal_prompt(letter: str) -> str:
    return f"Propose: {letter}"


def solver_prompt(word: str) -> str:
    return f"Reverse: {word}"


def is_valid(word: str, letter: str) -> bool:
    """Whether a proposal is as asked: small letters, the first as given, of a length within bounds."""
    return word.startswith(letter) and MIN_CHARS <= len(word) <= MAX_CHARS and set(word) <= set(LETTERS)


def similarity(reply: str, word: str) -> float:
    """Ratcliff–Obershelp ratio of the reply and the word backwards, in [0, 1] (difflib)."""
    return difflib.SequenceMatcher(None, reply, word[::-1], autojunk=False).ratio()


def learnability(solved: Sequence[bool]) -> float:
    """1 − |2p − 1| for the share p of attempts that solved it: 1 where half do, 0 where none or all do."""
    return 1.0 - abs(2.0 * sum(solved) / len(solved) - 1.0)


def rows(number: int, heldout: bool, seed: int, fault_share: float) -> list[made.Row]:
    """Words of Python's own documentation, half of the train rows proposals, half solutions.

    Held-out rows are for the taskset reverse-text: `prompt` and `target` of the solver.
    """
    words = _words()

    def draw(chance: Random) -> tuple[str, None]:
        return chance.choice(words), None

    found = []
    for index, (word, _) in enumerate(made.distinct(TASK, draw, number, heldout, seed)):
        row = {"id": made.identity(TASK, word), "prompt": solver_prompt(word), "target": word[::-1]}
        reply = word if made.faulty(TASK, word, seed, fault_share) else word[::-1]
        ask = solver_prompt(word)
        if index % 2 and not heldout:
            ask, reply = proposal_prompt(word[0]), word
        found.append({**row, "messages": [made.user(ask), made.assistant(reply)]})
    return found


def _words() -> list[str]:
    from pydoc_data.topics import topics

    from rlmake.envs import phrases

    found = {word for text in phrases.paragraphs(topics) for clause in phrases.clauses(text) for word in clause}
    return sorted(word for word in found if is_valid(word, word[:1]))
