"""How many bytes a cache really holds: one walk over its objects, every storage counted once, at its full size.

Parts of a report (bytes):

* ``full``: keys and values at full precision that are in use (sinks, local region, full tier)
* ``codes``, ``quant_meta``: codes, scales and zeros that attention reads
* ``ledger``: codes, scales and zeros of promoted units (their full copy is the one being read)
* ``ids``: unit ids, ledger links, write positions, per-sequence positions
* ``scores``: accumulated attention, weights of values
* ``tables``: rotary frequencies, calibrated thresholds and codebooks
* ``spare``: allocated slots that hold nothing
* ``other``: any tensor reachable from the cache that the store did not name; its test value is 0
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import torch

from qevict.hf.cache import TierCache

PARTS = ("full", "codes", "quant_meta", "ledger", "ids", "scores", "tables", "spare", "other")


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


def measure(cache: TierCache) -> dict[str, int]:
    """Persistent bytes of a cache by part, and their sum under ``total``. Measured on its storages, never computed."""
    out = dict.fromkeys(PARTS, 0)
    everything = sum(t.untyped_storage().nbytes() for t in _tensors(cache).values())
    for part, nbytes in cache.store.parts() if cache.store is not None else ():
        out[part] += nbytes
    shared = [cache.rope.inv_freq, *(t for layer in cache.tables or () for t in layer.values())]
    out["tables"] += sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in shared}.values())
    out["other"] = everything - sum(out.values())
    return out | {"total": everything}


def full_bytes(cache: TierCache) -> int:
    """``M_full`` of what the cache has seen, padding included, as an uncompressed cache would hold it."""
    store = cache.store
    return cache.geometry.full_bytes(store.seen) * store.batch if store else 0
