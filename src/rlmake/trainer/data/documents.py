"""The endless stream of documents of a data set: epoch after epoch, in the global order, each row once per epoch."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from loguru import logger

from rlmake.core.errors import UserError
from rlmake.trainer.data.pack import Document
from rlmake.trainer.data.tokens import Tokens

CHUNK = 32  # rows per piece of work; says nothing about the result
CACHE_TOKENS = 1 << 25  # tokens kept, so that a second epoch over a small data set costs nothing
NAMED = 10  # rows that are skipped by name before only their number is told

Fetch = Callable[[list[int]], list[Tokens | str]]  # rows by global index → tokens, or why there is nothing to train


class Fetcher:
    """Tokenises chunks of rows, here or ahead of time in `workers` threads, and keeps what fits for the next epoch.

    Threads suffice: encoding leaves the interpreter, as does the training that runs meanwhile, and nothing has to be
    started, imported again or sent. `make()` builds a `Fetch`; each thread has its own, with its own tokenizer.
    """

    def __init__(self, make: Callable[[], Fetch], workers: int):
        self._make, self._mine = make, threading.local()
        self._cache: dict[int, Tokens | str] = {}
        self._room = CACHE_TOKENS
        self._pool = ThreadPoolExecutor(workers, "rows") if workers else None
        self.ahead = 4 * workers  # chunks asked for beyond the one in hand

    def submit(self, indices: list[int]) -> Future:
        if self._pool is not None:
            return self._pool.submit(self._get, indices)
        done: Future = Future()
        done.set_result(self._get(indices))
        return done

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _get(self, indices: list[int]) -> list[Tokens | str]:
        missing = [index for index in indices if index not in self._cache]
        fresh = dict(zip(missing, self._fetch(missing), strict=True)) if missing else {}
        for index, found in fresh.items():
            size = 1 if isinstance(found, str) else len(found.ids)
            if self._room >= size:
                self._cache[index], self._room = found, self._room - size
        return [fresh[index] if index in fresh else self._cache[index] for index in indices]

    def _fetch(self, indices: list[int]) -> list[Tokens | str]:
        if not hasattr(self._mine, "fetch"):
            self._mine.fetch = self._make()
        return self._mine.fetch(indices)


class Documents(Iterator[Document]):
    """Documents in global order. `epoch` and `position` name the next row; both are all the state there is.

    Rows without a trained token are skipped, counted, and named once each (the first ten). `epochs` ends the stream.
    Raises `UserError` when a whole epoch has nothing to train.
    """

    def __init__(
        self,
        order: Callable[[int], np.ndarray],
        part_ends: np.ndarray,
        fetcher: Fetcher,
        name: str,
        epoch: int = 0,
        position: int = 0,
        epochs: int | None = None,
    ):
        self._order, self._part_ends, self._fetcher, self._name = order, part_ends, fetcher, name
        self.epoch, self.position, self._epochs = epoch, position, epochs
        self.skipped: dict[str, int] = {}
        self._named: set[int] = set()
        self._pending: deque[tuple[int, int, list[int], Future]] = deque()  # epoch, start, indices, future
        self._ready: deque[tuple[int, int, int, Tokens | str]] = deque()  # epoch, position, index, outcome
        self._ask_epoch, self._ask_position = epoch, position
        self._current = (-1, np.empty(0, dtype=np.int64))
        self._ended = False
        self._useful = (epoch, position) != (0, 0)  # whether the running epoch has yielded anything (a resumed one has)

    def __next__(self) -> Document:
        while True:
            epoch, position, index, found = self._outcome()
            if epoch != self.epoch:
                self._end_of_epoch()
            self.epoch, self.position = epoch, position + 1
            if isinstance(found, str):
                self._skip(index, found)
                continue
            self._useful = True
            part = int(np.searchsorted(self._part_ends, index, side="right"))
            return Document(epoch, index, part, found.ids, found.targets, found.mask, found.cut)

    def refetch(self, epoch: int, index: int) -> Document:
        """A document again by its name (the pool of a checkpoint)."""
        found = self._fetcher.submit([index]).result()[0]
        if isinstance(found, str):
            raise UserError(f"{self._name}: row {index} of the checkpoint's pool has changed: {found}")
        part = int(np.searchsorted(self._part_ends, index, side="right"))
        return Document(epoch, index, part, found.ids, found.targets, found.mask, found.cut)

    def _outcome(self) -> tuple[int, int, int, Tokens | str]:
        if not self._ready:
            while len(self._pending) <= self._fetcher.ahead and self._ask():
                pass
            if not self._pending:
                if not self._ended:
                    self._ended = True
                    self._end_of_epoch()
                raise StopIteration
            epoch, start, indices, future = self._pending.popleft()
            found = future.result()
            self._ready.extend(
                (epoch, start + i, index, outcome)
                for i, (index, outcome) in enumerate(zip(indices, found, strict=True))
            )
        return self._ready.popleft()

    def _ask(self) -> bool:
        """Hand the next chunk of the order to the fetcher; False when the last epoch is asked for."""
        while True:
            if self._epochs is not None and self._ask_epoch >= self._epochs:
                return False
            if self._current[0] != self._ask_epoch:
                self._current = (self._ask_epoch, self._order(self._ask_epoch))
            indices = self._current[1][self._ask_position : self._ask_position + CHUNK].tolist()
            if indices:
                break
            self._ask_epoch, self._ask_position = self._ask_epoch + 1, 0
        self._pending.append((self._ask_epoch, self._ask_position, indices, self._fetcher.submit(indices)))
        self._ask_position += len(indices)
        return True

    def _end_of_epoch(self) -> None:
        if not self._useful:
            reasons = "; ".join(f"{count} × {reason}" for reason, count in self.skipped.items())
            raise UserError(f"{self._name}: no row of epoch {self.epoch} has anything to train ({reasons})")
        self._useful = False

    def _skip(self, index: int, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if index not in self._named:
            self._named.add(index)
            if len(self._named) <= NAMED:
                logger.warning(f"{self._name}: row {index} skipped: {reason}")
            elif len(self._named) == NAMED + 1:
                logger.warning(f"{self._name}: more rows are skipped; their number is in progress/skipped_rows")
