"""From a conversation to token ids and a loss mask, through `renderers`.

Trained are the tokens that the model would itself have produced: the renderer's sampled tokens of the enabled roles,
closing token included. Never trained: role headers, and a block that the generation prompt gives at inference (the
empty `<think>` block when thinking is disabled), although renderers count the latter as sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from renderers.base import build_training_sample

from rlmake.core.jsonio import canonical
from rlmake.trainer.data.rows import Conversation, RowError

NOTHING_LEFT, NOTHING = "no trained token is left within seq_len", "no trained token"


@dataclass
class Tokens:
    """`ids` int32 [L], `targets` int32 [L] (the next token), `mask` bool [L] (whether that one is trained)."""

    ids: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    cut: bool = False  # whether the row was longer


class Tokeniser:
    """`make_renderer(options)` builds the renderer of the configuration with a row's own options on top."""

    def __init__(self, make_renderer: Callable[[dict[str, Any]], Any], loss_mask: Any, seq_len: int):
        self._make, self._seq_len = make_renderer, seq_len
        self._renderers: dict[bytes, tuple[Any, list[int]]] = {}
        roles = {role for role in ("system", "user", "tool") if getattr(loss_mask, role)}
        self._body_roles = frozenset(roles) or None
        self._role_filter = None if loss_mask.assistant else (lambda message: False)

    def __call__(self, conversation: Conversation) -> Tokens | str:
        """The shifted sample, cut to `seq_len`, or the reason why it has nothing to train. Raises `RowError`."""
        renderer, given = self._renderer(conversation.options)
        try:
            sample = build_training_sample(
                renderer,
                conversation.messages,
                role_to_mask=self._role_filter,
                tools=conversation.tools,
                content_sft_roles=self._body_roles,
                ensure_final_stop=True,
                message_loss_mask=conversation.message_mask,
            )
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise RowError(f"the renderer refuses it: {error}") from None
        ids = np.asarray(sample.token_ids, dtype=np.int32)
        mask = without_given(ids, np.asarray(sample.loss_mask, dtype=bool), given)
        if not mask[1:].any():
            return NOTHING
        end = self._seq_len
        tokens = Tokens(ids[:-1][:end], ids[1:][:end], mask[1:][:end], cut=len(ids) - 1 > end)
        return tokens if tokens.mask.any() else NOTHING_LEFT

    def _renderer(self, options: dict[str, Any]) -> tuple[Any, list[int]]:
        key = canonical(options)
        if key not in self._renderers:
            renderer = self._make(options)
            self._renderers[key] = renderer, generation_prompt(renderer)
        return self._renderers[key]


def generation_prompt(renderer: Any) -> list[int]:
    """The tokens that stand before a sampled turn at inference: role header and what else the template gives."""
    probe = [{"role": "user", "content": "x"}]
    plain = renderer.render_ids(probe)
    return renderer.render_ids(probe, add_generation_prompt=True)[len(plain) :]


def without_given(ids: np.ndarray, mask: np.ndarray, given: list[int]) -> np.ndarray:
    """Take from each trained run the tokens at its start that continue the generation prompt before it.

    `ids` int32 [L], `mask` bool [L], `given` the generation prompt's ids. Returns the mask without them.
    """
    mask = mask.copy()
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    for start in starts.tolist():
        before = max(
            (n for n in range(1, len(given) + 1) if ids[max(start - n, 0) : start].tolist() == given[:n]), default=0
        )
        at = start
        while before and before < len(given) and at < len(ids) and mask[at] and ids[at] == given[before]:
            mask[at] = False
            at, before = at + 1, before + 1
    return mask
