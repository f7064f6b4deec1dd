"""`rlmake export <format> …`: conversions by hand. torch is imported only for valid arguments."""

import argparse
import re
from pathlib import Path
from typing import Any

from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError
from rlmake.export.staging import restore

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FORMATS = ("bf16", "fp8", "dequantize", "adapter", "merge")


def export(argv: list[str]) -> int | None:
    """convert a checkpoint or a model directory: bf16, fp8, dequantize, adapter, merge"""
    arguments = _parser().parse_args(argv)
    source = Path(arguments.source)
    if not source.is_dir():
        raise UserError(f"{source}: no such directory")
    out = Path(arguments.out) if arguments.out else _default(arguments.format, source)
    restore(out)
    if out.exists() or out.is_symlink():
        if not arguments.overwrite:
            raise UserError(f"{out}: there already; give another OUT or --overwrite")
        _require_replaceable(out, source)
    facts = _convert(arguments, source, out)
    size, files = facts["bytes"] / 1e9, len(facts["shards"])
    print(f"{out}: {facts['format']}, {facts['tensors']} tensors, {size:.3g} GB in {files} files")
    return 0


def _convert(arguments: argparse.Namespace, source: Path, out: Path) -> dict[str, Any]:
    if arguments.format == "dequantize":
        from rlmake.export import dequantize

        return dequantize.export(source, out)
    if arguments.format == "bf16":
        from rlmake.export import bf16

        return bf16.export(source, out, max_shard=arguments.max_shard, trust=arguments.trust)
    if arguments.format == "adapter":
        from rlmake.export import adapter

        return adapter.export(source, out, trust=arguments.trust)
    if arguments.format == "merge":
        from rlmake.export import merge

        return merge.export(source, out, max_shard=arguments.max_shard, trust=arguments.trust)
    from rlmake.export import fp8

    if is_checkpoint(source):
        return fp8.export(source, out, block=arguments.block_size, max_shard=arguments.max_shard, trust=arguments.trust)
    return fp8.quantize(source, out, block=arguments.block_size)


def _require_replaceable(out: Path, source: Path) -> None:
    """Only a model's or an adapter's directory is ever replaced (or an empty one), and never what is converted."""
    if source.resolve().is_relative_to(out.resolve()):
        raise UserError(f"{out}: holds what is to be converted; give another OUT")
    known = [out / name for name in ("config.json", "adapter_config.json")]
    if out.is_symlink() or not out.is_dir() or not (any(map(Path.is_file, known)) or not any(out.iterdir())):
        raise UserError(f"{out}: no exported model, --overwrite does not replace it; give another OUT")


def is_checkpoint(folder: Path) -> bool:
    """Whether a directory is a step of `checkpoints/` or the trainer half of one, and not a model directory."""
    return (folder / "trainer").is_dir() or (folder / ".metadata").is_file()


def _default(format_: str, source: Path) -> Path:
    """Beside or inside what is converted: `<step>/{weights,weights-FP8,adapter}`, `<dir>-FP8`, `<dir>-BF16`."""
    step = source.parent if source.name == "trainer" else source
    if format_ == "adapter":
        return step / "adapter"
    if format_ in ("bf16", "merge"):
        return step / "weights"
    if format_ == "fp8" and is_checkpoint(source):
        return step / "weights-FP8"
    return source.with_name(f"{source.name}-{'FP8' if format_ == 'fp8' else 'BF16'}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="rlmake export", description="Convert a checkpoint or a model directory.")
    formats = parser.add_subparsers(dest="format", required=True, metavar=f"{{{','.join(FORMATS)}}}")
    for name, what, about in (
        ("bf16", "CHECKPOINT", "a checkpoint (…/checkpoints/step_<n>) as bf16 safetensors"),
        ("fp8", "CHECKPOINT or DIRECTORY", "a checkpoint or a bf16 directory as blockwise FP8"),
        ("dequantize", "DIRECTORY", "an FP8 release as bf16"),
        ("adapter", "CHECKPOINT", "the adapter of a LoRA checkpoint in PEFT's layout"),
        ("merge", "CHECKPOINT", "a LoRA checkpoint as bf16 weights, the adapter merged into its base model"),
    ):
        one = formats.add_parser(name, help=about, description=about)
        one.add_argument("source", metavar=what)
        one.add_argument("out", nargs="?", metavar="OUT", help="default: beside the source, or in the step's folder")
        one.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
        if name not in ("dequantize", "adapter"):
            one.add_argument("--max-shard", type=_size, default="5GB", help="largest file, e.g. 5GB (default)")
        if name != "dequantize":
            one.add_argument("--trust", action="store_true", help="read a checkpoint that has no COMPLETE record")
        if name == "fp8":
            one.add_argument("--block-size", type=_block, help="edge of a block: 128, or 64 where only that fits")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.upper())
    if not match or (size := int(float(match[1]) * UNITS[match[2]])) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no size, expected e.g. 5GB")
    return size


def _block(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no block size, expected a positive integer")
    return int(text)
