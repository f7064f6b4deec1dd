"""A finished group: credit, observation by the sampler, gates, and the traces that go to the queue."""

from collections.abc import Callable, Mapping
from typing import Any

import verifiers.v1 as vf

from rlmake.algorithms import Algorithm
from rlmake.algorithms.traces import trainable_traces
from rlmake.core.offload import off_loop
from rlmake.monitors.traces import Recorder, trace_name
from rlmake.orchestrator.facts import trace_facts
from rlmake.orchestrator.records import Group, Unit
from rlmake.orchestrator.rollouts import rollout_name
from rlmake.orchestrator.samples import prune, samples_of
from rlmake.orchestrator.sources import Sources


class Groups:
    """Turns finished groups into units. `on_group(group, facts, units, admitted)` sees every one, for the metrics."""

    def __init__(
        self,
        config: Any,
        sources: Sources,
        algorithms: Mapping[str, Algorithm],
        temperature: Callable[[str], float],
        on_group: Callable[[Group, list[dict[str, Any]], list[Unit], bool], None],
        recorder: Recorder,
    ):
        self.config, self.sources, self.algorithms = config, sources, algorithms
        self.temperature, self.on_group, self.recorder = temperature, on_group, recorder

    async def finish(self, group: Group, version: int) -> list[Unit]:
        """Units of a group whose episodes are all there, in the order of samples; `version` is the policy now."""
        episodes, algorithm = group.in_order(), self.algorithms[group.env]
        for episode in episodes:
            if trainable_traces(episode):
                await algorithm.score_episode(episode)
        await algorithm.finish(episodes)
        admitted = self._observe(group, episodes)
        units, facts = await off_loop(self._flatten, group, version, admitted)
        self.on_group(group, facts, units, admitted)
        return units

    def _observe(self, group: Group, episodes: list[vf.Episode]) -> bool:
        source = self.sources.by_name[group.env]
        source.sampler.observe(group.task, [t.reward for episode in episodes for t in trainable_traces(episode)])
        refusing = [name for name, gate in source.gates.items() if not gate.admits(episodes)]
        for name in refusing:
            source.rejected[name] = source.rejected.get(name, 0) + 1
        source.finished += 1
        source.admitted += not refusing
        group.rejected = bool(refusing)
        return not refusing

    def _flatten(self, group: Group, version: int, admitted: bool) -> tuple[list[Unit], list[dict[str, Any]]]:
        """Units of the admitted traces that train something, and the facts of all of them."""
        units, facts = [], []
        for sample, episode in sorted(group.episodes.items()):
            self.recorder.credited(rollout_name(group, sample), episode)
            trainable = {id(trace) for trace in trainable_traces(episode)}
            rows = trace_facts(episode, group, self.algorithms[group.env].context.agents)
            for number, (trace, row) in enumerate(zip(episode.traces, rows, strict=False)):
                if id(trace) not in trainable:
                    continue
                name = trace_name(rollout_name(group, sample), number, len(episode.traces))
                unit = self._unit(group, version, trace, name, row)
                row["is_trainable"] = float(unit is not None)
                row["is_admitted"] = float(unit is not None and admitted)
                if unit is not None and admitted:
                    units.append(unit)
            facts += rows
        return units, facts

    def _unit(self, group: Group, version: int, trace: vf.Trace, name: str, row: dict[str, Any]) -> Unit | None:
        temperature, seq_len = self.temperature(group.env), self.config.seq_len
        samples = samples_of(trace, name, group.env, temperature, seq_len)
        group.cut += not samples
        if self.config.constant_trainer_batch_size:
            samples = [kept for sample in samples if (kept := prune(sample)) is not None]
        if not samples:
            return None
        numbers = {key: v for key, v in row.items() if isinstance(v, float) and not key.startswith("timing/")}
        numbers |= {"is_trainable": 1.0, "is_admitted": 1.0}  # of what is shipped, for which this is kept
        return Unit(samples, group.env, trace.agent.name, group.index, group.version, version, group.frozen, numbers)
