"""Token ids back to text, a token at a time, with the tokenizer of the run's model where it lies on this machine."""

import functools
from pathlib import Path
from typing import Any

from rlmake.dashboard.run import CONFIGS, Run, table

MAX_BYTES = 200 << 20
LONGEST = 8  # tokens that one character may be spread over


def of_run(run: Run) -> tuple[str, "Texts | None"]:
    """`(status, decoder)`: ok, missing_model or tokenizer_unavailable."""
    for name in _names(run):
        for base in (run.output_dir.parent, Path.cwd()):
            try:
                path = (base / name / "tokenizer.json").resolve()
                if path.is_file() and path.stat().st_size <= MAX_BYTES:
                    return "ok", load(path, path.stat().st_mtime_ns)
            except Exception:  # whatever is wrong with somebody's file
                return "tokenizer_unavailable", None
        return "tokenizer_unavailable", None
    return "missing_model", None


def _names(run: Run) -> list[str]:
    found = []
    for file in CONFIGS:
        config = run.load(run.resolved[1] / file)
        for key in ("tokenizer", "model"):
            value = config.get(key)
            found.append(value.get("name") if isinstance(value, dict) else value)
        found.append(table(table(config, "inference"), "vllm").get("model"))
    return [name for name in found if isinstance(name, str) and "\0" not in name]


@functools.lru_cache(maxsize=4)
def load(path: Path, _changed: int) -> "Texts":
    from tokenizers import Tokenizer

    return Texts(Tokenizer.from_file(str(path)))


class Texts:
    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __call__(self, ids: list[int]) -> list[str]:
        """One text per token. A character that several tokens make up stands at the first of them, the others have "".

        An id that the tokenizer doesn't know, or bytes that are no text, are shown as ⟨id⟩.
        """
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        known = [i if 0 <= i < size else None for i in ids]
        texts = self._tokenizer.decode_batch([[] if i is None else [i] for i in known], skip_special_tokens=False)
        at = 0
        while at < len(ids):
            if known[at] is None or (not texts[at] and self._tokenizer.id_to_token(ids[at]) is None):
                texts[at] = f"⟨{ids[at]}⟩"
            elif "\ufffd" in texts[at]:
                at += self._join(ids, known, texts, at)
                continue
            at += 1
        return texts

    def _join(self, ids: list[int], known: list[int | None], texts: list[str], at: int) -> int:
        """Decode from `at` the fewest tokens that make text; how many."""
        for count in range(2, LONGEST + 1):
            part = known[at : at + count]
            if len(part) < count or None in part:
                break
            text = self._tokenizer.decode(part, skip_special_tokens=False)
            if "\ufffd" not in text:
                texts[at : at + count] = [text] + [""] * (count - 1)
                return count
        texts[at] = f"⟨{ids[at]}⟩"
        return 1
