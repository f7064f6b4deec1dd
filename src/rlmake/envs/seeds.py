"""A seed for each run of an agent within an episode.

A request's seed comes with its episode. verifiers hands it to every agent alike, so several attempts at one prompt
would be one attempt, and two players would draw the same numbers.
"""

import copy
import dataclasses
from contextlib import AbstractAsyncContextManager
from typing import Any

from rlmake.core.seeds import derive

SOLE = "agent"  # the one agent of verifiers' environment for plain tasksets


def own_seeds() -> None:
    """Have run n of an agent sample with a seed of its own: of the episode's, the agent's name, and n in the order of
    calls. The first run of a sole agent keeps the episode's. Without effect where none is given; cheap to repeat.
    """
    from verifiers.v1 import env

    Base = env._EpisodeAgent
    if Base.__module__ == __name__:
        return

    class Seeded(Base):
        runs = 0

        def _next(self) -> Any:
            seed, number = getattr(self.ctx.sampling, "seed", None), self.runs
            self.runs += 1
            if seed is None or (self._name, number) == (SOLE, 0):
                return self
            sampling = self.ctx.sampling.model_copy(update={"seed": derive(seed, self._name, number)})
            own = copy.copy(self)  # runs may go side by side; a retry within one keeps its seed
            own.ctx = dataclasses.replace(self.ctx, sampling=sampling)
            own.config = self.config.model_copy(update={"sampling": sampling})
            return own

        async def run(self, *args: Any, **kwargs: Any) -> Any:
            return await Base.run(self._next(), *args, **kwargs)

        def interaction(self, *args: Any, **kwargs: Any) -> AbstractAsyncContextManager:
            return Base.interaction(self._next(), *args, **kwargs)

    env._EpisodeAgent = Seeded
