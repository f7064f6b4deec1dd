"""Imports point downwards only, and what must stay light imports nothing heavy.

    cli → launch → {report, export, evals, parity, orchestrator, trainer, inference, dashboard}
        → {algorithms, envs, transport, monitors, models, checkpoint} → build → config → core

Rooms of one tier may use one another as long as they form no circle. Rooms that do not exist yet are no failure.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "rlmake"
TIERS = [
    {"core"},
    {"config"},
    {"build"},
    {"algorithms", "envs", "transport", "monitors", "models", "checkpoint"},
    {"report", "export", "evals", "parity", "orchestrator", "trainer", "inference", "dashboard"},
    {"launch"},
    {"cli"},
]
TIER = {room: tier for tier, rooms in enumerate(TIERS) for room in rooms}
LIGHT = ("core", "config", "build", "checkpoint", "monitors", "launch", "cli")
HEAVY = ("torch", "transformers", "datasets", "verifiers", "vllm")
ENGINE = ("inference", "models")  # may live in an environment of their own, beside vllm
NOT_BESIDE_ENGINE = ("verifiers", "snakemake", "datasets")


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """`(line, imported module or name)` of every import, also inside functions, but not those only for type checks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: 1 - node.level or None]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        yield from imports(node, package)


def edges(paths: list[Path]) -> Iterator[tuple[str, str, str]]:
    """`(room, imported room, where)` of every import from one room into another."""
    for path in paths:
        package = name(path) if path.name == "__init__.py" else name(path).rpartition(".")[0]
        for line, imported in imports(ast.parse(path.read_text(encoding="utf-8")), package):
            parts = imported.split(".")
            if parts[0] == "rlmake" and len(parts) > 1 and parts[1] in TIER and parts[1] != room(path):
                yield room(path), parts[1], f"{path.relative_to(ROOT.parent)}:{line}"


def test_every_room_has_a_tier():
    assert {room(path) for path in files()} <= set(TIER)


def test_imports_point_downwards():
    upwards = [f"{where} imports {below}" for above, below, where in edges(files()) if TIER[below] > TIER[above]]
    assert not upwards, "\n".join(upwards)


def test_rooms_of_one_tier_form_no_circle():
    uses: dict[str, dict[str, str]] = {}
    for above, below, where in edges(files()):
        if TIER[above] == TIER[below]:
            uses.setdefault(above, {})[below] = where

    def reach(start: str, at: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for below, where in uses.get(at, {}).items():
            if below == start:
                yield (*path, where)
            elif where not in path and len(path) < len(TIER):
                yield from reach(start, below, (*path, where))

    circles = [" → ".join(circle) for start in uses for circle in reach(start, start, ())]
    assert not circles, "\n".join(circles)


def test_the_walk_finds_violations(tmp_path, monkeypatch):
    """The checks above can fail: lazy, relative and plain imports are all seen, those for type checks are not."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path / "rlmake")
    bad = tmp_path / "rlmake" / "build" / "x.py"
    bad.parent.mkdir(parents=True)
    bad.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rlmake.cli\n"
        "import rlmake.trainer.rl\ndef f():\n    from rlmake import launch\nfrom ..envs import data\nfrom . import y\n"
    )
    assert [(below, where.rpartition(":")[2]) for _, below, where in edges(files())] == [
        ("trainer", "4"),
        ("launch", "6"),
        ("envs", "7"),
    ]


def import_all(rooms: tuple[str, ...], forbidden: tuple[str, ...]) -> subprocess.CompletedProcess:
    """Import every module of the rooms in one process that refuses the forbidden packages at module level."""
    modules = [name(path) for path in files() if room(path) in rooms]
    code = f"""
import importlib, importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            raise ImportError(f"{{name}} must not be imported here")
sys.meta_path.insert(0, Refuse())
faults = []
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ImportError as error:
        if not (isinstance(error, ModuleNotFoundError) and error.name == "vllm"):
            faults.append(f"{{module}}: {{error}}")
print("\\n".join(faults))
sys.exit(bool(faults))
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_light_rooms_import_nothing_heavy():
    done = import_all(LIGHT, HEAVY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_engine_needs_nothing_that_vllm_excludes():
    done = import_all(ENGINE, NOT_BESIDE_ENGINE)
    assert done.returncode == 0, done.stdout + done.stderr
