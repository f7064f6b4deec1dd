"""Mixtures of experts: the layout of releases, each expert with blocks of its own."""

from pathlib import Path

import pytest
import torch
from export_tiny import save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlmake.core.jsonio import read_json, write_json
from rlmake.export import bf16, dequantize, fp8

EXPERTS, WIDTH, INNER = 3, 160, 72
IDS = torch.tensor([[5, 9, 40, 41, 42, 8]])


@pytest.fixture(scope="module")
def mixture() -> Qwen3MoeForCausalLM:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=WIDTH, intermediate_size=64, moe_intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=2,
        tie_word_embeddings=False, eos_token_id=3,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_experts_leave_the_checkpoint_one_by_one(tmp_path, base, mixture):
    bf16.export(save(tmp_path / "run", mixture, base), tmp_path / "weights", max_shard=100_000)
    found, trained = weights(tmp_path / "weights"), mixture.state_dict()
    stack = trained["model.layers.1.mlp.experts.gate_up_proj"].to(torch.bfloat16)
    for expert in range(EXPERTS):
        name = f"model.layers.1.mlp.experts.{expert}"
        assert torch.equal(found[f"{name}.gate_proj.weight"], stack[expert, :INNER])
        assert torch.equal(found[f"{name}.up_proj.weight"], stack[expert, INNER:])
    assert not [name for name in found if name.endswith("gate_up_proj")]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.bfloat16)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained[name].to(torch.bfloat16)), name
    with torch.no_grad():
        assert torch.equal(loaded.float()(IDS).logits, rounded(mixture)(IDS).logits)


def rounded(model):
    twin = Qwen3MoeForCausalLM(model.config).float().eval()
    twin.load_state_dict({name: tensor.to(torch.bfloat16).float() for name, tensor in model.state_dict().items()})
    return twin


def test_fp8_from_the_checkpoint_is_fp8_of_the_bf16_export(tmp_path, base, mixture):
    folder = save(tmp_path / "run", mixture, base)
    bf16.export(folder, tmp_path / "weights")
    fp8.quantize(tmp_path / "weights", tmp_path / "two")
    fp8.export(folder, tmp_path / "one")
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert one[name].dtype == torch.float8_e4m3fn and one[f"{name}_scale_inv"].shape == (2, 1)
    kept = read_json(tmp_path / "one" / "config.json")["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]


def test_a_stacked_directory_has_blocks_per_expert_there_and_back(tmp_path, base):
    torch.manual_seed(2)
    stack = torch.randn(EXPERTS, 2 * INNER, WIDTH) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    stack[1, :, 128:] = 0.0
    stack = stack.to(torch.bfloat16)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = tmp_path / "stacked"
    folder.mkdir()
    save_file({name: stack, "model.norm.weight": torch.ones(4)}, folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", {"model_type": "other"})
    fp8.quantize(folder, tmp_path / "fp8")
    found = weights(tmp_path / "fp8")
    assert found[name].shape == stack.shape and found[f"{name}_scale_inv"].shape == (EXPERTS, 2, 2)
    for expert in range(EXPERTS):
        q, scale = fp8.quantize_block(stack[expert])
        assert torch.equal(found[name][expert].view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(found[f"{name}_scale_inv"][expert], scale)
    dequantize.export(tmp_path / "fp8", tmp_path / "back")
    back = weights(tmp_path / "back")[name]
    assert back.isfinite().all()
    for expert in range(EXPERTS):
        assert torch.equal(back[expert], dequantize.dequantize_block(*fp8.quantize_block(stack[expert])))
