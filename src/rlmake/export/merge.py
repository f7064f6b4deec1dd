"""A LoRA checkpoint as whole weights: `W + (alpha / rank) · B·A` in fp32, rounded once to bf16."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlmake.core.errors import UserError
from rlmake.export import bf16
from rlmake.export.adapter import AdapterSource
from rlmake.export.sources import EMBEDDING, HEAD, DirectorySource
from rlmake.export.writer import MAX_SHARD
from rlmake.models import loading


def export(checkpoint: Path, out: Path, *, max_shard: int = MAX_SHARD, trust: bool = False) -> dict[str, Any]:
    """Write the base model with the adapter of `checkpoint` merged into it as a bf16 directory at `out`.

    Returns facts for a manifest. Raises `UserError` for a damaged checkpoint, one without an adapter, and a base model
    that is gone or lacks a module that was adapted.
    """
    return bf16.export_with(checkpoint, out, "bf16", bf16.rule, bf16.make, max_shard, trust, open_source=MergedSource)


class MergedSource:
    """The base model's tensors, the adapted ones with what was learnt added to them."""

    lora = None

    def __init__(self, trainer_half: Path):
        self.adapter = AdapterSource(trainer_half)
        base = loading.locate(self.adapter.lora["base"])
        self.base = DirectorySource(base)
        self.config, self.assets = self.adapter.config, self.adapter.assets
        self.chat_template = self.adapter.chat_template
        self.tensors = dict(self.base.tensors)
        if self.config.get("tie_word_embeddings") and EMBEDDING in self.tensors:
            self.tensors.pop(HEAD, None)
        self.adapted = {f"{module}.weight": module for module in self.adapter.modules}
        for name, module in self.adapted.items():
            a, b = (self.adapter.tensors[f"{module}.lora_{part}.weight"].shape for part in "AB")
            if name not in self.tensors or self.tensors[name].shape != (b[0], a[1]):
                raise UserError(f"{base}: not the model that was adapted: {name} {[b[0], a[1]]} is not in it")

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = self.base.load(names)
        scale = self.adapter.adapter.alpha / self.adapter.adapter.rank
        for name in names:
            if module := self.adapted.get(name):
                parts = self.adapter.load([f"{module}.lora_A.weight", f"{module}.lora_B.weight"])
                a, b = (parts[f"{module}.lora_{part}.weight"].float() for part in "AB")
                found[name] = found[name].float() + scale * (b @ a)
        return found
