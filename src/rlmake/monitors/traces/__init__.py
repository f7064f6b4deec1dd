"""The trace stream of a run: every episode as one JSON line, what is learnt about it later, and what is in flight.

    traces/stream/00000.jsonl[.zst]       episodes, append-only, in chunks; full ones are compressed
    traces/stream.index.jsonl             a row an episode: where it lies, and what tables need of it
    traces/annotations/<producer>/…       what is known later: credit, shipping, the trainer's view of every token
    traces/live/<trace>.jsonl             deltas of a trace in flight; live/pending/<episode>.json before its first
    traces/plan.json                      how many episodes each environment is to give

Producers use `Recorder`; readers use `rlmake.monitors.traces.read`. docs/traces.md describes the formats.
"""

from rlmake.monitors.traces.recorder import Recorder
from rlmake.monitors.traces.records import Work, spans, trace_id, trace_name
from rlmake.monitors.traces.stream import TraceStream

__all__ = ["Recorder", "TraceStream", "Work", "spans", "trace_id", "trace_name"]
