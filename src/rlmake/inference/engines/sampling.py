"""Sampling of next tokens, so that a token depends on its own request only: on its logits, seed and position.

The uniform number of a draw is a hash of (seed, absolute position), and the token is found in the float64 cumulative
distribution in the vocabulary's order. No generator is shared, so the company in the batch changes nothing.
B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rlmake.inference.engines.base import Entry, Sampling
from rlmake.models.logprobs import log_distribution

_GREEDY = 1e-5  # temperatures below are greedy, as with vLLM
_MASK = 2**64 - 1


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) per (seed, position), by the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    seed = np.array([value & _MASK for value in seeds], dtype=np.uint64)
    x = seed * np.uint64(0x9E3779B97F4A7C15) + np.array(positions, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    x = x + np.uint64(0x2545F4914F6CDD1D)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature < _GREEDY


def sample(
    logits: torch.Tensor, rows: Sequence[Sampling], seeds: Sequence[int], positions: Sequence[int], made: Sequence[int]
) -> tuple[list[int], list[float], list[list[Entry]]]:
    """Tokens, their logprobs under the processed distribution, and the top entries that each row asked for.

    logits fp32 [B, V]; `positions`: absolute position that each token will have; `made`: tokens generated so far.
    """
    logits = _without_early_stops(logits, rows, made)
    temperatures = None
    if any(row.temperature != 1.0 for row in rows):
        temperatures = torch.tensor([1.0 if is_greedy(row) else row.temperature for row in rows])
    filtered = [i for i, row in enumerate(rows) if _filters(row) and not is_greedy(row)]
    if filtered:
        logits = _filter(logits, temperatures, filtered, rows)
    logp = log_distribution(logits, temperatures)
    cdf = logp.double().exp_().cumsum_(-1)
    total = cdf[:, -1]
    draws = torch.from_numpy(uniforms(seeds, positions)) * total
    # A draw may round up to the total; the token must lie where the distribution grows.
    draws = torch.minimum(draws, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cdf, draws[:, None], right=True)[:, 0]
    greedy = [i for i, row in enumerate(rows) if is_greedy(row)]
    if greedy:
        tokens[greedy] = logits[greedy].argmax(-1)
    tokens = tokens.clamp_max(logits.shape[1] - 1)  # only reached with NaN weights, which the caller reports
    logprobs = logp.gather(1, tokens[:, None])[:, 0]
    wanted = max(row.top_logprobs for row in rows)
    tops = _top(logp, rows, wanted) if wanted else [[] for _ in rows]
    return tokens.tolist(), logprobs.tolist(), tops


def _filters(row: Sampling) -> bool:
    return row.top_p < 1.0 or row.top_k > 0 or row.min_p > 0.0


def _without_early_stops(logits: torch.Tensor, rows: Sequence[Sampling], made: Sequence[int]) -> torch.Tensor:
    early = [i for i, row in enumerate(rows) if made[i] < row.min_tokens and row.stop_ids]
    if early:
        logits = logits.clone()
        for i in early:
            logits[i, sorted(rows[i].stop_ids)] = float("-inf")
    return logits


def _filter(
    logits: torch.Tensor, temperatures: torch.Tensor | None, indices: list[int], rows: Sequence[Sampling]
) -> torch.Tensor:
    """Remove what min_p, then top_k, then top_p of each row leave out, of the temperature-scaled distribution."""
    scaled = logits[indices] if temperatures is None else logits[indices] / temperatures[indices, None]
    asked = [rows[i] for i in indices]
    probabilities = torch.softmax(scaled, -1)
    floor = probabilities.amax(-1, keepdim=True) * torch.tensor([[row.min_p] for row in asked])
    scaled = scaled.masked_fill(probabilities < floor, float("-inf"))
    ordered, order = scaled.sort(descending=True, stable=True)
    limit = torch.tensor([[row.top_k or logits.shape[1]] for row in asked])
    ordered = ordered.masked_fill(torch.arange(logits.shape[1]) >= limit, float("-inf"))
    probabilities = torch.softmax(ordered, -1).double()
    before = probabilities.cumsum(-1) - probabilities
    share = torch.tensor([[row.top_p if row.top_p < 1.0 else 2.0] for row in asked])
    cut = before >= share
    cut[:, 0] = False
    out = torch.zeros_like(cut).scatter_(1, order, cut | (ordered == float("-inf")))
    logits = logits.clone()
    logits[indices] = logits[indices].masked_fill(out, float("-inf"))
    return logits


def _top(logp: torch.Tensor, rows: Sequence[Sampling], wanted: int) -> list[list[Entry]]:
    values, ids = logp.topk(min(wanted, logp.shape[1]), -1)
    return [
        [Entry(token, value, rank) for rank, (token, value) in enumerate(zip(t, v, strict=True), 1)][: row.top_logprobs]
        for row, t, v in zip(rows, ids.tolist(), values.tolist(), strict=True)
    ]
