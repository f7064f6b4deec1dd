"""A tokenizer that is its tokenizer.json and no more, read by `tokenizers` alone.

transformers' `AutoTokenizer` imports torch, which costs an env server seconds and half a gigabyte for a job that the
Rust library does by itself. This is the adapter that `renderers` asks for; anything else that is asked of it comes
from the transformers tokenizer, loaded then.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

PLAIN = {"PreTrainedTokenizerFast", "TokenizersBackend"}  # classes that add nothing to their file


class PlainTokenizer:
    """`name_or_path` is the directory; token ids, text and offsets (characters) are those of transformers."""

    def __init__(self, folder: str, config: dict[str, Any], general: Callable[[str], Any]):
        self.name_or_path = folder
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._general, self._full = general, None
        self.eos_token_id = self._special(config, "eos_token")
        self.unk_token_id = self._special(config, "unk_token")

    def _special(self, config: dict[str, Any], key: str) -> int | None:
        token = config.get(key)
        return (
            None
            if token is None
            else self.convert_tokens_to_ids(token["content"] if isinstance(token, dict) else token)
        )

    def __len__(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        found: dict[str, Any] = {"input_ids": encoding.ids}
        if return_offsets_mapping:
            found["offset_mapping"] = encoding.offsets
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        if clean_up_tokenization_spaces:
            raise TypeError("this tokenizer does not clean up spaces")
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._tokenizer.token_to_id(tokens)
        return self.__dict__.get("unk_token_id") if found is None else found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._full is None:
            self._full = self._general(self.name_or_path)
        return getattr(self._full, name)


def load(folder: str, general: Callable[[str], Any]) -> Any:
    """The tokenizer of a directory that holds a plain one; what `general` loads for any other, and for hub ids."""
    try:
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
        if config["tokenizer_class"] in PLAIN and not config.get("clean_up_tokenization_spaces"):
            return PlainTokenizer(folder, config, general)
    except (OSError, ValueError, KeyError):
        pass
    return general(folder)
