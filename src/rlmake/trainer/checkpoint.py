"""The trainer's half of a checkpoint: tensors through DCP, everything else as JSON beside them.

    trainer/{.metadata,__<rank>_<i>.distcp}   `model.<name>`, `optim.<name>.<state>`; names are Hugging Face's
    trainer/state.json                        step, progress, loader, random generators of each rank, ledger
    trainer/model.json                        what an export needs, see `rlmake.export.sources`

DCP pickles its index, so nothing but tensors goes into it, and hashes are checked before it is read
(`rlmake.checkpoint`). Its files hold shards by name: another number of ranks can load them.
"""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.optim import Optimizer

from rlmake import checkpoint as records
from rlmake.checkpoint.halves import disk_full_line
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.trainer.world import World

HALF, STATE, MODEL, PREFIX = "trainer", "state.json", "model.json", "model."
SCHEMA = 1
Named = list[tuple[str, nn.Parameter]]


def tensors_of(named: Named, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """`{key: tensor}` of the parameters and, where given, of the optimizer's state; the tensors themselves."""
    found: dict[str, Tensor] = {f"{PREFIX}{name}": p.detach() for name, p in named}
    if optimizer is not None:
        known = {p for group in optimizer.param_groups for p in group["params"]}
        for name, p in named:
            if p.requires_grad and p not in known:
                raise RuntimeError(f"{name} is another parameter than the one that the optimizer works on")
            for key, value in optimizer.state.get(p, {}).items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"optimizer state {name}.{key} is {type(value).__name__}, not a tensor")
                found[f"optim.{name}.{key}"] = value
    return found


def save(
    step_dir: Path, tensors: dict[str, Tensor], state: dict[str, Any], model: dict[str, Any], world: World
) -> None:
    """Write and seal the half; every rank calls it. On any failure nothing of it stays, and every rank raises."""
    temporary = world.on_master(lambda: records.begin(step_dir, HALF))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # DCP warns of a world of one
            dcp.save(tensors, checkpoint_id=temporary, process_group=world.control)

        def finish() -> None:
            write_json(temporary / STATE, {"schema": SCHEMA, **state})
            write_json(temporary / MODEL, {"schema": SCHEMA, **model})
            records.commit(temporary, step_dir, HALF)

        world.on_master(finish)
    except BaseException as error:
        full = world.any(records.disk_full(error, temporary))  # all ranks are here: a failure is raised on each
        freed = records.abort(temporary) if world.master else 0
        if full:
            raise RunFailed(disk_full_line(step_dir, HALF, freed)) from error
        raise


def load(step_dir: Path, named: Named, optimizer: Optimizer | None, world: World) -> None:
    """Fill parameters and optimizer state in place; every rank calls it. The half must have been verified.

    Raises `UserError` when the checkpoint holds other tensors than the model and optimizer have.
    """
    folder = step_dir / HALF
    wanted = tensors_of(named, optimizer)
    there = {key: tuple(meta.size) for key, meta in _metadata(folder).items()}
    for key, tensor in wanted.items():
        if key not in there:
            raise UserError(f"{folder}: holds no {key}: saved with another model or optimizer")
        if there[key] != tuple(tensor.shape):
            raise UserError(f"{folder}: {key} has shape {there[key]}, the model wants {tuple(tensor.shape)}")
    kinds = (PREFIX,) if optimizer is None else (PREFIX, "optim.")
    if extra := sorted(key for key in there if key.startswith(kinds) and key not in wanted):
        owner = "model" if extra[0].startswith(PREFIX) else "optimizer"
        raise UserError(f"{folder}: holds {extra[0]}, which the {owner} lacks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(wanted, checkpoint_id=folder, process_group=world.control)


def read_state(step_dir: Path) -> dict[str, Any]:
    """`state.json`; an unknown schema is a `UserError`."""
    return _record(step_dir / HALF / STATE)


def _metadata(folder: Path) -> dict[str, Any]:
    if not (folder / ".metadata").is_file():
        raise UserError(f"{folder}: no trainer half of a checkpoint there")
    return FileSystemReader(folder).read_metadata().state_dict_metadata


def _record(path: Path) -> dict[str, Any]:
    record = read_json(path)
    if record.get("schema") != SCHEMA:
        raise UserError(f"{path}: schema {record.get('schema')} is unknown, expected {SCHEMA}")
    return record
