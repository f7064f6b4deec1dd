"""The trained model as the loops see it: a packed row in, log-probabilities and entropies of its chosen tokens out."""

from typing import Any

import torch
from torch import Tensor, nn

from rlmake.models import exact, lora, packed
from rlmake.models.logprobs import token_logprobs
from rlmake.trainer.batch import PackedRow
from rlmake.trainer.lm_head import chunked_logprobs


class Policy(nn.Module):
    """Root of the FSDP units, so that one call gathers embedding and head, runs the blocks and scores the tokens.

    `exact`: the batch-invariant fp32 forward on a CPU, whose log-probabilities equal the embedded engine's bit for bit.
    """

    def __init__(self, model: nn.Module, exact: bool, head_chunk: int):
        super().__init__()
        self.model, self.exact, self.head_chunk = model, exact, head_chunk

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """fp32 [N] each; the entropy carries no gradient."""
        forward = exact.packed_forward if self.exact else packed.packed_forward
        hidden = forward(self.model, row.input_ids[None], row.position_ids[None], row.lens)[row.at]
        weight = self.model.lm_head.weight
        if self.exact:
            return token_logprobs(hidden, weight, row.targets, row.temperatures)
        temperatures = torch.ones_like(row.at, dtype=torch.float32) if row.temperatures is None else row.temperatures
        return chunked_logprobs(hidden, weight, row.targets, temperatures, self.head_chunk)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """What is trained, saved and sent: all parameters by their Hugging Face names (a tied head is not listed), or
        those of the adapter alone."""
        return lora.parameters(self.model) or list(self.model.named_parameters())


def head_chunk(config: Any) -> int:
    """`fused_lm_head_token_chunk_size`; disabled means all tokens at once."""
    size = config.fused_lm_head_token_chunk_size
    return 1 << 40 if size == "disabled" else size
