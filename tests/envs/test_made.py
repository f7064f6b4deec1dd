"""Made tasks: splits, faults, rows for SFT, and Kuhn poker against its known solution."""

import json
from itertools import product

import pytest

from rlmake.config import DataConfig
from rlmake.config.renderer import RendererConfig
from rlmake.core.errors import ConfigError, UserError
from rlmake.envs import data, made
from rlmake.envs.made import alphabet_sort, kuhn_poker, phone_book, proposer_solver
from rlmake.models.renderer import CHATML, make_renderer
from rlmake.trainer.data.rows import resolve


def config(source):
    return DataConfig.model_validate({"source": source})


@pytest.mark.parametrize("task", ["alphabet-sort", "phone-book", "proposer-solver"])
def test_sides_share_no_task_and_do_not_depend_on_size_or_seed(tmp_path, task):
    def rows(**rest):
        data.make(config({"type": "made", "task": task, "num_train": 60, "num_heldout": 20, **rest}), tmp_path)
        return [
            [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
            for split in ("train", "heldout")
        ]

    (train, heldout), (other, _), (faulty, right) = rows(), rows(seed=1), rows(fault_share=0.5)
    ids = [{row["id"] for row in part} for part in (train, heldout, other)]
    assert len(ids[0]) == 60 and len(ids[1]) == 20
    assert ids[0].isdisjoint(ids[1]) and ids[2].isdisjoint(ids[1])
    assert right == heldout  # what is held out is never faulty
    assert {row["id"] for row in faulty} == ids[0] and 10 < sum(a != b for a, b in zip(train, faulty, strict=True)) < 50


def test_rows_are_conversations_that_sft_reads(tokenizer):
    renderer = make_renderer(tokenizer, RendererConfig(name="custom", import_path=CHATML))
    columns = DataColumns()
    for module in (alphabet_sort, phone_book, proposer_solver, kuhn_poker):
        for row in module.rows(6, False, 0, 0.3):
            found = resolve(row, columns)
            rendered = renderer.render(found.messages, tools=found.tools)
            assert any(rendered.sampled_mask) and found.messages[-1]["role"] == "assistant"


class DataColumns:
    messages, prompt, completion, tools, message_loss_mask = (
        "messages",
        "prompt",
        "completion",
        "tools",
        "message_loss_mask",
    )
    renderer: dict = {}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"task": "phone-book", "num_train": 2600}, "source.num_train: 'phone-book' has about 1... tasks on that side"),
        ({"task": "proposer-solver", "num_heldout": 999}, "source.num_heldout: "),
    ],
)
def test_more_tasks_than_there_are(tmp_path, source, message):
    with pytest.raises(UserError, match=message):
        data.make(config({"type": "made", "num_train": 10, "num_heldout": 10, **source}), tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "made"}, "source.*task"),
        ({"type": "made", "task": "kuhn-poker"}, "num_heldout: must be 0 for kuhn"),
        ({"type": "pydoc-phrases", "hint_share": 0.5}, "hint: is needed"),
        ({"type": "pydoc-phrases", "hint": "x"}, "hint: must contain"),
    ],
)
def test_sources_are_checked(source, message):
    from rlmake.config import parse

    with pytest.raises(ConfigError, match=message):
        parse(DataConfig, {"source": source})


def test_hinted_phrases(tmp_path):
    source = {"type": "pydoc-phrases", "num_train": 400, "num_heldout": 5, "copy_share": 0.5, "max_chars": 20}
    data.make(config({**source, "hint": "Answer: {demonstration}", "hint_share": 0.5}), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    hinted = [row for row in rows if row["messages"][0]["role"] == "system"]
    assert 150 < len(hinted) < 250
    for row in hinted:
        assert row["messages"][0]["content"] == f"Answer: {row['target']}" == f"Answer: {row['demonstration']}"
        assert row["messages"][-1]["content"] == row["target"]
    plain = [row for row in rows if len(row["messages"]) == 2]
    assert {row["messages"][1]["content"] == row["prompt"] for row in plain} == {True, False}


def test_moves_of_the_warm_start_go_by_the_card():
    """With a fault share of 0.8, a king is active in 0.2 + 0.8/2 of its moves, a jack in the rest of that."""
    seen: dict[str, list[bool]] = {card: [] for card in kuhn_poker.CARDS}
    for row in kuhn_poker.rows(3000, False, 0, 0.8):
        ask, reply = (message["content"] for message in row["messages"][:2])
        seen[ask[5]].append(reply in ("bet", "call"))
    shares = {card: sum(moves) / len(moves) for card, moves in seen.items()}
    assert shares == pytest.approx({"J": 0.4, "Q": 0.5, "K": 0.6}, abs=0.06)


def uniform():
    return dict.fromkeys(kuhn_poker.INFOSETS, 0.5)


def equilibrium(alpha):
    """Kuhn's family of equilibria: bet a jack with `alpha` ≤ 1/3, a king three times as often (Kuhn 1950)."""
    first = {"J": alpha, "Q": 0.0, "K": 3 * alpha}
    again = {"J": 0.0, "Q": alpha + 1 / 3, "K": 1.0}
    bluff, call = {"J": 1 / 3, "Q": 0.0, "K": 1.0}, {"J": 0.0, "Q": 1 / 3, "K": 1.0}
    tables = {"": first, "cb": again, "c": bluff, "b": call}
    return {(card, history): tables[history][card] for card, history in kuhn_poker.INFOSETS}


@pytest.mark.parametrize("alpha", [0.0, 0.2, 1 / 3])
def test_kuhn_s_equilibria_cannot_be_exploited(alpha):
    policy = equilibrium(alpha)
    assert kuhn_poker.exploitability(policy) == pytest.approx(0.0, abs=1e-12)
    assert kuhn_poker.value(policy, policy) == pytest.approx(-1 / 18, abs=1e-12)


def test_exploitability_of_known_policies():
    assert kuhn_poker.exploitability(uniform()) == pytest.approx(11 / 24, abs=1e-12)
    always = dict.fromkeys(kuhn_poker.INFOSETS, 1.0)
    # Who always bets and calls: both seats bet and call kings, fold jacks; a queen is worth nothing either way.
    assert kuhn_poker.exploitability(always) == pytest.approx(1 / 3, abs=1e-12)
    worse = equilibrium(0.2) | {("K", "b"): 0.0}
    assert kuhn_poker.exploitability(worse) > 0.05


def test_the_game_is_zero_sum_and_ends():
    """Every line of play ends in at most three moves, and what one wins the other loses."""
    ends = set()
    for moves in product((False, True), repeat=3):
        history, over = "", False
        for active in moves:
            if not over:
                history, over = kuhn_poker.follow(history, active)
        assert over
        ends.add(history)
    assert ends == {"c-", "b-", "b+", "cb-", "cb+"}
    for end in ends:
        pairs = {(kuhn_poker.payoff(deal, end), kuhn_poker.payoff(deal[::-1], end)) for deal in kuhn_poker.DEALS}
        assert all(abs(a) in (1, 2) for pair in pairs for a in pair)


def test_replies_count_as_documented():
    assert kuhn_poker.is_active(" Bet\n", "") and not kuhn_poker.is_active("call", "")
    assert not kuhn_poker.is_active("I bet", "") and not kuhn_poker.is_legal("I bet", "")
    assert kuhn_poker.is_legal("fold", "cb") and kuhn_poker.is_active("call", "cb")
    assert kuhn_poker.conversation("Q", "cb")[1]["content"] == "check"


def test_proposals():
    assert proposer_solver.is_valid("abc", "a")
    assert not any(proposer_solver.is_valid(word, "a") for word in ("", "ab", "bcd", "abc d", "aBC", "a" * 9))
    assert [proposer_solver.learnability(s) for s in ([True], [False], [True, False])] == [0.0, 0.0, 1.0]


def test_the_phone_book_knows_only_its_people():
    assert phone_book.look_up("Ada Fox") == f"Ada Fox: {phone_book.number_of('Ada Fox')}"
    assert phone_book.look_up("Ada") == phone_book.look_up("nobody") == "not found"


def test_a_person_is_on_one_side_with_all_questions():
    sides = [
        {row["name"] for row in phone_book.rows(number, side, 0, 0.0)} for number, side in ((900, False), (200, True))
    ]
    assert sides[0].isdisjoint(sides[1])


def test_a_task_is_on_one_side():
    assert {made.is_heldout("x", str(n)) for n in range(100)} == {True, False}
