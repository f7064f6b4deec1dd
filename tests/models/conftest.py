"""A tiny model made by `init`, shared by the tests of this room."""

import json

import pytest

from rlmake.config import InitConfig
from rlmake.models import init

TEXT = [
    "Write the user's text backwards.\nhello world, the quick brown fox jumps over the lazy dog",
    "a statement is executed; an expression is evaluated: names refer to objects (§ 4.1) — naïve café",
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`(directory, facts)` of a two-layer model."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "train.jsonl").write_text("".join(json.dumps({"prompt": text, "n": 1}) + "\n" for text in TEXT * 20))
    cfg = InitConfig(tokenizer={"text": str(root / "train.jsonl"), "vocab_size": 400})
    out = root / "model"
    return out, init.make(cfg, out)


@pytest.fixture(scope="session")
def tokenizer(tiny):
    from rlmake.models.renderer import load_tokenizer

    return load_tokenizer(tiny[0])
