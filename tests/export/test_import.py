"""Models brought in: the same numbers rounded once, the same tokens, and one line for what can't be brought."""

import json
import shutil

import numpy as np
import pytest
import torch
from export_tiny import make_base, make_model
from gguf_tiny import SPECIAL
from gguf_tiny import make_model as make_gguf_model
from gguf_tiny import write as write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlmake.config import ImportConfig
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.export import bring, fp8

IDS = torch.tensor([[5, 9, 40, 41, 42, 8]])


def make(out, **source):
    out.mkdir(parents=True, exist_ok=True)
    return bring.make(ImportConfig(source=source), out)


def weights(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(("family", "tied", "quantised"), [("llama", True, True), ("qwen3", False, False)])
def test_a_gguf_file_is_the_model_it_was_made_from(tmp_path, family, tied, quantised):
    model = make_gguf_model(family, tied)
    meant = write_gguf(tmp_path / "a b.gguf", model, quantised=quantised)
    facts = make(tmp_path / "out", type="gguf", path=str(tmp_path / "a b.gguf"))
    found = weights(tmp_path / "out")
    assert found.keys() == meant.keys()
    for name, tensor in meant.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    assert facts["parameters"] == sum(tensor.numel() for tensor in meant.values())
    assert facts["vocabulary"] == model.config.vocab_size and facts["quantisation"]["F32"] > 0
    # The same logits in transformers: rotary base, epsilon and head width came along.
    with torch.no_grad():
        for name, tensor in meant.items():
            model.state_dict()[name].copy_(tensor.to(torch.bfloat16))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    config = read_json(tmp_path / "out" / "config.json")
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"] is tied and config["dtype"] == "bfloat16"
    assert config["architectures"] == [type(model).__name__] and "quantization_config" not in config
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()


def test_the_tokenizer_of_a_gguf_file(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_gguf_model("llama"), pre="smollm")
    make(tmp_path / "out", type="gguf", path=str(tmp_path / "m.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "say the <|im_end|> naïve 🧪 12"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert "Ġthe" in tokens and tokens[-2:] == ["1", "2"], "digits stand alone although a merge joins them"
    assert tokens.count("<|im_end|>") == 1
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL] == [0, 1, 2]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id in (2, [2])


def test_gguf_faults_are_one_line(tmp_path):
    def said(path, match):
        with pytest.raises(UserError, match=match) as caught:
            make(tmp_path / "out", type="gguf", path=str(path))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    said(tmp_path / "none.gguf", "no such file")
    said(tmp_path, "is a directory")
    text = tmp_path / "text.gguf"
    text.write_text("version https://git-lfs.github.com/spec/v1\n")
    said(text, "no GGUF file")
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, make_gguf_model("llama"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-5000])
    said(cut, "damaged or cut off")
    scaled = tmp_path / "scaled.gguf"
    write_gguf(scaled, make_gguf_model("llama"), **{"rope_freqs.weight": np.ones(16, np.float32)})
    said(scaled, r"holds \d+ weights, the llama model takes \d+")


def test_a_file_with_another_content_than_stated(tmp_path):
    write_gguf(tmp_path / "m.gguf", make_gguf_model("llama"))
    with pytest.raises(UserError, match=r"m\.gguf: blake3 [0-9a-f]{64}, expected 00"):
        make(tmp_path / "out", type="gguf", path=str(tmp_path / "m.gguf"), blake3="00" * 32)


def test_a_directory_is_rounded_once_with_everything_in_it(tmp_path, base):
    facts = make(tmp_path / "out", type="local", path=str(base))
    there = weights(base)
    assert {name: t.to(torch.bfloat16).tolist() for name, t in there.items()} == {
        name: tensor.tolist() for name, tensor in weights(tmp_path / "out").items()
    }
    assert facts == {"source": "local", "dtype": "bfloat16", "parameters": sum(t.numel() for t in there.values()),
                     "vocabulary": 320}  # fmt: skip
    assert read_json(tmp_path / "out" / "generation_config.json") == read_json(base / "generation_config.json")
    assert (tmp_path / "out" / "modeling_local.py").is_file()


def test_a_tied_head_is_written_once_and_may_be_missing_where_an_index_lists_it(tmp_path, base):
    shutil.copytree(base, tmp_path / "doubled")
    found = load_file(base / "model.safetensors")
    save_file({**found, "lm_head.weight": found["model.embed_tokens.weight"].clone()},
              tmp_path / "doubled" / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    make(tmp_path / "a", type="local", path=str(tmp_path / "doubled"))
    assert "lm_head.weight" not in weights(tmp_path / "a")
    shutil.copytree(base, tmp_path / "ghost")
    names = [*found, "lm_head.weight"]
    write_json(
        tmp_path / "ghost" / "model.safetensors.index.json",
        {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model.safetensors")},
    )
    make(tmp_path / "b", type="local", path=str(tmp_path / "ghost"))
    assert weights(tmp_path / "b").keys() == weights(tmp_path / "a").keys()


def test_an_fp8_release_is_dequantised(tmp_path, base):
    bf = tmp_path / "bf"
    make(bf, type="local", path=str(base))
    fp8.quantize(bf, tmp_path / "fp8")
    make(tmp_path / "out", type="fp8", path=str(tmp_path / "fp8"))
    found, meant = weights(tmp_path / "out"), weights(bf)
    assert found.keys() == meant.keys() and {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert "quantization_config" not in read_json(tmp_path / "out" / "config.json")
    with pytest.raises(UserError, match=r"holds no FP8 weight; it comes in with source\.type = 'local'"):
        make(tmp_path / "no", type="fp8", path=str(bf))


def test_directories_that_are_no_whole_model(tmp_path, base):
    def said(change, match):
        folder = tmp_path / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)
        change(folder)
        with pytest.raises(UserError, match=match) as caught:
            make(tmp_path / "out", type="local", path=str(folder))
        assert "\n" not in str(caught.value)

    def edit(key, value):
        def change(folder):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, key: value}))

        return change

    def without_norm(folder):
        found = load_file(folder / "model.safetensors")
        found.pop("model.norm.weight")
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})

    def without_tokenizer(folder):
        for path in folder.glob("*token*"):
            path.unlink()

    said(lambda folder: (folder / "config.json").unlink(), "config.json: no such file")
    said(lambda folder: (folder / "model.safetensors").unlink(), "holds neither")
    said(lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), "not readable as safetensors")
    said(without_norm, r"missing keys: model\.norm\.weight")
    said(without_tokenizer, "no tokenizer there")
    said(edit("model_type", "qwen99"), "transformers can't load it|qwen99")
    said(edit("quantization_config", {"quant_method": "gptq"}), "quantised by 'gptq'")


def test_a_model_with_nan_is_refused(tmp_path):
    folder = make_base(tmp_path / "base")
    found = load_file(folder / "model.safetensors")
    found["model.norm.weight"][3] = float("nan")
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight holds NaN"):
        make(tmp_path / "out", type="local", path=str(folder))
    assert make_model().config.vocab_size == 320
