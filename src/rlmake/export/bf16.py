"""A checkpoint becomes bf16 safetensors: fp32 master weights are rounded once, to nearest even."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rlmake import checkpoint as ck
from rlmake.core.errors import UserError
from rlmake.core.rundir import step_dir
from rlmake.export import assets, experts
from rlmake.export.sources import EMBEDDING, HEAD, CheckpointSource, Spec
from rlmake.export.staging import staged
from rlmake.export.writer import MAX_SHARD, Make, Rule, checked, plan_shards, write_model

TENSORS = ".distcp"


def rule(name: str, spec: Spec) -> dict[str, Spec]:
    """Floating-point tensors become bf16, others stay as they are."""
    return {name: Spec(torch.bfloat16, spec.shape) if spec.dtype.is_floating_point else spec}


def make(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    return checked(name, tensor, torch.bfloat16)


def export(checkpoint: Path, out: Path, *, max_shard: int = MAX_SHARD, trust: bool = False) -> dict[str, Any]:
    """Write the model of `checkpoint` (`…/checkpoints/step_<n>`, or its `trainer`) as a bf16 directory at `out`.

    Returns facts for a manifest: format, step, fingerprint, policy_version, tensors, parameters, bytes, shards, files.
    Raises `UserError` for a damaged or LoRA checkpoint, a tensor with NaN, shapes that contradict the configuration.
    `trust` reads a checkpoint without COMPLETE record, whose DCP metadata (a pickle) nothing vouches for.
    """
    return export_with(checkpoint, out, "bf16", rule, make, max_shard, trust)


def export_with(
    checkpoint: Path,
    out: Path,
    kind: str,
    rule: Rule,
    make: Make,
    max_shard: int,
    trust: bool,
    changes: Callable[[dict[str, Spec]], dict[str, Any]] = lambda tensors: {},
    open_source: Callable[[Path], Any] = CheckpointSource,
) -> dict[str, Any]:
    """The way of every export from a checkpoint; `changes(source tensors)` go into config.json.

    `open_source(trainer half)` gives the tensors, with configuration, assets and chat template as `CheckpointSource`.
    """
    folder = step_folder(checkpoint)
    with ck.reading(folder), staged(out) as temporary, vouched(folder, trust) as record:
        source = open_source(folder / "trainer")
        _check(source, folder)
        rule, make = experts.apart(source.config, rule, make)
        stated = changes(
            {k: v for name, spec in source.tensors.items() for k, v in experts.names(name, spec, source.config).items()}
        )
        outputs = {name: rule(name, spec) for name, spec in source.tensors.items()}
        facts = write_model(temporary, source, plan_shards(outputs, max_shard), outputs, make)
        assets.copy(assets.resolve(source.assets), temporary, source.chat_template)
        assets.write_config(temporary, source.config, **stated)
    return {"format": kind, **record, **facts}


def step_folder(checkpoint: Path) -> Path:
    """The step's folder of a checkpoint that is named by it or by its trainer half; `UserError` where none is."""
    folder = checkpoint.parent if checkpoint.name == "trainer" else checkpoint
    if not (folder / "trainer").exists() and not (folder / "COMPLETE").exists():
        steps = ck.steps(folder)
        newest = f"; the newest of this run is {step_dir(folder, steps[-1])}" if steps else ""
        raise UserError(f"{checkpoint}: no checkpoint, expected …/checkpoints/step_<n>{newest}")
    return folder


@contextmanager
def vouched(folder: Path, trust: bool) -> Iterator[dict[str, Any]]:
    """Step, fingerprint and policy version of a checkpoint whose hashes agree; `UserError` naming what does not.

    The files of tensors are hashed while the block works, and their faults are raised at its end, whatever else the
    block may have made of them; the others (DCP's pickled index among them) before it begins.
    """
    if trust and not (folder / "COMPLETE").exists():
        try:
            yield {"step": None, "fingerprint": None, "policy_version": None}
        except UserError:
            raise
        except (Exception, CheckpointException) as error:  # of damaged files torch complains in many ways
            cause = next(iter(getattr(error, "failures", {}).values()), (error,))[0]  # DCP: {rank: (error, traceback)}
            said = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise UserError(f"{folder}: could not be read and converted: {said}") from error
        return
    if faults := ck.verify(folder, lambda path: not path.endswith(TENSORS)):
        raise UserError(faults[0])
    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(ck.verify, folder, lambda path: path.endswith(TENSORS), mapped=True)  # as the source is
        try:
            yield {key: ck.read(folder)[key] for key in ("step", "fingerprint", "policy_version")}
        finally:
            if faults := hashing.result():
                raise UserError(faults[0]) from None


def _check(source: CheckpointSource, folder: Path) -> None:
    """Refuse an adapter run, drop the tied head, compare what the configuration says with the tensors."""
    if source.lora is not None or any(".lora_A" in name for name in source.tensors):
        raise UserError(f"{folder}: a LoRA checkpoint has no full weights; export it as 'adapter' or 'merge'")
    if EMBEDDING not in source.tensors:
        return
    if source.config["tie_word_embeddings"]:
        source.tensors.pop(HEAD, None)
    elif HEAD not in source.tensors:
        raise UserError(f"{folder}: tie_word_embeddings is false, yet there is no {HEAD}")
    rows, vocabulary = source.tensors[EMBEDDING].shape[0], source.config["vocab_size"]
    if rows != vocabulary:
        raise UserError(f"{folder}: {EMBEDDING} has {rows} rows, vocab_size is {vocabulary}")
