"""Rows of the tasksets that read files: what a launcher sees of them before anything heavy is loaded, and the docs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlmake.core import jsonl

DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
SFT_ROW = '{"messages": [{"role": "user", "content": "a"}]}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SFT_ROW, "row 1: expected an object with text in 'prompt' and 'target'; it has 'messages'"),
        ("{}", "row 1: expected an object with text in 'prompt' and 'target'; it has nothing"),
        ("[1]", "row 1: expected an object with text in 'prompt' and 'target', not list"),
        ("prompt,target", "row 1: expected an object with text in 'prompt' and 'target': Expecting value"),
        ("", "no row; expected an object with text in 'prompt' and 'target' a line"),
        (None, "No such file or directory"),
    ],
)
def test_the_first_row(tmp_path, text, expected):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    fault = jsonl.fault_of_first({"id": "reverse-text", "path": str(path)})
    assert fault.startswith(str(path)) and expected in fault and "\n" not in fault


def test_good_rows_and_tasksets_of_others(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "ab", "target": "ba", "messages": []}\n' + SFT_ROW)
    assert jsonl.fault_of_first({"id": "reverse-text", "path": str(path)}) is None, "the first one alone"
    assert jsonl.fault_of_first({"id": "my-own", "path": str(path)}) is None
    assert jsonl.fault_of_first({"id": "kuhn-poker"}) is None
    assert "in 'turns' a line, not 3" in jsonl.fault_of_first({"id": "alphabet-sort", "path": 3})
    assert jsonl.fault_of_first({"id": "phone-book", "pth": str(path)}).endswith("not null")


def test_looking_loads_neither_verifiers_nor_torch():
    code = "import sys; from rlmake.launch import inputs; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert {"verifiers.v1", "torch", "pydantic"} & set(loaded) == {"pydantic"}


def test_the_docs_name_every_column_and_their_lines_can_be_read():
    section = DOCS.read_text(encoding="utf-8").partition("## Environments that ship")[2]
    for name, columns in jsonl.COLUMNS.items():
        cells = re.search(rf"^\| `{name}` \| (`\w+`.*) \| `({{.*}})` \|$", section, re.M)
        assert set(re.findall(r"`(\w+)`", cells[1])) == {*columns.needed, *columns.optional}
        assert set(columns.of(name, json.loads(cells[2]))) == set(columns.needed)
