"""Reading a weight version that a trainer offers: nothing is served that differs from what was offered."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from loguru import logger
from safetensors import SafetensorError, safe_open

from rlmake.core.errors import UserError
from rlmake.core.jsonio import content_hash, read_record
from rlmake.inference.engines.base import EngineFailed
from rlmake.models.digest import digest
from rlmake.models.loading import DTYPES, HEAD, read_weights, weight_files
from rlmake.transport.weights import RECORD, SCHEMA, Record, damaged

Shapes = dict[str, tuple[int, ...]]
HASHERS = 8  # files read at a time


def read_version(
    folder: Path, version: int | None, checksum: str | None = None, key: str = "weight_dir"
) -> tuple[dict[str, torch.Tensor], int | None]:
    """`({name: tensor}, version)` of a directory of safetensors, checked against its `version.json` if it has one.

    Without the record (an exported model) the version is as asked; with a `checksum` there must be one that has it.
    Raises `UserError` for a directory that is not there (naming `key`), a record of another version, a file that is
    missing, unlisted or damaged.
    """
    version = check_version(folder, version, checksum, key)
    return read_weights(folder), version


def check_version(
    folder: Path, version: int | None, checksum: str | None = None, key: str = "weight_dir"
) -> int | None:
    """The version of a directory, every file checked against its record; see `read_version`."""
    if not os.path.isdir(folder):  # False for a name that is none, too
        raise UserError(f"{key}: {'not a' if os.path.exists(folder) else 'no such'} directory: {str(folder)[:300]}")
    if checksum is None and not os.path.lexists(folder / RECORD):
        return version
    return _check(folder, version, checksum)


def shapes_of(folder: Path) -> Shapes:
    """`{name: shape}` of a directory's safetensors, by their headers. Raises `UserError` for a damaged file."""
    found: Shapes = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not readable as safetensors: {error}") from None
    return found


def check_shapes(given: Shapes, wanted: Shapes, where: str) -> None:
    """All tensors of the served model and no other, each of its shape; a tied head counts on neither side."""
    if missing := sorted(wanted.keys() - given.keys() - {HEAD}):
        raise UserError(f"{where}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if extra := sorted(given.keys() - wanted.keys() - {HEAD}):
        raise UserError(f"{where}: tensor {extra[0]} does not belong to this model ({len(extra)} in all)")
    for name in given.keys() & wanted.keys():
        if given[name] != wanted[name]:
            raise UserError(f"{where}: tensor {name} has shape {given[name]}, the model wants {wanted[name]}")


def file_digests(folder: Path, dtype: str) -> dict[str, str]:
    """Digests of a directory's tensors as an engine of `dtype` holds them."""
    return {name: digest(tensor.to(DTYPES[dtype])) for name, tensor in read_weights(folder).items()}


def compare(found: Mapping[str, str], expected: Mapping[str, str], where: str) -> None:
    """`inference.check_weights`: digests of what an engine holds and of what was sent. `EngineFailed`: they differ."""
    for name, value in expected.items():
        if found[name] != value:
            raise EngineFailed(f"check_weights: {name} is not what {where} holds")
    logger.info(f"check_weights: all {len(expected)} tensors are those of {where}")


def _check(folder: Path, version: int | None, checksum: str | None) -> int:
    record = read_record(folder / RECORD, Record, SCHEMA)
    if checksum not in (None, record["checksum"]):
        raise UserError(f"{folder / RECORD}: is not the record of what was offered")
    if version is not None and record["version"] != version:
        raise UserError(f"{folder}: holds version {record['version']}, not {version}")
    files = record["files"]
    if content_hash(files) != record["checksum"]:
        raise UserError(f"{folder / RECORD}: its checksum does not fit its list of files")
    listed = {file["path"] for file in files}
    for path in folder.glob("*.safetensors"):
        if path.name not in listed:
            raise UserError(f"{path}: is not part of the version offered")
    with ThreadPoolExecutor(HASHERS) as pool:
        for file, bad in zip(files, pool.map(lambda file: damaged(folder, file), files), strict=True):
            if bad:
                raise UserError(f"{folder / file['path']}: missing or damaged, v{record['version']} cannot be served")
    return record["version"]
