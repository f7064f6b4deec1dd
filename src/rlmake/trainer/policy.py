"""The trained model as the loops see it: a packed row in, log-probabilities and entropies of its chosen tokens out."""

import contextlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlmake.models import exact, lora, packed
from rlmake.models.logprobs import log_distribution, logits_of, token_logprobs
from rlmake.models.packing import up
from rlmake.trainer.batch import PackedRow
from rlmake.trainer.context import Ulysses
from rlmake.trainer.experts import RouterStatistics
from rlmake.trainer.masters import Masters
from rlmake.trainer.world import World

SHAPES = 8  # lengths of rows that compiled blocks see: eighths of the longest


class Policy(nn.Module):
    """Root of the FSDP units, so that one call gathers embedding and head, runs the blocks and scores the tokens.

    `exact`: the batch-invariant fp32 forward on a CPU, whose log-probabilities equal the embedded engine's bit for bit.
    `multiple`: what rows are padded to; the padding lengthens the last document, which nothing of it can reach.
    """

    def __init__(
        self,
        model: nn.Module,
        exact: bool,
        head_chunk: int | None = None,
        multiple: int = 1,
        context: Ulysses | None = None,
    ):
        super().__init__()
        self.model, self.exact, self.head_chunk = model, exact, head_chunk
        self.multiple, self.context = multiple, context
        self.masters: Masters | None = None
        self.routing: RouterStatistics | None = None

    def forward(self, row: PackedRow, entropies: bool = True) -> tuple[Tensor, Tensor]:
        """fp32 [N] each; the entropy carries no gradient, and is none unless asked for. With `context` the row is this
        rank's piece."""
        watched = contextlib.nullcontext() if self.routing is None else self.routing.watching(len(row.input_ids))
        with watched:
            hidden = self._hidden(row)[row.at]
        weight = self.model.lm_head.weight
        return token_logprobs(hidden, weight, row.targets, row.temperatures, self.head_chunk, entropies=entropies)

    def distribution(self, row: PackedRow) -> Tensor:
        """Logprobs of all tokens, fp32 [N, V], at the places where `forward` scores one; by the same products."""
        return log_distribution(logits_of(self._hidden(row)[row.at], self.model.lm_head.weight), row.temperatures)

    def _hidden(self, row: PackedRow) -> Tensor:
        """[T or more, width]."""
        ids, positions, lens = row.input_ids, row.position_ids, row.lens
        if self.context is not None:
            exchange = (self.context.to_heads, self.context.to_tokens)
            whole = packed.Row.of(lens, ids.device, packed.compute_type(self.model), exchange)
            return packed.packed_forward(self.model, ids[None], positions[None], lens, whole)
        if padding := up(len(ids), self.multiple) - len(ids):
            ids, positions = F.pad(ids, (0, padding)), F.pad(positions, (0, padding))
            lens = [*lens[:-1], lens[-1] + padding]
        forward = exact.packed_forward if self.exact else packed.packed_forward
        return forward(self.model, ids[None], positions[None], lens)

    def piece(self, row: PackedRow) -> tuple[PackedRow, Tensor | None]:
        """This rank's share of a row and which of its scored tokens these are; (the row, None) without `context`."""
        return (row, None) if self.context is None else self.context.piece(row, self.multiple)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, saved and sent: all parameters by their Hugging Face names (a tied head is not listed), or
        those of the adapter alone.

        FSDP leaves the units of a forward without a backward (an evaluation) gathered, their parameters being other
        objects than those that the optimizer knows: they are sharded again first.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        named = lora.parameters(self.model) or list(self.model.named_parameters())
        return self.masters.named(named) if self.masters else named

    def sum_gradients(self) -> None:
        """Over the copies of the model, where FSDP has not done it."""
        if self.masters:
            self.masters.reduce()

    def refresh(self) -> None:
        """Compute with what `named` holds now."""
        if self.masters:
            self.masters.refresh()


def make_policy(model: nn.Module, config: Any, longest: int, world: World) -> Policy:
    """As `trainer.model` says; `longest`: tokens of the longest row."""
    size = config.fused_lm_head_token_chunk_size
    chunk = 1 << 40 if size == "disabled" else size
    multiple = 1 if config.compile is None else up(-(-longest // SHAPES), 16)
    shared = world.context
    context = None if shared is None else Ulysses(shared.group, shared.rank, shared.size)
    return Policy(model.train(), config.attn == "exact", chunk, multiple, context)
