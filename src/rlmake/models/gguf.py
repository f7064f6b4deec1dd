"""GGUF files, as llama.cpp writes them: weights dequantised, tokenizer and configuration rebuilt from the metadata.

transformers does the reading. What it leaves open is settled here: a width of heads that it takes from a default,
words that its tokenizer cuts otherwise than llama.cpp, numbers that the file holds in single precision, tensors of the
file that it would ignore, and those of the model that it would make up.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from loguru import logger
from tokenizers import pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rlmake.core.errors import UserError
from rlmake.models import loading

MAGIC = b"GGUF"
# Values of `tokenizer.ggml.pre`, https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
AS_GPT2 = {"gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"}


def bring(path: Path, out: Path) -> dict[str, Any]:
    """Write the model of a GGUF file as a bf16 Hugging Face directory `out`; every weight is rounded once.

    Returns facts: parameters, vocabulary, quantisation {type: tensors}. The whole model is in memory in bf16. Raises
    `UserError` for a file that is no whole GGUF model, or one of which something would be lost.
    """
    reader = _open(path)
    with loading.quiet():
        config = _config(reader, path)
        tokenizer = _tokenizer(reader, path)
        model = _model(reader, path, config)
    tensors = {name: model.state_dict()[name] for name in loading.expected(model)}
    stops = loading.stop_ids(out, tokenizer)
    config.architectures = [type(model).__name__]
    loading.save_hf(tensors, out, config, dtype="bfloat16", stop_ids=stops)
    tokenizer.save_pretrained(out)
    kinds: dict[str, int] = {}
    for tensor in reader.tensors:
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
    return {
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "vocabulary": len(tokenizer),
        "quantisation": dict(sorted(kinds.items())),
    }


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        raise UserError(f"{path}: {'is a directory, expected a GGUF file' if path.is_dir() else 'no such file'}")
    with open(path, "rb") as file:
        if file.read(4) != MAGIC:
            raise UserError(f"{path}: no GGUF file (it does not begin with {MAGIC.decode()})")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader raises whatever NumPy does at a wrong length
        raise UserError(f"{path}: damaged or cut off: {error}") from None
    if (parts := _field(reader, "split.count", 1)) > 1:
        raise UserError(f"{path}: one of {parts} parts; join them first (llama-gguf-split --merge)")
    for key in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.tokens"):
        if key not in reader.fields:
            raise UserError(f"{path}: holds no {key}, so it is no whole model")
    return reader


def _field(reader: GGUFReader, key: str, default: Any = None) -> Any:
    return reader.fields[key].contents() if key in reader.fields else default


def _config(reader: GGUFReader, path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise UserError(f"{path}: {loading.first_line(error)}") from None
    architecture = _field(reader, "general.architecture")
    if (width := _field(reader, f"{architecture}.attention.key_length")) is not None:
        config.head_dim = int(width)
    if (scaling := _field(reader, f"{architecture}.rope.scaling.type", "none")) != "none":
        raise UserError(f"{path}: rotary embeddings are scaled ({scaling}), which is not carried over")
    table = config.to_dict()
    for key in ("_name_or_path", "_model_name_or_path"):  # the author's name for it, not a place
        table.pop(key, None)
    return type(config).from_dict(_shortest(table))


def _shortest(value: Any) -> Any:
    """Numbers of single precision as they were written: 9.999999747378752e-06 is 1e-05."""
    if isinstance(value, dict):
        return {key: _shortest(item) for key, item in value.items()}
    if isinstance(value, float) and math.isfinite(value) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _tokenizer(reader: GGUFReader, path: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        raise UserError(f"{path}: its tokenizer can't be rebuilt: {loading.first_line(error)}") from None
    cut = _field(reader, "tokenizer.ggml.pre", "default")
    if _field(reader, "tokenizer.ggml.model") == "gpt2":
        if cut in SINGLE_DIGITS:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif cut not in AS_GPT2 and isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
            logger.warning(f"{path}: tokenizer.ggml.pre = '{cut}' is not known; words are cut as GPT-2 cuts them")
    if not tokenizer.chat_template:
        logger.warning(f"{path}: holds no chat template; a renderer must be named to train on messages")
    return tokenizer


def _model(reader: GGUFReader, path: Path, config: Any) -> nn.Module:
    """The model with the file's weights in bf16, nothing missing and nothing left over."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=config, dtype=torch.bfloat16, output_loading_info=True
        )
    except Exception as error:
        raise UserError(f"{path}: {loading.first_line(error)}") from None
    loading.require_all(info, str(path))
    expected = loading.expected(model)
    if odd := [name for name in expected if model.state_dict()[name].dtype != torch.bfloat16]:
        raise UserError(f"{path}: tensor {odd[0]} could not be dequantised")
    there = sum(int(tensor.n_elements) for tensor in reader.tensors)
    taken = sum(math.prod(shape) for shape in expected.values())
    if there != taken:
        raise UserError(f"{path}: holds {there} weights, the {config.model_type} model takes {taken} of them")
    return model
