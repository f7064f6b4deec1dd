"""Weights of GPUs that each hold a whole model: it computes with copies in the type of its products, the optimizer
works on fp32 masters, gradients are summed in the masters' type as they arrive, and over the GPUs once a step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


class Masters:
    """Takes the place of a model's trainable parameters; frozen ones are cast for good. `named`: the masters.

    `dtype`: of the products; `reduce_dtype`: of gradients while they are summed over the ranks of `group`.
    """

    def __init__(self, root: nn.Module, dtype: torch.dtype, reduce_dtype: torch.dtype, group: Any):
        self.reduce_dtype, self.group = reduce_dtype, group
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._of: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in root.parameters():
            if parameter.requires_grad:
                master = nn.Parameter(parameter.detach().clone())
                parameter.register_post_accumulate_grad_hook(self._collect)
                self._pairs.append((parameter, master))
            parameter.data = parameter.data.to(dtype)
        self._of = dict(self._pairs)

    @torch.no_grad()
    def _collect(self, parameter: Tensor) -> None:
        """Move a gradient that has just arrived into the master's sum."""
        master = self._of[parameter]
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    def named(self, named: Named) -> Named:
        """The same names with the masters."""
        return [(name, self._of.get(parameter, parameter)) for name, parameter in named]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over the ranks; one that a rank lacks counts as zero there."""
        if dist.get_world_size(self.group) == 1:
            return
        pending = []
        for _, master in self._pairs:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            sent = master.grad.to(self.reduce_dtype)
            pending.append((master.grad, sent, dist.all_reduce(sent, group=self.group, async_op=True)))
        for grad, sent, work in pending:
            work.wait()
            if sent is not grad:
                grad.copy_(sent)

    @torch.no_grad()
    def refresh(self) -> None:
        """The model computes with what the masters have become."""
        copies, masters = zip(*self._pairs, strict=True)
        torch._foreach_copy_(copies, masters)
