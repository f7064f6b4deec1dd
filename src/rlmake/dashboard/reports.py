"""Reports of a run, `reports/*.md`: markdown as a tree of plain nodes, and citations that are checked against traces.

A citation is a mark `[^id]` in the text and, on one line of its own, `[^id]: {json}` with step, kind, subset, episode,
quote and note (all needed), and run, trace, branch, node, field, prefix, suffix where they help.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.parser_inline import ParserInline
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode

from rlmake.dashboard.confine import NotThere, files_in, inside, opened, regular
from rlmake.dashboard.quotes import find
from rlmake.dashboard.run import Run

MAX_BYTES = 4 << 20
RENDERED = 128 << 10  # characters of markdown that are rendered, seconds of work at most; the rest is plain text
PARAGRAPH = 16 << 10  # characters of one paragraph in which marks are looked for, whose cost grows with the square
DEFINITION = re.compile(r"\[\^([^\]\s]{1,100})\]:\s*(\{.*\})")
MARK = re.compile(r"\[\^([^\]\s]{1,100})\]")
REQUIRED = {"step": int, "kind": str, "subset": str, "episode": str, "quote": str, "note": str}
OPTIONAL = {"run": str, "trace": int, "branch": int, "node": int, "field": str, "prefix": str, "suffix": str}
KINDS, SUBSETS, FIELDS = ("train", "eval"), ("all", "effective"), ("content", "reasoning")


class _Inline(ParserInline):
    """Marks inside of a paragraph; a very long one stays text."""

    def parse(self, src: str, md: MarkdownIt, env: Any, tokens: list[Token]) -> list[Token]:
        if len(src) <= PARAGRAPH:
            return super().parse(src, md, env, tokens)
        tokens.append(Token("text", "", 0, content=src))
        return tokens


_MARKDOWN = MarkdownIt("commonmark", {"html": False})
_MARKDOWN.inline = _Inline()
_MARKDOWN.configure("commonmark", {"html": False}).enable(["table", "strikethrough"])
_TAGS = {
    "paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "list_item": "li", "hardbreak": "br",
    **{tag: tag for tag in ("blockquote", "em", "strong", "s", "table", "thead", "tbody", "tr", "th", "td", "hr")},
}  # fmt: skip


def folders(run: Run) -> list[Path]:
    return list(dict.fromkeys([run.folder / "reports", run.work / "reports"]))


def listed(run: Run) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for folder in folders(run):
        for path, stat in files_in(folder, run.roots, (".md",), 500):
            relative = path.relative_to(folder).as_posix()
            if relative not in found:
                try:
                    title = _split(_text(path, run, 1 << 16))[0].get("title") or path.stem
                except OSError as error:
                    title = f"{path.stem} ({error.strerror})"
                found[relative] = {"file": relative, "title": title, "mtime": stat.st_mtime}
    return sorted(found.values(), key=lambda row: -row["mtime"])


def located(run: Run, file: str) -> Path:
    """Raises `NotThere`."""
    for folder in folders(run):
        try:
            path = inside(folder, file, run.roots)
            regular(path, run.roots)
        except (NotThere, OSError):
            continue
        if path.suffix == ".md":
            return path
    raise NotThere(file)


def report(run: Run, file: str) -> dict[str, Any]:
    """`{title, body: tree, citations: {id: definition or fault}, cut: note or None}`; which quotes hold is for `check`
    to say. Raises `NotThere`."""
    path, text = _read(run, file)
    return {"file": file, **_rendered(path, text, Path(file).stem)}


def citations(run: Run, file: str) -> dict[str, dict[str, Any]]:
    """The citations alone: nothing is rendered. Raises `NotThere`."""
    return _cited(_split(_read(run, file)[1])[1])[1]


def _read(run: Run, file: str) -> tuple[Path, str]:
    path = located(run, file)
    try:
        return path, _text(path, run, MAX_BYTES + 1)
    except OSError as error:
        raise NotThere(f"{file}: {error.strerror}") from None


@functools.lru_cache(maxsize=8)
def _rendered(path: Path, text: str, name: str) -> dict[str, Any]:
    head, rest = _split(text[:MAX_BYTES])
    body, cites = _cited(rest)
    cut, end, note = len(text) > MAX_BYTES, len(body), None
    if end > RENDERED:
        end = max(body.rfind("\n", 0, RENDERED), 0) or RENDERED
    tree = _children(SyntaxTreeNode(_MARKDOWN.parse(body[:end])))
    if end < len(body) or cut:
        note = f"This report is long: from character {end} on it is shown as plain text"
        note += f", and of its bytes behind the first {MAX_BYTES} nothing." if cut else "."
        tree += [
            {"tag": "p", "children": [{"tag": "em", "children": [note]}]},
            {"tag": "pre", "children": [body[end:]]},
        ]
    return {"title": head.get("title") or name, "body": tree, "citations": cites, "cut": note}


def _cited(text: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The text without its definitions, and the citations."""
    lines: list[str] = []
    definitions: dict[str, list[str]] = {}
    for line in text.split("\n"):
        match = DEFINITION.fullmatch(line.rstrip()) if line.startswith("[^") else None
        if match:
            definitions.setdefault(match[1], []).append(match[2])
        lines.append("" if match else line)
    found = {name: definition(texts) for name, texts in definitions.items()}
    body = "\n".join(lines)
    for name in MARK.findall(body):
        found.setdefault(name, {"fault": "no definition of this citation"})
    return body, found


def definition(texts: list[str]) -> dict[str, Any]:
    """A citation's definition as it is, or `{fault}`."""
    if len(texts) > 1:
        return {"fault": "defined more than once"}
    try:
        found = json.loads(texts[0])
    except ValueError as error:
        return {"fault": f"not JSON: {error}"}
    except RecursionError:
        return {"fault": "not JSON: nested too deeply"}
    if missing := [key for key in REQUIRED if key not in found]:
        return {"fault": f"{missing[0]} is missing"}
    for key, value in found.items():
        kind = {**REQUIRED, **OPTIONAL}.get(key)
        if kind is None:
            return {"fault": f"{key} is unknown"}
        if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and abs(value) > 1 << 53):
            return {"fault": f"{key} must be {'a number' if kind is int else 'text'}"}
    for key, values in (("kind", KINDS), ("subset", SUBSETS), ("field", FIELDS)):
        if key in found and found[key] not in values:
            return {"fault": f"{key} must be {' or '.join(values)}"}
    return found if found["quote"].strip() else {"fault": "the quote is empty"}


def check(citation: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Whether the quote stands in the record, exactly once: `{ok, trace, node, field}` or `{ok: False, fault}`."""
    hits = find(record, citation["quote"], citation.get("trace"), citation.get("node"), citation.get("field"),
                citation.get("prefix", ""), citation.get("suffix", ""), citation.get("branch"))  # fmt: skip
    if len(hits) == 1:
        return {"ok": True, **hits[0]}
    if not hits:
        return {"ok": False, "fault": "the quote is not in this episode"}
    return {"ok": False, "fault": f"the quote stands {len(hits)} times in this episode: give node, prefix or suffix"}


def _text(path: Path, run: Run, most: int) -> str:
    with opened(path, run.roots) as file:
        return file.read(most).decode("utf-8", "replace")


def _split(text: str) -> tuple[dict[str, str], str]:
    """Front matter (`key: value` lines between two `---`) and the rest."""
    match = re.match(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", text, re.DOTALL)
    if not match:
        return {}, text
    pairs = (line.partition(":") for line in match[1].split("\n") if ":" in line)
    return {key.strip(): value.strip().strip("\"'") for key, _, value in pairs}, text[match.end() :]


def _children(node: SyntaxTreeNode) -> list[Any]:
    return [part for child in node.children for part in _tree(child)]


def _tree(node: SyntaxTreeNode) -> list[Any]:
    """A node as `{tag, children, …}`; text as strings and `{cite}`. What has no tag here is shown as its text."""
    if node.type == "inline":
        return _children(node)
    if node.type in ("text", "html_inline", "html_block"):
        return _marks(node.content)
    if node.type == "softbreak":
        return ["\n"]
    if node.type == "code_inline":
        return [{"tag": "code", "children": [node.content]}]
    if node.type in ("fence", "code_block"):
        return [{"tag": "pre", "children": [node.content]}]
    if node.type == "heading":
        return [
            {"tag": node.tag if node.tag in ("h1", "h2", "h3", "h4", "h5", "h6") else "h6", "children": _children(node)}
        ]
    if node.type == "link":
        target = str(node.attrs.get("href", ""))
        if _leads(target):
            return [{"tag": "a", "href": target, "children": _children(node)}]
        return _children(node)
    if node.type == "image":
        return _marks(f"[image: {node.content}]")
    tag = _TAGS.get(node.type)
    return [{"tag": tag, "children": _children(node)}] if tag else _children(node)


def _leads(target: str) -> bool:
    """Whether a link is shown as one: to http(s), or inside of the report."""
    try:
        return target.startswith("#") or urlsplit(target).scheme in ("http", "https")
    except ValueError:  # brackets that are no address
        return False


def _marks(text: str) -> list[Any]:
    parts = MARK.split(text)
    found: list[Any] = []
    for number, part in enumerate(parts):
        if number % 2:
            found.append({"cite": part})
        elif part:
            found.append(part)
    return found
