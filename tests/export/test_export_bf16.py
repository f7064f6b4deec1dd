"""Checkpoint → bf16: the exported directory is the trained model, whole, and never half there (E01, E04, E05)."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from export_tiny import TEMPLATE, VOCAB, complete, make_model, save
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlmake import checkpoint as ck
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import write_json
from rlmake.core.rundir import step_dir
from rlmake.export import bf16, writer
from rlmake.export.sources import SCHEMA, CheckpointSource, Spec
from rlmake.models.layout import TYPES

IDS = torch.tensor([[5, 9, 200, 310, 7, 8]])


def load(folder: Path):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard", [10**9, 40_000])
def test_the_exported_model_is_the_trained_one(tmp_path, base, tied, max_shard, kernels):
    trained = make_model(tied)
    facts = bf16.export(save(tmp_path / "run", trained, base), tmp_path / "weights", max_shard=max_shard)
    out = tmp_path / "weights"
    loaded = load(out)
    assert loaded.dtype == torch.bfloat16
    for parameter in trained.parameters():  # buffers (rotary frequencies) stay fp32, as in any model that is loaded
        parameter.data = parameter.data.to(torch.bfloat16)
    assert torch.equal(logits(loaded), logits(trained))
    tensors = {}
    for shard in out.glob("*.safetensors"):
        tensors |= load_file(shard)
        assert max_shard > 10**8 or shard.stat().st_size < max_shard + 2000
    assert ("lm_head.weight" in tensors) == (not tied)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, trained.state_dict()[name]), name
    assert tied or not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    config = AutoConfig.from_pretrained(out)
    assert "_name_or_path" not in json.loads((out / "config.json").read_text())
    assert config.tie_word_embeddings is tied and config.vocab_size == VOCAB and config.dtype == torch.bfloat16
    assert (facts["step"], facts["format"], facts["bytes"]) == (7, "bf16", sum(t.nbytes for t in tensors.values()))
    assert facts["parameters"] == sum(t.numel() for t in tensors.values()) and facts["tensors"] == len(tensors)


def test_index_and_shards(tmp_path, base):
    out = tmp_path / "weights"
    facts = bf16.export(save(tmp_path / "run", make_model(), base), out, max_shard=40_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    n = len(facts["shards"])
    assert n > 2 and facts["shards"] == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    assert index["metadata"]["total_size"] == facts["bytes"]
    for shard in facts["shards"]:
        with safe_open(out / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert sorted(file.keys()) == sorted(name for name, at in index["weight_map"].items() if at == shard)


def test_everything_else_travels_along(tmp_path, base):
    out = tmp_path / "weights"
    bf16.export(save(tmp_path / "run", make_model(), base), out)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()
    assert GenerationConfig.from_pretrained(out).eos_token_id == [3, 5]
    assert (out / "modeling_local.py").is_file() and not (out / "card.json").exists()
    assert AutoTokenizer.from_pretrained(out).chat_template == TEMPLATE
    assert not [path for path in out.iterdir() if path.name.startswith(".") or "tmp" in path.name]


def test_a_configured_chat_template_replaces_the_tokenizers(tmp_path, base):
    out = tmp_path / "weights"
    bf16.export(save(tmp_path / "run", make_model(), base, chat_template="{{ 'mine' }}"), out)
    turn = [{"role": "user", "content": "hi"}]
    assert AutoTokenizer.from_pretrained(out).apply_chat_template(turn, tokenize=False) == "mine"


def test_same_bytes_every_time(tmp_path, base):
    folder = save(tmp_path / "run", make_model(), base)
    bf16.export(folder, tmp_path / "a")
    bf16.export(folder / "trainer", tmp_path / "b")
    assert {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()
    }


ONE_OF_TWO_RANKS = """
import sys
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
rank, store, tensors, out = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
# As FSDP2 holds parameters: row-sharded DTensors (uneven ones among them).
state = {f"model.{k}": distribute_tensor(v, mesh, [Shard(0)]) for k, v in load_file(tensors).items()}
dcp.save(state, checkpoint_id=out)
dist.destroy_process_group()
"""


def test_a_checkpoint_of_two_ranks_gives_the_same_bytes(tmp_path, base):
    model = make_model(tied=False)
    one = save(tmp_path / "one", model, base)
    half = step_dir(tmp_path / "two", 7) / "trainer.tmp-x"
    half.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, tmp_path / "all.safetensors")
    arguments = [str(tmp_path / "store"), str(tmp_path / "all.safetensors"), str(half)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", ONE_OF_TWO_RANKS, str(rank), *arguments], env=env)
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    shutil.copyfile(one / "trainer" / "model.json", half / "model.json")
    ck.commit(half, half.parent, "trainer")
    files = sorted((half.parent / "trainer").glob("*.distcp"))
    assert len(files) == 2
    files[1].rename(tmp_path / "aside")
    with pytest.raises(UserError, match="could not be read and converted") as caught:
        bf16.export(half.parent, tmp_path / "b", trust=True)
    assert len(str(caught.value).splitlines()) == 1 and files[1].name in str(caught.value)
    (tmp_path / "aside").rename(files[1])
    bf16.export(one, tmp_path / "a", max_shard=40_000)
    bf16.export(complete(tmp_path / "two", 7), tmp_path / "b", max_shard=40_000)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_every_type_and_layout_are_read_as_they_were_saved(tmp_path, base):
    """Also one behind another of odd length, where nothing is aligned to its type any more."""
    whole = torch.randn(40, 50)
    saved = {f"{str(dtype)[6:]}": (torch.randn(7, 3) * 5).to(dtype) for dtype in TYPES.values()}
    saved |= {"scalar": torch.tensor(3.5), "no rows": torch.empty(0, 4), "no columns": torch.empty(3, 0)}
    saved |= {"turned": whole.t(), "every other": whole[::2, ::3], "part": whole[5:9], "again": whole}
    saved |= {"repeated": torch.randn(1, 5).expand(4, 5), "odd": torch.arange(3, dtype=torch.uint8), "last": whole * 2}
    dcp.save({f"model.{name}": tensor for name, tensor in saved.items()}, checkpoint_id=tmp_path, no_dist=True)
    facts = {
        "schema": SCHEMA,
        "config": {},
        "assets": str(base),
        "chat_template": None,
        "prefix": "model.",
        "lora": None,
    }
    write_json(tmp_path / "model.json", facts)
    source = CheckpointSource(tmp_path)
    assert source.tensors == {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in saved.items()}
    for name, tensor in source.load(list(saved)).items():
        assert tensor.dtype == saved[name].dtype and tensor.tolist() == saved[name].tolist(), name
    assert source._mapped("float32") is not None and source._mapped("turned") is None  # not copied where it can be


def test_a_damaged_checkpoint_is_refused_before_it_is_read(tmp_path, base):
    folder = save(tmp_path / "run", make_model(), base)
    data = folder / "trainer" / ".metadata"
    data.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(UserError, match=r"trainer/\.metadata"):
        bf16.export(folder, tmp_path / "weights")
    (folder / "COMPLETE").unlink()
    with pytest.raises(UserError, match="never finished"):
        bf16.export(folder, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()


def test_a_foreign_directory_needs_trust(tmp_path, base):
    folder = save(tmp_path / "run", make_model(), base)
    (folder / "COMPLETE").unlink()
    assert bf16.export(folder, tmp_path / "weights", trust=True)["step"] is None
    load(tmp_path / "weights")
    for path in (folder / "trainer").glob("__*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="could not be read and converted") as caught:
        bf16.export(folder, tmp_path / "cut", trust=True)
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "cut").exists()


def test_lora_is_refused_in_one_line(tmp_path, base):
    folder = save(tmp_path / "run", make_model(), base, lora={"rank": 4, "alpha": 16})
    with pytest.raises(UserError, match="LoRA") as caught:
        bf16.export(folder, tmp_path / "weights")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3.4e38])  # the last is no number in bf16
def test_a_diverged_model_is_never_written(tmp_path, base, value, kernels):
    model = make_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*NaN"):
        bf16.export(save(tmp_path / "run", model, base), tmp_path / "weights")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_wrong_vocabulary_is_named(tmp_path, base):
    model = make_model()
    model.config.vocab_size = 300
    with pytest.raises(UserError, match="has 320 rows, vocab_size is 300"):
        bf16.export(save(tmp_path / "run", model, base), tmp_path / "weights")


KILLED = """
import os, signal, sys
from pathlib import Path
from rlmake.export import bf16, writer
real, calls = writer.Shard.finish, []
def dying(shard):
    calls.append(shard)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real(shard)
writer.Shard.finish = dying
bf16.export(Path(sys.argv[1]), Path(sys.argv[2]), max_shard=40_000)
"""


def test_a_killed_export_never_looks_finished_and_starts_again_cleanly(tmp_path, base):
    folder, out = save(tmp_path / "run", make_model(), base), tmp_path / "exports" / "weights"
    code = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(out)], timeout=200).returncode
    assert code == -signal.SIGKILL
    assert not out.exists() and len(list(out.parent.glob("weights.tmp-*"))) == 1
    bf16.export(folder, out)
    assert [path.name for path in out.parent.iterdir()] == ["weights"]
    load(out)


def test_a_full_disk_leaves_the_older_export(tmp_path, base, monkeypatch):
    folder, out = save(tmp_path / "run", make_model(), base), tmp_path / "weights"
    bf16.export(folder, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer.Shard, "write", full)
    with pytest.raises(RunFailed, match="no space left"):
        bf16.export(folder, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "weights"}


def test_a_file_that_lacks_a_part_of_a_tensor_is_an_error(tmp_path):
    shard = writer.Shard(tmp_path / "x", {"a": Spec(torch.float32, (4,))})
    shard.write("a", torch.ones(3))
    with pytest.raises(ValueError, match="1 tensors are not whole, a among them"):
        shard.finish()
    for wrong in (torch.ones(2), torch.ones(1).half()):
        with pytest.raises(ValueError, match=r"a: .* behind 12 bytes"):
            shard.write("a", wrong)
    shard.write("a", torch.zeros(1))
    shard.finish()
    assert load_file(tmp_path / "x")["a"].tolist() == [1, 1, 1, 0]


def test_shards_are_planned_in_layer_order():
    specs = {f"model.layers.{n}.w": {f"model.layers.{n}.w": writer.Spec(torch.bfloat16, (50,))} for n in (10, 2, 1)}
    assert list(writer.plan_shards(specs, 200).values()) == [
        ["model.layers.1.w", "model.layers.2.w"], ["model.layers.10.w"],
    ]  # fmt: skip
