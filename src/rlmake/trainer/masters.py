"""Weights of one GPU that nothing is sharded over: the model computes with copies in the type of its products, the
optimizer works on fp32 masters, and gradients are summed in the masters' type as they arrive."""

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


class Masters:
    """Takes the place of a model's trainable parameters; frozen ones are cast for good. `named`: the masters."""

    def __init__(self, root: nn.Module, dtype: torch.dtype):
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
    def refresh(self) -> None:
        """The model computes with what the masters have become."""
        copies, masters = zip(*self._pairs, strict=True)
        torch._foreach_copy_(copies, masters)
