"""Workspace: how much temporary memory a step needs beyond what is alive when it starts. Time: of calls, and of calls within
calls.

For workspace ``cuda`` reads the allocator's peak. ``dispatch`` follows every tensor storage that PyTorch operations make and free;
it does not see scratch inside a kernel, so it is a lower bound. Rows of different meters must not be compared. Times are process
CPU time on a CPU with one thread, which other work on the machine does not change; else wall time, synchronized.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles

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


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had; None: not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def clock_name() -> str:
    return "process CPU time" if torch.get_num_threads() == 1 and not torch.cuda.is_available() else "wall time"


def _now() -> float:
    return (time.process_time() if clock_name() == "process CPU time" else time.perf_counter()) * 1e3


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = _now()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return _now() - began


class Laps:
    """Times a call that other timed calls make, without waiting for the device inside of them."""

    def __init__(self, device: torch.device):
        self.device, self._marks = device, []

    def _mark(self):
        if self.device.type != "cuda":
            return _now()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def around(self, call: Callable[[], object]) -> Callable[[], None]:
        def timed() -> None:
            began = self._mark()
            call()
            self._marks.append((began, self._mark()))

        return timed

    def ms(self) -> list[float]:
        """Milliseconds of each call so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [began.elapsed_time(ended) for began, ended in self._marks]
        return [ended - began for began, ended in self._marks]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles; of a single value the value."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "q1": low, "q3": high}


def ratio(times: Mapping[str, Sequence[float]], other: str | None) -> dict[str, float] | None:
    """``method`` to another: ratio of medians, with the quartiles of the ratios of steps that ran next to each other."""
    if other not in times:
        return None
    pairs = [a / b for a, b in zip(times["method"], times[other], strict=True)]
    return spread(pairs) | {"median": median(times["method"]) / median(times[other])}


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest whole number that fits, by doubling and halving from a guess; 0 if not even 1 does. What fits a number fits all
    smaller ones."""
    low, high = 0, max(guess, 1)  # low fits
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def projected(need: Callable[[int], int], limit: int, most: int = 8) -> int:
    """The largest number whose need stays within a limit, on the line through two that are measured: the first of 2, 4, 8 ... that
    is above the limit (or is ``most``) and its half. A need may grow faster than that, when what is constant no longer hides it."""
    low, high = 1, 2
    one, two = need(low), need(high)
    while two <= limit and high < most:
        low, one, high = high, two, 2 * high
        two = need(high)
    return max(0, low + (limit - one) * (high - low) // (two - one))
