"""Seeds: every random stream has a name of its own, so no draw of one shifts another."""

from typing import Any

from blake3 import blake3

from rlmake.core.jsonio import canonical


def derive(*parts: Any) -> int:
    """A 63-bit seed for the stream named by `parts`, e.g. `derive(run_seed, "rollout", step, task, sample)`."""
    return int.from_bytes(blake3(canonical(parts)).digest(8), "little") >> 1
