"""Phone-book: say a person's number, which only the tool `look_up` knows. Tool use; exact answers score 1.

Rows are JSON objects, one a line, with `prompt` (the question), `name` (whose number it is about) and, if wanted, `id`.
"""

from pathlib import Path

import verifiers.v1 as vf

from rlmake.core import jsonl
from rlmake.envs.made import phone_book as rules
from rlmake.envs.toolsets.phone_book import PhoneBook


class PersonData(vf.TaskData):
    """Whose number is asked for: `name`, which is the task's name too."""

    name: str


class PersonTask(vf.Task[PersonData]):
    """One question; the harness runs the tool calls in between."""

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.reward(weight=1.0)
    async def right_number(self, trace: vf.Trace) -> float:
        """1 when the last reply is the number and nothing else."""
        return float(trace.last_reply == rules.number_of(self.data.name))

    @vf.metric
    async def looked_up(self, trace: vf.Trace) -> float:
        """1 when the tool was asked for this person."""
        return float(any(m.role == "tool" and m.content == rules.look_up(self.data.name) for m in messages(trace)))


def messages(trace: vf.Trace) -> list:
    return [node.message for node in trace.nodes]


class PhoneBookConfig(vf.TasksetConfig):
    """Where the names come from."""

    path: Path
    """JSON-lines file of the rows; relative paths count from the working directory."""
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()
    """The tool server: one for all episodes of a worker."""


class PhoneBookTaskset(vf.Taskset[PersonTask, PhoneBookConfig]):
    """The rows of a file, in its order."""

    def load(self):
        for data in jsonl.tasks(self.config.path, PersonData, "phone-book"):
            yield PersonTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: PhoneBookConfig) -> list[vf.Toolset]:
        return [PhoneBook(config.tools)]


__all__ = ["PhoneBookTaskset"]
