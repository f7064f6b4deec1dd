"""Reverse-text: write a phrase backwards. Single turn; the reward is the similarity of reply and reversed phrase.

Rows are JSON objects, one a line, with `prompt` (the phrase), `target` (its reversal) and, if wanted, `id` and
`demonstration`, which opsd shows to its teacher.
"""

import difflib
from pathlib import Path

import verifiers.v1 as vf

from rlmake.core import jsonl


class ReverseData(vf.TaskData):
    """One phrase; `target` travels to the env server with it."""

    target: str
    demonstration: str | None = None


class ReverseTask(vf.Task[ReverseData]):
    """One question, one reply."""

    @property
    def key(self) -> str:
        """The row's own id where it has one: it stays the same when rows are added or dropped around it."""
        return self.data.id or self.hash

    @vf.stop
    async def replied(self, trace: vf.Trace) -> bool:
        """End after the first reply."""
        return trace.num_turns > 0

    @vf.reward(weight=1.0)
    async def similarity(self, trace: vf.Trace) -> float:
        """Ratcliff–Obershelp ratio of reply and target, 2·matches/(lengths), in [0, 1] (difflib).

        `autojunk` is off: with it, letters that are frequent in a long phrase would count as junk.
        """
        return difflib.SequenceMatcher(None, trace.last_reply, self.data.target, autojunk=False).ratio()

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        """1 when the reply is the target, character for character."""
        return float(trace.last_reply == self.data.target)


class ReverseTextConfig(vf.TasksetConfig):
    """Where the phrases come from, and how the task is put to the model."""

    path: Path
    """JSON-lines file of the rows; relative paths count from the working directory."""
    instruction: str | None = None
    """System prompt of every task; None: the phrase alone."""


class ReverseTextTaskset(vf.Taskset[ReverseTask, ReverseTextConfig]):
    """The rows of a file, in its order."""

    def load(self):
        common = {"system_prompt": self.config.instruction}
        for row in jsonl.tasks(self.config.path, ReverseData, "reverse-text", **common):
            yield ReverseTask(row, self.config.task)


__all__ = ["ReverseTextTaskset"]
