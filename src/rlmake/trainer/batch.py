"""One packed row as the model takes it.

Axes: T tokens of the row, N tokens whose log-probability somebody needs. Documents lie one after the other; attention
is causal within each and crosses from none to the next.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlmake.trainer.losses import Streams
from rlmake.transport.types import MicroBatch

if TYPE_CHECKING:
    from rlmake.trainer.data.pack import Document


@dataclass
class PackedRow:
    """Row and the N tokens to score: token n is predicted at position `at[n]` of the row and is `targets[n]`.

    A row without anything to score keeps one token, so that every rank runs the same collectives; its `weight` is 0.
    """

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T]
    lens: list[int]  # document lengths, sum T
    at: Tensor  # int64 [N]
    targets: Tensor  # int64 [N]
    temperatures: Tensor | None  # float32 [N]; None means 1
    empty: bool = False

    def to(self, device: torch.device) -> "PackedRow":
        if device.type == "cpu":
            return self
        # From pageable memory the copy would wait for everything that the GPU has still to do.
        tensors = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return PackedRow(**{**vars(self), **tensors})

    @classmethod
    def of_documents(cls, documents: "list[Document]") -> "PackedRow":
        """A row of SFT documents, scored where their masks say; none gives a dummy row."""
        if not documents:
            return _dummy()
        lens = [len(document) for document in documents]
        ids, targets, mask = (
            np.concatenate([getattr(document, name) for document in documents]) for name in ("ids", "targets", "mask")
        )
        at = np.flatnonzero(mask)
        return cls(_int(ids), _positions(lens), lens, _int(at), _int(targets[at]), None)


def _dummy() -> PackedRow:
    zero = torch.zeros(1, dtype=torch.int64)
    return PackedRow(zero, zero, [1], zero, zero, None, empty=True)


def _int(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _positions(lens: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lens])


def of_micro_batch(batch: MicroBatch) -> tuple[PackedRow, Streams, np.ndarray]:
    """An RL micro-batch, reduced to the tokens that count; and the environment [N] of each of these tokens.

    Token i of the row is predicted at position i − 1, so a first token of a sequence can't be scored: `ValueError`
    when one is to be trained.
    """
    wanted = np.array(batch.loss_mask, dtype=bool)
    for weights in (batch.ce_weights, batch.ref_kl_weights):  # not confined to the loss mask
        if weights is not None:
            wanted |= weights != 0
    starts = np.cumsum([0, *batch.sequence_lengths[:-1]])
    if wanted[starts].any():
        raise ValueError("a sequence's first token is to be trained, but nothing predicts it")
    index = np.flatnonzero(wanted)
    empty = not len(index)
    if empty:
        index = np.array([min(1, len(batch.input_ids) - 1)])
    owner = np.searchsorted(starts, index, side="right") - 1
    lens = list(batch.sequence_lengths)
    row = PackedRow(
        input_ids=_int(batch.input_ids),
        position_ids=_int(batch.position_ids),
        lens=lens,
        at=_int(np.maximum(index - 1, 0)),
        targets=_int(batch.input_ids[index]),
        temperatures=torch.from_numpy(batch.temperatures[index].astype(np.float32)),
        empty=empty,
    )

    def stream(values: np.ndarray | None) -> Tensor | None:
        return None if values is None else torch.from_numpy(values[index].astype(np.float32))

    streams = Streams(
        inference_logprobs=stream(batch.inference_logprobs),
        advantages=stream(batch.advantages),
        loss_mask=torch.from_numpy(batch.loss_mask[index].astype(bool)),
        rl_weights=stream(batch.rl_weights),
        ce_weights=stream(batch.ce_weights),
        ref_kl_weights=stream(batch.ref_kl_weights),
        ref_logprobs=stream(batch.ref_logprobs),
        sequences=np.bincount(owner, minlength=len(lens)).tolist(),
    )
    return row, streams, np.array(batch.env_names, dtype=object)[owner]
