"""Models made by init, saved and loaded: names, shapes, dtypes, tokenizer, and one line for what is wrong."""

import hashlib
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlmake.config import InitConfig
from rlmake.core.errors import UserError
from rlmake.models import exact, init, loading
from rlmake.models.text import load_tokenizer


def test_transformers_loads_what_init_makes(tiny):
    folder, facts = tiny
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.tie_word_embeddings
    assert sum(p.numel() for p in model.parameters()) == facts["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == facts["vocabulary"] == model.config.vocab_size
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [
        end,
        tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    ]
    assert model.config.eos_token_id == end == tokenizer.eos_token_id
    assert loading.stop_ids(folder, tokenizer) == (end, tokenizer.pad_token_id)
    text = "naïve 🧪 don 't ,  two  spaces .\r\n\x00 e\u0301"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (folder / "chat_template.jinja").is_file()


def test_init_is_the_same_in_another_process(tiny, tmp_path):
    """Bytes depend on the seed and on nothing else, threads included."""
    folder, _ = tiny
    text = str(folder.parent / "train.jsonl")
    code = (
        "import sys, torch; torch.set_num_threads(1); from pathlib import Path\n"
        "from rlmake.config import InitConfig; from rlmake.models import init\n"
        f"init.make(InitConfig(tokenizer={{'text': {text!r}, 'vocab_size': 400}}), Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again")], check=True, timeout=120)
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()  # noqa: E731
    files = sorted(path.name for path in folder.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all(digest(folder / name) == digest(tmp_path / "again" / name) for name in files)
    other = init.first_weights("a", (3, 4), type("C", (), {"initializer_range": 0.02}), 1)
    assert not torch.equal(other, init.first_weights("b", (3, 4), type("C", (), {"initializer_range": 0.02}), 1))


def test_text_sources(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        list(init.texts(str(tmp_path / "none.txt")))
    data = tmp_path / "data"
    data.mkdir()
    with pytest.raises(UserError, match="no text"):
        list(init.texts(str(data)))
    (data / "train.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}], "n": 3}) + "\n")
    (data / "heldout.jsonl").write_text(json.dumps({"prompt": "secret"}) + "\n")
    (data / "notes.md").write_text("m")
    assert list(init.texts(str(data))) == ["user", "a"]
    assert list(init.texts([str(data / "notes.md"), str(data / "heldout.jsonl")])) == ["m", "secret"]
    (data / "train.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"train\.jsonl:1: not JSON"):
        list(init.texts(str(data)))


def test_untied_and_sharded(tmp_path, tiny):
    cfg = InitConfig(
        architecture={"tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 96},
        tokenizer={"text": str(tiny[0].parent / "train.jsonl"), "vocab_size": 300},
        dtype="float32",
    )
    init.make(cfg, tmp_path / "untied")
    model = loading.load(tmp_path / "untied", attn=exact.NAME)
    assert "lm_head.weight" in loading.expected(model) and model.dtype == torch.float32
    loading.save_hf(dict(model.state_dict()), tmp_path / "sharded", model.config, dtype="float32", max_shard=200_000)
    assert (tmp_path / "sharded" / loading.INDEX).is_file()
    again = loading.load(tmp_path / "sharded", attn=exact.NAME)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_loading_draws_no_random_numbers(tmp_path, tiny):
    """All weights are overwritten; what is no weight is as in a model that was initialised."""
    before = torch.get_rng_state()
    model = loading.load(tiny[0], attn=exact.NAME)
    assert torch.equal(before, torch.get_rng_state())
    made = loading.build(model.config, attn=exact.NAME, device="cpu")
    assert not torch.equal(before, torch.get_rng_state())
    buffers = dict(made.named_buffers())
    assert buffers and buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffers[name], value) for name, value in model.named_buffers())
    model.lm_head.weight.data.zero_()
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(), "tied"


def test_padded_embedding_rows_are_kept(tmp_path, tiny):
    """E04: more embedding rows than tokens."""
    model = loading.load(tiny[0], attn=exact.NAME)
    model.config.vocab_size = rows = model.config.vocab_size + 6
    padded = loading.build(model.config, attn=exact.NAME, device="cpu")
    loading.save_hf(dict(padded.state_dict()), tmp_path / "padded", padded.config, dtype="bfloat16")
    shutil.copy(tiny[0] / "tokenizer.json", tmp_path / "padded")
    again = loading.load(tmp_path / "padded", attn=exact.NAME)
    assert again.lm_head.weight.shape[0] == rows == again.config.vocab_size


def test_weights_that_do_not_fit_touch_nothing(tmp_path, tiny):
    model = loading.load(tiny[0], attn=exact.NAME)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    good = {name: torch.zeros(shape) for name, shape in loading.expected(model).items()}
    last = max(good)
    faults = {
        "is missing": {name: tensor for name, tensor in good.items() if name != last},
        "does not belong": {**good, "model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)},
        "has shape": {**good, last: torch.zeros(3, 3)},
        "floating point": {**good, last: torch.zeros(good[last].shape, dtype=torch.int64)},
    }
    for message, tensors in faults.items():
        with pytest.raises(UserError, match=message):
            loading.assign(model, tensors, "there")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    loading.assign(model, {**good, "lm_head.weight": torch.zeros(1)}, "there")
    assert model.lm_head.weight.abs().sum() == 0


def test_damaged_directories(tmp_path, tiny):
    with pytest.raises(UserError, match="no such directory"):
        loading.load("./nowhere/model", attn=exact.NAME)
    with pytest.raises(UserError, match=r"no config\.json"):
        loading.load(tmp_path, attn=exact.NAME)
    shutil.copytree(tiny[0], tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not readable"):
        loading.load(tmp_path / "m", attn=exact.NAME)
    weights.unlink()
    with pytest.raises(UserError, match="no safetensors"):
        loading.load(tmp_path / "m", attn=exact.NAME)
    save_file(load_file(tiny[0] / "model.safetensors"), weights)
    loading.load(tmp_path / "m", attn=exact.NAME)
    for index, said in (
        ({"weight_map": {"x": "other.safetensors"}}, "other"),
        ([], "index.json: expected 'weight_map'"),
        ({}, "index.json: expected 'weight_map'"),
        ({"weight_map": ["model.safetensors"]}, "index.json: expected 'weight_map'"),
        ({"weight_map": {"x": 3}}, "index.json: expected 'weight_map'"),
    ):
        (tmp_path / "m" / loading.INDEX).write_text(json.dumps(index))
        with pytest.raises(UserError, match=said):
            loading.load(tmp_path / "m", attn=exact.NAME)


@pytest.mark.parametrize(
    "change",
    [
        [], None, "x", {"model_type": "nope"}, {"hidden_size": "x"}, {"hidden_size": -4}, {"num_attention_heads": 0},
        {"hidden_act": "nope"}, {"pad_token_id": 10**6}, {"vocab_size": 0}, {"dtype": "nope"},
    ],
)  # fmt: skip
def test_a_config_of_odd_shape_is_one_line(tmp_path, tiny, change):
    shutil.copytree(tiny[0], tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change if isinstance(change, dict) else change))
    with pytest.raises(UserError, match=r"m: config\.json: .") as error:
        loading.load(tmp_path / "m", attn=exact.NAME)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["[]", '"x"', "null", "{}", "", '{"added_tokens": 3}'])
def test_a_tokenizer_of_odd_shape_is_one_line(tmp_path, tiny, content):
    shutil.copytree(tiny[0], tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"^tokenizer '.*/m': .") as error:
        load_tokenizer(tmp_path / "m")
    assert "\n" not in str(error.value)


def test_stop_ids_are_tokens(tmp_path, tokenizer):
    path, end = tmp_path / "generation_config.json", tokenizer.eos_token_id
    assert loading.stop_ids(tmp_path, tokenizer) == (end,)
    for stated, ids in ((None, (end,)), ([], (end,)), (7, (7, end)), ([end, 7, 7], (end, 7))):
        path.write_text(json.dumps({"eos_token_id": stated}))
        assert loading.stop_ids(tmp_path, tokenizer) == ids
    odd = [{"eos_token_id": stated} for stated in ("x", [1, "x"], True, {}, 1.5, -3)]
    for content in ([], 3, None, *odd):
        path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id: expected a token's id"):
            loading.stop_ids(tmp_path, tokenizer)


def test_unknown_hub_id_is_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="neither a directory nor") as error:
        loading.load_config("nobody/nothing-here")
    assert "\n" not in str(error.value)
