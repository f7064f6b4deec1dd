"""The first rows of what is trained and evaluated on, looked at when it is planned: a misspelt column costs no job.

Looked at are JSON lines that are there: files of the user's, those that a `data` run of them is made from (with its
`columns`), and data sets that are built. Of everything else the job that reads it says what is wrong.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmake.build import names, store
from rlmake.core import jsonl
from rlmake.core.errors import ConfigError, UserError, nearest

if TYPE_CHECKING:
    from rlmake.build.registry import Registry

Table = dict[str, Any]
# The keys of `env.taskset` for tasksets that ship (a test asks verifiers); the first is needed.
OPTIONS = {
    "reverse-text": ("path", "instruction"),
    "alphabet-sort": ("path",),
    "phone-book": ("path", "tools"),
    "kuhn-poker": (),
    "kuhn-exploitability": (),
    "proposer-solver": (),
    "reasoning-gym": ("dataset", "options", "size", "seed", "split", "instruction"),
}
COMMON = ("id", "task", "system_prompt")
# Keys of `env`, and of its tables, where it is verifiers' own environment of one agent (the same test asks).
ENV = {
    "": ("taskset", "agent", "timeout", "retries", "max_concurrent_agents", "interception", "id"),
    "timeout": ("episode", "finalize"),
    "agent": (
        "harness", "runtime", "model", "client", "sampling", "max_turns", "max_input_tokens", "max_output_tokens",
        "max_total_tokens", "timeout", "retries", "network_notice",
    ),
    "agent.timeout": ("setup", "rollout", "finalize", "scoring"),
}  # fmt: skip
OF_ONE_AGENT = ("reverse-text", "alphabet-sort", "phone-book", "reasoning-gym")
TALK = "a conversation in '{messages}', or '{prompt}' and '{completion}'"


class FirstRows:
    """Faults of first rows, each file looked at once for each reader."""

    def __init__(self, registry: "Registry"):
        self.registry = registry
        self._seen: dict[tuple[str, ...], str | None] = {}

    def faults(self, config: Table) -> Iterator[tuple[str, str | None, str]]:
        """`(key, its value where that is at fault, what is wrong)` of the files that a resolved configuration names."""
        for key, source in _sources(config):
            taskset = source["env"]["taskset"]
            columns, path = jsonl.COLUMNS.get(taskset["id"]), taskset.get("path")
            if source["serve"]["address"] is None:
                yield from _of_table(f"{key}.env.taskset", taskset)
                yield from _of_env(f"{key}.env", source["env"])
            here = columns and isinstance(path, str) and source["serve"]["address"] is None
            if here and (fault := self._fault(path, columns.expected, columns.needed)):
                yield f"{key}.env.taskset.path", path, fault
        for key, data in _data(config):
            columns, name = data["columns"], data["name"]
            for split in data["splits"] or ["train"]:
                path = name if name.endswith(".jsonl") else f"{name}/{split}.jsonl"
                talk = (columns["messages"],), (columns["prompt"], columns["completion"])
                if not data["subsets"] and (fault := self._fault(path, TALK.format(**columns), *talk)):
                    yield f"{key}.name", name, fault

    def _fault(self, path: str, expected: str, *either: tuple[str, ...]) -> str | None:
        """What is wrong with the first row where it has none of these sets of columns."""
        known = (path, expected)
        if known not in self._seen:
            self._seen[known] = self._look(path, expected, either)
        return self._seen[known]

    def _look(self, path: str, expected: str, either: tuple[tuple[str, ...], ...]) -> str | None:
        file, renamed = self._place(path) if names.is_output(path) else (Path(path), [])
        if file is None or file.suffix != ".jsonl":
            return None
        try:
            with open(file, encoding="utf-8") as lines:
                number, line = next(((n, text) for n, text in enumerate(lines, 1) if text.strip()), (0, ""))
        except (OSError, UnicodeDecodeError):
            return None  # said elsewhere
        if not number:
            return f"{file}: has no rows"
        where = f"{file}: row {number}"
        try:
            row = jsonl.parsed(where, line, expected)
        except ValueError as error:
            return str(error)
        for columns in renamed:
            row = {columns.get(name, name): value for name, value in row.items()}
        if any(all(row.get(name) is not None for name in columns) for columns in either):
            return None
        return f"{where}: expected {expected}; it has {', '.join(map(repr, row)) or 'nothing'}"

    def _place(self, path: str) -> tuple[Path | None, list[dict[str, str]]]:
        """The file that stands for one of a target, and how its columns are renamed, one time after the other."""
        try:
            target = self.registry.target(path)
            work, artefact = self.registry.work(target.run), self.registry.artefact(target)
        except (ConfigError, UserError):
            return None, []
        if target.kind != "data":
            return None, []
        if store.finished(artefact):
            return artefact.path / target.rest, []
        source, split = work.config["source"], target.rest.removesuffix(".jsonl")
        files = source["paths"].get(split, []) if source["type"] == "file" else []
        first = files if isinstance(files, str) else next(iter(files), "")
        file, renamed = self._place(first) if names.is_output(first) else (Path(first), [])
        return file, [*renamed, work.config["columns"]]


def _of_table(key: str, taskset: Table) -> Iterator[tuple[str, None, str]]:
    """Keys of a taskset that ships: those that it does not have, and those that it needs."""
    name = taskset["id"]
    if name not in OPTIONS:
        return
    known = (*OPTIONS[name], *COMMON)
    for one in taskset.keys() - set(known):
        yield f"{key}.{one}", None, f"unknown key{nearest(one, known)}; '{name}' has {', '.join(sorted(known))}"
    for one in OPTIONS[name][:1]:
        if taskset.get(one) is None:
            yield f"{key}.{one}", None, "is needed"


def _of_env(key: str, env: Table) -> Iterator[tuple[str, None, str]]:
    """Keys that verifiers' environment of one agent does not have, where a taskset that ships runs in it."""
    if env.get("id") or env["taskset"]["id"] not in OF_ONE_AGENT:
        return
    for place, known in ENV.items():
        table: Any = env
        for part in filter(None, place.split(".")):
            table = table.get(part) if isinstance(table, dict) else None
        for one in (table if isinstance(table, dict) else {}).keys() - set(known):
            at = ".".join(filter(None, (key, place, one)))
            yield at, None, f"unknown key{nearest(one, known)}; expected one of {', '.join(sorted(known))}"


def _sources(config: Table) -> Iterator[tuple[str, Table]]:
    """`(key, table)` of every environment."""
    parts = config.get("orchestrator") or config
    for key in ("train", "eval", ""):
        table = (parts.get(key) or {}) if key else parts
        listed = table.get("source")
        if isinstance(listed, list):
            at = ".".join(filter(None, ("orchestrator" if "orchestrator" in config else "", key, "source")))
            yield from ((f"{at}.{index}", source) for index, source in enumerate(listed))


def _data(config: Table) -> Iterator[tuple[str, Table]]:
    """`(key, table)` of the rows that an SFT trains on and validates with."""
    for key, holder in (("data", config), ("val.data", config.get("val") or {})):
        table = holder.get("data")
        if isinstance(table, dict) and table.get("type") == "sft":
            yield key, table
