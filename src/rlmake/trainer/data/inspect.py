"""What a data table gives the trainer: rows as they will be trained, and how the whole of it falls into packed rows."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmake.models.text import decode, load_tokenizer
from rlmake.trainer.data.documents import Documents, Fetcher
from rlmake.trainer.data.fetch import make_fetch, open_data
from rlmake.trainer.data.order import epoch_order
from rlmake.trainer.data.pack import Document, Packer

LIMIT = 20_000  # rows that are looked at


@dataclass
class Shown:
    """A row: where it comes from, its tokens, and its text in spans `(text, trained)`."""

    part: str
    row: int
    tokens: int
    trained: int
    spans: list[tuple[str, bool]]


@dataclass
class Summary:
    """The first epoch, or its first `LIMIT` rows."""

    rows: int
    looked_at: int
    skipped: dict[str, int]
    lengths: np.ndarray  # tokens of each document
    trained: int
    cut: int  # documents longer than seq_len
    packed: int  # packed rows
    padding: float  # share of their places without a token
    parts: dict[str, int] = field(default_factory=dict)


def look(data: Any, renderer: Any, tokenizer: Any, vocab_size: int, count: int) -> tuple[list[Shown], Summary]:
    """The first `count` rows of the first epoch's order, and the summary. Raises `UserError` as the trainer would."""
    parts = open_data(data)
    sizes = [len(part.rows) for part in parts]
    ends = np.cumsum(sizes)
    order = epoch_order(
        sizes,
        seed=data.seed,
        epoch=0,
        shuffle=getattr(data, "shuffle", True),
        probabilities=getattr(data, "probabilities", None),
        stopping_strategy=getattr(data, "stopping_strategy", "all_exhausted"),
    )
    seen = order[:LIMIT]
    fetcher = Fetcher(lambda: make_fetch(data, renderer, tokenizer, vocab_size), getattr(data, "num_workers", 0))
    documents = Documents(lambda epoch: seen, ends, fetcher, getattr(data, "name", "fake data"), epochs=1)
    text = None if data.type == "fake" else load_tokenizer(tokenizer)
    shown: list[Shown] = []
    summary = Summary(len(order), len(seen), documents.skipped, np.empty(0), 0, 0, 0, 0.0)
    lengths: list[int] = []

    def watched() -> Iterator[Document]:
        for document in documents:
            label = parts[document.part].label
            if len(shown) < count:
                first = int(ends[document.part - 1]) if document.part else 0
                shown.append(_show(document, label, document.index - first, text))
            lengths.append(len(document))
            summary.trained += int(document.mask.sum())
            summary.cut += document.cut
            summary.parts[label] = summary.parts.get(label, 0) + 1
            yield document

    packer = Packer(watched(), data.seq_len)
    while packer.row() is not None:
        summary.packed += 1
    fetcher.close()
    summary.lengths = np.asarray(lengths)
    summary.padding = 1 - sum(lengths) / (summary.packed * data.seq_len)
    return shown, summary


def _show(document: Document, label: str, row: int, tokenizer: Any) -> Shown:
    ids = [*document.ids.tolist(), int(document.targets[-1])]
    mask = np.concatenate([[False], document.mask])
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    spans = [
        (str(ids[a:b]) if tokenizer is None else decode(tokenizer, ids[a:b]), bool(mask[a]))
        for a, b in zip([0, *changes], [*changes, len(ids)], strict=True)
    ]
    return Shown(label, row, len(document), int(document.mask.sum()), spans)
