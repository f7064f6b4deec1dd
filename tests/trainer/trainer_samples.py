"""Rows and files for the trainer's tests."""

import json
from pathlib import Path

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau"


def rows(count: int) -> list[dict]:
    """Prompt–completion rows of a few lengths."""
    known, found = WORDS.split(), []
    for i in range(count):
        words = [known[(i * 7 + j * j) % len(known)] for j in range(2 + i % 5)]
        found.append({"prompt": " ".join(words), "completion": " ".join(reversed(words))})
    return found


def write_jsonl(path: Path, content: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    return path
