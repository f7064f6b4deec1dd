"""A small model with its tokenizer, and data, made once per session by the project's own makers."""

from pathlib import Path

import pytest
from trainer_samples import rows, write_jsonl

from rlmake.config import InitConfig, parse
from rlmake.models import init


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """Two layers, 64 wide, 320 tokens."""
    root = tmp_path_factory.mktemp("model")
    text = root / "text.txt"
    text.write_text("\n".join(row["prompt"] + "\n" + row["completion"] for row in rows(200)) + "\nnaïve → é 🙂\n")
    architecture = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    raw = {
        "architecture": architecture,
        "tokenizer": {"vocab_size": 320, "text": str(text)},
        "dtype": "float32",
    }
    out = root / "model"
    out.mkdir()
    init.make(parse(InitConfig, raw), out)
    return out


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_jsonl(root / "train.jsonl", rows(60))
    write_jsonl(root / "heldout.jsonl", rows(13))
    return root
