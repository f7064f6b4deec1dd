"""`rlmake inspect-data @ sft.toml -n 3`: rows as they will be trained, lengths, padding, and what is skipped."""

import sys
from typing import Any

from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import ConfigError, Fault


def inspect_data(argv: list[str]) -> int:
    """Rows of an SFT configuration as they will be trained: `inspect-data @ sft.toml [-n 3] [--val]`."""
    parser = ArgumentParser(prog="rlmake inspect-data", description=inspect_data.__doc__, add_help=False)
    parser.add_argument("-n", type=int, default=3, metavar="ROWS", help="how many rows to show (default 3)")
    parser.add_argument("--val", action="store_true", help="the validation data (val.data)")
    parser.add_argument("-h", "--help", action="store_true", help="this text")
    args, rest = parser.parse_known_args(argv)
    if args.help or not rest:
        print(
            parser.format_help()
            + "\nEverything else is the configuration, as `sft` takes it: @ file.toml --data.seq_len 512 …"
        )
        return 0 if args.help else 2
    from rlmake.config import SFTConfig, parse_argv

    config, files = parse_argv(SFTConfig, rest, prog="rlmake inspect-data")
    if args.val and config.val is None:
        raise ConfigError(Fault("is not set, so there is no validation data", "val"))
    from rlmake.launch.inputs import check_inputs
    from rlmake.models.loading import load_config
    from rlmake.trainer.data.inspect import look

    check_inputs(config, files)
    data = config.val.data if args.val else config.data
    vocabulary = load_config(config.model.name, trust_remote_code=config.model.trust_remote_code).vocab_size
    shown, summary = look(data, config.renderer, config.tokenizer, vocabulary, max(args.n, 0))
    for row in shown:
        print(f"── row {row.row} of {row.part}: {row.tokens} tokens, {row.trained} trained")
        print("".join(_span(text, trained, sys.stdout.isatty()) for text, trained in row.spans).rstrip("\n"))
    _summarise(summary, data)
    return 0


def _span(text: str, trained: bool, colours: bool) -> str:
    """Trained text in green on a terminal, else between ⟦ and ⟧."""
    if colours:
        return f"\x1b[32m{text}\x1b[0m" if trained else f"\x1b[2m{text}\x1b[0m"
    return f"⟦{text}⟧" if trained else text


def _summarise(found: Any, data: Any) -> None:
    import numpy as np

    lengths, tokens = found.lengths, int(found.lengths.sum())
    skipped = sum(found.skipped.values())
    only = "" if found.looked_at == found.rows else f" (the first {found.looked_at:,} of {found.rows:,})"
    print(f"── rows{only}: {len(lengths):,} trained, {skipped:,} skipped")
    for reason, count in sorted(found.skipped.items()):
        print(f"   {count:,} × {reason}")
    if len(found.parts) > 1:
        print("   " + ", ".join(f"{label} {count / len(lengths):.1%}" for label, count in found.parts.items()))
    low, median, high = (int(value) for value in np.percentile(lengths, (0, 50, 90)))
    print(f"   tokens: {tokens:,}, {found.trained:,} of them trained ({found.trained / tokens:.1%})")
    print(f"   length: least {low}, median {median}, 90 % below {high}, greatest {lengths.max()}; {found.cut:,} cut")
    steps = found.packed / data.batch_size
    print(
        f"   packed: {found.packed:,} rows of {data.seq_len} tokens, padding {found.padding:.1%}; "
        f"{steps:.1f} steps an epoch"
    )
