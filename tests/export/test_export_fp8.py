"""FP8 both ways, against references in float64 (spec 3.4, E07, E09)."""

import json
from pathlib import Path

import pytest
import torch
from export_tiny import make_model, save
from safetensors.torch import load_file, save_file

from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_json
from rlmake.export import bf16, dequantize, fp8, writer
from rlmake.export.sources import Spec


def reference(weight: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule of spec 3.4, block by block in float64; scales and results rounded to what is stored."""
    rows, cols = weight.shape
    q = torch.zeros(rows, cols, dtype=torch.float64)
    scale = torch.zeros(-(-rows // block), -(-cols // block), dtype=torch.float64)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            s = (weight[part].double().abs().max() / 448).clamp(min=1e-12).float().double()
            scale[i, j] = s
            q[part] = (weight[part].double() / s).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    return q, scale


SHAPES = [(128, 128), (300, 257), (1, 1), (127, 640), (256, 100), (130, 1300)]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_and_back_equals_float64(shape, kernels):
    torch.manual_seed(sum(shape))
    weight = (torch.randn(shape) * torch.logspace(-3, 2, shape[1])).to(torch.bfloat16)
    q, scale = fp8.quantize_block(weight)
    q_ref, scale_ref = reference(weight)
    assert scale.dtype == torch.float32 and q.dtype == torch.float8_e4m3fn
    assert torch.equal(scale.double(), scale_ref) and torch.equal(q.double(), q_ref)
    back = dequantize.dequantize_block(q, scale)
    wide = scale_ref.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    assert torch.equal(back, (q_ref * wide).to(torch.bfloat16))


@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_within_half_a_step(shape, kernels):
    torch.manual_seed(1)
    weight = torch.randn(shape).to(torch.bfloat16)
    q, scale = fp8.quantize_block(weight)
    wide = scale.double().repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    # e4m3: three mantissa bits, smallest normal exponent -6.
    step = torch.exp2((weight.double().abs() / wide).clamp(min=2**-6).log2().floor() - 3) * wide
    assert bool(((q.double() * wide - weight.double()).abs() <= step / 2 * (1 + 1e-6)).all())


def test_zero_and_tiny_blocks(kernels):
    weight = torch.zeros(256, 256)
    weight[0, 0] = 1
    q, scale = fp8.quantize_block(weight)
    assert not q.float().isnan().any() and scale.isfinite().all()
    assert torch.equal(dequantize.dequantize_block(q, scale).float(), weight)
    q, scale = fp8.quantize_block(torch.full((128, 128), 1e-38))
    assert q.float().isfinite().all() and (scale == 1e-12).all()


@pytest.mark.skipif(fp8._kernels is None, reason="installed without a C compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_kernels_give_the_same_bytes(dtype):
    """Of every bf16 number, in blocks of many scales; of fp32 of every exponent, ties among them; of views, and of
    tensors at odd addresses."""
    torch.manual_seed(0)
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()].view(-1, 120)
    some = torch.randint(-(2**31), 2**31, (700, 300), dtype=torch.int32).view(torch.float32)
    some[::2] = (some[::2].view(torch.int32) & -0x8000 | 0x8000).view(torch.float32)  # half-way between two of bf16
    some = torch.where(some.isfinite() & (some.abs() < 3e38), some, 0)
    for weight in (every, every[torch.randperm(len(every))], some, some.sort().values, some.sort(0).values):
        for block in (128, 64, 100, 1, 1500):
            weight = weight.to(dtype)
            odd = bytearray(b"x" + weight.contiguous().view(torch.uint8).numpy().tobytes())
            odd = torch.frombuffer(odd, dtype=dtype, offset=1).view(weight.shape)
            for part in (weight, weight[3:, 5:], weight.t(), odd):
                found, expected = fp8.quantize_block(part, block), fp8.quantize_torch(part, block)
                assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
                assert torch.equal(found[1], expected[1])
    (_, piece), *rest = writer.checked("w", some, torch.bfloat16)
    assert not rest and torch.equal(piece.view(torch.int16), some.to(torch.bfloat16).view(torch.int16).reshape(-1))


# A mixture of experts, as E09 lists it: [name, shape, becomes FP8].
MIXED = [
    ("model.embed_tokens.weight", (64, 160), False),
    ("model.layers.0.self_attn.q_proj.weight", (130, 160), True),
    ("model.layers.0.self_attn.q_proj.bias", (130,), False),
    ("model.layers.0.input_layernorm.weight", (160,), False),
    ("model.layers.0.mlp.gate.weight", (4, 160), False),
    ("model.layers.0.mlp.experts.0.gate_proj.weight", (96, 160), True),
    ("model.layers.0.mlp.experts.1.down_proj.weight", (160, 96), True),
    ("model.layers.0.mlp.shared_expert_gate.weight", (1, 160), False),
    ("model.layers.0.linear_attn.in_proj_a.weight", (8, 160), False),
    ("model.visual.blocks.0.attn.qkv.weight", (48, 160), False),
    ("lm_head.weight", (64, 160), False),
]


@pytest.fixture
def mixed(tmp_path) -> Path:
    """A bf16 release in two shards with an index."""
    folder = tmp_path / "moe"
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape, _ in MIXED}
    names, weight_map = list(tensors), {}
    for n, part in enumerate((names[:6], names[6:]), 1):
        file = f"model-{n:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 1}, "weight_map": weight_map})
    write_json(folder / "config.json", {"model_type": "toy", "dtype": "bfloat16", "text_config": {"dtype": "float32"}})
    (folder / "notes.txt").write_text("travels along")
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def test_what_is_quantised_and_what_the_config_says(mixed):
    facts = fp8.quantize(mixed)
    out = mixed.with_name("moe-FP8")
    before, after = tensors_of(mixed), tensors_of(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values()) == facts["bytes"]
    assert facts["shards"] == sorted(path.name for path in mixed.glob("*.safetensors"))
    for name, shape, quantised in MIXED:
        if quantised:
            q, scale = reference(before[name])
            assert after[name].dtype == torch.float8_e4m3fn and torch.equal(after[name].double(), q)
            assert after[name + "_scale_inv"].dtype == torch.float32
            assert torch.equal(after[name + "_scale_inv"].double(), scale)
            assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
        else:
            assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], before[name])
            assert name + "_scale_inv" not in after
    config = json.loads((out / "config.json").read_text())
    kept = sorted(
        n.removesuffix(".weight") for n, shape, q in MIXED if n.endswith(".weight") and len(shape) == 2 and not q
    )
    assert config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }  # fmt: skip
    assert (out / "notes.txt").read_text() == "travels along"


def test_there_and_back(mixed):
    fp8.quantize(mixed)
    dequantize.export(mixed.with_name("moe-FP8"))
    before, after = tensors_of(mixed), tensors_of(mixed.with_name("moe-FP8-BF16"))
    assert before.keys() == after.keys()
    for name, shape, quantised in MIXED:
        expected = before[name]
        if quantised:
            q, scale = reference(before[name])
            wide = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
            expected = (q * wide).to(torch.bfloat16)
        assert after[name].dtype == torch.bfloat16 and torch.equal(after[name], expected), name
    config = json.loads((mixed.with_name("moe-FP8-BF16") / "config.json").read_text())
    assert "quantization_config" not in config and config["text_config"]["dtype"] == "bfloat16"


def test_scales_in_another_shard(mixed, tmp_path):
    fp8.quantize(mixed)
    out = mixed.with_name("moe-FP8")
    tensors = tensors_of(out)
    parts = [{n: t for n, t in tensors.items() if n.endswith("_scale_inv") is scales} for scales in (False, True)]
    for path in out.glob("*.safetensors"):
        path.unlink()
    weight_map = {}
    for n, part in enumerate(parts, 1):
        save_file(part, out / f"model-{n:05d}-of-00002.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{n:05d}-of-00002.safetensors")
    write_json(out / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    facts = dequantize.export(out, tmp_path / "back")
    assert tensors_of(tmp_path / "back").keys() == tensors_of(mixed).keys()
    assert facts["shards"] == ["model-00001-of-00002.safetensors"]  # nothing of the second one is left


def test_refusals(mixed, tmp_path):
    fp8.quantize(mixed)
    out = mixed.with_name("moe-FP8")
    with pytest.raises(UserError, match="already"):
        fp8.quantize(out, tmp_path / "x")
    with pytest.raises(UserError, match="no FP8 weight"):
        dequantize.export(mixed, tmp_path / "x")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    write_json(out / "config.json", config)
    with pytest.raises(UserError, match="ue8m0"):
        dequantize.export(out, tmp_path / "x")
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file({"model.norm.weight": torch.ones(4)}, plain / "model.safetensors")
    write_json(plain / "config.json", {})
    with pytest.raises(UserError, match="no weight that FP8 applies to"):
        fp8.quantize(plain, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_damaged_releases_are_one_line(mixed, tmp_path):
    fp8.quantize(mixed)
    out = mixed.with_name("moe-FP8")
    config, index = json.loads((out / "config.json").read_text()), out / "model.safetensors.index.json"

    def refused(match):
        with pytest.raises(UserError, match=match) as caught:
            dequantize.export(out, tmp_path / "x")
        assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "x").exists()

    for size in ("x", [0, 0], [64], [128.5, 128], 128):
        config["quantization_config"]["weight_block_size"] = size
        write_json(out / "config.json", config)
        refused("weight_block_size is .*, expected two positive integers")
    write_json(out / "config.json", [])
    refused("config.json: not a model's configuration")
    write_json(out / "config.json", {})
    for broken in ({}, [], {"weight_map": []}, {"weight_map": {"a": 1}}):
        write_json(index, broken)
        refused("holds no weight_map")
    index.unlink()
    vector = {"a.weight": torch.ones(4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)}
    save_file(vector, out / "model.safetensors")
    refused(r"a\.weight \[4\] is FP8, but no matrix")


def test_a_type_that_no_export_holds_is_named(tmp_path, base):
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", {})
    save_file({"rope.freqs": torch.ones(3, dtype=torch.complex64)}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model\.safetensors: rope\.freqs is of type C64, expected BOOL, U8, "
    ) as caught:
        fp8.quantize(tmp_path / "model")
    assert len(str(caught.value).splitlines()) == 1
    model = make_model()
    model.register_buffer("freqs", torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UserError, match=r"^tensor freqs is of type complex64, expected BOOL, U8, ") as caught:
        bf16.export(save(tmp_path / "run", model, base), tmp_path / "weights")
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "weights").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_is_named(tmp_path, value, kernels):
    folder = tmp_path / "bad"
    folder.mkdir()
    weight = torch.ones(256, 256, dtype=torch.bfloat16)
    weight[200, 3] = value
    save_file({"model.layers.0.mlp.up_proj.weight": weight}, folder / "model.safetensors")
    write_json(folder / "config.json", {})
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        fp8.quantize(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_directly_from_a_checkpoint_equals_by_way_of_bf16(tmp_path, base, kernels):
    checkpoint = save(tmp_path / "run", make_model(tied=False), base)
    bf16.export(checkpoint, tmp_path / "weights")
    fp8.quantize(tmp_path / "weights", tmp_path / "two")
    fp8.export(checkpoint, tmp_path / "one")
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)
    assert (tmp_path / "one" / "config.json").read_text() == (tmp_path / "two" / "config.json").read_text()
    assert one["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_pieces_of_any_size_give_the_same_bytes(tmp_path, monkeypatch):
    """Of matrices, stacks of them and what is kept; a release with rows and columns beyond whole blocks."""
    torch.manual_seed(0)
    shapes = {"layers.0.mlp.up_proj.weight": (300, 257), "layers.0.mlp.experts.down_proj": (3, 300, 140),
              "embed_tokens.weight": (70, 33), "norm.weight": (33,)}  # fmt: skip
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", {})
    tensors = {f"model.{name}": torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model" / "model.safetensors")

    def there_and_back(name: str) -> list[bytes]:
        fp8.quantize(tmp_path / "model", tmp_path / name)
        dequantize.export(tmp_path / name, tmp_path / f"{name}-back")
        return [(tmp_path / out / "model.safetensors").read_bytes() for out in (name, f"{name}-back")]

    whole = there_and_back("whole")
    for module in (writer, fp8, dequantize):
        monkeypatch.setattr(module, "PIECE", 64)
    monkeypatch.setattr(fp8, "TILE", 100)
    monkeypatch.setattr(writer, "GROUP", 1)
    monkeypatch.setattr(writer, "WRITE_BACK", 1000)
    assert there_and_back("parts") == whole


def test_of_tensors_with_more_axes_only_stacked_experts_are_quantised():
    spec = Spec(torch.bfloat16, (8, 512, 512))
    assert fp8.is_quantized("model.layers.0.mlp.experts.gate_up_proj", spec)
    assert not fp8.is_quantized("model.layers.0.mlp.experts.gate_up_proj_bias", spec)
    assert not fp8.is_quantized("model.layers.0.linear_attn.conv1d.weight", spec)


def test_blocks_fit_the_widths_that_engines_need_divided():
    def model(hidden: int, kv: int, inner: int) -> dict[str, fp8.Spec]:
        shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
                  "self_attn.v_proj": (kv, hidden), "mlp.gate_proj": (inner, hidden),
                  "mlp.down_proj": (hidden, inner)}  # fmt: skip
        return {f"model.layers.0.{name}.weight": fp8.Spec(torch.bfloat16, shape) for name, shape in shapes.items()}

    assert fp8.block_of(model(1024, 1024, 3072)) == 128
    assert fp8.block_of(model(576, 192, 1536)) == 64  # SmolLM2-135M
    assert fp8.block_of(model(512, 192, 1024)) == 64  # the key's rows lie before the value's
    assert fp8.block_of(model(96, 96, 256)) == 128  # neither fits
    rows = {"model.layers.0.self_attn.kv_a_proj_with_mqa.weight": fp8.Spec(torch.bfloat16, (576, 1024))}
    assert fp8.block_of(rows) == 128  # as DeepSeek releases it
