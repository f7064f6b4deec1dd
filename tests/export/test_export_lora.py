"""A LoRA checkpoint as adapter and merged (E05): PEFT loads it, and the numbers are the trained model's."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_tiny import complete, make_model, trainer_half
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlmake import checkpoint as ck
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json
from rlmake.core.rundir import step_dir
from rlmake.export import adapter, bf16, cli, merge
from rlmake.models import lora

IDS = torch.tensor([[5, 9, 40, 41, 42, 8]])


@pytest.fixture
def trained(tmp_path, base):
    """`(checkpoint, the trained model)`: rank 4 and alpha 16 on two kinds of modules, B not zero any more."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = lora.inject(model, lora.Adapter(str(base), 4, 16, 0.1, ["q_proj", "down_proj"]), seed=3)
    with torch.no_grad():
        for name, parameter in lora.parameters(model):
            if name.endswith("lora_B.weight"):
                parameter.normal_(0.0, 0.3)
    half = step_dir(tmp_path / "run", 7) / "trainer.tmp-x"
    half.mkdir(parents=True)
    trainer_half(half, make_model(), base, lora=settings.to_record())
    for path in half.glob("*.distcp"):
        path.unlink()
    dcp.save({f"model.{name}": p.detach() for name, p in lora.parameters(model)}, checkpoint_id=half, no_dist=True)
    ck.commit(half, half.parent, "trainer")
    return complete(tmp_path / "run", 7), model.eval()


def test_peft_loads_the_adapter_and_it_is_the_trained_model(trained, tmp_path, base):
    folder, model = trained
    facts = adapter.export(folder, tmp_path / "adapter")
    assert facts["format"] == "adapter" and facts["step"] == 7 and facts["shards"] == ["adapter_model.safetensors"]
    config = read_json(tmp_path / "adapter" / "adapter_config.json")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 16, "LORA")
    assert config["base_model_name_or_path"] == str(base) and config["target_modules"] == ["down_proj", "q_proj"]
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert len(names) == 8
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight" in names
    assert not (tmp_path / "adapter" / "model.safetensors.index.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        before = plain(IDS).logits.clone()
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
        assert not torch.allclose(before, loaded(IDS).logits, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template


def test_merged_weights_are_base_plus_scaled_product_rounded_once(trained, tmp_path, base):
    folder, model = trained
    facts = merge.export(folder, tmp_path / "weights", max_shard=40_000)
    assert facts["format"] == "bf16" and len(facts["shards"]) > 1
    found = {}
    for path in (tmp_path / "weights").glob("*.safetensors"):
        found |= load_file(path)
    before, learnt = load_file(base / "model.safetensors"), dict(lora.parameters(model))
    assert found.keys() == before.keys()
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        wanted = weight.double()
        if f"{module}.lora_A.weight" in learnt:
            a, b = (learnt[f"{module}.lora_{part}.weight"].detach().double() for part in "AB")
            wanted = wanted + 16 / 4 * (b @ a)
            assert not torch.equal(found[name], weight.to(torch.bfloat16))
        ulp = torch.exp2(wanted.abs().clamp(min=1e-30).log2().floor() - 7)
        assert bool(((found[name].double() - wanted).abs() <= ulp / 2 * (1 + 1e-4) + 1e-7).all()), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32).eval()
    with torch.no_grad():
        near, far = (other(IDS).logits for other in (loaded, make_model().eval()))
        truth = model(IDS).logits
    assert math.sqrt((near - truth).square().mean()) < 0.05 * math.sqrt((far - truth).square().mean())
    assert read_json(tmp_path / "weights" / "config.json")["dtype"] == "bfloat16"


def test_what_does_not_apply_is_one_line(trained, tmp_path, base, capsys):
    folder, _ = trained
    with pytest.raises(UserError, match="a LoRA checkpoint has no full weights; export it as 'adapter' or 'merge'"):
        bf16.export(folder, tmp_path / "no")
    half = step_dir(tmp_path / "full", 3) / "trainer.tmp-x"
    half.mkdir(parents=True)
    trainer_half(half, make_model(), base)
    ck.commit(half, half.parent, "trainer")
    full = complete(tmp_path / "full", 3)
    for worker in (adapter, merge):
        with pytest.raises(UserError, match="no LoRA checkpoint"):
            worker.export(full, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    assert cli.export(["adapter", str(folder)]) == 0 and cli.export(["merge", str(folder / "trainer")]) == 0
    assert (folder / "adapter" / "adapter_config.json").is_file() and (folder / "weights" / "config.json").is_file()
    assert "adapter, 8 tensors" in capsys.readouterr().out
    assert ck.verify(folder) == []


def test_another_base_model_is_refused(trained, tmp_path, base):
    folder, _ = trained
    record = read_json(folder / "trainer" / "model.json")
    (base / "model.safetensors").rename(base / "aside")
    try:
        with pytest.raises(UserError, match="holds neither"):
            merge.export(folder, tmp_path / "no")
    finally:
        (base / "aside").rename(base / "model.safetensors")
    assert record["lora"]["base"] == str(base)
