"""How many bytes a cache really holds: one walk over its objects, every storage counted once, at its full size.

Parts of a report (bytes):

* ``full``: keys and values at full precision that are in use (sinks, local region, full tier)
* ``codes``, ``quant_meta``: codes, scales and zeros that attention reads
* ``ledger``: codes, scales and zeros of promoted units (their full copy is the one being read)
* ``ids``: unit ids, ledger links, write positions, per-sequence positions
* ``scores``: accumulated attention, weights of values
* ``tables``: rotary frequencies
* ``spare``: allocated slots that hold nothing
* ``other``: any tensor reachable from the cache that the store did not name; its test value is 0
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import torch

from qevict.hf.cache import TierCache
from qevict.store.pool import FIRST_LEDGER, Pool

PARTS = ("full", "codes", "quant_meta", "ledger", "ids", "scores", "tables", "spare", "other")
RECORD_PART = {"unit": "ids", "link": "ids", "score": "scores", "peak": "scores", "weight": "scores"}


def _tensors(root: object) -> dict[int, torch.Tensor]:
    """Every tensor reachable from ``root`` through attributes, containers and dataclasses, one per storage."""
    found: dict[int, torch.Tensor] = {}
    visited: set[int] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if id(item) in visited or isinstance(item, str | bytes | int | float | bool | type | torch.nn.Module | None):
            continue
        visited.add(id(item))
        if isinstance(item, torch.Tensor):
            found.setdefault(item.untyped_storage().data_ptr() or id(item), item)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif is_dataclass(item):
            stack += [getattr(item, f.name) for f in fields(item)]
        elif hasattr(item, "__dict__"):
            stack += item.__dict__.values()
    return found


def _size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _pool(pool: Pool, payload_part) -> dict[str, int]:
    """Parts of a pool; a slot's share of a payload tensor goes to what the slot holds."""
    units = pool.grid("unit")
    per = pool.kv_heads // pool.groups
    live, kept = int((units >= 0).sum()) * per, int((units <= FIRST_LEDGER).sum()) * per
    out = dict.fromkeys(PARTS, 0)
    for name, tensor in pool.payload.items():
        total, slots = _size(tensor), tensor.shape[0]
        one = total // slots if slots else 0
        out[payload_part(name)] += live * one
        out["ledger"] += kept * one
        out["spare"] += total - (live + kept) * one
    for name, tensor in pool.record.items():
        out[RECORD_PART[name]] += _size(tensor)
    return out


def measure(cache: TierCache) -> dict[str, int]:
    """Persistent bytes of a cache by part, and their sum under ``total``. Measured on its storages, never computed."""
    out = dict.fromkeys(PARTS, 0)
    everything = sum(_size(t) for t in _tensors(cache).values())
    arena = cache.store
    if arena is not None:
        pools = [_pool(arena.full, lambda name: "full")]
        if arena.coded is not None:
            pools.append(_pool(arena.coded, lambda name: "codes" if name.endswith("code") else "quant_meta"))
        for part in PARTS:
            out[part] = sum(p[part] for p in pools)
        out["full"] += _size(arena.sink)
        out["ids"] += _size(arena.write) + _size(arena.rows)
        if arena.full.ragged is not None:
            out["ids"] += _size(arena.full.ragged)
    out["tables"] = _size(cache.rope.inv_freq)
    out["other"] = everything - sum(out.values())
    return out | {"total": everything}


def full_bytes(cache: TierCache) -> int:
    """``M_full`` of what the cache has seen, padding included, as an uncompressed cache would hold it."""
    arena = cache.store
    return cache.geometry.full_bytes(arena.seen) * arena.batch if arena else 0
