"""What moves inside the orchestrator: groups of rollouts in flight, and trainable traces waiting for a batch."""

from dataclasses import dataclass, field

import msgspec
import verifiers.v1 as vf

from rlmake.transport import TrainingSample


@dataclass
class Group:
    """`size` rollouts of one drawn task, all dispatched with one policy version.

    `index` counts the draws of the run, `draw` those of the environment: (env, draw) is the group's identity, so the
    same task drawn twice, or equal task ids in two environments, are different groups.
    """

    index: int
    env: str
    draw: int
    task: int
    size: int
    step: int  # the step being collected at dispatch
    version: int  # the policy at dispatch
    frozen: bool = False  # sampled from a frozen model: never stale
    started: int = 0
    episodes: dict[int, vf.Episode] = field(default_factory=dict)  # sample number -> finished episode
    rejected: bool = False  # by a gate
    cut: int = 0  # traces whose sampled tokens all lie beyond seq_len

    @property
    def accounted(self) -> bool:
        return len(self.episodes) >= self.size

    def again(self) -> "Group":
        """The same draw, not started; step and version are those of its next dispatch."""
        return Group(self.index, self.env, self.draw, self.task, self.size, 0, 0, self.frozen)

    def in_order(self) -> list[vf.Episode]:
        return [self.episodes[sample] for sample in sorted(self.episodes)]


class Unit(msgspec.Struct):
    """One trainable trace: what a batch counts. Its samples are the trace's branches.

    `start` and `end` are the policy versions at dispatch and at completion. `facts` are the trace's numbers for the
    metrics of what was shipped; no times in it, so that equal runs have equal checkpoints.
    """

    samples: list[TrainingSample]
    env: str
    agent: str
    group: int
    start: int
    end: int
    frozen: bool
    facts: dict[str, float]

    @property
    def name(self) -> str:
        """The trace's name in ledger and traces: that of its samples without the branch."""
        return self.samples[0].sample_id.partition("#")[0]

    @property
    def tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)


class Ahead(msgspec.Struct):
    """A batch that was collected although it trains on a later version (lock-step with a lag)."""

    step: int
    units: list[Unit]


class Waiting(msgspec.Struct):
    """What `queue.msgpack` of a checkpoint holds."""

    queue: list[Unit]
    ahead: list[Ahead]
