"""Data sets of the build: rows for SFT and for tasksets, user's files checked row by row."""

import json

import pytest

from rlmake.config import DataConfig
from rlmake.core.errors import UserError
from rlmake.envs import data


def config(source, **rest):
    return DataConfig.model_validate({"source": source, **rest})


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_phrases_become_rows_of_two_splits(tmp_path):
    source = {"type": "pydoc-phrases", "num_train": 200, "num_heldout": 40, "min_chars": 8, "max_chars": 20}
    facts = data.make(config(source), tmp_path / "data")
    assert facts["rows"] == {"train": 200, "heldout": 40}
    assert facts["files"] == {"train": "train.jsonl", "heldout": "heldout.jsonl"}
    assert len(facts["source"]["text_blake3"]) == 64
    train, heldout = (rows(tmp_path / "data" / name) for name in facts["files"].values())
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    for row in train + heldout:
        assert row["target"] == row["completion"] == row["prompt"][::-1] and 8 <= len(row["prompt"]) <= 20
    assert len({row["id"] for row in train + heldout}) == 240
    again = data.make(config(source), tmp_path / "again")
    assert again == facts
    assert (tmp_path / "again/train.jsonl").read_bytes() == (tmp_path / "data/train.jsonl").read_bytes()


def test_some_demonstrations_copy_and_the_target_stays(tmp_path):
    source = {"type": "pydoc-phrases", "num_train": 1000, "num_heldout": 50, "copy_share": 0.4}
    data.make(config(source), tmp_path)
    train, heldout = (rows(tmp_path / f"{split}.jsonl") for split in ("train", "heldout"))
    assert all(row["target"] == row["prompt"][::-1] for row in train + heldout)
    assert all(row["completion"] == row["target"] for row in heldout)
    copied = [row for row in train if row["completion"] == row["prompt"]]
    assert 350 < len(copied) < 450
    assert all(row["completion"] in (row["prompt"], row["target"]) for row in train)


def test_more_phrases_than_there_are(tmp_path):
    with pytest.raises(UserError, match=r"source.num_heldout: there are \d+ phrases of 8 to 20 characters, not 99999"):
        data.make(config({"type": "pydoc-phrases", "num_heldout": 99999, "max_chars": 20}), tmp_path)


def test_parquet_and_renamed_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "x", "a": "y"}\n\n{"q": "naïve 🧪", "a": "z"}\n')
    source = {"type": "file", "paths": {"train": str(tmp_path / "a.jsonl")}}
    facts = data.make(config(source, columns={"q": "prompt", "a": "completion"}, format="parquet"), tmp_path / "out")
    assert facts["rows"] == {"train": 2} and facts["files"] == {"train": "train.parquet"}
    back = {"type": "file", "paths": {"train": [str(tmp_path / "out/train.parquet")] * 2}}
    data.make(config(back), tmp_path / "back")
    two = [{"prompt": "x", "completion": "y"}, {"prompt": "naïve 🧪", "completion": "z"}]
    assert rows(tmp_path / "back/train.jsonl") == two * 2


@pytest.mark.parametrize(
    ("lines", "rest", "message"),
    [
        (['{"prompt": "a"}', "{nonsense"], {}, "row 2: not JSON"),
        (['{"prompt": "a"}', "[1]"], {}, "row 2: expected an object, not list"),
        (['{"prompt": 3}'], {}, "row 1, column 'prompt': expected str or list, not int"),
        (['{"messages": [{"content": "a"}]}'], {}, "row 1, column 'messages': message 0 needs a 'role'"),
        (['{"prompt": "a"}', '{"promt": "a"}'], {}, "row 2, column 'prompt': missing, .*did you mean 'promt'"),
        (['{"prompt": "a"}', '{"prompt": "a", "x": 1}'], {}, "row 2, column 'x': not in row 1"),
        (['{"prompt": "a"}'], {"columns": {"promt": "p"}}, "columns.promt: .*did you mean 'prompt'"),
        (['{"a": "1", "b": "2"}'], {"columns": {"a": "b"}}, "two columns"),
        ([""], {}, "split 'train' has no rows"),
    ],
)
def test_faults_name_file_row_and_column(tmp_path, lines, rest, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    source = {"type": "file", "paths": {"train": str(path)}}
    with pytest.raises(UserError, match=message):
        data.make(config(source, **rest), tmp_path / "out")


def test_missing_file_and_unknown_kind(tmp_path):
    for name, message in (("none.jsonl", "no such file"), ("rows.csv", r"ending in .jsonl or .parquet")):
        if name == "rows.csv":
            (tmp_path / name).write_text("a,b")
        with pytest.raises(UserError, match=message):
            data.make(config({"type": "file", "paths": {"train": str(tmp_path / name)}}), tmp_path / "out")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(UserError, match="not readable as Parquet"):
        data.make(config({"type": "file", "paths": {"t": str(tmp_path / "broken.parquet")}}), tmp_path / "out")
