"""A tiny Qwen3 model with a tokenizer, and its checkpoint as the trainer writes one."""

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlmake import checkpoint as ck
from rlmake.core.jsonio import write_json
from rlmake.core.rundir import RunContext, step_dir

VOCAB = 320
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


def make_config(tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=tied, eos_token_id=3,
    )  # fmt: skip


def make_model(tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(make_config(tied)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def make_base(folder: Path) -> Path:
    """The directory of the model that a run starts from: tokenizer, template, generation config, code."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="!", pad_token='"')
    fast.chat_template = TEMPLATE
    make_model().save_pretrained(folder)
    fast.save_pretrained(folder)
    write_json(folder / "generation_config.json", {"temperature": 0.7, "eos_token_id": [3, 5]})
    (folder / "modeling_local.py").write_text("# code that travels with the model\n")
    (folder / "card.json").write_text("{}")
    return folder


def trainer_half(folder: Path, model: Qwen3ForCausalLM, base: Path, **facts) -> None:
    """What trainer/checkpoint.py writes: DCP tensors and model.json."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"optim.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    write_json(folder / "state.json", {"step": 7})
    table = {
        "schema": 1,
        "config": {**json.loads(model.config.to_json_string(use_diff=False)), "_name_or_path": str(base)},
        "assets": str(base),
        "chat_template": None,
        "prefix": "model.",
        "lora": None,
    }
    write_json(folder / "model.json", {**table, **facts})


def complete(run: Path, step: int) -> Path:
    ck.publish(
        run, step, ("trainer",), policy_version=step, world_size=1, ledger=None, ctx=RunContext.from_env(run), timeout=5
    )
    return step_dir(run, step)


def save(run: Path, model: Qwen3ForCausalLM, base: Path, step: int = 7, **facts) -> Path:
    """A complete checkpoint of `model`."""
    with ck.writing(step_dir(run, step), "trainer") as folder:
        trainer_half(folder, model, base, **facts)
    return complete(run, step)
