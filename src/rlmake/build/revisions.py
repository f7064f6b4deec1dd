"""Revisions of the data and code that a result rests on.

What ships has a number here, raised by whoever changes what it computes: everything that was built on it is then built
anew. What belongs to the user's project counts by the content of its files; an installed package by its version.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError, nearest
from rlmake.core.jsonio import canonical, hash_bytes, hash_file, write_json

# Code that ships. Raise a number when the same configuration gives another result than before.
SHIPPED = {
    "data": 1,  # rlmake.envs.data and the phrases it cuts
    "init": 1,  # rlmake.models.init
    "import": 1,  # rlmake.export.bring and rlmake.models.gguf
    "sft": 1,  # the SFT trainer: packing, loss, optimizer
    "rl": 1,  # the RL trainer, orchestrator, algorithms and the embedded engine
    "eval": 1,  # the evaluation loop and the embedded engine
    "parity": 1,  # what is asked of engine and trainer, and how the answers are compared
    "report": 1,  # the page of a run
    "grid": 1,  # the page of a grid
    "best": 1,  # the choice of a best checkpoint
    "export": 1,  # checkpoint to weights
}
HARNESSES = ("inproc-chat", "inproc-tools")  # rlmake.envs.harnesses
TASKSETS = {  # rlmake.envs.tasksets with their environments, rewards and tools
    "alphabet-sort": 1,
    "kuhn-exploitability": 1,
    "kuhn-poker": 2,
    "phone-book": 1,
    "proposer-solver": 2,
    "reasoning-gym": 1,  # of the version that pyproject.toml pins
    "reverse-text": 1,
}
NAMED = {"rlmake.models.chatml.ChatMLRenderer": 1}  # what ships and a configuration names by its import path


class ContentCache:
    """blake3 of files, remembered by (size, mtime) in one small file of the store."""

    def __init__(self, path: Path):
        self.path = path
        self.dirty = False
        try:
            known = json.loads(path.read_bytes())
        except (OSError, ValueError):
            known = {}
        rows = known.items() if isinstance(known, dict) else ()
        self.known: dict[str, list[Any]] = {key: row for key, row in rows if isinstance(row, list) and len(row) == 4}

    def hash(self, path: Path) -> str:
        stat = path.stat()
        key, mark = os.fspath(path.absolute()), [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        entry = self.known.get(key)
        if entry is None or entry[:3] != mark:
            entry = self.known[key] = [*mark, hash_file(path)]
            self.dirty = True
        return entry[3]

    def tree(self, path: Path) -> str:
        """Content of a file, or of all files below a directory with their relative paths, Python's caches left out."""
        if path.is_file():
            return self.hash(path)
        rows = [
            [file.relative_to(path).as_posix(), self.hash(file)]
            for file in sorted(path.rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
        ]
        return hash_bytes(canonical(rows))

    def save(self) -> None:
        """Keep what was learnt (never called in a dry run)."""
        if self.dirty:
            write_json(self.path, self.known)
            self.dirty = False


def of_taskset(name: str, cache: ContentCache) -> str:
    """Revision of a taskset (its tasks, rewards and tools). Raises `UserError` when no such taskset can be found.

    An id that ships means ours in every process (see `rlmake.envs.plugins`), then verifiers' own, then any module.
    """
    if name in TASKSETS:
        return f"rlmake:{TASKSETS[name]}"
    if _of_verifiers(name):
        return f"verifiers:{importlib.metadata.version('verifiers')}"
    if fault := fault_of_taskset(name):
        raise UserError(fault)
    return of_module(_leaf(name), cache, f"taskset '{name}'")


def fault_of_taskset(name: str) -> str | None:
    """Why there is no such taskset; None where there is one. Nothing is imported."""
    if name in TASKSETS or _of_verifiers(name) or _find(_leaf(name)) is not None:
        return None
    return f"taskset '{name}': {_no_module(_leaf(name))}{nearest(name, TASKSETS)}"


def fault_of_harness(name: str) -> str | None:
    """Why there is no such harness; None where there is one. Nothing is imported."""
    own, leaf = _find("verifiers"), _leaf(name)
    theirs = {path.stem for path in (own / "v1" / "harnesses").iterdir()} if own else set()
    known = [*HARNESSES, *(one.replace("_", "-") for one in sorted(theirs) if not one.startswith("_"))]
    if name in HARNESSES or leaf in theirs or _find(leaf) is not None:
        return None
    return f"harness '{name}': {_no_module(leaf)}{nearest(name, known)}"


def _leaf(name: str) -> str:
    """The module of a taskset's id `owner/name@version`."""
    return name.rpartition("/")[2].partition("@")[0].replace("-", "_")


def _of_verifiers(name: str) -> bool:
    own, leaf = _find("verifiers"), _leaf(name)
    return bool(own) and any((own / "v1" / "tasksets" / one).exists() for one in (leaf, f"{leaf}.py"))


def of_import(path: str, cache: ContentCache) -> str:
    """Revision of code named as `path/to/file.py:Name` or `package.module.Name`."""
    if path in NAMED:
        return f"rlmake:{NAMED[path]}"
    file, _, _ = path.partition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise UserError(f"no file {file}")
        return f"content:{cache.hash(Path(file))}"
    return of_module(path.partition(".")[0], cache, f"'{path}'")


def fault_of_import(path: str) -> str | None:
    """Why there is no code of this name (see `of_import`), as far as it can be seen without importing it."""
    file, _, _ = path.partition(":")
    if file.endswith(".py"):
        return None if Path(file).is_file() else f"no file {file}"
    top = path.partition(".")[0]
    return None if _find(top) is not None else f"'{path}': {_no_module(top)}"


def _no_module(name: str) -> str:
    return f"no module '{name}' in the project or among the installed packages"


def of_module(name: str, cache: ContentCache, what: str) -> str:
    """Revision of a module: content of its files in the project, version of its distribution where installed."""
    found = _find(name)
    if found is None:
        raise UserError(f"{what}: {_no_module(name)}")
    if not _installed(found):
        return f"content:{cache.tree(found)}"
    distribution = importlib.metadata.packages_distributions().get(name, [None])[0]
    return (
        f"{distribution}:{importlib.metadata.version(distribution)}" if distribution else f"content:{cache.tree(found)}"
    )


def of_project(name: str, cache: ContentCache) -> str | None:
    """Revision of a module of the user's project; None for one that was installed or is not there."""
    found = _find(name.replace("-", "_"))
    return f"content:{cache.tree(found)}" if found and not _installed(found) else None


def _installed(path: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & set(path.parts)) or path.is_relative_to(Path(os.__file__).parent)


def _find(name: str) -> Path | None:
    """File or folder of a top-level module, without importing it; the project's root comes first."""
    for candidate in (Path(name), Path(f"{name}.py"), Path("environments") / name, Path("environments") / f"{name}.py"):
        if (candidate.suffix == ".py" and candidate.is_file()) or (candidate / "__init__.py").is_file():
            return candidate
    if not name.isidentifier() or name in sys.builtin_module_names:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.origin or not spec.has_location:
        return None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin
