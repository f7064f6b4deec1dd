"""What a monitor is asked to take. A new one is one file with a subclass, and a line in the registry."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmake.monitors.traces import TraceStream


class Monitor:
    """Of one producer. Rows are `{"step", "time", "producer", "attempt", <metric>: number, …}`; numbers are finite."""

    traces: "TraceStream | None" = None  # where episodes go, for a monitor that takes them

    def log(self, row: dict[str, Any]) -> None:
        raise NotImplementedError

    def close(self, finished: bool = False) -> None:
        """`finished`: the producer has done all its work, nothing more will come."""
