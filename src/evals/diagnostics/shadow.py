"""Watching a policy at work: where it holds every unit after each routing event, where its own attention goes, and what each change
of tier does to the attention output. Read from outside; the cache under watch computes what it would anyway."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from evals.diagnostics.metrics import FUTURE, PROMOTED, PROTECTED
from evals.diagnostics.trace import grid
from qevict.engine.reference import Block, attend
from qevict.hf.cache import TierCache
from qevict.policy import CODED, EVICTED, FULL
from qevict.store.arena import Arena

# What may happen to a unit at an event: name -> (tiers before, tier after). Units leave the local region as originals.
CHANGES = {
    "promoted": ((CODED,), PROMOTED),
    "demoted": ((FULL, PROTECTED), CODED),
    "demoted_again": ((PROMOTED,), CODED),
    "evicted_full": ((FULL, PROTECTED), EVICTED),
    "evicted_promoted": ((PROMOTED,), EVICTED),
    "evicted_code": ((CODED,), EVICTED),
}


def tiers(arena: Arena, units: int) -> Tensor:
    """Where each place is held now: ``[L, B, H, 1 + units]`` int8, see :mod:`evals.diagnostics.metrics`."""
    g, groups = arena.geometry, arena.full.groups
    held = torch.full((g.layers, arena.batch, groups, units + 1), EVICTED, dtype=torch.int8)  # the last takes what is no unit
    full = arena.full.grid("unit").cpu().long()
    aged = arena.aged(full, arena.everyone).cpu()
    tier = torch.where(aged, FULL, PROTECTED)
    if "link" in arena.full.record:
        tier = torch.where(aged & (arena.full.grid("link").cpu() >= 0), PROMOTED, tier)
    held.scatter_(-1, torch.where(full >= 0, full, units), tier.to(torch.int8))
    if arena.coded is not None:
        coded = arena.coded.grid("unit").cpu().long()
        held.scatter_(-1, torch.where(coded >= 0, coded, units), CODED * torch.ones_like(coded, dtype=torch.int8))
    held = held[..., :-1]
    end = arena.origin + (torch.arange(units) + 1) * arena.policy.window
    held[..., end > arena.seen] = FUTURE
    only_sinks = end <= arena.rows[0].cpu()[:, None]  # [B, units] nothing of them is kept apart from the sinks
    held = held.masked_fill(only_sinks[:, None], PROTECTED)
    sinks = torch.full_like(held[..., :1], PROTECTED)
    return torch.cat((sinks, held), -1).repeat_interleave(g.kv_heads // groups, 2)


class Shadow:
    """Watches one cache from before its prompt on.

    Args:
        prompt, forced: tokens that will pass.
        originals: keep the keys and values of all tokens aside, to measure what changes of tier do.

    Attributes:
        time: forced tokens that had passed at each event; 0 is the selection at the end of the prompt.
        tier: of each event, ``[L, B, H, P]``.
        mass: of each step and layer, ``[B, H, P]``: the cache's own attention.
        changes: per text: name -> sums over changes of ``n``, and of the unit's attention-output error ``before`` and ``after``.
    """

    def __init__(self, cache: TierCache, prompt: int, forced: int, originals: bool = True):
        self.cache, self.prompt, self.tokens = cache, prompt, prompt + forced
        self.units = grid(prompt, self.tokens, cache.policy.window)[1]
        self.time: list[int] = []
        self.tier: list[Tensor] = []
        self.mass: list[Tensor] = []
        self.changes: list[dict[str, dict[str, float]]] = []
        self.keep = originals and cache.policy.codec(cache.geometry) is not None
        self.kv: list[tuple[Tensor, Tensor]] = []  # per layer: what arrived, in the storage type
        self.pending: dict[str, tuple[Tensor, ...]] = {}
        self.coded: dict[int, list[Block]] = {}  # of each layer since the last event
        cache.attend = self._watched(cache.attend)

    @property
    def passed(self) -> int:
        return self.cache.store.seen - self.prompt

    def _watched(self, attend: Callable) -> Callable:
        def watched(index, module, q, k, v, *args, **kwargs):
            if self.keep:
                self._keep(index, k, v)
            store, last = self.cache.store, index == self.cache.geometry.layers - 1
            if store is not None and index == 0 and k.shape[2] == 1 and not self.mass:
                store.decode = self._decode(store.decode)
            due = None if store is None else list(store.due)
            out = attend(index, module, q, k, v, *args, **kwargs)
            if last and (not self.tier or self.cache.store.due != due):
                self._event()
            return out

        return watched

    def _keep(self, index: int, k: Tensor, v: Tensor) -> None:
        batch, heads, n, dim = k.shape
        if index == len(self.kv):
            self.kv.append(tuple(k.new_zeros(batch, heads, self.tokens, dim, dtype=self.cache.geometry.dtype) for _ in range(2)))
        start = self.cache.layers[index].seen - n
        for kept, new in zip(self.kv[index], (k, v), strict=True):
            kept[:, :, start : start + n] = new

    def _decode(self, decode: Callable) -> Callable:
        def watched(layer, q, k, v, scaling):
            out = decode(layer, q, k, v, scaling)
            self._note(layer, q, scaling)
            self._weigh(layer, q, out, scaling)
            return out

        return watched

    def _note(self, layer: int, q: Tensor, scaling: float) -> None:
        """Where the token that was just stored attends to."""
        store = self.cache.store
        if layer not in self.coded:
            self.coded[layer] = list(store.coded_blocks(layer))
        _, said = attend(q, [*store.dense_blocks(layer, q), *self.coded[layer]], scaling, mass_queries=1)
        heads = q.new_zeros(*said[0].shape[:2], self.units + 2, dtype=torch.float32)  # the last takes what is no unit
        if store.sink.shape[-2]:
            heads[..., 0] = said.pop(0)[..., 0]
        unit = torch.cat([p.grid("unit", layer) for p in store.pools], -1).long()
        unit = unit.repeat_interleave(heads.shape[1] // unit.shape[1], 1)
        heads.scatter_add_(-1, torch.where(unit >= 0, unit + 1, self.units + 1), torch.cat(said, -1))
        self.mass.append(heads[..., :-1].half().cpu())

    def _event(self) -> None:
        store = self.cache.store
        self.coded = {}
        now = tiers(store, self.units)
        if self.keep and self.tier:
            before, groups = self.tier[-1], store.full.groups
            per = now.shape[2] // groups
            old, new = (t[:, :, ::per, 1:] for t in (torch.where(before == FUTURE, PROTECTED, before), now))
            for name, (sources, target) in CHANGES.items():
                found = torch.stack([old == s for s in sources]).any(0) & (new == target)
                self.pending[name] = found.to(store.device).nonzero(as_tuple=True)  # layer, row, group, unit
        self.tier.append(now)
        self.time.append(self.passed)

    # -- what a change of tier does --------------------------------------------------------------------------------------

    def _weigh(self, layer: int, q: Tensor, out: Tensor, scaling: float) -> None:
        """At the first step after an event: the error that each unit that changed tier makes in this layer's attention output, as
        it is held now and as it would be had it stayed."""
        if not any(len(at[0]) for at in self.pending.values()):
            return
        if not self.changes:
            self.changes = [defaultdict(lambda: dict.fromkeys(("n", "before", "after"), 0.0)) for _ in range(len(q))]
        total = self._log_total(layer, q, scaling)
        for name, (layers, *place) in self.pending.items():
            row, group, unit = (x[layers == layer] for x in place)
            if not len(row):
                continue
            coded, copy, gone = self._errors(layer, q, out, scaling, total, row, group, unit)
            none = torch.zeros_like(coded)
            before, after = {
                "promoted": (coded, copy), "demoted": (none, coded), "demoted_again": (copy, coded),
                "evicted_full": (none, gone), "evicted_promoted": (copy, gone), "evicted_code": (coded, gone),
            }[name]  # fmt: skip
            for r, a, b in zip(row.tolist(), before.tolist(), after.tolist(), strict=True):
                for key, value in (("n", 1), ("before", a), ("after", b)):
                    self.changes[r][name][key] += value
        if layer == self.cache.geometry.layers - 1:
            self.pending = {}

    def _log_total(self, layer: int, q: Tensor, scaling: float) -> Tensor:
        """``[B, H, group]`` log of the softmax's denominator over everything that is held."""
        parts = []
        for block in self.cache.store.blocks(layer, q):
            query = q if block.turned_query is None else block.turned_query
            logits = self._logits(query, block.k.float(), scaling)
            parts.append(logits if block.visible is None else logits.masked_fill(~block.visible, float("-inf")))
        return torch.cat(parts, -1).logsumexp(-1)

    @staticmethod
    def _logits(q: Tensor, k: Tensor, scaling: float) -> Tensor:
        """``[B, H, group, t]`` of one query token ``[B, H_q, 1, d]`` and keys ``[B, H, t, d]``."""
        return q.float().squeeze(2).unflatten(1, (k.shape[1], -1)) @ k.transpose(-1, -2) * scaling

    def _errors(self, layer, q, out, scaling, total, row, group, unit) -> tuple[Tensor, Tensor, Tensor]:
        """Error of units ``[n]`` if they are held coded, as a full copy of their code, or not at all: L2 norm of the change of the
        attention output (before the output projection) against the originals, over that of the heads' whole output."""
        store = self.cache.store
        head = store.full.heads_of(group)  # [n, heads per group]
        b, ids = row.unsqueeze(-1).expand_as(head), unit.unsqueeze(-1).expand_as(head)
        column = torch.maximum(store.columns(ids), store.rows[0][b].unsqueeze(-1))  # a first unit repeats its first real token ...
        real = store.columns(ids) == column  # ... which is masked out
        k, v = (kept[b.unsqueeze(-1), head.unsqueeze(-1), column] for kept in self.kv[layer])
        data = store.encode(k, v, b, ids)
        position = column + store.rows[1][b].unsqueeze(-1)
        coded_k, coded_v = store.rope.turn(store.codec.decode_keys(data), position), store.codec.decode_values(data)
        dtype = k.dtype
        query = q.float().squeeze(2).unflatten(1, (store.geometry.kv_heads, -1))[b, head]  # [n, heads, group, d]
        top = total[b, head].unsqueeze(-1)

        def part(k: Tensor, v: Tensor) -> Tensor:
            weights = (query @ k.float().transpose(-1, -2) * scaling - top).exp() * real.unsqueeze(2)
            return weights @ v.float()

        whole = out.float().squeeze(2).unflatten(1, (store.geometry.kv_heads, -1))[b, head].flatten(1).norm(dim=-1)
        exact = part(k, v)
        held = (part(coded_k, coded_v), part(coded_k.to(dtype), coded_v.to(dtype)), torch.zeros_like(exact))
        return tuple((x - exact).flatten(1).norm(dim=-1) / whole for x in held)
