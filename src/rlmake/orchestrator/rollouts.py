"""One rollout of a group: client, sampling and seed, and the episode's final standing."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import verifiers.v1 as vf

from rlmake.algorithms.traces import settle
from rlmake.config.shared import ClientConfig
from rlmake.core.seeds import derive
from rlmake.envs.client import EnvHandle, engine_client
from rlmake.monitors.traces import Recorder, Work
from rlmake.orchestrator.engines import Engines
from rlmake.orchestrator.records import Group


class Rollouts:
    """Runs episodes on the sources' env servers. In deterministic mode every request carries its rollout's own seed;
    elsewhere it would promise nothing, and an engine that draws each row by itself is slower for it."""

    def __init__(
        self,
        config: Any,
        envs: Mapping[str, EnvHandle],
        engines: Engines,
        recorder: Recorder,
        version: Callable[[], int],
    ):
        self.seed, self.envs, self.recorder, self.version = config.seed, envs, recorder, version
        self.deterministic = config.deterministic
        self._clients: dict[str, vf.ClientConfig] = {}
        self._models: dict[str, str] = {}
        self._configs: dict[str, tuple[dict[str, Any], vf.SamplingConfig]] = {}
        self.sampling: dict[str, dict[str, Any]] = {}
        for source in config.train.source:
            frozen = source.algo.sampling.source if source.algo.sampling.source != "policy" else None
            client = ClientConfig(api_key_var=frozen.api_key_var) if frozen else config.model.client
            url = frozen.base_url if frozen else engines.base_url
            self._clients[source.name] = engine_client(client, url, config.renderer, config.tokenizer.name)
            self._models[source.name] = frozen.name if frozen else engines.model
            self.sampling[source.name] = train_sampling(source.sampling)

    def temperature(self, env: str) -> float:
        return self.sampling[env]["temperature"]

    def _sampling(self, group: Group, sample: int) -> vf.SamplingConfig:
        """Where no rollout has a seed of its own, one object for all rollouts of a source and a version."""
        sampling = dict(self.sampling[group.env])
        if self.deterministic:
            sampling["seed"] = derive(self.seed, "rollout", group.env, group.draw, sample)
        if not group.frozen:
            sampling["cache_salt"] = str(group.version)
        known = self._configs.get(group.env)
        if known is None or known[0] != sampling:
            known = self._configs[group.env] = (sampling, vf.SamplingConfig(**sampling))
        return known[1]

    async def run(self, group: Group, sample: int) -> vf.Episode:
        """The episode of one sample of a group, its standing settled. Never raises for a failure of the episode.

        The cache salt is the version at dispatch: prefixes computed with other weights are never reused.
        """
        env = self.envs[group.env]
        work = work_of(group, sample)
        with self.recorder.episode(work) as on_delta:
            episode = await env.run(
                env.task(group.task),
                self._clients[group.env],
                self._models[group.env],
                self._sampling(group, sample),
                on_delta,
            )
        note_empty(episode)
        settle(episode)
        self.recorder.arrived(work, episode, None if group.frozen else self.version())
        return episode


def work_of(group: Group, sample: int) -> Work:
    """What the trace stream calls one rollout of a group."""
    return Work(
        kind="train",
        env=group.env,
        group=f"{group.env}/{group.draw}",
        name=rollout_name(group, sample),
        step=group.step,
        version=None if group.frozen else group.version,
        dispatched=time.time(),
        task=group.task,
        sample=sample,
    )


def rollout_name(group: Group, sample: int) -> str:
    """The rollout's name in ledger and traces."""
    return f"{group.env}/{group.draw}/{sample}"


def train_sampling(config: Any) -> dict[str, Any]:
    """What goes on the wire: tokens are drawn from the whole temperature-scaled distribution, as the loss assumes."""
    sampling = {"temperature": config.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    if config.max_completion_tokens is not None:
        sampling["max_tokens"] = config.max_completion_tokens
    return sampling | dict(config.extra_body)


def note_empty(episode: vf.Episode) -> None:
    """An episode without traces, or a clean trace without a sampled token, is an error of its own type."""
    if episode.ok and not episode.traces:
        episode.ok = False
        episode.errors.append(vf.Error(type="EmptyEpisode", message="the environment returned no trace"))
    for trace in episode.traces:
        if trace.ok and trace.agent.trainable and not any(any(node.mask) for node in trace.nodes):
            trace.ok = False
            trace.errors.append(vf.Error(type="EmptyTrajectory", message="no sampled token"))
