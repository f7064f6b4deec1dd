"""HTML by construction: text is escaped unless it is `Html` already, so nothing of a run can become markup."""

from html import escape
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
VOID = {"br", "circle", "input", "line", "meta", "path", "rect"}


class Html(str):
    """Text that is markup already."""


def text(value: Any) -> Html:
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(name: str, *children: Any, **attributes: Any) -> Html:
    """`<name …>children</name>`; None among children or attributes is left out, `cls` is `class`, `_` becomes `-`."""
    spelled = "".join(
        f' {"class" if key == "cls" else key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{spelled}>" if name in ("br", "input", "meta") else f"<{name}{spelled}/>")
    return Html(f"<{name}{spelled}>{join(children)}</{name}>")


def join(children: Any) -> Html:
    """Children one after the other; lists and generators among them are opened."""
    parts = []
    for child in children:
        if child is None:
            continue
        parts.append(join(child) if not isinstance(child, str) and hasattr(child, "__iter__") else text(child))
    return Html("".join(parts))


def table(head: list[Any], rows: list[list[Any]], cls: str | None = None) -> Html:
    """A table inside a box that scrolls by itself where the screen is narrower. Columns after the first align right
    when `cls` is "numbers"."""
    body = [tag("tr", [tag("td", cell) for cell in row]) for row in rows]
    top = tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])) if head else None
    return tag("div", tag("table", top, tag("tbody", body), cls=cls), cls="scroll")


def page(title: str, body: Html) -> str:
    """A whole document: style and script inside, nothing loaded from anywhere."""
    style, script = ((STATIC / name).read_text() for name in ("page.css", "page.js"))
    head = (
        tag("meta", charset="utf-8")
        + tag("meta", name_="viewport", content="width=device-width, initial-scale=1")
        + tag("title", title)
        + Html(f"<style>{style}</style>")
    )
    head = f"<head>{head}</head>"
    return f'<!doctype html>\n<html lang="en">\n{head}\n<body>\n{body}\n<script>{script}</script>\n</body></html>\n'
