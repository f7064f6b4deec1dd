"""Alphabet-sort: sort names that come in over several turns. Multi-turn; the user is a script.

Rows are JSON objects, one a line, with `turns` (the names that come in with each) and, if wanted, `id`.
"""

from pathlib import Path

import verifiers.v1 as vf

from rlmake.core import jsonl
from rlmake.envs.made import alphabet_sort as rules


class SortData(vf.TaskData):
    """The names of each turn travel to the env server with the task."""

    turns: list[list[str]]


class SortTask(vf.Task[SortData]):
    """One conversation."""

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.reward(weight=1.0)
    async def sorted_names(self, trace: vf.Trace) -> float:
        """Mean over the turns of the similarity of reply and sorted names, in [0, 1]."""
        return rules.score([message.content or "" for message in trace.assistant_messages], self.data.turns)

    @vf.metric
    async def all_right(self, trace: vf.Trace) -> float:
        """1 when every turn's reply is the answer, character for character."""
        replies = [message.content for message in trace.assistant_messages]
        return float(replies == rules.answers(self.data.turns))


class AlphabetSortConfig(vf.TasksetConfig):
    """Where the names come from."""

    path: Path
    """JSON-lines file of the rows; relative paths count from the working directory."""


class AlphabetSortTaskset(vf.Taskset[SortTask, AlphabetSortConfig]):
    """The rows of a file, in its order."""

    def load(self):
        for data in jsonl.tasks(self.config.path, SortData, "alphabet-sort"):
            if not data.turns or not all(data.turns):
                expected = jsonl.COLUMNS["alphabet-sort"].expected
                raise ValueError(f"{self.config.path}: expected {expected}, not {data.turns}")
            first = rules.questions(data.turns)[0]
            yield SortTask(data.model_copy(update={"prompt": first}), self.config.task)


class AlphabetSortEnvConfig(vf.EnvConfig):
    """One agent that trains."""

    agent: vf.AgentConfig = vf.AgentConfig()


class AlphabetSortEnv(vf.Env[AlphabetSortEnvConfig]):
    """Plays the user: one more message after each reply, to the last turn or until the agent's run ends."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            for message in rules.questions(task.data.turns)[1:]:
                if reply.terminated:
                    break
                reply = await talk.turn(message)


__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]
