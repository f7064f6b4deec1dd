"""Tokens of a data set's rows by their global index: what the loader and its worker threads call."""

from typing import Any

import numpy as np

from rlmake.core.errors import UserError
from rlmake.core.seeds import derive
from rlmake.trainer.data.documents import Fetch
from rlmake.trainer.data.rows import RowError, resolve
from rlmake.trainer.data.source import Part, open_parts
from rlmake.trainer.data.tokens import Tokeniser, Tokens

FAKE_ROWS = 1 << 16


def open_data(config: Any) -> list[Part]:
    """The parts of a `data` table. A fake one has one part whose rows are made by index."""
    if config.type == "fake":
        identity = f"fake/{config.length}/{config.input_ids}/{config.seed}"
        return [Part("fake", range(FAKE_ROWS), identity)]
    return open_parts(config.name, config.subsets, config.splits, config.revision)


def make_fetch(data: Any, renderer: Any, tokenizer: Any, vocab_size: int) -> Fetch:
    """`fetch(indices)` over the concatenated parts of a `data` table.

    `renderer`, `tokenizer`: the tables of the configuration. A row that cannot be read raises `UserError` with data
    set, row and column.
    """
    parts = open_data(data)
    if data.type == "fake":
        return lambda indices: [_fake(index, data, vocab_size) for index in indices]
    tokenise = Tokeniser(_renderers(renderer, tokenizer), data.loss_mask, data.seq_len)
    ends = np.cumsum([len(part.rows) for part in parts])

    def one(index: int) -> Tokens | str:
        which = int(np.searchsorted(ends, index, side="right"))
        row = index - (int(ends[which - 1]) if which else 0)
        try:
            return tokenise(resolve(parts[which].rows[row], data.columns))
        except RowError as error:
            raise UserError(f"{data.name} ({parts[which].label}): row {row}: {error}") from None

    return lambda indices: [one(index) for index in indices]


def _renderers(renderer: Any, tokenizer: Any):
    """A factory `options -> renderer` over one loaded tokenizer."""
    from rlmake.models.renderer import load_tokenizer, make_renderer

    loaded = load_tokenizer(tokenizer)

    def make(options: dict[str, Any]) -> Any:
        if not options:
            return make_renderer(loaded, renderer)
        return make_renderer(loaded, renderer.model_copy(update=options))

    return make


def _fake(index: int, data: Any, vocab_size: int) -> Tokens:
    """A made-up sample of `seq_len` tokens, or of a log-normal number with a sixteenth as median; all of it trains."""
    generator = np.random.Generator(np.random.PCG64(derive(data.seed, "fake", index)))
    length = data.seq_len
    if data.length == "variable":
        length = int(np.clip(generator.lognormal(np.log(data.seq_len / 16)), 1, data.seq_len))
    if data.input_ids == "increasing":
        ids = np.arange(index, index + length + 1) % vocab_size
    else:
        ids = generator.integers(0, vocab_size, length + 1)
    ids = ids.astype(np.int32)
    return Tokens(ids[:-1], ids[1:], np.ones(length, dtype=bool))
