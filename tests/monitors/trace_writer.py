"""A process that writes to a trace stream; it imports little, so that several start at once."""

from pathlib import Path

from rlmake.monitors.traces.chunks import Chunks, to_line


def append_150(root: str, number: int) -> None:
    chunks = Chunks(Path(root) / "stream", Path(root) / "index.jsonl", 200_000, compress=True)
    for n in range(150):
        chunks.append(to_line({"writer": number, "n": n, "text": "é" * 3000}), {"writer": number, "n": n})
    chunks.close()
