"""Phrases of plain English out of the documentation that ships with every Python (`pydoc_data.topics`).

    topics → paragraphs of prose → clauses (words between punctuation) → phrases (words in a row within a clause)

Held-out phrases come from clauses of their own: a clause's hash alone decides its side, so it is the same for every
size and seed, and whatever a phrase of the held-out side is made of, no row of the other has it.
"""

import re
from collections.abc import Iterable, Iterator

from rlmake.core.seeds import derive

HELDOUT_SHARE = 6  # one clause in so many is held out

_WORD = re.compile(r"(?P<open>[(“‘]*)(?P<word>[A-Z]?[a-z]+)(?P<close>[.,;:!?)”’]*)")
_PLAIN = re.compile(r"[A-Za-z]?[a-z]*[.,;:)]?")


def paragraphs(topics: dict[str, str]) -> list[str]:
    """The distinct paragraphs of prose, sorted, each on one line; grammar, sessions, tables and headings left out."""
    found = set()
    for text in topics.values():
        for block in re.split(r"\n\s*\n", text):
            words = block.split()
            plain = sum(_PLAIN.fullmatch(word) is not None for word in words)
            if len(words) >= 6 and plain >= 0.7 * len(words) and "::=" not in block and ">>>" not in block:
                found.add(" ".join(words))
    return sorted(found)


def clauses(paragraph: str) -> Iterator[tuple[str, ...]]:
    """Words in a row, in lower case; punctuation, quotes, emphasis, digits and names of code end a clause."""
    clause: list[str] = []
    for token in paragraph.split():
        match = _WORD.fullmatch(token)
        if clause and (match is None or match["open"]):
            yield tuple(clause)
            clause = []
        if match is not None:
            clause.append(match["word"].lower())
            if match["close"]:
                yield tuple(clause)
                clause = []
    if clause:
        yield tuple(clause)


def windows(clause: tuple[str, ...], min_chars: int, max_chars: int) -> Iterator[str]:
    """Every run of whole words of `clause` with min_chars … max_chars characters, spaces counted."""
    for start in range(len(clause)):
        phrase = ""
        for word in clause[start:]:
            phrase = f"{phrase} {word}" if phrase else word
            if len(phrase) > max_chars:
                break
            if len(phrase) >= min_chars:
                yield phrase


def is_heldout(clause: tuple[str, ...]) -> bool:
    """Which side of the split a clause is on."""
    return derive("phrases", "heldout", " ".join(clause)) % HELDOUT_SHARE == 0


def split(texts: Iterable[str], min_chars: int, max_chars: int, seed: int) -> tuple[list[str], list[str]]:
    """All phrases `(train, heldout)`, distinct, none in both, each in an order drawn by `seed`.

    A clause gives at most one phrase to the held-out side, so that its tasks are independent of one another.
    """
    train: set[str] = set()
    heldout: dict[str, set[tuple[str, ...]]] = {}  # phrase → clauses that it is in
    for clause in {clause for text in texts for clause in clauses(text)}:
        phrases = windows(clause, min_chars, max_chars)
        if not is_heldout(clause):
            train.update(phrases)
            continue
        for phrase in phrases:
            heldout.setdefault(phrase, set()).add(clause)

    def order(phrase: str) -> tuple[int, str]:
        return derive("phrases", "order", seed, phrase), phrase

    used: set[tuple[str, ...]] = set()
    chosen = []
    for phrase in sorted(heldout, key=order):
        if used.isdisjoint(heldout[phrase]):
            used |= heldout[phrase]
            chosen.append(phrase)
    return sorted(train - heldout.keys(), key=order), chosen
