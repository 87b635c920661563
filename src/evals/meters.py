"""Workspace: how much temporary memory a step needs beyond what is alive when it starts.

``cuda`` reads the allocator's peak. ``dispatch`` follows every tensor storage that PyTorch operations make and free; it
does not see scratch inside a kernel, so it is a lower bound. Rows of different meters must not be compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakTensors(TorchDispatchMode):
    """Live bytes of tensors made under it, minus those of older tensors that it saw die; ``peak`` is the highest value."""

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self._sizes: dict[int, int] = {}

    def _see(self, tensor: torch.Tensor, new: bool) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size == 0 or key in self._sizes:
            return
        self._sizes[key] = size
        weakref.finalize(storage, self._gone, key)
        if new:
            self.current += size
            self.peak = max(self.peak, self.current)

    def _gone(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, False)
        out = func(*args, **kwargs)
        for leaf in tree_iter(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, True)
        return out


def meter_name(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "dispatch"


def workspace(device: torch.device, step: Callable[[], object]) -> int:
    """Peak temporary bytes of ``step()``: highest live bytes during it minus those at its start."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - base
    with PeakTensors() as meter:
        step()
    return meter.peak
