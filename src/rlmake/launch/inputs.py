"""What a start needs on this machine, looked at before anything heavy is imported: models, data, tasks."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlmake.build import edges, local, names, revisions
from rlmake.config import OrchestratorConfig, dump
from rlmake.config.fields import Config
from rlmake.core import jsonio, jsonl
from rlmake.core.errors import ConfigError, Fault, UserError


def check_inputs(cfg: Config, files: Sequence[Path], built: bool = True) -> None:
    """What a configuration names on this machine must be there and readable. Raises `ConfigError`.

    `built`: also what is a target of the build, which a direct start doesn't make.
    """
    where = str(files[0]) if len(files) == 1 else None
    texts = [(key, value) for key, value in local.strings(dump(cfg)) if not key.startswith(("run.", "output_dir"))]
    gone = (one for one in texts if built and names.is_output(one[1]) and not Path(one[1]).exists())
    faults = [Fault(_not_there(value), key, where) for value, key in local.shortest(gone).items()]
    wrong = local.shortest(
        (key, fault) for key, value in texts if (fault := local.fault(key, value) or _code(key, value))
    )
    faults += [Fault(fault, key, where) for fault, key in wrong.items()]
    if faults:
        raise ConfigError(faults)


def check_rows(*sources: tuple[str, Iterable[Any]]) -> None:
    """The first row of every environment's file, `(key, its sources)`, so that no engine is started for rows that the
    environment cannot read. Raises `ConfigError`."""
    faults = [
        Fault(fault, f"{key}.{index}.env.taskset.path")
        for key, listed in sources
        for index, source in enumerate(listed)
        if source.serve.address is None and (fault := jsonl.fault_of_first(source.env["taskset"]))
    ]
    if faults:
        raise ConfigError(faults)


def check_frozen(cfg: OrchestratorConfig) -> None:
    """The tokens that one of policy and frozen model writes must be the other's too, as far as both are directories
    here. Raises `ConfigError`."""
    faults = {}
    for key, model in cfg.frozen_models():
        policy, frozen = _vocabulary(cfg.tokenizer.name), _vocabulary(model.name)
        if not policy or not frozen:
            continue
        teaches = key.endswith(".teacher")  # it reads what the policy writes
        written, read = (policy, frozen) if teaches else (frozen, policy)
        other = next((token for token, number in written.items() if read.get(token) != number), None)
        if other is not None:
            numbers = (
                f"{policy.get(other, 'none')} in {cfg.tokenizer.name}, {frozen.get(other, 'none')} in {model.name}"
            )
            text = f"not the policy's tokenizer: '{other}' has the id {numbers}; expected a model with the same tokens"
            faults.setdefault((model.name, teaches), Fault(text, f"orchestrator.{key}.name"))
    if faults:
        raise ConfigError(list(faults.values()))


@functools.cache
def _vocabulary(name: str) -> dict[str, int]:
    """Ids by token of a tokenizer that lies in the directory `name`; empty where none can be read."""
    try:
        read = jsonio.read_json(Path(name) / "tokenizer.json")
        tokens = read["model"]["vocab"]
        known = {token: i for i, (token, *_) in enumerate(tokens)} if isinstance(tokens, list) else dict(tokens)
        return known | {token["content"]: token["id"] for token in read.get("added_tokens", ())}
    except (UserError, KeyError, TypeError, ValueError):
        return {}


def _code(key: str, value: str) -> str | None:
    """Why code of the user's, or a taskset, is not there; None where it is, or where `value` names none."""
    if edges.CODE.fullmatch(key):
        return revisions.fault_of_import(value)
    return revisions.fault_of_taskset(value) if edges.TASKSET.fullmatch(f".{key}") else None


def _not_there(value: str) -> str:
    target = _target_of(value)
    if target != value and Path(target).exists():
        return f"{value}: no such file in {target}"
    return f"{value} is not there; build it, or link what is in the store, with: snakemake -c all {target}"


def _target_of(value: str) -> str:
    """The target in a path below it: `outputs/x/data/train.jsonl` is a file of `outputs/x/data`."""
    parts = value.split("/")
    leaf = next((i for i, part in enumerate(parts) if i > 1 and part in names.RESERVED), None)
    if leaf is None:  # `data` may be a run's name too: outputs/x/data/data
        leaf = max((i for i, part in enumerate(parts) if i > 1 and part == "data"), default=None)
    return "/".join(parts[: leaf + 1]) if leaf is not None and parts[leaf] in ("data", "weights") else value
