"""Adapters: what is adapted, names, the exact forward with them, and the files in PEFT's layout."""

import json
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from rlmake.core.errors import UserError
from rlmake.models import exact, loading, lora

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def model_dir(tiny):
    return tiny[0]


def adapted(model_dir, targets=ALL, dropout=0.0, rank=4):
    model = loading.load(model_dir, attn=exact.NAME)
    return model, lora.inject(model, lora.Adapter(str(model_dir), rank, 16.0, dropout, list(targets)), seed=3)


def logits(model):
    ids = torch.arange(20)[None] % model.config.vocab_size
    hidden = exact.packed_forward(model, ids, torch.arange(20)[None], [20])
    return hidden @ model.lm_head.weight.T


def test_only_the_adapter_trains_and_it_starts_as_the_base(model_dir):
    plain = loading.load(model_dir, attn=exact.NAME)
    model, adapter = adapted(model_dir)
    names = [name for name, _ in lora.parameters(model)]
    layers = plain.config.num_hidden_layers
    assert len(names) == 2 * len(ALL) * layers and "model.layers.0.self_attn.q_proj.lora_A.weight" in names
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(p) for _, p in lora.parameters(model)}
    assert torch.equal(logits(model), logits(plain))
    assert adapter.target_modules == sorted(ALL)
    again, _ = adapted(model_dir)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(lora.parameters(model), lora.parameters(again), strict=True))


def test_the_formula_and_the_file_that_peft_reads(model_dir, tmp_path):
    model, adapter = adapted(model_dir, ["q_proj"])
    for name, p in lora.parameters(model):
        if name.endswith("lora_B.weight"):
            p.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    by_hand = loading.load(model_dir, attn=exact.NAME)
    parts = dict(lora.parameters(model))
    with torch.no_grad():
        for i, layer in enumerate(by_hand.model.layers):
            stem = f"model.layers.{i}.self_attn.q_proj"
            delta = parts[f"{stem}.lora_B.weight"].double() @ parts[f"{stem}.lora_A.weight"].double()
            layer.self_attn.q_proj.weight += (16 / 4 * delta).float()
    assert torch.allclose(logits(model), logits(by_hand), atol=1e-5)
    assert not torch.allclose(logits(model), logits(loading.load(model_dir, attn=exact.NAME)), atol=1e-3)

    save_file({lora.FILE_PREFIX + name: p.detach() for name, p in parts.items()}, tmp_path / lora.WEIGHTS)
    lora.write_config(adapter, tmp_path)
    theirs = PeftModel.from_pretrained(loading.load(model_dir, attn=exact.NAME), tmp_path)
    assert torch.equal(logits(theirs.base_model.model), logits(model))
    assert lora.read_config(tmp_path) == adapter


def test_part_of_the_modules_is_named_in_full(model_dir):
    _, adapter = adapted(model_dir, [r".*layers\.0\..*\.(q|k)_proj", "down_proj"])
    assert adapter.target_modules == [
        "down_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.q_proj",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("targets", "message"),
    [(["q_prj"], "did you mean 'q_proj'"), (["lm_head"], "no linear layer fits 'lm_head'"), (["("], "expression")],
)
def test_a_target_that_fits_nothing_is_named(model_dir, targets, message):
    with pytest.raises(UserError, match=r"model\.lora\.target_modules.*") as caught:
        adapted(model_dir, targets)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([], "expected the settings of an adapter"),
        ({"peft_type": "IA3"}, "only plain LoRA"),
        ({"use_dora": True}, "only plain LoRA without biases is known here: use_dora"),
        ({"target_modules": "all-linear"}, "target_modules must be a list of names"),
        ({"target_modules": [3]}, "target_modules must be a list of names"),
        *(({key: "x"}, "expected numbers in r") for key in ("r", "lora_alpha", "lora_dropout")),
        *(({"r": rank}, "expected numbers in r") for rank in (None, 0, [8], math.inf)),
    ],
)
def test_an_adapters_settings_of_odd_shape_are_named(tmp_path, change, said):
    lora.write_config(lora.Adapter("base", 8, 16.0, 0.0, ["q_proj"]), tmp_path)
    path = tmp_path / lora.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change if isinstance(change, dict) else change))
    with pytest.raises(UserError, match=rf"{lora.CONFIG}: {said}"):
        lora.read_config(tmp_path)


def test_the_forward_with_an_adapter_is_exact(model_dir):
    model, _ = adapted(model_dir, dropout=0.5)
    model.train()
    before = [p.detach().clone() for _, p in lora.parameters(model)]
    with lora.stirred(model):
        assert exact.self_test(model).ok
    assert model.training and all(torch.equal(a, b) for a, (_, b) in zip(before, lora.parameters(model), strict=True))


def test_a_wrong_adapter_is_refused_whole(model_dir):
    model, _ = adapted(model_dir, ["q_proj"])
    good = {name: torch.ones_like(p) for name, p in lora.parameters(model)}
    first = next(iter(good))
    cases = [
        ({k: v for k, v in good.items() if k != first}, "is missing"),
        (good | {"x": torch.ones(1)}, "does not belong"),
        (good | {first: torch.ones(2, 2)}, "has shape"),
    ]
    for tensors, message in cases:
        with pytest.raises(UserError, match=message):
            lora.assign(model, tensors, "here")
    assert all(not torch.equal(good[name], p) for name, p in lora.parameters(model))
