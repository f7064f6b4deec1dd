"""The adapter of a LoRA checkpoint in PEFT's layout: `adapter_model.safetensors` and `adapter_config.json`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmake import checkpoint as ck
from rlmake.core.errors import UserError
from rlmake.export import assets, bf16
from rlmake.export.sources import CheckpointSource
from rlmake.export.staging import staged
from rlmake.export.writer import checked, write_model
from rlmake.models import lora


def export(checkpoint: Path, out: Path, *, trust: bool = False) -> dict[str, Any]:
    """Write the adapter of `checkpoint` as it was trained (nothing is rounded), with the tokenizer beside it.

    Its base model is named by its path in the project, or by its hub id. Returns facts for a manifest. Raises
    `UserError` for a damaged checkpoint, a run that trained all weights, and tensors that do not fit one another.
    """
    folder = bf16.step_folder(checkpoint)
    with ck.reading(folder), staged(out) as temporary, bf16.vouched(folder, trust) as record:
        source = AdapterSource(folder / "trainer")
        outputs = {name: {f"{lora.FILE_PREFIX}{name}": spec} for name, spec in source.tensors.items()}

        def make(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
            return checked(f"{lora.FILE_PREFIX}{name}", tensor)

        facts = write_model(temporary, source, {lora.WEIGHTS: list(outputs)}, outputs, make, index=False)
        assets.copy(assets.resolve(source.assets), temporary, source.chat_template)
        lora.write_config(source.adapter, temporary)
    return {"format": "adapter", **record, **facts}


class AdapterSource(CheckpointSource):
    """The adapter's tensors, `<module>.lora_A.weight` [rank, in] and `<module>.lora_B.weight` [out, rank]."""

    def __init__(self, trainer_half: Path):
        super().__init__(trainer_half)
        if self.lora is None:
            raise UserError(f"{trainer_half.parent}: no LoRA checkpoint; export its weights as bf16 or fp8")
        self.adapter = lora.Adapter(**{**self.lora, "base": portable(self.lora["base"])})
        for name, spec in self.tensors.items():
            other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
            rank = spec.shape[0] if ".lora_A." in name else spec.shape[1]
            if other == name or other not in self.tensors or rank != self.adapter.rank:
                raise UserError(
                    f"{trainer_half}: {name} {list(spec.shape)} fits no adapter of rank {self.adapter.rank}"
                )

    @property
    def modules(self) -> list[str]:
        """Names of the adapted modules."""
        return [name.removesuffix(".lora_A.weight") for name in self.tensors if name.endswith(".lora_A.weight")]


def portable(base: str) -> str:
    """A path inside the project relative to its root; nothing else of a machine goes into an artefact."""
    path = Path(base)
    return path.relative_to(Path.cwd()).as_posix() if path.is_absolute() and path.is_relative_to(Path.cwd()) else base
