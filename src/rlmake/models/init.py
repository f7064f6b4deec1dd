"""Models made from nothing: a Qwen3 architecture with seeded weights and a byte-level BPE tokenizer trained on text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from rlmake.config import InitConfig
from rlmake.core.errors import UserError
from rlmake.core.seeds import derive
from rlmake.models import chatml, loading


def make(cfg: InitConfig, out: Path) -> dict[str, Any]:
    """Write the model into the directory `out`, in Hugging Face layout.

    Returns facts for a manifest: parameters, vocabulary, dtype. Raises `UserError` for text that is missing or empty.
    """
    tokenizer = train_tokenizer(list(texts(cfg.tokenizer.text)), cfg.tokenizer.vocab_size)
    config = architecture(cfg, len(tokenizer), tokenizer.convert_tokens_to_ids(chatml.PAD))
    model = loading.build(config, attn="eager")
    tensors = {name: first_weights(name, shape, config, cfg.seed) for name, shape in loading.expected(model).items()}
    stops = [tokenizer.convert_tokens_to_ids(token) for token in (chatml.END, chatml.PAD)]
    loading.save_hf(tensors, out, config, dtype=cfg.dtype, stop_ids=stops)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return {"parameters": parameters, "vocabulary": len(tokenizer), "dtype": cfg.dtype}


def architecture(cfg: InitConfig, vocabulary: int, pad: int) -> Qwen3Config:
    """The transformers configuration; no token is added in front, generation ends at `<|im_end|>`."""
    table = cfg.architecture.model_dump(exclude={"model_type", "rope_theta"})
    return Qwen3Config(
        **table,
        vocab_size=vocabulary,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.architecture.rope_theta},
        bos_token_id=None,
        eos_token_id=pad + chatml.SPECIAL.index(chatml.END),
        pad_token_id=pad,
        architectures=["Qwen3ForCausalLM"],
    )


def first_weights(name: str, shape: tuple[int, ...], config: Any, seed: int) -> torch.Tensor:
    """fp32 weights: norms 1, all else normal with the configured deviation, each tensor from a stream of its own."""
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(derive(seed, "init", name))
    return torch.empty(shape).normal_(0.0, config.initializer_range, generator=generator)


def train_tokenizer(lines: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens: ChatML's markers first, marks of calls last.

    Every text decodes to itself, byte for byte, since all 256 bytes are tokens and nothing is cleaned up.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(chatml.MARKS),
        special_tokens=list(chatml.SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(lines, trainer)
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in chatml.MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=chatml.END,
        pad_token=chatml.PAD,
        additional_special_tokens=[chatml.START, chatml.END],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chatml.TEMPLATE
    return tokenizer


def texts(sources: str | list[str]) -> Iterator[str]:
    """Every text of the given files or data directories (train split only where there is one), in their order."""
    count = 0
    for source in [sources] if isinstance(sources, str) else sources:
        for path in _files(Path(source)):
            for text in _read(path):
                count += 1
                yield text
    if not count:
        raise UserError(f"tokenizer.text: no text in {sources}")


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"tokenizer.text: no such file or directory: {source}")
    found = sorted(path for path in source.rglob("*") if path.suffix in (".jsonl", ".parquet", ".txt", ".md"))
    return [path for path in found if path.stem.startswith("train")] or found


def _read(path: Path) -> Iterator[str]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        for row in parquet.read_table(path).to_pylist():
            yield from _strings(row)
    elif path.suffix == ".jsonl":
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield from _strings(json.loads(line))
                except ValueError as error:
                    raise UserError(f"{path}:{number}: not JSON: {error}") from None
    else:
        yield path.read_text(encoding="utf-8")


def _strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
