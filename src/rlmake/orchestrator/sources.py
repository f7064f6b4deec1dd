"""Training sources: which environment the next task comes from, by ratio, and which task it is."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from rlmake.core.jsonio import canonical, hash_bytes
from rlmake.core.seeds import derive
from rlmake.orchestrator.curriculum import GATES, AdvantageRange, Sampler, sampler
from rlmake.orchestrator.records import Group


@dataclass
class Source:
    """One environment to train on; `draws` counts its groups."""

    name: str
    config: Any
    sampler: Sampler
    gates: dict[str, AdvantageRange]
    tasks: int | None
    draws: int = 0
    anew: bool = False  # its tasks are not those of the checkpoint
    finished: int = 0  # groups since the last report
    admitted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    @property
    def identity(self) -> dict[str, Any]:
        """What the cursor belongs to: another data set or another number of tasks makes it meaningless."""
        return {"tasks": self.tasks, "taskset": hash_bytes(canonical(self.config.env["taskset"]))}

    def group(self, index: int, draw: int, task: int, step: int, version: int) -> Group:
        """Draw `draw` of this source, which is draw `index` of the run, as a group to be started."""
        frozen = self.config.algo.sampling.source != "policy"
        return Group(index, self.name, draw, task, self.config.group_size, step, version, frozen)

    def metrics(self) -> dict[str, float]:
        rows = {"admission_rate": self.admitted / self.finished} if self.finished else {}
        rows |= {f"sampler/{key}": value for key, value in self.sampler.metrics().items()}
        rows |= {f"gate/{name}/rejected": float(self.rejected.get(name, 0)) for name in self.gates}
        self.finished, self.admitted, self.rejected = 0, 0, {}
        return {f"curriculum/{self.name}/{key}": value for key, value in rows.items()}


class Sources:
    """Draws groups. Draw n of the run is a function of the seed, n and the samplers' states."""

    def __init__(self, configs: list[Any], tasks: Mapping[str, int | None], seed: int):
        self.seed, self.draws = seed, 0
        self.by_name = {
            config.name: Source(
                config.name,
                config,
                sampler(config.curriculum.sampler, tasks[config.name], config.name),
                {name: GATES[gate.type](gate) for name, gate in config.curriculum.gates.items()},
                tasks[config.name],
            )
            for config in configs
        }

    def draw(self, step: int, version: int) -> Group:
        """Open the next group, at the step being collected and the policy version being served."""
        names = list(self.by_name)
        ratios = [self.by_name[name].config.ratio for name in names]
        chance = random.Random(derive(self.seed, "source", self.draws))
        source = self.by_name[chance.choices(names, ratios)[0]]
        group = source.group(self.draws, source.draws, source.sampler.next(source.draws), step, version)
        self.draws += 1
        source.draws += 1
        return group

    def state_dict(self) -> dict[str, Any]:
        return {
            "draws": self.draws,
            "sources": {
                source.name: {"draws": source.draws, "sampler": source.sampler.state_dict(), **source.identity}
                for source in self.by_name.values()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue; a source whose taskset or sampler changed starts anew, with a warning."""
        self.draws = state["draws"]
        for name, source in self.by_name.items():
            saved = state["sources"].get(name)
            if saved is None:
                source.anew = True
                logger.warning(f"source '{name}' is not in the checkpoint: it starts at its first task")
                continue
            source.draws = saved["draws"]  # also with new tasks: seeds are never used twice
            if {key: saved[key] for key in source.identity} != source.identity:
                source.anew = True
                logger.warning(
                    f"source '{name}': its taskset is not that of the checkpoint: it starts at its first task"
                )
                continue
            if saved["sampler"].keys() != source.sampler.state_dict().keys():
                logger.warning(f"source '{name}': its sampler is not that of the checkpoint: it starts anew")
                continue
            source.sampler.load_state_dict(saved["sampler"])
        for name in state["sources"].keys() - self.by_name.keys():
            logger.warning(f"source '{name}' of the checkpoint is not configured any more")
