"""Mixtures of experts at toy size: training, frozen routers, the page's metrics, both layouts of the weights."""

import json
import shutil

import pytest
import torch
from test_sft_run import CONSTANT, run, tensors
from test_sft_run import config as config  # the fixture
from transformers import Qwen3MoeConfig

from rlmake.core.errors import UserError
from rlmake.models import exact, loading
from rlmake.monitors import read
from rlmake.trainer.experts import RouterStatistics, _load
from rlmake.trainer.families import qwen3_moe


@pytest.fixture(scope="module")
def moe_dir(model_dir, tmp_path_factory):
    """Two layers of four experts, two chosen; the tokenizer of the dense toy."""
    out = tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(model_dir, out, ignore=shutil.ignore_patterns("*.safetensors*", "config.json"))
    base = json.loads((model_dir / "config.json").read_text())
    config = Qwen3MoeConfig(
        vocab_size=base["vocab_size"], hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=64, moe_intermediate_size=16, num_experts=4,
        num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True, max_position_embeddings=256,
        eos_token_id=base["eos_token_id"], pad_token_id=base["pad_token_id"], bos_token_id=None,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    model = loading.build(config, attn="eager")
    g = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=g) * 0.1
        for name, shape in loading.expected(model).items()
    }
    loading.save_hf(weights, out, config, dtype="float32")
    return out


def test_it_trains_and_says_how_it_routes(config, tmp_path, moe_dir):
    path = tmp_path / "run"
    run(config(path, max_steps=4, scheduler=CONSTANT, model={"name": str(moe_dir), "ac": {}}))
    rows = [row.metrics for row in read(path) if "loss/mean" in row.metrics]
    assert rows[-1]["loss/mean"] < rows[0]["loss/mean"]
    row = rows[0]
    wanted = {f"expert_load/{name}/{stat}" for name in ("cv", "max_mean", "cold_frac") for stat in ("mean", "max")}
    assert wanted | {"max_vio/mean", "max_vio/max", "routing_confidence/mean"} <= row.keys()
    assert 0.5 <= row["routing_confidence/mean"] <= 1 and 1 <= row["expert_load/max_mean/max"] <= 2
    assert row["max_vio/max"] >= row["max_vio/mean"] >= 0
    saved = tensors(path, 4)
    assert not torch.equal(saved["model.model.layers.0.mlp.gate.weight"], loading.read_weights(moe_dir)[
        "model.layers.0.mlp.gate.weight"])  # fmt: skip


def test_a_frozen_router_stays_and_the_rest_moves(config, tmp_path, moe_dir):
    path = tmp_path / "run"
    run(config(path, max_steps=2, scheduler=CONSTANT, model={"name": str(moe_dir), "freeze_moe_router": True}))
    saved, before = tensors(path, 2), loading.read_weights(moe_dir)
    moved = {name for name, tensor in before.items() if not torch.equal(saved[f"model.{name}"], tensor)}
    assert {name for name in before if name not in moved} == {f"model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert not any("gate.weight" in key for key in saved if key.startswith("optim."))


def test_metrics_by_hand():
    found = _load(torch.tensor([[4.0, 4.0, 4.0, 4.0], [16.0, 0.0, 0.0, 0.0]]))
    assert found["expert_load/cv/max"] == pytest.approx(3**0.5) and found["expert_load/cv/mean"] == pytest.approx(
        3**0.5 / 2
    )
    assert found["expert_load/max_mean/max"] == 4 and found["expert_load/cold_frac/mean"] == 3 / 8


def test_padding_and_recomputation_do_not_count(moe_dir):
    model = loading.load(moe_dir, attn=exact.NAME)
    routers = qwen3_moe.routers(model)
    statistics = RouterStatistics(routers)
    hidden = torch.randn(10, 32)
    with statistics.watching(6):
        for router in routers:
            router(hidden)
    routers[0](hidden)
    assert [int(load.sum()) for load in statistics._passes[0]] == [12, 12] and len(statistics._passes) == 1


def test_experts_that_lie_apart_are_stacked(moe_dir):
    together = loading.read_weights(moe_dir)
    apart = {}
    for name, tensor in together.items():
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for index, one in enumerate(tensor):
                gate, up = one.chunk(2)
                apart |= {f"{stem}.{index}.gate_proj.weight": gate, f"{stem}.{index}.up_proj.weight": up}
        elif kind == "down_proj":
            apart |= {f"{stem}.{index}.down_proj.weight": one for index, one in enumerate(tensor)}
        else:
            apart[name] = tensor
    model = loading.load(moe_dir, attn=exact.NAME)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loading.assign(model, apart, "hub")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    del apart["model.layers.0.mlp.experts.1.up_proj.weight"]
    with pytest.raises(UserError, match="down_proj is missing"):
        loading.assign(model, apart, "hub")
