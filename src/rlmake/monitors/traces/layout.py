"""Names of the files of a trace stream."""

import re
from pathlib import Path

VERSION = 1
FOLDER = "traces"
CHUNK = re.compile(r"(\d{5})\.jsonl(\.zst)?")


def stream(root: Path) -> Path:
    return root / "stream"


def index(root: Path) -> Path:
    return root / "stream.index.jsonl"


def annotations(root: Path, producer: str) -> Path:
    return root / "annotations" / producer


def annotation_index(root: Path, producer: str) -> Path:
    return root / "annotations" / f"{producer}.index.jsonl"


def live(root: Path) -> Path:
    return root / "live"


def pending(root: Path) -> Path:
    return root / "live" / "pending"


def plan(root: Path) -> Path:
    return root / "plan.json"


def chunk_name(number: int) -> str:
    return f"{number:05d}.jsonl"


def chunks(folder: Path) -> dict[int, Path]:
    """`{number: file}` in ascending order; where a chunk is there in both forms, the compressed one."""
    found: dict[int, Path] = {}
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if match := CHUNK.fullmatch(path.name):
                found[int(match[1])] = path  # "….jsonl.zst" sorts behind "….jsonl"
    return dict(sorted(found.items()))
