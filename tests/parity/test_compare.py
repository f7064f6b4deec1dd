"""Trainer and engine compared, in one process: the trainer's numbers, the report's, and what is compared at all."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlmake.config import InitConfig, RLConfig, SFTConfig, parse
from rlmake.config import parity as config
from rlmake.config.trainer import LoRAConfig
from rlmake.models import init
from rlmake.parity import report
from rlmake.parity.order import Answer, Order, load, save
from rlmake.parity.prompts import messages_of, of_run
from rlmake.parity.score import build, packed, score
from rlmake.trainer import world as worlds

CHATML = {"name": "custom", "import_path": "rlmake.models.chatml.ChatMLRenderer"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("model")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 30)
    architecture = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256, "head_dim": 32}
    architecture |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
    tokenizer = {"text": str(root / "text.txt"), "vocab_size": 280}
    (root / "model").mkdir()
    init.make(
        parse(InitConfig, {"architecture": architecture, "tokenizer": tokenizer, "dtype": "float32"}), root / "model"
    )
    return root / "model"


def sft(model: Path, rows: str = "rows.jsonl", **deployment) -> SFTConfig:
    data = {"name": rows, "seq_len": 256, "num_workers": 0}
    place = {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": 1} | deployment
    return parse(SFTConfig, {"model": {"name": str(model)}, "data": data, "renderer": CHATML, "deployment": place})


def rl(model: Path, **inference) -> RLConfig:
    source = {"env": {"taskset": {"id": "reverse-text", "path": "rows.jsonl"}}}
    orchestrator = {"renderer": CHATML, "batch_size": 4, "train": {"group_size": 4, "source": [source]}}
    place = {"num_train_gpus": 0, "num_infer_gpus": 0}
    raw = {"model": {"name": str(model)}, "orchestrator": orchestrator, "deployment": place, "inference": inference}
    return parse(RLConfig, raw)


@pytest.fixture
def world():
    made = worlds.start(gpu=False, threads=1)
    yield made
    made.close()


def plain(model: Path, answers: list[Answer]) -> list[np.ndarray]:
    """Logprobs of all tokens by transformers' own model, one sequence at a time."""
    bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for one in answers:
        ids = torch.from_numpy(np.concatenate([one.prompt, one.completion]))[None]
        with torch.no_grad():
            logprobs = bare(ids).logits[0].double().log_softmax(-1)
        found.append(logprobs[len(one.prompt) - 1 : -1].numpy())
    return found


@pytest.mark.parametrize(("dtype", "attention"), [(d, a) for d in config.DTYPES for a in ("exact", "varlen")])
def test_the_trainers_side(model, world, dtype, attention):
    """Packed and sharded as in a step, the whole vocabulary agrees with a bare model and with what is trained on."""
    rng = np.random.default_rng(0)
    blank = [
        Answer(rng.integers(0, 280, n), rng.integers(0, 280, m), np.zeros(m), np.zeros((m, 280)))
        for n, m in [(3, 9), (40, 1), (7, 70)]
    ]
    answers = [
        Answer(one.prompt, one.completion, one.sampled, whole)
        for one, whole in zip(blank, plain(model, blank), strict=True)
    ]
    policy = build(config.trainer_with(sft(model), str(model), dtype, attention), world)
    rows = packed(answers, 64)
    assert [len(row) for row in rows] == [2, 1], "a row ends where the next sequence does not fit"
    scored = [scores for row in rows for scores in score(policy, row, world)]
    for one, (chosen, whole) in zip(answers, scored, strict=True):
        assert np.array_equal(chosen, whole[np.arange(len(chosen)), one.completion]), "what `forward` trains on"
        assert np.allclose(np.exp(whole.astype(np.float64)).sum(-1), 1, atol=1e-5)
    row = report.pair(dtype, attention, answers, scored, str)
    assert (row["sequences"], row["tokens"], row["vocab"]) == (3, 80, 280)
    assert row["max_abs"] < (1e-4 if dtype == "float32" else 0.5)
    assert dtype == "float32" or row["max_abs"] > 1e-3, "bf16 is not fp32: the type was used"


def test_numbers_of_a_pair():
    """Against the formulas, written out; the worst token is found wherever it is."""
    rng = np.random.default_rng(1)

    def logprobs(n):
        logits = rng.normal(size=(n, 5))
        return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)

    answers = [
        Answer(np.arange(n), np.arange(2) % 5, rng.normal(size=2).astype(np.float32), logprobs(2)) for n in (3, 4)
    ]
    scored = [(one.sampled, one.logprobs) for one in answers]
    same = report.pair("float32", "exact", answers, scored, str)
    assert (same["max_abs"], same["mean_abs"], same["kl_mean"], same["chosen_max_abs"], same["worst"]) == (
        0,
        0,
        0,
        0,
        None,
    )
    other = answers[1].logprobs.copy()
    other[1, 3] -= 0.75
    other[0, 0] += 0.25
    scored[1] = (answers[1].sampled + np.float32(0.5), other)
    row = report.pair("float32", "exact", answers, scored, lambda token: f"<{token}>")
    worst = {"sequence": 1, "position": 5, "token": 3, "text": "<3>"}
    worst |= {"trainer": float(other[1, 3]), "engine": float(answers[1].logprobs[1, 3])}
    assert row["worst"] == worst
    assert math.isclose(row["max_abs"], 0.75, rel_tol=1e-6) and math.isclose(row["mean_abs"], 1.0 / 20, rel_tol=1e-6)
    p = np.exp(answers[1].logprobs.astype(float))
    assert math.isclose(row["kl_mean"], (0.75 * p[1, 3] - 0.25 * p[0, 0]) / 4, rel_tol=1e-5)
    assert math.isclose(row["chosen_mean_abs"], 0.25, rel_tol=1e-6)
    assert "max 0.75" in report.line(row) and "token 3 '<3>' at 1.5" in report.line(row)


def test_what_is_compared(model):
    """Every type and path that the device has; the others with their reasons."""
    run = rl(model)
    pairs, left_out = config.pairs_of(run)
    assert set(pairs) == {(d, a) for d in ("float32", "bfloat16") for a in ("exact", "varlen")}
    assert {one["attention"] for one in left_out} == {f"flash_attention_{n}" for n in (2, 3, 4)}
    assert all("flash attention" in one["reason"] for one in left_out)
    gpu = sft(model, num_train_gpus=1)
    pairs, left_out = config.pairs_of(gpu)
    assert set(pairs) == {("float32", "varlen"), ("bfloat16", "varlen")}
    assert any(one["attention"] == "exact" and "CPU" in one["reason"] for one in left_out)
    assert config.engine_of(gpu).engine == "vllm" and config.gpus_of(gpu) == 1 and config.gpus_of(run) == 0
    both = [config.engine_of(run, "folder", dtype) for dtype in config.DTYPES]
    assert [one.transformers.dtype for one in both] == ["float32", "bfloat16"] and both[0].vllm.model == "folder"
    assert run.inference.vllm.model == str(model), "the run's own configuration is left alone"
    adapted = rl(model, vllm={"enable_lora": True}).model_copy(deep=True)
    adapted.trainer.model.lora = LoRAConfig()
    assert config.trainer_with(adapted, "folder", "float32", "exact").model.lora is None, "merged weights"
    assert not config.engine_of(adapted, "folder").vllm.enable_lora
    vllm = config.engine_of(rl(model, engine="vllm", vllm={"max_num_seqs": 8}), "folder", "bfloat16").vllm
    assert (vllm.dtype, vllm.arguments) == ("bfloat16", {"max_num_seqs": 8, "max_logprobs": -1})


def test_prompts(model, tmp_path, monkeypatch):
    """What tasks ask, and what stands before the first trained token of a row: the same tokens here."""
    monkeypatch.chdir(tmp_path)
    texts = ["fox", "the lazy dog " * 30, "over", "dog"]
    lines = [f'{{"prompt": "{text}", "completion": "{text[::-1]}", "target": "{text[::-1]}"}}\n' for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    of_tasks, of_rows = of_run(rl(model), model, 280, 2, 100), of_run(sft(model), model, 280, 2, 100)
    assert of_tasks == of_rows and len(of_tasks) == 2, "too long a prompt is passed over"
    assert len(of_run(sft(model), model, 280, 16, 100)) == 3, "as many as there are"
    with pytest.raises(Exception, match="no prompt of the run's data has at most 2 tokens: raise seq_len"):
        of_run(sft(model), model, 280, 2, 2)
    user = {"role": "user", "content": "x"}
    assert messages_of({"prompt": "x", "system_prompt": "s"}) == [{"role": "system", "content": "s"}, user]
    assert messages_of({"prompt": [user]}) == [user]
    game = {"id": "JQ", "idx": 0, "prompt": None, "name": None, "timeout": {"agent": None}, "deal": "JQ"}
    assert messages_of(game) == [{"role": "user", "content": '{"deal": "JQ", "id": "JQ"}'}]


def test_records_travel(model, tmp_path):
    order = Order(rl(model), model, tmp_path, {"run": "a/b"})
    (tmp_path / "parity.json").write_text(json.dumps(order.to_json()))
    assert Order.read(tmp_path / "parity.json") == order
    answers = [Answer(np.arange(3), np.arange(n), np.ones(n, np.float32), np.ones((n, 4), np.float32)) for n in (1, 2)]
    save(order.answers("float32"), answers, "0.32.0")
    found, version = load(order.answers("float32"))
    assert version == "0.32.0" and len(found) == 2
    assert all(
        np.array_equal(a, b)
        for x, y in zip(found, answers, strict=True)
        for a, b in zip(vars(x).values(), vars(y).values(), strict=True)
    )
