"""The tables of docs/configuration.md, made from the schema.

python -m rlmake.config.docs docs/configuration.md     rewrites what stands below the page's marker
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import rlmake.config as config
from rlmake.config.describe import Row, Section, sections
from rlmake.config.experiment import ExperimentTable
from rlmake.config.unbuilt import UNBUILT
from rlmake.core.errors import UserError, entry_point
from rlmake.core.jsonio import write_bytes

MARKER = "<!-- Everything below is written by `python -m rlmake.config.docs docs/configuration.md`. -->"
PAGES = (
    ("RLConfig", "rl"),
    ("TrainerConfig", "trainer"),
    ("OrchestratorConfig", "orchestrator"),
    ("InferenceConfig", "inference"),
    ("SFTConfig", "sft"),
    ("EvalConfig", "eval"),
    ("EnvServerConfig", "env-server"),
    ("DataConfig", "data"),
    ("InitConfig", "init"),
    ("ImportConfig", "import"),
)
REFUSED = {item.key for item in UNBUILT if item.refuse is None and "." not in item.key}  # wherever they stand
Seen = dict[type, str]


def tables() -> str:
    """The generated part: one chapter per entry point, one table per configuration table, and what is not built."""
    lines = [MARKER, "", "## All keys", ""]
    seen: Seen = {}
    for name, title in PAGES:
        lines += [f"### `{title}`", "", *_chapter(title, sections(getattr(config, name), into_entries=False), seen)]
    lines += ["### `[experiment]`", "", *_chapter("experiment", sections(ExperimentTable, "experiment"), seen)]
    lines += ["### Not built yet", "", "These keys are refused, not ignored.", "", "| key | why |", "|---|---|"]
    lines += [f"| {_code(item.key)}{_values(item.refuse)} | {item.reason} |" for item in UNBUILT]
    return "\n".join(lines) + "\n"


def _chapter(title: str, found: Iterable[Section], seen: Seen) -> Iterator[str]:
    """The tables of one entry point; one that was shown before (`seen`) is only named."""
    repeated: set[str] = set()
    for section in found:
        if section.table in seen:
            if not any(section.path == path or section.path.startswith(f"{path}.") for path in repeated):
                repeated.add(section.path)
                yield f"**`[{section.path}]`**: as {seen[section.table]}"
                yield ""
        else:
            seen[section.table] = f"`[{section.path}]` of `{title}`"
            yield from _table(section)


def _variant(section: Section) -> str:
    return f' with `type = "{section.variant}"`' if section.variant else ""


def _table(section: Section) -> Iterator[str]:
    rows = [row for row in section.rows if row.key != "type"]
    yield f"**`[{section.path}]`**{_variant(section)}: {section.doc}" if section.path else section.doc
    yield ""
    if rows:
        yield "| key | type | default | class | meaning |"
        yield "|---|---|---|---|---|"
        yield from map(_line, rows)
        yield ""


def _line(row: Row) -> str:
    default = row.default if row.default == "required" else _code(row.default)
    unbuilt = " Not built yet: refused." if row.key in REFUSED else ""
    return f"| {_code(row.key)} | {_escape(row.type)} | {default} | {row.kind} | {_escape(row.doc)}{unbuilt} |"


def _code(text: str) -> str:
    text = text.replace("\n", " ")
    return f"`{_escape(text if len(text) <= 80 else text[:77] + '…')}`"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _values(refuse: tuple | None) -> str:
    return " = " + ", ".join(_code(str(value)) for value in refuse) if refuse else ""


def page(text: str) -> str:
    """The page with its generated part renewed. Raises `UserError` where the page has no marker."""
    prose, found, _ = text.partition(MARKER)
    if not found:
        raise UserError(f"the page has no line {MARKER}")
    return prose + tables()


@entry_point
def main() -> None:
    if len(sys.argv) != 2:
        raise UserError("usage: python -m rlmake.config.docs docs/configuration.md")
    path = Path(sys.argv[1])
    write_bytes(path, page(path.read_text(encoding="utf-8")).encode())


if __name__ == "__main__":
    main()
