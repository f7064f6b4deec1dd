"""Low-rank adapters through peft: y = W·x + (alpha / rank)·B·A·x on chosen linear layers (https://arxiv.org/abs/2106.09685).

Trainer and embedded engine run the same modules, unmerged, so their bits agree. A tensor's name is its module's with
`.lora_A.weight` or `.lora_B.weight` behind: `model.layers.0.self_attn.q_proj.lora_A.weight`; files in PEFT's layout
put `base_model.model.` in front. What a checkpoint of a LoRA run holds is said in docs/trainer.md.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlmake.core.errors import UserError, nearest
from rlmake.core.jsonio import read_json, write_json
from rlmake.core.seeds import derive

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."
_NAME = "default"  # peft's name of the adapter inside the model
_OUTSIDE = ("lm_head", "embed_tokens")  # scored and looked up by weight, never called as modules


@dataclass(frozen=True)
class Adapter:
    """An adapter's settings; also `lora` in a checkpoint's `model.json`. `base`: the model it belongs to."""

    base: str
    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]

    @classmethod
    def of_config(cls, base: str, table: Any) -> "Adapter":
        """From `model.lora`."""
        return cls(base, table.rank, table.alpha, table.dropout, list(table.target_modules))

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    def peft_config(self) -> Any:
        """As peft has it; `target_modules` must be names of modules (see `inject`)."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=list(self.target_modules),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base,
            bias="none",
        )


def inject(model: nn.Module, adapter: Adapter, seed: int) -> Adapter:
    """Put adapters into `model`, in place, and freeze everything else. A is random by name and `seed`, B is 0.

    Returns the adapter with the names of what was adapted: leaf names where each module of that name is. An entry of
    `target_modules` is a part of a module's path or a regular expression for the whole. Raises `UserError` for an
    entry that fits no linear layer.
    """
    from peft import inject_adapter_in_model

    adapter = Adapter(**{**asdict(adapter), "target_modules": _targets(model, adapter.target_modules)})
    model.requires_grad_(False)
    inject_adapter_in_model(adapter.peft_config(), model, adapter_name=_NAME)
    for name, parameter in parameters(model):
        if name.endswith("lora_B.weight"):
            nn.init.zeros_(parameter)
        else:
            generator = torch.Generator().manual_seed(derive(seed, "lora", name))
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5), generator=generator)
    return adapter


def _targets(model: nn.Module, asked: Sequence[str]) -> list[str]:
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in _OUTSIDE
    ]
    leaves = sorted({name.rpartition(".")[2] for name in linear})
    chosen: set[str] = set()
    for target in asked:
        try:
            found = {name for name in linear if target in name.split(".") or re.fullmatch(target, name)}
        except re.error as error:
            raise UserError(f"model.lora.target_modules: '{target}' is no regular expression: {error}") from None
        if not found:
            have = ", ".join(leaves)
            raise UserError(
                f"model.lora.target_modules: no linear layer fits '{target}'{nearest(target, leaves)} (have: {have})"
            )
        chosen |= found
    names = []
    for leaf in leaves:
        members = [name for name in linear if name.rpartition(".")[2] == leaf]
        mine = [name for name in members if name in chosen]
        names += [leaf] if mine == members else mine
    return names


def parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The adapter's parameters by name; empty for a model without one."""
    return list(_adapter_parameters(model))


def _adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            yield name.replace(f".{_NAME}.", "."), parameter


@contextlib.contextmanager
def stirred(model: nn.Module) -> Iterator[None]:
    """Inside, every B of a plain model is small noise and dropout rests, so that a test sees what the adapter does."""
    held = [(p, p.detach().clone()) for name, p in parameters(model) if name.endswith("lora_B.weight")]
    training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, _ in held:
            parameter.normal_(0.0, 0.02, generator=generator)
        try:
            yield
        finally:
            for parameter, value in held:
                parameter.copy_(value)
            model.train(training)


def write_config(adapter: Adapter, folder: Path) -> None:
    """`adapter_config.json` in PEFT's layout."""
    config = adapter.peft_config().to_dict()
    config["target_modules"] = sorted(config["target_modules"])
    config["inference_mode"] = True
    config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    write_json(folder / CONFIG, config)


def read_config(folder: Path) -> Adapter:
    """The settings in a folder of PEFT's layout. `UserError` for kinds of adapters that are not plain LoRA."""
    path = folder / CONFIG
    if not path.is_file():
        raise UserError(f"{folder}: no {CONFIG} there, so this is no adapter")
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected the settings of an adapter")
    odd = [
        key for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save") if found.get(key)
    ]
    if found.get("peft_type") != "LORA" or found.get("bias", "none") != "none" or odd:
        raise UserError(f"{path}: only plain LoRA without biases is known here{': ' + odd[0] if odd else ''}")
    targets = found.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise UserError(f"{path}: target_modules must be a list of names, not {targets!r}")
    base = str(found.get("base_model_name_or_path") or "")
    try:
        rank, alpha, dropout = int(found["r"]), float(found["lora_alpha"]), float(found.get("lora_dropout", 0.0))
        if rank < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{path}: expected numbers in r (1 or more), lora_alpha and lora_dropout") from None
    return Adapter(base, rank, alpha, dropout, targets)


def assign(model: nn.Module, tensors: dict[str, torch.Tensor], where: str) -> None:
    """Copy an adapter's tensors, named as in its file or as here, into an adapted model; all or nothing.

    Raises `UserError` naming `where` and the tensor that is missing, does not belong or has another shape.
    """
    given = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in tensors.items()}
    wanted = dict(parameters(model))
    if missing := sorted(wanted.keys() - given.keys()):
        raise UserError(f"{where}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(given.keys() - wanted.keys()):
        raise UserError(f"{where}: tensor {extra[0]} does not belong to this adapter ({len(extra)} in all)")
    for name, parameter in wanted.items():
        if given[name].shape != parameter.shape:
            raise UserError(
                f"{where}: tensor {name} has shape {tuple(given[name].shape)}, the model wants {tuple(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(given[name])
