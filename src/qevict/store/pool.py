"""A pool of slots, each holding one unit (``window`` consecutive tokens) per KV head, for all layers and sequences.

Payload tensors are flat, ``[slots in all, ...]``, ordered by layer, sequence, KV head, slot: a kernel needs one base
pointer and the first slot of a (layer, sequence, head). Heads may own different numbers of slots (``ragged``); then
nothing is padded. Unit ids, scores and links are flat in the same order, per group of heads that choose alike.

Ids: ``u >= 0`` holds unit ``u``; ``EMPTY`` is free; in a pool of codes ``ledger(u)`` marks the code of a unit whose full
copy is the one being read. ``ABSENT`` fills the padded view of heads that own fewer slots.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

EMPTY, ABSENT, FIRST_LEDGER = -1, -2, -3
LARGE_PAGE, ADVICE = 2 << 20, 14  # bytes; MADV_HUGEPAGE of Linux


def ledger(unit: Tensor) -> Tensor:
    """The id under which the code of a promoted unit is kept, and back."""
    return FIRST_LEDGER - unit


def blank(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory without content, in large pages where the system grants them: a pool that grows is copied, and getting the new memory
    in small pages takes several times as long as the copy."""
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.device.type == "cpu" and sys.platform == "linux":
        first = -(-out.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        last = (out.data_ptr() + out.nbytes) // LARGE_PAGE * LARGE_PAGE
        if last > first:  # advice: whether it is taken makes no difference but time
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ADVICE)
    return out


def pair(items: Tensor, free: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Match the k-th True of ``items [R, n]`` with the k-th True of ``free [R, m]``: (row, item, slot) indices, flat."""
    row, item = items.nonzero(as_tuple=True)
    rank = items.cumsum(-1)[row, item] - 1
    slot = (~free).to(torch.uint8).argsort(dim=-1, stable=True)[row, rank]
    return row, item, slot


class Pool:
    """Slots of one tier.

    Args:
        heads: (layers, batch, kv_heads).
        groups: 1 (a slot's unit is the same for all heads of a layer) or kv_heads.
        slots: slots per head, or int32 ``[layers, batch, kv_heads]`` if heads differ (needs ``groups == kv_heads``).
        spec: payload of one slot of one head: name -> (shape, dtype).
        records: name -> (dtype, value of an empty slot) kept per slot and group, beside the unit id.
    """

    def __init__(self, heads, groups, slots, spec, records, device):
        self.layers, self.batch, self.kv_heads = heads
        self.groups, self.spec, self.device = groups, dict(spec), device
        self.records = {"unit": (torch.int32, EMPTY), **records}
        self.ragged = slots.to(device, torch.int32) if isinstance(slots, Tensor) else None
        self.slots = int(slots.max()) if isinstance(slots, Tensor) else slots
        if self.ragged is not None and groups != self.kv_heads:
            raise ValueError("heads can own different numbers of slots only if each chooses for itself")
        total = int(self.ragged.sum()) if self.ragged is not None else self.slots * self.layers * self.batch * self.kv_heads
        entries = total // self.kv_heads * groups if self.ragged is None else total
        self.payload = {n: blank((total, *shape), t, device).zero_() for n, (shape, t) in self.spec.items()}
        self.record = {n: torch.full((entries,), v, dtype=t, device=device) for n, (t, v) in self.records.items()}

    # -- addressing ---------------------------------------------------------------------------------------------------

    def first(self) -> Tensor:
        """``[L, B, H]`` index of each head's first slot in the flat payload."""
        if self.ragged is None:
            count = self.layers * self.batch * self.kv_heads
            return (torch.arange(count, device=self.device) * self.slots).view(self.layers, self.batch, self.kv_heads)
        flat = self.ragged.flatten().long()
        return (flat.cumsum(0) - flat).view_as(self.ragged)

    def heads_of(self, group: Tensor) -> Tensor:
        """``[..., heads per group]`` KV heads of groups."""
        per = self.kv_heads // self.groups
        return group.unsqueeze(-1) * per + torch.arange(per, device=self.device)

    def index(self, layer: Tensor, row: Tensor, group: Tensor, slot: Tensor) -> Tensor:
        """Flat payload indices ``[..., heads per group]`` of slots given by equally shaped index tensors."""
        head = self.heads_of(group)
        if self.ragged is None:
            first = ((layer * self.batch + row).unsqueeze(-1) * self.kv_heads + head) * self.slots
        else:
            first = self.first()[layer.unsqueeze(-1), row.unsqueeze(-1), head]
        return first + slot.unsqueeze(-1)

    def _padded(self, lo: int, hi: int, layers: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """For ragged pools: flat indices ``[l, B, H, hi-lo]`` of a range of slots, and which of them exist."""
        slot = torch.arange(lo, hi, device=self.device)
        exists = slot < self.ragged[layers].unsqueeze(-1)
        return (self.first()[layers].unsqueeze(-1) + slot) * exists, exists

    def _entries(self, layer: int | None) -> tuple[slice, Tensor]:
        """For ragged pools: where the slots of all layers, or of one, lie in the flat records, and which slots of the padded view
        ``[l, B, H, slots]`` exist."""
        own = self.ragged if layer is None else self.ragged[layer : layer + 1]
        start = 0 if layer is None else int(self.ragged[:layer].sum())
        exists = torch.arange(self.slots, device=self.device) < own.unsqueeze(-1)
        return slice(start, None if layer is None else start + int(own.sum())), exists

    def grid(self, name: str, layer: int | None = None) -> Tensor:
        """A record as ``[L, B, G, slots]``, or of one layer: a view if heads are alike, else a padded copy (write back with
        :meth:`put`)."""
        flat = self.record[name]
        if self.ragged is None:
            out = flat.view(self.layers, self.batch, self.groups, self.slots)
            return out if layer is None else out[layer]
        where, exists = self._entries(layer)
        fill = ABSENT if name == "unit" else self.records[name][1]
        out = torch.full(exists.shape, fill, dtype=flat.dtype, device=self.device).masked_scatter_(exists, flat[where])
        return out if layer is None else out[0]

    def put(self, name: str, grid: Tensor, layer: int | None = None) -> None:
        """Write a whole record back from ``[L, B, G, slots]``, or that of one layer."""
        if self.ragged is None:
            self.grid(name, layer).copy_(grid)
        else:
            where, exists = self._entries(layer)
            self.record[name][where] = grid.reshape(exists.shape).masked_select(exists)

    def read(self, layer: int, lo: int, hi: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Payload of slots ``lo:hi`` of one layer, each ``[B, H, hi-lo, ...]``; a view if heads are alike."""
        if self.ragged is None:
            shape = (self.layers, self.batch, self.kv_heads, self.slots)
            return {n: self.payload[n].unflatten(0, shape)[layer][:, :, lo:hi] for n in names}
        index, _ = self._padded(lo, hi, slice(layer, layer + 1))
        return {n: self.payload[n][index[0]] for n in names}

    # -- changes ------------------------------------------------------------------------------------------------------

    def resize(self, slots: int) -> None:
        """Give every head ``slots`` slots, keeping the content of the first that many."""
        lead = (self.layers, self.batch)

        def grown(flat: Tensor, heads: int, value) -> Tensor:
            old = flat.view(*lead, heads, self.slots, *flat.shape[1:])
            new = blank((*lead, heads, slots, *flat.shape[1:]), flat.dtype, flat.device)
            new[:, :, :, : self.slots] = old[:, :, :, :slots]
            new[:, :, :, self.slots :] = value
            return new.flatten(0, 3)

        for name in self.payload:  # one tensor at a time: the old one is freed before the next is copied
            self.payload[name] = grown(self.payload[name], self.kv_heads, 0)
        for name, (_, value) in self.records.items():
            self.record[name] = grown(self.record[name], self.groups, value)
        self.slots = slots

    def shrink(self, slots: int) -> Tensor:
        """Fewer slots for every head; what lies beyond moves to free slots below.

        Returns:
            ``[L, B, G, old slots]`` int32: where the content of each slot is now.
        """
        taken = self.grid("unit") != EMPTY
        below = torch.arange(self.slots, device=self.device) < slots
        row, source, target = pair((taken & ~below).flatten(0, 2), (~taken & below).flatten(0, 2))
        place = torch.unravel_index(row, taken.shape[:3])
        before, after = self.index(*place, source), self.index(*place, target)
        for flat in self.payload.values():
            flat[after] = flat[before]
        for name in self.record:
            grid = self.grid(name)
            grid[(*place, target)] = grid[(*place, source)]
        moved = torch.arange(self.slots, dtype=torch.int32, device=self.device).repeat(*taken.shape[:3], 1)
        moved[(*place, source)] = target.to(torch.int32)
        self.resize(slots)
        return moved

    def assign(self, layer: int, slots: Tensor) -> None:
        """Share the slots of a layer that holds nothing yet among its heads: ``[B, H]``, the same sum per sequence."""
        self.ragged[layer] = slots
        self.slots = int(self.ragged.max())

    def repartition(self, slots: Tensor) -> None:
        """Give heads ``[L, B, H]`` slots; each must hold the units that are there. They move along, in the order of their slots."""
        unit = self.grid("unit")
        held = unit >= 0
        layer, row, head, slot = held.nonzero(as_tuple=True)
        source = self.first()[layer, row, head] + slot
        rank = (held.cumsum(-1) - 1)[layer, row, head, slot]
        self.ragged = slots.to(self.device, torch.int32)
        self.slots, total = int(self.ragged.max()), int(self.ragged.sum())
        target = self.first()[layer, row, head] + rank
        take = torch.zeros(total, dtype=torch.int64, device=self.device)
        take[target] = source
        empty = torch.ones(total, dtype=torch.bool, device=self.device)
        empty[target] = False
        for store in (self.payload, self.record):  # an empty slot holds what the first one held, and is marked as empty
            for name, flat in store.items():
                moved = blank((total, *flat.shape[1:]), flat.dtype, flat.device)
                store[name] = torch.index_select(flat, 0, take, out=moved) if len(flat) else moved.zero_()
        for name, (_, fill) in self.records.items():
            self.record[name][empty] = fill

    def select_rows(self, rows: Tensor) -> None:
        """Keep the sequences ``rows`` (in that order, repeats allowed): beam search, batch selection."""
        if self.ragged is not None:
            index, exists = self._padded(0, self.slots)
            take = index[:, rows][exists[:, rows]]
            for store in (self.payload, self.record):
                for name, flat in store.items():
                    store[name] = flat[take]
            self.ragged = self.ragged[:, rows]
        else:
            for store, heads in ((self.payload, self.kv_heads), (self.record, self.groups)):
                for name, flat in store.items():
                    shaped = flat.view(self.layers, self.batch, heads, self.slots, *flat.shape[1:])
                    store[name] = shaped.index_select(1, rows).flatten(0, 3)
        self.batch = len(rows)

    def parts(self, payload_part: Callable[[str], str]) -> Iterator[tuple[str, int]]:
        """Bytes by part, see :mod:`qevict.accounting`; a slot's share of a payload tensor goes to what the slot holds."""
        units = self.grid("unit")
        per = self.kv_heads // self.groups
        live, kept = int((units >= 0).sum()) * per, int((units <= FIRST_LEDGER).sum()) * per
        for name, tensor in self.payload.items():
            total, slots = tensor.untyped_storage().nbytes(), tensor.shape[0]
            one = total // slots if slots else 0
            yield payload_part(name), live * one
            yield "ledger", kept * one
            yield "spare", total - (live + kept) * one
        for name, tensor in self.record.items():
            yield "ids" if name in ("unit", "link") else "scores", tensor.untyped_storage().nbytes()
        if self.ragged is not None:
            yield "ids", self.ragged.untyped_storage().nbytes()
