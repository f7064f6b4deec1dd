"""The ledger: which samples a run has trained, in order, as one running hash and one row per step."""

import json

from blake3 import blake3

from rlmake.core.jsonio import canonical, hash_bytes
from rlmake.core.rundir import RunContext


class Ledger:
    """`L_n = blake3(L_{n−1} ‖ canonical(sample ids of step n))`, L_0 empty. `value` is the last one, hex.

    Rows go to `<run>/ledger/attempt_<k>.jsonl`: `{step, ids_hash, ledger, samples}`. Only the master writes.
    """

    def __init__(self, ctx: RunContext, value: str | None, write: bool):
        self.value = value or ""
        self._path = ctx.run_dir / "ledger" / f"attempt_{ctx.attempt}.jsonl"
        self._write = write

    def append(self, step: int, samples: list[str]) -> None:
        ids = canonical(samples)
        self.value = blake3(self.value.encode() + ids).hexdigest()
        if not self._write:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        row = {"step": step, "ids_hash": hash_bytes(ids), "ledger": self.value, "samples": samples}
        with open(self._path, "ab", buffering=0) as file:
            whole, line = file.tell(), json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
            try:
                while line:
                    line = line[file.write(line) :]
            except OSError:
                file.truncate(whole)  # a full disk leaves no torn row
                raise
