"""Phone-book: a question that only the tool can answer. The book itself is a function of the name, so nobody keeps it.

The fault of a warm start: the reply is a number made up on the spot, without a look into the book.
"""

from random import Random

from rlmake.core.seeds import derive
from rlmake.envs import made
from rlmake.envs.made.alphabet_sort import NAMES

TASK = "phone-book"
SURNAMES = (
    "Abel", "Berg", "Cole", "Dorn", "Egan", "Fox", "Gray", "Hill", "Ives", "Jost", "Kern", "Lang", "Moss",
    "Nash", "Otto", "Peck", "Quan", "Reed", "Shaw", "Tate", "Ulm", "Vega", "West", "Xu", "York", "Zorn",
)  # fmt: skip
DESCRIPTION = "The number of a person."
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": DESCRIPTION,
        "parameters": {
            "type": "object",
            "properties": {"name": {"title": "Name", "type": "string"}},
            "required": ["name"],
            "title": "look_upArguments",
        },
    },
}


def number_of(name: str) -> str:
    """Three digits."""
    return f"{derive('made', TASK, 'number', name) % 1000:03d}"


def look_up(name: str) -> str:
    """What the tool answers."""
    first, _, last = name.partition(" ")
    return f"{name}: {number_of(name)}" if first in NAMES and last in SURNAMES else "not found"


QUESTIONS = ("Number of {}?", "Call {}.", "How do I reach {}?")


def rows(number: int, heldout: bool, seed: int, fault_share: float) -> list[made.Row]:
    """Several questions about one person; a person is held out with all of them."""

    def draw(chance: Random) -> tuple[str, str]:
        name = f"{chance.choice(NAMES)} {chance.choice(SURNAMES)}"
        return chance.choice(QUESTIONS).format(name), name

    found = []
    for question, name in made.distinct(TASK, draw, number, heldout, seed, lambda _, name: name):
        call = {"id": "call_0", "type": "function", "function": {"name": "look_up", "arguments": {"name": name}}}
        middle = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": look_up(name)},
        ]
        answer = number_of(name)
        if made.faulty(TASK, question, seed, fault_share):
            middle, answer = [], f"{derive('made', TASK, 'guess', seed, question) % 1000:03d}"
        row = {"id": made.identity(TASK, question), "prompt": question, "name": name}
        found.append({**row, "messages": [made.user(question), *middle, made.assistant(answer)], "tools": [TOOL]})
    return found
