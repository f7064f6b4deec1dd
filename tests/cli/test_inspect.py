"""`rlmake inspect-data`: rows as they will be trained, counts, and bad input in one line."""

import json
import subprocess
import sys

import pytest

from rlmake.config import InitConfig
from rlmake.models import init


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("inspect")
    rows = [{"prompt": f"say {i}", "completion": "yes " * (1 + i % 3)} for i in range(20)]
    rows.append({"messages": [{"role": "user", "content": "only a question"}]})
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "model").mkdir()
    init.make(InitConfig(tokenizer={"text": str(root / "train.jsonl"), "vocab_size": 300}), root / "model")
    (root / "sft.toml").write_text(
        f'model.name = "{root}/model"\n[data]\nname = "{root}/train.jsonl"\nseq_len = 64\nbatch_size = 2\n'
        '[renderer]\nname = "custom"\nimport_path = "rlmake.models.chatml.ChatMLRenderer"\n'
        "[deployment]\nnum_train_gpus = 0\nnum_infer_gpus = 0\n"
    )
    return root


def call(*args) -> subprocess.CompletedProcess:
    code = "from rlmake.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "inspect-data", *map(str, args)], capture_output=True, text=True, timeout=200
    )


def test_rows_counts_and_what_is_skipped(folder):
    done = call("@", folder / "sft.toml", "-n", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("── row ") == 2 and "<|im_start|>assistant\n⟦yes" in done.stdout
    assert "20 trained, 1 skipped" in done.stdout and "1 × no trained token" in done.stdout
    assert "rows of 64 tokens, padding" in done.stdout


def test_bad_input_is_one_line(folder):
    done = call("@", folder / "sft.toml", "--data.name", folder / "nowhere.jsonl")
    assert done.returncode == 2 and "nowhere.jsonl" in done.stderr and "Traceback" not in done.stderr
    done = call("@", folder / "sft.toml", "--val")
    assert done.returncode == 2 and "val" in done.stderr and "Traceback" not in done.stderr
