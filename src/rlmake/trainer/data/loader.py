"""The SFT loader: packed rows of a step for this rank, and the state that continues it exactly.

The plan (order, packing) is global: every rank walks all of it and keeps its own rows, so a run does not depend on
ranks, workers or micro-batches. That costs tokenising everything on each rank, which worker threads do ahead. A plain
generator with two numbers and a pool of names as its state does here what a stateful loader library would: there is
nothing in flight that has to be saved, since what workers prepare ahead is simply asked for again.

Tail policy: the stream wraps into the next epoch, so no row is dropped or padded away at the end of an epoch.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.jsonio import canonical, hash_bytes
from rlmake.trainer.batch import PackedRow
from rlmake.trainer.data.documents import Documents, Fetcher
from rlmake.trainer.data.fetch import make_fetch, open_data
from rlmake.trainer.data.order import epoch_order
from rlmake.trainer.data.pack import Document, Packer

SCHEMA = 1


@dataclass
class StepData:
    """`rows`: this rank's micro-batches, equally many on each rank. The rest counts the whole step."""

    rows: list[PackedRow]
    sample_ids: list[str]
    trained_tokens: int
    tokens: int
    fill: float  # share of the rows' places that hold a token


@dataclass
class _Ahead:
    """A step prepared early, and what the loader was before."""

    data: StepData | Exception
    state: dict[str, Any]
    metrics: dict[str, float]


class SFTLoader:
    """Endless (training) or one pass (`epochs=1`, validation, where the last rows may be short or empty)."""

    def __init__(
        self,
        config: Any,
        renderer: Any,
        tokenizer: Any,
        vocab_size: int,
        rank: int,
        world: int,
        epochs: int | None = None,
    ):
        self._config, self._rank, self._world = config, rank, world
        self._parts = open_data(config)
        self._sizes = [len(part.rows) for part in self._parts]
        self.name = getattr(config, "name", "fake data")
        self.identity = hash_bytes(canonical([[part.identity, part.label] for part in self._parts]))
        make = functools.partial(make_fetch, config, renderer, tokenizer, vocab_size)
        self._fetcher = Fetcher(make, getattr(config, "num_workers", 0))
        self._epochs = epochs
        self._samples: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._begin(0, 0)
        logger.info(f"{self.name}: {sum(self._sizes)} rows in {', '.join(part.label for part in self._parts)}")

    def restart(self) -> None:
        """Begin again at the first row (one pass after another, in validation)."""
        self._begin(0, 0)

    def _begin(self, epoch: int, position: int) -> None:
        ends = np.cumsum(self._sizes)
        self.documents = Documents(self._order, ends, self._fetcher, self.name, epoch, position, self._epochs)
        self._packer = Packer(self.documents, self._config.seq_len)
        self._ahead: _Ahead | None = None

    def _order(self, epoch: int) -> np.ndarray:
        config = self._config
        return epoch_order(
            self._sizes,
            seed=config.seed,
            epoch=epoch,
            shuffle=getattr(config, "shuffle", True) and self._epochs is None,
            probabilities=getattr(config, "probabilities", None),
            stopping_strategy=getattr(config, "stopping_strategy", "all_exhausted"),
        )

    def step(self) -> StepData:
        """The next `batch_size` packed rows, of which this rank gets every `world`-th."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return self._next()
        if isinstance(ahead.data, Exception):
            raise ahead.data
        return ahead.data

    def look_ahead(self) -> None:
        """Prepare the next step's rows now, while a GPU is at work. `state` and `metrics` stay those of before; what
        fails is raised when the rows are asked for."""
        state, metrics = self.state(), self.metrics()
        try:
            data = self._next()
        except Exception as error:
            data = error
        self._ahead = _Ahead(data, state, metrics)

    def _next(self) -> StepData:
        rows = [row for _ in range(self._config.batch_size) if (row := self._packer.row()) is not None]
        documents = [document for row in rows for document in row]
        for document in documents:
            label = self._parts[document.part].label
            self._samples[label] += 1
            self._tokens[label] += len(document)
        tokens = sum(len(document) for document in documents)
        return StepData(
            rows=list(self._mine(rows)),
            sample_ids=[document.sample_id for document in documents],
            trained_tokens=sum(int(document.mask.sum()) for document in documents),
            tokens=tokens,
            fill=tokens / max(len(rows) * self._config.seq_len, 1),
        )

    def __iter__(self) -> Iterator[StepData]:
        """Steps until the stream ends (with `epochs`)."""
        while (data := self.step()).sample_ids:
            yield data

    def _mine(self, rows: list[list[Document]]) -> Iterator[PackedRow]:
        """Micro-batches of this rank: as many as any rank has, dummies where rows are missing."""
        size = self._config.micro_batch_size
        own = rows[self._rank :: self._world]
        for start in range(0, -(-len(rows) // self._world), size):
            yield PackedRow.of_documents([document for row in own[start : start + size] for document in row])

    def metrics(self) -> dict[str, float]:
        """The page's `progress/*`."""
        if self._ahead:
            return self._ahead.metrics
        found: dict[str, float] = {
            "progress/epoch": self.documents.epoch,
            "progress/num_samples": sum(self._samples.values()),
            "progress/num_tokens": sum(self._tokens.values()),
            "progress/skipped_rows": sum(self.documents.skipped.values()),
        }
        if len(self._parts) > 1:
            for label in (part.label for part in self._parts):
                found[f"progress/{label}/ratio_samples"] = self._samples[label] / max(sum(self._samples.values()), 1)
                found[f"progress/{label}/ratio_tokens"] = self._tokens[label] / max(sum(self._tokens.values()), 1)
        return found

    def state(self) -> dict[str, Any]:
        """JSON. The pool is kept by name (epoch, row) and tokenised again."""
        if self._ahead:
            return self._ahead.state
        return {
            "schema": SCHEMA,
            "data": self.identity,
            "epoch": self.documents.epoch,
            "position": self.documents.position,
            "pool": [[document.epoch, document.index] for document in self._packer.pool],
            "skipped": dict(self.documents.skipped),
            "samples": dict(self._samples),
            "tokens": dict(self._tokens),
        }

    def load(self, state: dict[str, Any], totals: bool = True) -> None:
        """Continue from `state`, with its `totals` or counting anew. Another data set than its own is refused."""
        if state["schema"] != SCHEMA:
            raise UserError(f"state of the data loader: schema {state['schema']}, this version reads {SCHEMA}")
        if state["data"] != self.identity:
            raise UserError(
                f"{self.name} is not the data set that the checkpoint was made with; resume with the same data, "
                "or set ckpt.skip_dataloader = true to begin this one at its first row"
            )
        self._begin(state["epoch"], state["position"])
        self._packer.pool = [self.documents.refetch(epoch, index) for epoch, index in state["pool"]]
        self.documents.skipped = dict(state["skipped"])
        if totals:
            self._samples, self._tokens = Counter(state["samples"]), Counter(state["tokens"])

    def close(self) -> None:
        self._fetcher.close()
