"""Reading a weight version that a trainer offers: nothing is served that differs from what was offered."""

from pathlib import Path

import torch

from rlmake.core.errors import UserError
from rlmake.core.jsonio import content_hash, hash_file, read_json
from rlmake.models.loading import read_weights
from rlmake.transport.weights import RECORD, SCHEMA


def read_version(folder: Path, version: int | None) -> tuple[dict[str, torch.Tensor], int | None]:
    """`({name: tensor}, version)` of a directory of safetensors, checked against its `version.json` if it has one.

    Without the record (an exported model) the version is as asked. Raises `UserError` for a directory that is not
    there, a record of another version, a file that is missing, unlisted or damaged.
    """
    if not folder.is_dir():
        raise UserError(f"weight_dir: no such directory: {folder}")
    if (folder / RECORD).is_file():
        version = _check(folder, version)
    return read_weights(folder), version


def _check(folder: Path, version: int | None) -> int:
    record = read_json(folder / RECORD)
    if record.get("schema") != SCHEMA:
        raise UserError(f"{folder / RECORD}: schema {record.get('schema')}, expected {SCHEMA}")
    if version is not None and record["version"] != version:
        raise UserError(f"{folder}: holds version {record['version']}, not {version}")
    files = record["files"]
    if content_hash(files) != record["checksum"]:
        raise UserError(f"{folder / RECORD}: its checksum does not fit its list of files")
    listed = {file["path"] for file in files}
    for path in folder.glob("*.safetensors"):
        if path.name not in listed:
            raise UserError(f"{path}: is not part of the version offered")
    for file in files:
        path = folder / file["path"]
        if not path.is_file() or path.stat().st_size != file["size"] or hash_file(path) != file["blake3"]:
            raise UserError(f"{path}: missing or damaged")
    return record["version"]
