"""The routing event: one selection for all layers at once, then only the units that change tier move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qevict.engine.reference import projected_norm
from qevict.policy import CODED, EVICTED, FULL, Candidates, select
from qevict.store.pool import EMPTY, ledger, pair

if TYPE_CHECKING:
    from qevict.store.arena import Arena

MOVED = 256  # units that move at a time
Place = tuple[Tensor, Tensor, Tensor, Tensor]  # layer, row, group, slot: equally long index tensors


def route(arena: Arena, rows: list[int], anew: list[bool]) -> None:
    """Rank the candidates of the sequences ``rows`` and carry the result out in place. Where ``anew``, heads that share slots get
    new shares."""
    policy, index = arena.policy, torch.tensor(rows, device=arena.device)

    def collected(name: str) -> Tensor | None:
        if name not in arena.full.record:
            return None
        return torch.cat([p.grid(name)[:, index] for p in arena.pools], -1)

    unit, score = collected("unit"), collected("score")
    if score is None:
        score = torch.zeros((), device=arena.device).expand(unit.shape)
    n = arena.full.slots
    coded = torch.zeros_like(unit, dtype=torch.bool)
    coded[..., n:] = True
    if policy.linked:
        coded[..., :n] = arena.full.grid("link")[:, index] >= 0
    candidate = arena.aged(unit, rows)
    weight = _norms(arena, index) if policy.weighs_values == "at_event" else collected("weight")
    room = (arena.limits(rows, name) for name in (policy.shared, "full", "codes"))
    c = policy.refresh(Candidates(unit, candidate, score, collected("peak"), weight, *room))
    c, slots = _share(arena, c, rows, anew) if policy.shares else (c, None)
    tier = select(policy.rank(c), unit, candidate, coded, c.full, c.codes, policy.promotion)
    drop, demote, promote = (candidate & (tier == t) for t in (EVICTED, CODED, FULL))
    if arena.coded is None:
        grid = arena.full.grid("unit")
        part = grid[:, index]
        part[drop] = EMPTY
        grid[:, index] = part
        arena.full.put("unit", grid)
        if slots is not None:
            arena.full.repartition(slots)
    else:
        _move(arena, index, drop, demote[..., :n], promote[..., n:], slots)


def _share(arena: Arena, c: Candidates, rows: list[int], anew: list[bool]) -> tuple[Candidates, Tensor | None]:
    """With the units that heads may keep: what they have, or in sequences ``anew`` what the method allocates; and ``[L, B, H]``
    slots of every head, None if they keep theirs."""
    policy = arena.policy
    pool = arena.coded if policy.shared == "codes" else arena.full
    own = pool.ragged[:, rows].unsqueeze(-1)
    if pool is arena.full:
        own = own - arena.limits(rows, "protected")
    if not any(anew):
        return replace(c, **{policy.shared: own}), None
    renewed = torch.tensor(anew, device=arena.device).view(1, -1, 1, 1)
    units = torch.where(renewed, getattr(policy.share(c), policy.shared), own)
    slots = pool.ragged.clone()
    slots[:, rows] += (units - own).squeeze(-1).to(slots.dtype)
    return replace(c, **{policy.shared: units}), slots


def _norms(arena: Arena, rows: Tensor) -> Tensor:
    """``[L, rows, G, slots]`` mean projected value norm of what the slots of both pools hold."""
    out = []
    for layer, module in sorted(arena.modules.items()):
        parts = []
        for pool in arena.pools:
            data = pool.read(layer, 0, pool.slots, ("v",) if pool is arena.full else tuple(pool.spec))
            v = (data["v"] if pool is arena.full else arena.codec.decode_values(data))[rows]
            norm = projected_norm(v.flatten(2, 3), module()).unflatten(-1, (-1, v.shape[3])).mean(-1)
            parts.append(norm.unflatten(1, (pool.groups, -1)).mean(2))
        out.append(torch.cat(parts, -1))
    return torch.stack(out)


def _move(arena: Arena, rows: Tensor, drop: Tensor, demote: Tensor, promote: Tensor, shares: Tensor | None) -> None:
    """Free, encode on first demotion, decode on promotion.

    Masks ``[L, rows, G, slots]``: ``drop`` over the slots of both pools, ``demote`` over the full ones, ``promote`` over the coded.
    ``shares [L, B, H]`` are the slots that heads get for their codes, if they share them.
    """
    n = arena.full.slots
    full, codes = ({name: pool.grid(name) for name in pool.record} for pool in arena.pools)
    unit, code_unit = full["unit"], codes["unit"]
    both = full.keys() & codes.keys()  # id and what a unit has collected

    def at(mask: Tensor) -> Place:
        layer, row, group, slot = mask.nonzero(as_tuple=True)
        return layer, rows[row], group, slot

    # evicted: both copies are freed
    gone = at(drop[..., n:])
    code_unit[gone] = EMPTY
    gone, link = at(drop[..., :n]), full.get("link")
    if link is not None:
        owned = link[gone] >= 0
        code_unit[(*(x[owned] for x in gone[:3]), link[gone][owned].long())] = EMPTY
        link[gone] = EMPTY
    unit[gone] = EMPTY
    # demoted again: the ledger's code becomes the one that is read
    if link is not None:
        back = at(demote & (link[:, rows] >= 0))
        slot = (*back[:3], link[back].long())
        for name in both:
            codes[name][slot] = full[name][back]
        unit[back] = EMPTY
        link[back] = EMPTY
    if shares is not None:
        arena.coded.put("unit", code_unit)
        arena.coded.repartition(shares)
        codes = {name: arena.coded.grid(name) for name in arena.coded.record}
        code_unit = codes["unit"]
    # demoted for the first time: encoded, written once
    for source, target in _match(demote & (unit[:, rows] >= 0), code_unit, rows):
        ids = unit[source]
        index = arena.full.index(*source)
        per = index.shape[-1]
        k, v = arena.full.payload["k"][index], arena.full.payload["v"][index]
        data = arena.encode(k, v, source[1].unsqueeze(-1).expand(-1, per), ids.unsqueeze(-1).expand(-1, per))
        index = arena.coded.index(*target)
        for name, value in data.items():
            arena.coded.payload[name][index] = value
        for name in both:
            codes[name][target] = full[name][source]
        unit[source] = EMPTY
    # promoted: the same approximation at full precision, its code stays in the ledger
    for source, target in _match(promote, unit, rows) if link is not None else ():
        ids = code_unit[source]
        index = arena.coded.index(*source)
        data = {name: flat[index] for name, flat in arena.coded.payload.items()}
        position = arena.columns(ids) + arena.rows[1][source[1]].unsqueeze(-1)
        k = arena.rope.turn(arena.codec.decode_keys(data), position.unsqueeze(1))
        index = arena.full.index(*target)
        arena.full.payload["k"][index] = k.to(arena.geometry.dtype)
        arena.full.payload["v"][index] = arena.codec.decode_values(data).to(arena.geometry.dtype)
        for name in both:
            full[name][target] = codes[name][source]
        link[target] = source[3].to(link.dtype)
        code_unit[source] = ledger(ids)
    for pool, grids in ((arena.full, full), (arena.coded, codes)):
        for name, grid in grids.items():
            pool.put(name, grid)


def _match(items: Tensor, free_unit: Tensor, rows: Tensor) -> Iterator[tuple[Place, Place]]:
    """Pair units to move (mask ``[L, rows, G, n]``) with free slots of the other pool: source and target, some at a time, so that
    what is decoded or encoded on the way stays small."""
    r, item, slot = pair(items.flatten(0, 2), (free_unit[:, rows] == EMPTY).flatten(0, 2))
    layer, row, group = torch.unravel_index(r, items.shape[:3])
    for part in torch.arange(len(r), device=r.device).split(MOVED):
        where = layer[part], rows[row[part]], group[part]
        yield (*where, item[part]), (*where, slot[part])
