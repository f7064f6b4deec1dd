"""How a mixture of experts routes: counts per expert from the routers' choices, and the page's metrics of them.

A router returns (logits [T, E], weights [T, K], chosen experts [T, K]) and has `num_experts`; E experts, K chosen.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rlmake.trainer.world import World

COLD = 0.1  # an expert with less than this share of the mean load is cold


class RouterStatistics:
    """Hooks on the routers, in the order of the layers. Passes inside `watching` count, recomputed ones do not."""

    def __init__(self, routers: list[nn.Module]):
        self._tokens = 0  # of the row at hand; what comes behind them in a pass is padding
        self._passes: list[list[Tensor]] = []  # micro-batches × layers, int64 [E]
        self._confidence: list[Tensor] = []
        for router in routers:
            router.register_forward_hook(self._note)

    @contextlib.contextmanager
    def watching(self, tokens: int) -> Iterator[None]:
        """Around the forward pass of a row of so many tokens."""
        self._tokens = tokens
        self._passes.append([])
        try:
            yield
        finally:
            self._tokens = 0

    @torch.compiler.disable
    @torch.no_grad()
    def _note(self, router: nn.Module, _, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if not self._tokens:
            return
        logits, _, chosen = output
        chosen = chosen[: self._tokens]
        self._passes[-1].append(torch.bincount(chosen.flatten(), minlength=router.num_experts))
        probabilities = logits[: self._tokens].float().softmax(-1)
        self._confidence.append(probabilities.gather(1, chosen).sum(-1).mean())

    def take(self, world: World) -> dict[str, float]:
        """The step's metrics over all ranks, and a fresh start; every rank calls it."""
        if not self._confidence:
            return {}
        loads = torch.stack([torch.stack(layers) for layers in self._passes]).double()  # [M, L, E]
        violations = ((loads.amax(-1) - loads.mean(-1)) / loads.mean(-1)).amax(1)  # [M]
        confidence = torch.stack(self._confidence).mean()
        self._passes, self._confidence = [], []
        everywhere = world.gather([violations.mean().item(), violations.max().item(), confidence.item()])
        mean, greatest, sure = zip(*everywhere, strict=True)
        return {
            "max_vio/mean": sum(mean) / len(mean),
            "max_vio/max": max(greatest),
            "routing_confidence/mean": sum(sure) / len(sure),
            **_load(world.sum(loads.sum(0))),
        }


def _load(loads: Tensor) -> dict[str, float]:
    """`expert_load/*` from tokens per layer and expert [L, E] of the whole step."""
    mean = loads.mean(-1)
    values = {
        "cv": loads.std(-1, correction=0) / mean,
        "max_mean": loads.amax(-1) / mean,
        "cold_frac": (loads < COLD * mean[:, None]).double().mean(-1),
    }
    found = {}
    for name, layers in values.items():
        found |= {f"expert_load/{name}/mean": layers.mean().item(), f"expert_load/{name}/max": layers.max().item()}
    return found
