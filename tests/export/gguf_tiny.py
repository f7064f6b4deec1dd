"""A tiny model written as a GGUF file, by llama.cpp's own writer and by its rules for names and rows."""

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2")]
TOKENS = [*SPECIAL, *LETTERS, *("".join(pair) for pair in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SHAPE = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def make_model(family: str, tied: bool = True):
    torch.manual_seed(3)
    config, cls = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[family]
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    model = cls(config(**SHAPE, rope_parameters=rope, tie_word_embeddings=tied)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a llama's query and key heads, halves of a head interleaved as llama.cpp's rotation wants them."""
    rows, cols = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def write(path: Path, model, *, quantised: bool = False, pre: str = "gpt-2", **extra) -> dict[str, torch.Tensor]:
    """Write the file; returns the weights that it stands for, by Hugging Face names. `extra`: tensors to add."""
    config, family = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    for add, value in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2), (writer.add_pad_token_id, 2)):
        add(value)
    writer.add_chat_template(TEMPLATE)
    meant = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        matrix = weight.ndim == 2
        meant[name] = q8(tensor) if quantised and matrix else tensor
        if family == "llama" and "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        if family == "llama" and "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        if quantised and matrix:
            blocks = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
    for name, value in extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def q8(weight: torch.Tensor) -> torch.Tensor:
    """Q8_0 and back: 32 values of a row share a half-precision step of amax / 127."""
    blocks = weight.double().view(-1, 32)
    step = (blocks.abs().amax(1, keepdim=True) / 127).float()
    rounded = torch.round(blocks.float() / torch.where(step == 0, 1.0, step))
    return (rounded * step.half().float()).view_as(weight)
