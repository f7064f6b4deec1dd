"""A taskset for benchmarks: random words in, any text out; the reward is a hash, so replies of a group differ in it."""

import zlib
from random import Random

import verifiers.v1 as vf

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


def prompt(index: int, words: int = 24) -> str:
    return " ".join(Random(index).choices(WORDS, k=words))


def score(reply: str) -> float:
    """In [0, 1)."""
    return zlib.crc32(reply.encode()) % 1000 / 1000


class HashTask(vf.Task[vf.TaskData]):
    @property
    def key(self) -> str:
        return self.hash

    @vf.stop
    async def replied(self, trace: vf.Trace) -> bool:
        return trace.num_turns > 0

    @vf.reward(weight=1.0)
    async def hashed(self, trace: vf.Trace) -> float:
        return score(trace.last_reply)


class HashTasksetConfig(vf.TasksetConfig):
    words: int = 24


class HashTaskset(vf.Taskset[HashTask, HashTasksetConfig]):
    """4,096 prompts."""

    def load(self):
        for index in range(4096):
            yield HashTask(vf.TaskData(prompt=prompt(index, self.config.words)), self.config.task)


__all__ = ["HashTaskset"]
