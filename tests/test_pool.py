"""The pool of slots against a plain dictionary, with equal and with different numbers of slots per head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qevict.store.pool import ABSENT, EMPTY, FIRST_LEDGER, Pool, ledger, pair

LAYERS, BATCH, HEADS = 3, 2, 4
SPEC = {"k": ((5, 6), torch.float32), "scale": ((1, 6), torch.float16)}
RECORDS = {"score": (torch.float32, 0.0), "link": (torch.int32, EMPTY)}


def slots_of(kind: str):
    if kind == "ragged":
        return torch.from_numpy(np.random.default_rng(3).integers(0, 6, (LAYERS, BATCH, HEADS)))
    return 5


def make(kind: str) -> Pool:
    groups = 1 if kind == "layer" else HEADS
    return Pool((LAYERS, BATCH, HEADS), groups, slots_of(kind), SPEC, RECORDS, torch.device("cpu"))


def addresses(pool: Pool) -> list[tuple[int, int, int, int]]:
    """(layer, row, group, slot) of every slot, by the plain meaning of the arguments."""
    count = pool.ragged if pool.ragged is not None else torch.full((LAYERS, BATCH, pool.groups), pool.slots)
    return [
        (i, b, g, s)
        for i in range(LAYERS)
        for b in range(pool.batch)
        for g in range(pool.groups)
        for s in range(int(count[i, b, g]))
    ]


def heads_of(pool: Pool, group: int) -> range:
    per = HEADS // pool.groups
    return range(group * per, (group + 1) * per)


def fill(pool: Pool) -> dict[tuple[int, int, int, int], dict]:
    """Give every slot other content, through the pool's own addresses; the dictionary says what should be where."""
    rng, model = np.random.default_rng(0), {}
    grids = {name: pool.grid(name).clone() for name in pool.record}
    for count, (i, b, g, s) in enumerate(addresses(pool)):
        entry = {"unit": count, "score": float(count) / 2, "link": count % 7}
        for name, grid in grids.items():
            grid[i, b, g, s] = entry[name]
        index = pool.index(*(torch.tensor([x]) for x in (i, b, g, s)))[0]
        assert index.shape == (HEADS // pool.groups,)
        for at, h in zip(index, heads_of(pool, g), strict=True):
            for name, (shape, dtype) in SPEC.items():
                entry[name, h] = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
                pool.payload[name][at] = entry[name, h]
        model[i, b, g, s] = entry
    for name, grid in grids.items():
        pool.put(name, grid)
    return model


def check(pool: Pool, model: dict, empty: set = frozenset()) -> None:
    for name in pool.record:
        grid = pool.grid(name)
        assert grid.shape == (LAYERS, pool.batch, pool.groups, pool.slots)
        for place, entry in model.items():
            assert grid[place].item() == entry[name], f"{name} of {place}"
        for place in empty:
            assert grid[place].item() == pool.records[name][1], f"{name} of the free slot {place}"
    for i in range(LAYERS):
        for lo, hi in ((0, pool.slots), (1, 3), (2, 2)):
            data = pool.read(i, lo, hi, tuple(SPEC))
            for name, (shape, _) in SPEC.items():
                assert data[name].shape == (pool.batch, HEADS, hi - lo, *shape)
            for (layer, b, g, s), entry in model.items():
                if layer == i and lo <= s < hi:
                    for h in heads_of(pool, g):
                        for name in SPEC:
                            assert torch.equal(data[name][b, h, s - lo], entry[name, h])


@pytest.mark.parametrize("kind", ["layer", "kv_head", "ragged"])
def test_content_is_where_a_dictionary_says(kind):
    pool = make(kind)
    check(pool, fill(pool))


@pytest.mark.parametrize("kind", ["layer", "kv_head", "ragged"])
def test_slots_do_not_overlap_and_none_is_wasted(kind):
    pool = make(kind)
    places = addresses(pool)
    index = pool.index(*torch.tensor(places).T)
    total = sum(HEADS // pool.groups for _ in places)
    assert sorted(index.flatten().tolist()) == list(range(total))
    for name, (shape, dtype) in SPEC.items():
        assert pool.payload[name].shape == (total, *shape)
        assert pool.payload[name].dtype == dtype
    assert all(len(record) == len(places) for record in pool.record.values())


def test_a_new_pool_is_empty():
    for kind in ("layer", "kv_head"):
        pool = make(kind)
        assert (pool.grid("unit") == EMPTY).all()
        assert (pool.grid("link") == EMPTY).all()
        assert (pool.grid("score") == 0).all()


def test_heads_with_fewer_slots_show_absent_ones():
    pool = make("ragged")
    fill(pool)
    exists = torch.arange(pool.slots) < pool.ragged.unsqueeze(-1)
    assert 0 < int(exists.sum()) < exists.numel()
    assert torch.equal(pool.grid("unit") == ABSENT, ~exists)
    before = {name: t.clone() for name, t in pool.record.items()}
    pool.put("unit", pool.grid("unit").masked_fill(~exists, 99))  # what is written beyond a head's slots goes nowhere
    assert all(torch.equal(pool.record[name], t) for name, t in before.items())


def test_ragged_heads_must_choose_for_themselves():
    with pytest.raises(ValueError, match="each chooses for itself"):
        Pool((LAYERS, BATCH, HEADS), 1, slots_of("ragged"), SPEC, RECORDS, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["layer", "kv_head"])
def test_grids_of_equal_heads_are_views(kind):
    pool = make(kind)
    pool.grid("score")[1, 1, 0, 2] = 7
    assert pool.grid("score")[1, 1, 0, 2] == 7
    data = pool.read(2, 1, 4, ("k",))["k"]
    data[1, 3, 0] = 5
    at = pool.index(*(torch.tensor([x]) for x in (2, 1, 3 if kind == "kv_head" else 0, 1)))[0, -1]
    assert (pool.payload["k"][at] == 5).all()


@pytest.mark.parametrize("kind", ["layer", "kv_head"])
def test_resize_keeps_the_content(kind):
    pool = make(kind)
    model = fill(pool)
    pool.resize(8)
    assert pool.slots == 8
    check(pool, model, set(addresses(pool)) - set(model))
    assert all(
        t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in (*pool.payload.values(), *pool.record.values())
    )


@pytest.mark.parametrize("kind", ["layer", "kv_head", "ragged"])
@pytest.mark.parametrize("rows", [[1, 0], [1], [0, 1, 1, 0]])
def test_select_rows(kind, rows):
    pool = make(kind)
    model = fill(pool)
    pool.select_rows(torch.tensor(rows))
    check(pool, {(i, new, g, s): model[i, old, g, s] for new, old in enumerate(rows) for i, b, g, s in model if b == old})
    assert pool.batch == len(rows)


@pytest.mark.parametrize("kind", ["layer", "kv_head"])
def test_shrink_moves_what_lies_beyond(kind):
    pool = make(kind)
    model = fill(pool)
    unit = pool.grid("unit")
    for i in range(LAYERS):  # free two slots of each head, others in each layer
        unit[i, ..., [i % 5, (i + 2) % 5]] = EMPTY
    taken = {(i, b, g, s) for i, b, g, s in model if s not in (i % 5, (i + 2) % 5)}
    moved = pool.shrink(3)
    assert pool.slots == 3
    after = {(i, b, g, int(moved[i, b, g, s])): model[i, b, g, s] for i, b, g, s in taken}
    assert len(after) == len(taken)
    check(pool, after)


def test_slots_of_an_empty_layer_are_shared_anew():
    pool = Pool((LAYERS, BATCH, HEADS), HEADS, torch.full((LAYERS, BATCH, HEADS), 3), SPEC, RECORDS, torch.device("cpu"))
    shares = torch.tensor([[0, 4, 5][:HEADS] + [3] * (HEADS - 3)] * BATCH)
    shares[:, -1] += 3 * HEADS - shares.sum(-1)
    pool.assign(1, shares)
    assert pool.ragged[1].tolist() == shares.tolist()
    assert pool.slots == int(shares.max())
    check(pool, fill(pool))


def test_units_move_along_when_heads_get_other_slots():
    pool = make("ragged")
    model = fill(pool)
    unit = pool.grid("unit")
    unit[..., ::2] = torch.where(unit[..., ::2] >= 0, EMPTY, unit[..., ::2])  # every second slot is freed
    pool.put("unit", unit)
    kept = (unit >= 0).sum(-1)
    slots = kept + torch.from_numpy(np.random.default_rng(5).integers(0, 3, kept.shape))
    pool.repartition(slots)
    assert torch.equal(pool.ragged.long(), slots)
    moved, free = {}, set()
    for i, b, g, s in addresses(pool):
        if s < int(kept[i, b, g]):
            moved[i, b, g, s] = model[i, b, g, 2 * s + 1]
        else:
            free.add((i, b, g, s))
    check(pool, moved, free)


def test_pair_matches_in_order():
    rng = np.random.default_rng(1)
    for _ in range(20):
        free = rng.random((6, 9)) < 0.6
        items = rng.random((6, 12)) < 0.4
        for r in range(6):  # as many items as there are free slots, at most
            items[r, np.flatnonzero(items[r])[free[r].sum() :]] = False
        want = [(r, i, s) for r in range(6) for i, s in zip(np.flatnonzero(items[r]), np.flatnonzero(free[r]), strict=False)]
        got = torch.stack(pair(torch.from_numpy(items), torch.from_numpy(free)), -1)
        assert got.tolist() == [list(map(int, x)) for x in want]


def test_ledger_ids():
    units = torch.arange(5)
    assert (ledger(units) <= FIRST_LEDGER).all()
    assert torch.equal(ledger(ledger(units)), units)
    assert len({*ledger(units).tolist(), EMPTY, ABSENT, *units.tolist()}) == 12
