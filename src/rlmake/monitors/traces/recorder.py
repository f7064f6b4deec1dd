"""What a producer of episodes calls: it turns groups, credit and batches into records of every trace stream."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlmake.monitors.traces.records import Arrival, Work, annotation, spans, trace_id, trace_name
from rlmake.monitors.traces.stream import TraceStream


class Recorder:
    """Fans out to `streams` (none: every call is free). `run_id` and `attempt` are the context's."""

    def __init__(self, streams: Sequence[TraceStream], run_id: str, attempt: int):
        self.streams, self.run_id, self.attempt = list(streams), run_id, attempt

    @contextmanager
    def episode(self, work: Work) -> Iterator[Callable[[bytes], None] | None]:
        """Around an episode in flight; gives what verifiers calls with each delta. A cancelled one is forgotten."""
        for stream in self.streams:
            stream.started(work)
        try:
            yield (lambda delta: self._delta(work, delta)) if self.streams else None
        except BaseException:
            for stream in self.streams:
                stream.dropped(work)
            raise

    def _delta(self, work: Work, delta: bytes) -> None:
        for stream in self.streams:
            stream.delta(work, delta)

    def arrived(self, work: Work, episode: Any, version: int | None) -> None:
        """The episode has ended and its standing is settled."""
        for stream in self.streams:
            stream.arrived(Arrival(work, episode, version, time.time()))

    def credited(self, name: str, episode: Any) -> None:
        """Advantages of an episode's traces, as far as an algorithm has given any."""
        if not self.streams:
            return
        for number, trace in enumerate(episode.traces):
            branches = [branch for branch in trace.branches if branch.trainable]
            rows = [row for index, branch in enumerate(branches) if (row := _credit(index, branch)) is not None]
            if rows:
                values = [value for row in rows for value in row["advantages"]]
                info = {"advantage": sum(values) / len(values)}
                self._annotate(trace_name(name, number, len(episode.traces)), info, rows)

    def shipped(self, names: Sequence[str], step: int, version: int) -> None:
        """Traces that go into the batch of `step`, which trains v`step − 1`; `version` is the policy that is served."""
        info = {"effective": True, "ship": {"step": step, "version": version, "time": time.time()}}
        for name in names if self.streams else ():
            self._annotate(name, info)

    def trained(self, name: str, step: int, branches: Sequence[Mapping[str, Any]]) -> None:
        """The trainer's numbers about the tokens of a trace that count in `step`."""
        self._annotate(name, {"trained": {"step": step}}, branches)

    def planned(self, counts: Mapping[str, int]) -> None:
        for stream in self.streams:
            stream.planned(dict(counts))

    def _annotate(self, name: str, info: Mapping[str, Any], branches: Sequence[Mapping[str, Any]] = ()) -> None:
        row = annotation(trace_id(self.run_id, name), self.attempt, info, branches)
        for stream in self.streams:
            stream.annotate(row)


def _credit(index: int, branch: Any) -> dict[str, Any] | None:
    """The advantages of a branch on its sampled tokens; None when it was never scored."""
    advantages = branch.advantages
    if advantages is None:
        return None
    at = [position for position, sampled in enumerate(branch.sampled_mask) if sampled]
    if not at:
        return None
    return {"index": index, "spans": spans(at), "advantages": [advantages[position] for position in at]}
