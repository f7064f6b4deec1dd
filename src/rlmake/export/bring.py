"""Models made elsewhere become a bf16 directory of the store (kind `import`)."""

from pathlib import Path
from typing import Any

from rlmake.config import ImportConfig
from rlmake.core.errors import UserError
from rlmake.core.jsonio import hash_file, read_json
from rlmake.export import assets, bf16, dequantize
from rlmake.export.sources import EMBEDDING, HEAD, DirectorySource, Spec
from rlmake.export.staging import staged
from rlmake.export.writer import write_model
from rlmake.models import loading

# A tokenizer has one of these; transformers makes up an empty one where there is none.
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")


def make(cfg: ImportConfig, out: Path) -> dict[str, Any]:
    """Write the model into the directory `out`: weights, configuration, tokenizer, chat template, generation config.

    Returns facts for a manifest: source, dtype, parameters, vocabulary. Raises `UserError` where the source is not
    there, is no model, is quantised in a way that is not known, or holds NaN.
    """
    source = cfg.source
    if source.type == "gguf":
        from rlmake.models import gguf

        path = Path(source.path)
        if source.blake3 is not None and path.is_file() and (found := hash_file(path)) != source.blake3:
            raise UserError(f"{path}: blake3 {found}, expected {source.blake3}")
        facts = gguf.bring(path, out)
    else:
        folder = loading.locate(source.id, revision=source.revision) if source.type == "hub" else Path(source.path)
        facts = bring(folder, out, fp8=source.type == "fp8")
    return {"source": source.type, "dtype": "bfloat16", **facts}


def bring(folder: Path, out: Path, fp8: bool = False) -> dict[str, Any]:
    """A Hugging Face directory as bf16; FP8 blocks are dequantised, and must be there where `fp8` says so."""
    model = DirectorySource(folder)
    quantised = any(spec.dtype.itemsize == 1 and spec.dtype.is_floating_point for spec in model.tensors.values())
    if fp8 and not quantised:
        raise UserError(f"{folder}: holds no FP8 weight; it comes in with source.type = 'local'")
    if quantised:
        facts = dequantize.export(folder, out)
    else:
        if method := (model.config.get("quantization_config") or {}).get("quant_method"):
            raise UserError(f"{folder}: is quantised by '{method}', which is not undone; bring the full weights")
        facts = _rounded(model, folder, out)
    vocabulary = _complete(out, folder)
    return {"parameters": facts["parameters"], "vocabulary": vocabulary}


def _rounded(model: DirectorySource, folder: Path, out: Path) -> dict[str, Any]:
    """Weights of any floating-point type, rounded once to bf16 shard by shard; a tied head is not written twice."""
    tied = model.config.get("tie_word_embeddings", False)

    def rule(name: str, spec: Spec) -> dict[str, Spec]:
        return {} if tied and name == HEAD and EMBEDDING in model.tensors else bf16.rule(name, spec)

    outputs = {name: rule(name, spec) for name, spec in model.tensors.items()}
    shards = {file: [name for name in names if outputs[name]] for file, names in model.shards.items()}
    with staged(out) as temporary:
        facts = write_model(temporary, model, shards, outputs, bf16.make)
        assets.copy_all(folder, temporary)
        assets.write_config(temporary, model.config)
    return facts


def _complete(out: Path, folder: Path) -> int:
    """Check that transformers takes the directory as a whole model with a tokenizer; add a generation config where none
    came. Returns the size of the vocabulary. `folder` is named in what is raised.
    """
    from transformers import AutoTokenizer, GenerationConfig

    loading.check(out, str(folder))
    if not any(path for pattern in VOCABULARIES for path in out.glob(pattern)):
        raise UserError(f"{folder}: no tokenizer there (none of {', '.join(VOCABULARIES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(out)
    except Exception as error:
        raise UserError(f"{folder}: no usable tokenizer: {loading.first_line(error)}") from None
    if not (out / "generation_config.json").is_file():
        stops = loading.stop_ids(out, tokenizer)
        GenerationConfig(eos_token_id=list(stops) or None, pad_token_id=tokenizer.pad_token_id).save_pretrained(out)
    return int(read_json(out / "config.json").get("vocab_size") or len(tokenizer))
