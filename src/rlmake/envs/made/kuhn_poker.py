"""Kuhn poker (Kuhn 1950): three cards, one each, one chip ante, one bet. Rules, words, exact exploitability.

    first player    check ──► second: check ──► showdown for 1
                      │       second: bet ────► first: fold (−1) or call: showdown for 2
                      └ bet ► second: fold (+1) or call: showdown for 2

A reply that is not the active word (bet, call) counts as the passive one (check, fold), whatever it says. So a policy
is twelve probabilities of the active reply, one for each card and history.

The fault of a warm start: a move at random. All others go by the card: active with a king, passive with a jack.
"""

from collections.abc import Mapping
from itertools import permutations
from random import Random

from rlmake.core.seeds import derive
from rlmake.envs import made

TASK = "kuhn-poker"
CARDS = "JQK"
DEALS = tuple("".join(deal) for deal in permutations(CARDS, 2))  # (first player's card, second player's)
GAME_VALUE = -1 / 18  # of the first player, in chips, when both play perfectly
PASSIVE_ACTIVE = {"": ("check", "bet"), "b": ("fold", "call"), "c": ("check", "bet"), "cb": ("fold", "call")}
"""History so far (c: check, b: bet) → the passive and the active word of whoever is to act."""
SEATS = {"": 0, "c": 1, "b": 1, "cb": 0}
INFOSETS = tuple((card, history) for history in PASSIVE_ACTIVE for card in CARDS)
Policy = Mapping[tuple[str, str], float]  # (card, history) → probability of the active reply


def prompt(card: str, history: str) -> str:
    """What a player is told when it is to act; on its second move the card is known to it."""
    before = {"": "You start", "c": "They check", "b": "They bet", "cb": "They bet"}[history]
    words = " or ".join(PASSIVE_ACTIVE[history])
    return f"{before}: {words}?" if history == "cb" else f"Card {card}. {before}: {words}?"


def conversation(card: str, history: str) -> list[dict[str, str]]:
    """The messages up to the reply that is asked for."""
    if history != "cb":
        return [made.user(prompt(card, history))]
    return [made.user(prompt(card, "")), made.assistant("check"), made.user(prompt(card, "cb"))]


def is_active(reply: str, history: str) -> bool:
    return reply.strip().lower() == PASSIVE_ACTIVE[history][1]


def is_legal(reply: str, history: str) -> bool:
    return reply.strip().lower() in PASSIVE_ACTIVE[history]


def follow(history: str, active: bool) -> tuple[str, bool]:
    """The history after a move, and whether the hand is over."""
    if history == "":
        return ("b", False) if active else ("c", False)
    if history == "c" and active:
        return "cb", False
    return history + ("+" if active else "-"), True


def payoff(deal: str, end: str) -> float:
    """Chips that the first player wins: `end` is the history with the last move, + active or − passive."""
    sign = 1.0 if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -1.0
    return {"c-": sign, "b-": 1.0, "b+": 2 * sign, "cb-": -1.0, "cb+": 2 * sign}[end]


def value(first: Policy, second: Policy) -> float:
    """Chips that the first player wins on average, over all deals."""

    def play(deal: str, history: str) -> float:
        seat = SEATS[history]
        chance = (first, second)[seat][deal[seat], history]
        total = 0.0
        for active, probability in ((True, chance), (False, 1 - chance)):
            after, over = follow(history, active)
            total += probability * (payoff(deal, after) if over else play(deal, after))
        return total

    return sum(play(deal, "") for deal in DEALS) / len(DEALS)


def best_response(policy: Policy, seat: int) -> float:
    """The most that a player in `seat` wins on average against `policy` in the other one.

    The player's pure strategies are enumerated: six information sets of two moves, 64 strategies. A mixed one can't do
    better than the best of them.
    """
    mine = [key for key in INFOSETS if SEATS[key[1]] == seat]
    best = -2.0
    for code in range(2 ** len(mine)):
        pure = {key: float(code >> place & 1) for place, key in enumerate(mine)}
        won = value(pure, policy) if seat == 0 else -value(policy, pure)
        best = max(best, won)
    return best


def exploitability(policy: Policy) -> float:
    """Mean over both seats of what a perfect opponent wins against the policy, in chips a hand.

    Half of NashConv; 0 exactly for an equilibrium, 11/24 for the one that moves at random.
    """
    return (best_response(policy, 0) + best_response(policy, 1)) / 2


def rows(number: int, heldout: bool, seed: int, fault_share: float) -> list[made.Row]:
    """Conversations of one player, `fault_share` of whose moves are random. Nothing to hold out: 12 situations."""
    chance = Random(derive("made", TASK, "draw", heldout, seed))
    found = []
    for index in range(number):
        deal, history, over = chance.choice(DEALS), "", False
        seats: tuple[list, list] = ([], [])
        while not over:
            seat, active = SEATS[history], chance.random() < 0.5
            if chance.random() >= fault_share and deal[seat] != "Q":
                active = deal[seat] == "K"
            reply = PASSIVE_ACTIVE[history][active]
            seats[seat].extend([made.user(prompt(deal[seat], history)), made.assistant(reply)])
            history, over = follow(history, active)
        messages = seats[index % 2]
        found.append({"id": made.identity(TASK, f"{heldout} {seed} {index}"), "messages": messages})
    return found
