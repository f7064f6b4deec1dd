"""Phrases: what counts as prose, and that no phrase is on both sides whatever the text."""

import re
from pydoc_data.topics import topics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmake.envs import phrases

PAGES = dict(sorted(topics.items())[:30])  # enough for what is shown here, and quick
WORD = st.text("abcdefgh", min_size=1, max_size=6)
CLAUSE = st.lists(WORD, min_size=1, max_size=8)
TEXT = st.lists(CLAUSE, min_size=1, max_size=30).map(lambda clauses: ", ".join(" ".join(words) for words in clauses))


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 8), st.integers(0, 12), st.integers(0, 3))
def test_no_phrase_on_both_sides_and_none_twice(texts, low, more, seed):
    train, heldout = phrases.split(texts, low, low + more, seed)
    assert not set(train) & set(heldout)
    assert len(train) == len(set(train)) and len(heldout) == len(set(heldout))
    for phrase in train + heldout:
        assert low <= len(phrase) <= low + more
        assert any(f" {phrase} " in f" {clause.strip()} " for text in texts for clause in text.split(","))


@settings(max_examples=30, deadline=None)
@given(TEXT, TEXT, st.integers(0, 3))
def test_a_phrase_never_changes_sides_when_text_is_added(first, second, seed):
    train, heldout = phrases.split([first], 3, 12, seed)
    more_train, more_heldout = phrases.split([first, second], 3, 12, seed)
    assert set(heldout).isdisjoint(more_train)
    new = {clause for clause in phrases.clauses(second) if phrases.is_heldout(clause)}
    taken = {phrase for clause in new for phrase in phrases.windows(clause, 3, 12)}
    assert set(train) - taken <= set(more_train) and set(more_heldout).isdisjoint(more_train)


def test_clauses_end_at_punctuation_quotes_and_code():
    text = 'When the *target* is (after all) a name, use "x" or int_max: 3 words. Plain “ones” too'
    assert [" ".join(clause) for clause in phrases.clauses(text)] == [
        "when the", "is", "after all", "a name", "use", "or", "words", "plain", "ones", "too",
    ]  # fmt: skip


def test_windows_are_whole_words_within_the_bounds():
    assert list(phrases.windows(("a", "list", "of", "names"), 4, 7)) == ["a list", "list", "list of", "names"]


def test_the_documentation_yields_plain_words_enough():
    texts = phrases.paragraphs(PAGES)
    assert not any("::=" in text or ">>>" in text for text in texts)
    train, heldout = phrases.split(texts, 8, 24, 0)
    assert len(train) > 5_000 and len(heldout) > 100
    assert all(re.fullmatch("[a-z]+( [a-z]+)*", phrase) for phrase in train + heldout)
    other, same_side = phrases.split(texts, 8, 24, 1)
    assert other != train and sorted(other) == sorted(train)
    assert not set(same_side) & set(train) and not set(heldout) & set(other)


def test_a_clause_gives_one_task_and_both_sides_are_alike_in_length():
    texts = phrases.paragraphs(PAGES)
    train, heldout = phrases.split(texts, 5, 12, 0)
    first = heldout[:80]
    clauses = {clause for text in texts for clause in phrases.clauses(text) if phrases.is_heldout(clause)}
    assert all(sum(phrase in set(phrases.windows(clause, 5, 12)) for phrase in first) <= 1 for clause in clauses)
    means = [sum(map(len, side)) / len(side) for side in (train, first)]
    assert abs(means[0] - means[1]) < 0.8


@pytest.mark.parametrize("position", range(3))
def test_heldout_share(position):
    clauses = [(f"word{'abcdefghij'[n % 10]}" * (1 + position), str(n)) for n in range(3000)]
    share = sum(map(phrases.is_heldout, clauses)) / len(clauses)
    assert abs(share - 1 / phrases.HELDOUT_SHARE) < 0.03
