"""Activation offloading: what a block keeps for the backward pass waits in host memory.

Copies leave the device on a stream of their own. A tensor is let go once `max_inflight_activations` later ones are on
their way, so the last few never leave; in the backward pass as many are fetched ahead. Values are copied and nothing is
computed elsewhere: not a bit changes.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALL = 1 << 10  # elements of a tensor that is not worth a copy


class Kept:
    """One tensor: `source`, where it was made, until its copy in `host` has arrived; `back`, where it is needed again.

    `before` is the one that was kept before it, and will be needed after it.
    """

    def __init__(self, source: Tensor, host: Tensor, before: "weakref.ref[Kept] | None"):
        self.source, self.host, self.before = source, host, before
        self.version = source._version
        self.back: Tensor | None = None
        self.moved: torch.cuda.Event | None = None  # the copy that was begun last

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it still has the very bytes of `tensor` on the device."""
        mine = self.source
        return (
            mine is not None
            and (mine.data_ptr(), mine.dtype, mine.shape, mine.stride())
            == (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            and self.version == mine._version == tensor._version
        )


class Offloading:
    """`config`: `model.ac_offloading`. Whatever autograd drops is freed here too: nothing but it holds a `Kept`."""

    def __init__(self, config: Any, device: torch.device):
        self.most, self.device = config.max_inflight_activations, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.pin = config.pin_memory and self.stream is not None
        self.leaving: deque[weakref.ref[Kept]] = deque()

    def apply(self, blocks: list[nn.Module]) -> None:
        """In place, around what each block's call is now: a compiled block stays one graph."""
        for block in blocks:
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = functools.partial(self._call, block, call)

    def _call(self, block: nn.Module, call: Callable, hidden: Tensor, **shared: Any) -> Any:
        """`shared`, the arguments beside the hidden states, are every block's: offloading them frees nothing."""
        stay: set[int] = set()

        def pack(tensor: Tensor) -> Tensor | Kept:
            if not stay:  # FSDP has gathered the weights by now
                values = [*block.parameters(), *block.buffers(), *_tensors(shared)]
                stay.update(value.untyped_storage()._cdata for value in values)
            here = not tensor.is_floating_point() or tensor.numel() < SMALL
            return tensor if here or tensor.untyped_storage()._cdata in stay else self._keep(tensor)

        with saved_tensors_hooks(pack, self._bring):
            return call(hidden, **shared)

    def _keep(self, tensor: Tensor) -> Tensor | Kept:
        for kept in (found for known in self.leaving if (found := known()) is not None):
            if kept.is_of(tensor):
                return kept
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.pin)
        if host.stride() != tensor.stride():
            return tensor  # a part of a tensor: it frees nothing by itself
        kept = Kept(tensor, host, self.leaving[-1] if self.leaving else None)
        self._copy(kept, host, tensor)
        self.leaving.append(weakref.ref(kept))
        while len(self.leaving) > self.most:
            if (oldest := self.leaving.popleft()()) is not None:
                self._wait(oldest)
                oldest.source = None
        return kept

    def _bring(self, kept: Tensor | Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        ahead: Kept | None = kept
        for _ in range(self.most):
            if ahead is None:
                break
            if ahead.source is None and ahead.back is None:
                ahead.back = torch.empty_like(ahead.host, device=self.device)
                self._copy(ahead, ahead.back, ahead.host)
            ahead = ahead.before and ahead.before()
        if kept.source is not None:
            return kept.source
        self._wait(kept)
        return kept.back

    def _copy(self, kept: Kept, to: Tensor, source: Tensor) -> None:
        """Begin it, behind what the device was given so far: the memory of `to` may still be in use."""
        if self.stream is None:
            to.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            kept.moved = self.stream.record_event()
        if to.is_cuda:
            to.record_stream(self.stream)  # or, dropped unused, its memory could be given away under the copy

    def _wait(self, kept: Kept) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.moved)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []
