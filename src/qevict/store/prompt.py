"""The first selection: which part of a layer's prompt is stored where, right after the layer ran (or after the last layer,
where layers share their slots)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from qevict.engine.reference import projected_norm
from qevict.policy import CODED, FULL, Candidates, PromptView, select
from qevict.store.pool import EMPTY, Pool, pair

if TYPE_CHECKING:
    from qevict.store.arena import Arena


def ingest(arena: Arena, layer: int, view: PromptView) -> None:
    """Store one layer's prompt, or hold it until the layers can share their slots."""
    policy, k, v = arena.policy, view.k, view.v
    if arena.sink.shape[-2]:
        column = arena.sink_columns().clamp_max(arena.prompt - 1)
        take = column[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[-1])
        arena.sink[:, layer] = torch.stack((k.gather(2, take), v.gather(2, take))).to(arena.sink.dtype)
    c = _candidates(arena, layer, view)
    if policy.shares is None or arena.layouts[0].interval is None:
        _store(arena, layer, k, v, c)
    elif policy.shares == "heads":
        c = policy.share(c)
        _assign(arena, layer, c)
        _store(arena, layer, k, v, c)
    else:
        arena.held[layer] = (k, v, c)
        if len(arena.held) == arena.geometry.layers:
            _commit(arena)


def _commit(arena: Arena) -> None:
    """Let all layers share their slots, then store them; each is let go of before the next is stored."""
    policy, layers = arena.policy, range(arena.geometry.layers)
    units = policy.allocate(Candidates.stack([arena.held[i][2] for i in layers]))
    each = [replace(arena.held[i][2], **{policy.shared: units[i]}) for i in layers]
    for i in layers:
        _assign(arena, i, each[i])
    for i in layers:
        k, v, _ = arena.held.pop(i)
        _store(arena, i, k, v, each[i])


def _assign(arena: Arena, layer: int, c: Candidates) -> None:
    if arena.policy.shared == "codes":
        arena.coded.assign(layer, c.codes.squeeze(-1))
    else:
        arena.full.assign(layer, (c.full + arena.limits(arena.everyone, "protected")[0]).squeeze(-1))


def _candidates(arena: Arena, layer: int, view: PromptView) -> Candidates:
    """The prompt's units and what they have collected."""
    policy, window = arena.policy, arena.policy.window
    groups, units = arena.full.groups, -(-arena.prompt // window)

    def by_unit(x: Tensor) -> Tensor:
        return pad(x.float(), (units * window - arena.prompt, 0)).unflatten(-1, (units, window))

    unit = torch.arange(units, dtype=torch.int32, device=arena.device).expand(arena.batch, groups, units)
    held = arena.held_tokens(unit).unflatten(-1, (units, window))
    collected = {name: (by_unit(x) * held).sum(-1) for name, x in policy.prompt_scores(view).items()} if policy.scored else {}
    weight = None
    if policy.weighs_values == "at_event":
        weight = by_unit(projected_norm(view.v, arena.modules[layer]())).mean(-1)
    elif policy.weighs_values == "at_arrival":
        weight = by_unit(arena.weigh(layer, view.v)).mean(-1)
    even, full, codes = (arena.limits(arena.everyone, name)[0] for name in (policy.shared, "full", "codes"))
    return Candidates(
        unit=unit,
        candidate=held.any(-1) & arena.aged(unit.unsqueeze(0), arena.everyone)[0],
        score=collected.get("score", torch.zeros(unit.shape, device=arena.device)),
        peak=collected.get("peak"),
        weight=weight,
        even=even,
        full=full,
        codes=codes,
    )


def _store(arena: Arena, layer: int, k: Tensor, v: Tensor, c: Candidates) -> None:
    """Select, and put every chosen unit into a slot. k, v ``[B, H, T, d]`` after RoPE."""
    policy = arena.policy
    tier = select(policy.rank(c), c.unit, c.candidate, torch.zeros_like(c.candidate), c.full, c.codes, policy.promotion)
    exists = arena.held_tokens(c.unit).unflatten(-1, (-1, policy.window)).any(-1)
    in_full = exists & (~c.candidate | (tier == FULL))
    _place(arena, arena.full, layer, in_full, c, lambda b, h, u: _gather(arena, k, v, b, h, u))
    if arena.coded is not None:

        def encoded(b, h, u):
            return arena.encode(*_gather(arena, k, v, b, h, u).values(), b, u)

        _place(arena, arena.coded, layer, c.candidate & (tier == CODED), c, encoded)


def _place(arena: Arena, pool: Pool, layer: int, chosen: Tensor, c: Candidates, payload) -> None:
    """Fill free slots of one layer with the chosen units ``[B, G, U]``."""
    grid = pool.grid("unit", layer)
    row, item, slot = pair(chosen.flatten(0, 1), (grid == EMPTY).flatten(0, 1))
    b, g = row // pool.groups, row % pool.groups
    index = pool.index(torch.full_like(b, layer), b, g, slot)  # [n, heads per group]
    ids = c.unit.flatten(0, 1)[row, item]
    for name in pool.record.keys() & {"unit", "score", "peak", "weight"}:
        grid = pool.grid(name, layer)
        grid[b, g, slot] = getattr(c, name).flatten(0, 1)[row, item].to(grid.dtype)
        pool.put(name, grid, layer)
    head = pool.heads_of(g)
    data = payload(b.unsqueeze(-1).expand_as(head), head, ids.unsqueeze(-1).expand_as(head))
    for name, value in data.items():
        pool.payload[name][index] = value.to(pool.payload[name].dtype)


def _gather(arena: Arena, k: Tensor, v: Tensor, b: Tensor, h: Tensor, unit: Tensor) -> dict[str, Tensor]:
    """Tokens of units from a prompt's k, v. Masked tokens of a first unit repeat its first real token."""
    column = torch.maximum(arena.columns(unit), arena.rows[0][b].unsqueeze(-1))
    index = (b.unsqueeze(-1), h.unsqueeze(-1), column)
    return {"k": k[index], "v": v[index]}
