"""What the trainer knows about single tokens, for the trace stream: log-probabilities, entropies, what was masked."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from rlmake.monitors.traces import Recorder, spans
from rlmake.trainer.batch import PackedRow
from rlmake.trainer.losses.components import Outputs


class TokenViews:
    """Collects a step's rows, hands them to the recorder after it. Free when nobody records."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self._rows: list[tuple[PackedRow, list[str], dict[str, Tensor]]] = []

    def add(self, row: PackedRow, names: list[str], logprobs: Tensor, entropy: Tensor, outputs: Outputs) -> None:
        """One packed row, whose sequences are the samples `names`; `logprobs` and `entropy` are [N]."""
        if not self.recorder.streams or row.empty:
            return
        streams = {"trainer_logprobs": logprobs, "entropies": entropy}
        if "is_masked" in outputs.tokens:
            streams["is_masked"] = outputs.tokens["is_masked"][0].bool()
        self._rows.append((row, names, {name: values.detach() for name, values in streams.items()}))

    def write(self, step: int) -> None:
        for row, names, kept in self._rows:  # read from the device now, not while it still had to compute
            streams = {name: values.cpu().numpy() for name, values in kept.items()}
            for name, branch in _branches(row, names, streams):
                self.recorder.trained(name, step, [branch])
        self._rows.clear()


def _branches(row: PackedRow, names: list[str], streams: dict[str, np.ndarray]) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(trace name, branch of an annotation)` for every sample of a row that has a token that counts."""
    at = row.at.cpu().numpy() + 1  # a token is predicted one position before its own
    starts = np.cumsum([0, *row.lens[:-1]])
    owner = np.searchsorted(starts, at, side="right") - 1
    for number, name in enumerate(names):
        chosen = owner == number
        if name and chosen.any():
            trace, _, branch = name.partition("#")
            positions = (at[chosen] - starts[number]).tolist()
            values = {key: stream[chosen] for key, stream in streams.items()}
            yield trace, {"index": int(branch or 0), "spans": spans(positions), **values}
