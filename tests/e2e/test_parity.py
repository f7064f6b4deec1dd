"""Trainer and engine compared by their real processes. `make test-vllm` does it with vLLM on the CPU."""

import os

import pytest
from test_engines import ENGINES, VLLM_PYTHON

from rlmake.config import RLConfig, parse
from rlmake.core.jsonio import read_json
from rlmake.launch import parity

CHATML = {"name": "custom", "import_path": "rlmake.models.chatml.ChatMLRenderer"}
FP32 = {"transformers": 0.0, "vllm": 1e-4}  # the largest difference of a logprob


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("engine", ENGINES)
def test_trainer_and_engine(tmp_path, parts, engine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = {"env": {"taskset": {"id": "reverse-text", "path": str(parts["data"])}}}
    inference = {"vllm": {"max_model_len": 64}}
    if engine == "vllm":
        inference |= {"engine": "vllm", "python": VLLM_PYTHON}
        inference["vllm"] |= {"enforce_eager": True}
    raw = {
        "model": {"name": "outputs/gone/weights"},
        "seq_len": 256,
        "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": 1},
        "orchestrator": {"renderer": CHATML, "batch_size": 4, "train": {"group_size": 4, "source": [source]}},
        "inference": inference,
    }
    out = tmp_path / "parity-0123456789abcdef"
    identity = {"run": "toy", "model_fingerprint": "f" * 16, "model_step": 3, "model_content": "c"}
    options = {"identity": identity, "argv": ["test"], "files": [], "fingerprint": "0123456789abcdef"}
    parity.run(parse(RLConfig, raw), parts["model"], out, **options)
    report = read_json(out / "report.json")
    assert {key: report[key] for key in identity} == identity
    assert report["engine"]["type"] == engine and report["engine"]["version"]
    found = {(row["dtype"], row["attention"]): row for row in report["pairs"]}
    assert set(found) == {(d, a) for d in ("float32", "bfloat16") for a in ("exact", "varlen")}
    for (dtype, attention), row in found.items():
        assert row["sequences"] == 16 and row["tokens"] > 100 and row["vocab"] == 272
        if dtype == "bfloat16":
            assert 1e-4 < row["max_abs"] < 0.3 and row["worst"]["engine"] != row["worst"]["trainer"]
        elif attention == "exact":
            assert row["max_abs"] <= FP32[engine] and row["chosen_max_abs"] <= FP32[engine], row
        else:
            assert row["max_abs"] <= 1e-4, row
    assert not (out / "answers").exists() and os.listdir(out / "logs")
