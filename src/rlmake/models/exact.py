"""The batch-invariant fp32 forward on a CPU: a token's bytes depend on its own document and on nothing else.

The trainer runs packed rows through it with autograd, the embedded engine prefills and decodes through it with a KV
cache, and both get the same bits. What makes bytes differ on a CPU is the shape of matrix products: so every flat row
has a multiple of `packing.TILE` tokens, key rows are padded by a fixed rule of the document's length, and at least four
query rows enter an attention product. Norms, softmax and element-wise functions do not depend on the rows.
It holds for one kind of machine and at most two threads; `self_test` looks, on the actual model, whether it holds.

T tokens of a flat row, H query heads, G key-value heads, D head width, S cache positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from rlmake.core.errors import UserError
from rlmake.models.logprobs import score, token_logprobs
from rlmake.models.packing import Plan, causal_bias, key_rows, up

__all__ = [
    "NAME",
    "Context",
    "Decode",
    "KVCache",
    "Packed",
    "SelfTest",
    "establish",
    "packed_forward",
    "require",
    "run",
    "self_test",
    "token_logprobs",
]

NAME = "rlmake_exact"
MIN_QUERY_ROWS = 4
MAX_THREADS = 2
STAGGER = 24
"""Positions that the cache has beyond its length: at a distance of a power of two, all slots would share the same few
sets of the processor's cache."""


@dataclass
class KVCache:
    """Keys and values of all layers, `[layers, slots + 1, G, S, D]` each; the last slot takes what padding writes.

    The memory is zeroed pages that the system hands out when they are first written, so unused length costs nothing.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        slots, heads, length = self.keys.shape[1:4]
        self._starts = torch.arange(slots * heads).view(slots, heads) * length

    @classmethod
    def make(cls, config, slots: int, length: int, dtype: torch.dtype = torch.float32) -> "KVCache":
        """A cache for `slots` sequences (rounded up to 16) of at most `length` tokens."""
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, up(slots) + 1, heads, key_rows(length) + STAGGER, width)
        return cls(_lazy_zeros(shape, dtype), _lazy_zeros(shape, dtype))

    @property
    def spare(self) -> int:
        """The slot that padding writes to."""
        return self.keys.shape[1] - 1

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot into another."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    def rows(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where `write` puts tokens that go to position `positions[t]` of slot `slots[t]`: [T · G], of all layers."""
        return (self._starts[slots] + positions[:, None]).flatten()

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key and value [T, G, D] to their `rows`."""
        for cache, new in ((self.keys, key), (self.values, value)):
            cache[layer].view(-1, cache.shape[-1]).index_copy_(0, rows, new.reshape(len(rows), -1))


@dataclass(frozen=True)
class Packed:
    """Whole documents. With a cache, their keys and values are also kept in its `rows`."""

    plan: Plan
    rows: torch.Tensor | None = None


@dataclass(frozen=True)
class Decode:
    """Row b holds the newest token of slot b, at position `positions[b]`; it sees what the cache holds up to there.

    The number of rows is a multiple of 16; rows beyond the slots in use write to the spare slot and mean nothing.
    """

    positions: torch.Tensor  # [B]
    rows: torch.Tensor  # [B · G] of the cache: of slot b, or of the spare one
    bias: torch.Tensor  # [B, 1, 1, N]

    @classmethod
    def of(cls, cache: KVCache, positions: torch.Tensor) -> "Decode":
        """For the first `len(positions)` slots of the cache."""
        used, rows = len(positions), up(len(positions))
        slots = torch.arange(rows)
        slots[used:] = cache.spare
        positions = F.pad(positions, (0, rows - used))
        keys = torch.arange(key_rows(int(positions.max()) + 1))
        bias = torch.zeros(rows, len(keys), dtype=cache.keys.dtype)
        bias.masked_fill_(keys > positions[:, None], float("-inf"))
        return cls(positions, cache.rows(slots, positions), bias[:, None, None])


@dataclass(frozen=True)
class Context:
    """What a flat row holds: first the rows of `decode`, then those of `packed`, either of which may be absent."""

    packed: Packed | None = None
    decode: Decode | None = None
    cache: KVCache | None = None


def attend(module: nn.Module, query, key, value, attention_mask, scaling=None, context=None, **kwargs):
    """transformers' attention function: query [1, H, T, D], key and value [1, G, T, D] → ([1, T, H, D], None).

    Query heads that share a key-value head are laid out as further query rows.
    """
    if context is None:
        raise ValueError(f"the attention {NAME} needs a context: call it through models.exact")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or kwargs.get("sliding_window"):
        raise UserError(f"the exact forward knows no soft caps, sinks or sliding windows ({type(module).__name__})")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    decode, packed, layer = context.decode, context.packed, module.layer_idx
    if decode is None:
        return _packed(layer, q, k, v, scaling, packed, context.cache)[None], None
    rows = len(decode.positions)
    out = _decode(layer, q[:rows], k[:rows], v[:rows], scaling, decode, context.cache)
    if packed is not None:
        out = torch.cat([out, _packed(layer, q[rows:], k[rows:], v[rows:], scaling, packed, context.cache)])
    return out[None], None


def _packed(layer: int, query, key, value, scaling: float, packed: Packed, cache: KVCache | None) -> torch.Tensor:
    """query [T, H, D], key and value [T, G, D] → [T, H, D]."""
    heads, width, kv_heads = query.shape[1], query.shape[2], key.shape[1]
    groups = heads // kv_heads
    if cache is not None:
        cache.write(layer, packed.rows, key, value)
    outputs = []
    for bucket in packed.plan.buckets:
        (size, rows), keys = bucket.queries.shape, bucket.keys.shape[1]
        q = query[bucket.queries].view(size, rows, kv_heads, groups, width).permute(0, 2, 3, 1, 4)
        k, v = (tensor[bucket.keys].transpose(1, 2) for tensor in (key, value))
        q = q.reshape(size, kv_heads, groups * rows, width)
        bias = _bias(rows, keys, groups).to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
        out = out.view(size, kv_heads, groups, rows, width).permute(0, 3, 1, 2, 4)
        outputs.append(out.reshape(size * rows, heads, width))
    return torch.cat(outputs)[packed.plan.back]


def _decode(layer: int, query, key, value, scaling: float, decode: Decode, cache: KVCache) -> torch.Tensor:
    """query [B, H, D], key and value [B, G, D] → [B, H, D]."""
    size, heads, width = query.shape
    kv_heads, length = key.shape[1], decode.bias.shape[-1]
    groups = heads // kv_heads
    rows = max(groups, MIN_QUERY_ROWS)
    cache.write(layer, decode.rows, key, value)
    keys, values = cache.keys[layer, :size, :, :length], cache.values[layer, :size, :, :length]
    q = query.reshape(size, kv_heads, groups, width)
    if groups < rows:
        q = torch.cat([q] * -(-rows // groups), 2)[:, :, :rows]
    bias = decode.bias.expand(size, 1, rows, length)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scaling)
    return out[:, :, :groups].reshape(size, heads, width)


AttentionInterface.register(NAME, attend)


_cached_bias = lru_cache(maxsize=64)(causal_bias)


def _bias(rows: int, keys: int, groups: int) -> torch.Tensor:
    """Small biases are kept; those of long documents are built again, since keeping them would cost gigabytes."""
    return (_cached_bias if rows * keys * groups <= 1 << 20 else causal_bias)(rows, keys, groups)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.zeros(shape, dtype=f"i{dtype.itemsize}")).view(dtype)


def require(config) -> None:
    """Raise `UserError` for an architecture that the exact forward cannot serve."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        raise UserError(
            f"model type {config.model_type}: the exact forward knows full attention only, not {sorted(kinds)}"
        )


def backbone(model: nn.Module) -> nn.Module:
    """The part of a causal language model that ends in hidden states, without the head."""
    return getattr(model, model.base_model_prefix)


def packed_forward(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, lens: Sequence[int]
) -> torch.Tensor:
    """Hidden states [T, hidden] of a packed row: input_ids and position_ids [1, T], document lengths that sum to T.

    The row is padded to a multiple of 16 inside; the padding is a document of its own. Under FSDP call it inside the
    forward of the root module, since it uses the backbone and not the head.
    """
    length = input_ids.shape[1]
    if sum(lens) != length:
        raise ValueError(f"document lengths sum to {sum(lens)}, the row has {length} tokens")
    padding = up(length) - length
    plan = Plan.of([*lens, padding] if padding else lens)
    ids, positions = F.pad(input_ids, (0, padding)), F.pad(position_ids, (0, padding))
    return run(model, ids, positions, Context(Packed(plan)))[:length]


def run(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, context: Packed | Decode
) -> torch.Tensor:
    """Hidden states [T, hidden] of a flat row [1, T] whose length is already a multiple of 16."""
    output = backbone(model)(input_ids=input_ids, position_ids=position_ids, use_cache=False, context=context)
    return output.last_hidden_state[0]


class RotaryTable(nn.Module):
    """A rotary embedding whose angles are computed once for each position instead of at every call: the same bits."""

    def __init__(self, rotary: nn.Module, length: int, dtype: torch.dtype):
        super().__init__()
        positions = torch.arange(up(length))[None]
        self._cos, self._sin = (table[0] for table in rotary(torch.empty(0, dtype=dtype), positions))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cos[position_ids], self._sin[position_ids]


def tabulate(model: nn.Module, length: int) -> None:
    """Give a model that generates up to `length` positions a `RotaryTable`, where its angles depend on nothing else."""
    part = backbone(model)
    rotary = getattr(part, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) == "default":
        part.rotary_emb = RotaryTable(rotary, length, model.dtype)


@dataclass(frozen=True)
class SelfTest:
    """What `self_test` found: the greatest difference of a logprob between the ways to compute it; 0 means exact."""

    packed_vs_alone: float
    packed_vs_decoded: float
    threads: int

    @property
    def ok(self) -> bool:
        return self.packed_vs_alone == 0 and self.packed_vs_decoded == 0

    def __str__(self) -> str:
        return (
            f"{'exact' if self.ok else 'NOT exact'} with {self.threads} thread(s): packed against alone "
            f"{self.packed_vs_alone:.1e}, packed against decoded {self.packed_vs_decoded:.1e}"
        )


@torch.no_grad()
def self_test(model: nn.Module, lens: Sequence[int] = (3, 17, 40, 77, 150, 203), decoded: int = 24) -> SelfTest:
    """Score random documents packed, alone and by decoding their last `decoded` tokens, and compare bit for bit.

    `model` is a plain (not sharded) fp32 model on the CPU that uses this attention. Costs about a thousand tokens.
    """
    config = model.config
    longest = config.max_position_embeddings
    lens = sorted({min(length, longest) for length in lens})
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in lens]
    packed = _logprobs(model, documents)
    alone = [_logprobs(model, [document])[0] for document in documents]
    steps = [min(decoded, length - 1) for length in lens]
    replayed = _decoded_logprobs(model, documents, steps)
    return SelfTest(
        max(_distance(a, b) for a, b in zip(packed, alone, strict=True)),
        max(_distance(a[len(a) - n :], b) for a, b, n in zip(packed, replayed, steps, strict=True)),
        torch.get_num_threads(),
    )


def establish(model: nn.Module) -> SelfTest:
    """Find a thread count at which the forward is exact: the present one (at most 2), else one. Sets it."""
    torch.set_num_threads(min(torch.get_num_threads(), MAX_THREADS))
    result = self_test(model)
    if not result.ok and result.threads > 1:
        torch.set_num_threads(1)
        result = self_test(model)
    return result


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    gap = float((a - b).abs().max())
    return gap if gap == gap else float("inf")


def _logprobs(model: nn.Module, documents: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logprobs of tokens 1 … of each document, all in one packed row."""
    lens = [len(document) for document in documents]
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(length) for length in lens])[None]
    hidden = packed_forward(model, ids, positions, lens)
    scores = score(hidden, model.lm_head.weight, torch.roll(ids[0], -1))
    return [part[:-1] for part in scores.split(lens)]


def _decoded_logprobs(model: nn.Module, documents: list[torch.Tensor], steps: list[int]) -> list[torch.Tensor]:
    """Logprobs of the last `steps[d]` tokens of each document, by prefilling the rest and decoding token by token."""
    cache = KVCache.make(model.config, len(documents), max(map(len, documents)))
    lens = [len(document) - count for document, count in zip(documents, steps, strict=True)]
    padding = up(sum(lens)) - sum(lens)
    ids = F.pad(torch.cat([document[:n] for document, n in zip(documents, lens, strict=True)]), (0, padding))
    positions = F.pad(torch.cat([torch.arange(n) for n in lens]), (0, padding))
    owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    owner = F.pad(owner, (0, padding), value=cache.spare)
    plan = Plan.of([*lens, padding] if padding else lens)
    hidden = run(model, ids[None], positions[None], Context(Packed(plan, cache.rows(owner, positions)), cache=cache))
    hidden = hidden[torch.tensor(lens).cumsum(0) - 1]
    found: list[list[torch.Tensor]] = [[] for _ in documents]
    for step in range(max(steps, default=0)):
        at = torch.tensor([min(n + step, len(d) - 1) for d, n in zip(documents, lens, strict=True)])
        tokens = torch.stack([document[place] for document, place in zip(documents, at, strict=True)])
        scores = score(hidden, model.lm_head.weight, tokens)
        for index, count in enumerate(steps):
            if step < count:
                found[index].append(scores[index])
        decode = Decode.of(cache, at)
        ids = F.pad(tokens, (0, len(decode.positions) - len(tokens)))
        hidden = run(model, ids[None], decode.positions[None], Context(decode=decode, cache=cache))[: len(documents)]
    return [torch.stack(scores) if scores else torch.empty(0) for scores in found]
