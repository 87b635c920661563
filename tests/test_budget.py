"""Bytes: what a cache holds is measured on its storages and compared with the budget and with the closed form."""

from __future__ import annotations

import re

import pytest
import torch

from baselines.adakv import AdaKV
from baselines.criticalkv import AdaCriticalKV, CriticalKV
from baselines.fullkv import FullKV
from baselines.kivi import KIVI
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from conftest import Stream, build, tiny
from qevict import Budget, BudgetError, QEvict, TierCache
from qevict.accounting import PARTS, full_bytes, measure
from qevict.hf.cache import geometry_of

POLICIES = {
    "qevict": QEvict(),
    "qevict-q0": QEvict(q=0),
    "qevict-q1": QEvict(q=1, local_fraction=0),
    "qevict-kv-head": QEvict(granularity="kv_head"),
    "qevict-uint8": QEvict(meta="uint8", window=16),
    "qevict-3-4-bit": QEvict(key_bits=3, value_bits=4, value_group=8),
    "qevict-8-bit-fp32": QEvict(key_bits=8, value_bits=8, meta="float32"),
    "qevict-interval-3": QEvict(interval=3, promotion="off"),
    "qevict-interval-20": QEvict(interval=20, window=6, promotion="original_only"),
    "qevict-shared": QEvict(q=1, granularity="kv_head", shares="layers", meta="uint8"),
    "qevict-shared-off": QEvict(promotion="off", granularity="kv_head", shares="heads", window=4),
    "qevict-token": QEvict(window=1, q=0, sink=0),
    "qevict-all-routing": QEvict(prompt_mass="all", score_source="routing_step", local_fraction=0.6, q=0.3),
    "snapkv": SnapKV(),
    "adakv": AdaKV(),
    "adakv-blend": AdaKV(observe=8, interval=5, safeguard="blend"),
    "criticalkv": CriticalKV(observe=8),
    "ada-criticalkv": AdaCriticalKV(observe=8),
    "snapkv-max": SnapKV(observe=8, kernel=7, pooling="max", interval=5),
    "streaming": StreamingLLM(),
    "streaming-original": StreamingLLM(sink=0, positions="original"),
}
PROMPTS = (1, 2, 5, 7, 8, 9, 63, 64, 65, 300, 1000, 2047, 4096)
FRACTIONS, BASES = (0.05, 0.2, 0.5), ("current", "prompt", "total")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NEW = 300
CELLS = [(f, b) for f in FRACTIONS for b in BASES]


def smallest(error: BudgetError) -> int:
    """The number of bytes that a budget error names."""
    found = re.search(r"smallest workable: (\d+) bytes", str(error))
    assert found, f"the error names no smallest budget: {error}"
    return int(found[1])


def filled(policy, budget, prompt: int, dtype=torch.float16, model=None) -> TierCache:
    model = model or tiny("llama")
    cache = TierCache(model, policy, budget, dtype)
    Stream(model, cache, [prompt]).feed(prompt)
    return cache


def grow(cache: TierCache) -> None:
    """One generated token as far as bytes are concerned: everything but the attention."""
    arena = cache.store
    if (arena.seen - arena.origin) % cache.policy.window == 0:
        arena.open_unit()
    arena.seen += 1
    for pool in (arena.full, arena.coded):
        if pool is not None and "score" in pool.record:
            pool.record["score"] += torch.rand(pool.record["score"].shape)
    arena.route()
    arena.carry()


def check(cache: TierCache, budget: Budget, prompt: int) -> dict[str, int]:
    """Measured bytes are within the budget, equal the closed form, and every one of them has a name."""
    arena, held = cache.store, measure(cache)
    layout = arena.layouts[0]
    where = f"{type(cache.policy).__name__}, prompt {prompt}, seen {arena.seen}, {budget}"
    assert held["other"] == 0, f"unnamed bytes: {held} ({where})"
    assert held["total"] == sum(held[p] for p in PARTS)
    assert all(held[p] >= 0 for p in PARTS), f"{held} ({where})"
    allowed = budget.resolve(cache.geometry, prompt, arena.seen)
    assert held["total"] <= allowed, f"{held['total']} bytes held, {allowed} allowed ({where})"
    assert held["total"] == layout.persistent_bytes, f"{held} against {layout} ({where})"
    return held


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", POLICIES)
def test_bytes_stay_within_the_budget(name, prompt):
    """Over prompt and generation. Which fraction, basis and type goes with which prompt rotates with the method."""
    policy, turn = POLICIES[name], list(POLICIES).index(name) + PROMPTS.index(prompt)
    (fraction, basis), dtype = CELLS[turn % len(CELLS)], DTYPES[turn % len(DTYPES)]
    budget = Budget(fraction, basis=basis, max_new_tokens=NEW)
    torch.manual_seed(turn)
    try:
        cache = filled(policy, budget, prompt, dtype)
    except BudgetError as error:
        least = smallest(error)
        assert least > budget.resolve(geometry_of(tiny("llama").config, dtype), prompt, prompt)
        with pytest.raises(BudgetError):
            filled(policy, Budget(nbytes=least - 1), prompt, dtype)
        budget = Budget(nbytes=least)
        cache = filled(policy, budget, prompt, dtype)
    check(cache, budget, prompt)
    for _ in range(NEW):
        grow(cache)
        check(cache, budget, prompt)


@pytest.mark.parametrize("name", ["qevict", "qevict-kv-head", "qevict-interval-3", "snapkv-max", "streaming"])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_bytes_of_real_decoding(name, fraction):
    """The same with attention, masks and chunks of a second turn in between: nothing of them may stay."""
    policy, budget, prompt = POLICIES[name], Budget(fraction), 1000
    cache = TierCache(tiny("llama"), policy, budget, "float16")
    stream = Stream(tiny("llama"), cache, [prompt])
    for n in (prompt, *[1] * 50, 37, *[1] * 20):
        stream.feed(n)
        check(cache, budget, prompt)


@pytest.mark.parametrize("name", POLICIES)
def test_layouts_never_exceed_the_budget(name):
    """The arithmetic alone, over many more lengths: closed form within the budget, and no tier of negative size."""
    policy = POLICIES[name]
    feasible = 0
    for dtype in DTYPES:
        g = geometry_of(tiny("llama").config, dtype)
        for fraction, basis in CELLS:
            budget = Budget(fraction, basis=basis, max_new_tokens=NEW)
            for prompt in (*PROMPTS, 500, 777):
                for seen in range(prompt, prompt + NEW, 13):
                    try:
                        layout = policy.layout(g, budget, prompt, seen)
                    except BudgetError as error:
                        least = smallest(error)
                        assert policy.layout(g, Budget(nbytes=least), prompt, seen).persistent_bytes <= least
                        with pytest.raises(BudgetError):
                            policy.layout(g, Budget(nbytes=least - 1), prompt, seen)
                        break
                    feasible += 1
                    assert layout.persistent_bytes <= layout.budget_bytes == budget.resolve(g, prompt, seen)
                    assert min(layout.full, layout.codes, layout.local) >= 0
                    # the local region, a unit in progress and the tokens up to the next event fit into the protected units
                    assert layout.protected * layout.window >= layout.local + layout.interval
    assert feasible > 1000


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("fraction", [0.05, 0.2])
def test_long_budgets_grow_in_steps_of_less_than_one_percent(name, fraction):
    """A pool is copied when it grows, so it must not at every event; what is granted late is little."""
    policy, g, budget, prompt = POLICIES[name], geometry_of(tiny("llama").config, torch.float16), Budget(fraction), 8200
    steps = range(prompt, prompt + 640, 8)
    layouts = [policy.slots(g, budget, prompt, seen) for seen in steps]
    costs = policy.costs(g, layouts[0].sink)
    unit = g.layers * max(costs.full_unit, costs.code_unit)
    for seen, layout in zip(steps, layouts, strict=True):
        allowed = budget.resolve(g, prompt, seen)
        assert 0 <= allowed - layout.persistent_bytes <= 0.008 * allowed + unit
    assert len({(x.dense, x.codes) for x in layouts}) <= 640 // 64 + 1


@pytest.mark.parametrize("budget", [Budget(0.2), Budget(tokens=600)], ids=str)
@pytest.mark.parametrize("name", ["qevict-shared", "qevict-shared-off", "adakv-blend"])
def test_long_sequences_renew_shares_only_when_a_growing_budget_grows(name, budget):
    """A pool is copied then, so it must not be at every event; nor may shares stay for good where the budget does not grow. Each
    sequence of a batch goes by its own length."""
    torch.manual_seed(0)
    model, lengths = tiny("llama"), [4120, 4100]
    cache = TierCache(model, POLICIES[name], budget, torch.float16)
    Stream(model, cache, lengths).feed(max(lengths))
    arena = cache.store
    pool, interval = arena.coded or arena.full, arena.layouts[0].interval
    renewed = [[], []]
    for new in range(1, 121):
        before = pool.ragged.clone()
        grow(cache)
        for row, times in enumerate(renewed):
            if not torch.equal(before[:, row], pool.ragged[:, row]):
                times.append(lengths[row] + new)
        assert measure(cache)["total"] <= 2 * budget.resolve(cache.geometry, 4120, 4120 + new)
    for times in renewed:
        assert len(times) >= 2
        assert all(t % 32 < interval for t in times)  # the first event after the budget has grown


@pytest.mark.parametrize("lengths", [[400, 40, 17], [17, 40, 400]], ids=str)
@pytest.mark.parametrize(
    "policy", [QEvict(), KIVI(group=16, evict=SnapKV()), KIVI(group=16)], ids=["qevict", "kivi-snapkv", "kivi"]
)
@pytest.mark.parametrize("share", [True, False])
def test_the_smallest_budget_that_is_named_is_enough_for_all_sequences(lengths, policy, share):
    """Short ones need the larger share, long ones the more bytes."""
    model, budget = tiny("llama"), Budget(0.001) if share else Budget(nbytes=100)
    with pytest.raises(BudgetError) as refused:
        Stream(model, TierCache(model, policy, budget, torch.float16), lengths).feed(400)
    named = re.search(r"budget>=([0-9.]+)|budget=1", str(refused.value))[1] or 1
    enough = Budget(float(named)) if share else Budget(nbytes=int(refused.value.least))
    Stream(model, TierCache(model, policy, enough, torch.float16), lengths).feed(400)


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("name", [n for n in POLICIES if n.startswith("qevict")])
def test_the_budget_is_used_up(name, fraction):
    """To within one coded window per layer (one full window without codes), and the rounding to whole bytes; unless every
    window is held, then there are no slots for windows that do not exist."""
    policy, prompt = POLICIES[name], 1000
    budget = Budget(fraction, basis="prompt")
    cache = filled(policy, budget, prompt)
    g = cache.geometry
    costs = policy.costs(g, cache.store.layouts[0].sink)
    unit = costs.code_unit if policy.q else costs.full_unit
    allowed = budget.resolve(g, prompt, prompt)
    for _ in range(40):
        grow(cache)
        used_up(cache, allowed, unit)


def used_up(cache: TierCache, allowed: int, unit: int) -> None:
    """To within one unit of ``unit`` bytes per layer, unless every window is held."""
    left = allowed - measure(cache)["total"]
    assert left >= 0
    if left >= cache.geometry.layers * (unit + 1):
        ids = torch.cat([pool.grid("unit")[0, 0, 0] for pool in cache.store.pools])
        behind_sinks, end = (int(x) - cache.store.origin for x in (cache.store.rows[0, 0], cache.store.seen))
        every = range(behind_sinks // cache.policy.window, -(-end // cache.policy.window))
        assert set(ids[ids >= 0].tolist()) == set(every), f"{left} bytes are left, yet a window is gone"


@pytest.mark.parametrize("name", POLICIES)
def test_a_growing_budget_is_taken_up(name):
    """At every event the budget of the tokens so far is met to within the smallest unit per layer."""
    policy, budget, prompt = POLICIES[name], Budget(0.4), 500
    cache = filled(policy, budget, prompt)
    g, arena = cache.geometry, cache.store
    costs = policy.costs(g, arena.layouts[0].sink)
    unit = costs.code_unit or costs.full_unit
    for _ in range(500):
        due = arena.next_due == arena.seen + 1
        grow(cache)
        if due:
            used_up(cache, budget.resolve(g, prompt, arena.seen), unit)


@pytest.mark.parametrize("name", POLICIES)
def test_a_budget_above_what_a_short_prompt_needs_costs_nothing_yet(name):
    """Slots come with the tokens: never more than the tokens up to the next selection could fill."""
    policy, prompt = POLICIES[name], 60
    cache = filled(policy, Budget(tokens=400), prompt)
    g, arena, ratios = cache.geometry, cache.store, []
    for _ in range(2500):
        units = -(-(arena.next_due - arena.origin) // policy.window) + 1
        most = policy.costs(g, arena.layouts[0].sink).total(g, units, units)
        ratios.append(check(cache, Budget(tokens=400), prompt)["total"] / g.full_bytes(400))
        assert ratios[-1] * g.full_bytes(400) <= most
        grow(cache)
    assert ratios[0] < 0.6 and ratios[-1] > 0.97


@pytest.mark.parametrize("policy", [SnapKV(), StreamingLLM()], ids=["snapkv", "streaming"])
def test_baselines_use_up_the_budget(policy):
    cache = filled(policy, Budget(0.5, basis="prompt"), 1000)
    unit = policy.costs(cache.geometry, 0).full_unit
    left = cache.store.layouts[0].budget_bytes - measure(cache)["total"]
    assert 0 <= left < cache.geometry.layers * (unit + 1)


def test_no_slot_is_spare_when_tokens_abound():
    """At a small budget everything that is allocated for codes holds codes, and the full pool only waits for new tokens."""
    cache = filled(QEvict(), 0.3, 1000)
    for _ in range(200):
        grow(cache)
        held, arena = measure(cache), cache.store
        waiting = arena.layouts[0].interval + arena.layouts[0].window
        assert held["spare"] <= cache.geometry.full_bytes(waiting)


def test_tokens_and_bytes_budgets():
    g = geometry_of(tiny("llama").config, torch.float16)
    assert Budget(tokens=100).resolve(g, 5, 7) == g.full_bytes(100) == 2 * 2 * 2 * 16 * 100 * 2
    assert Budget(nbytes=777).resolve(g, 5, 7) == 777
    assert Budget(0.5).resolve(g, 100, 130) == g.full_bytes(130) // 2
    assert Budget(0.5, basis="prompt").resolve(g, 100, 130) == g.full_bytes(100) // 2
    assert Budget(0.5, basis="total", max_new_tokens=60).resolve(g, 100, 130) == g.full_bytes(160) // 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prompt", [1, 16, 300])
def test_fullkv_holds_exactly_the_tokens(dtype, prompt):
    """Keeping everything costs FullKV's bytes; what comes on top (ids, room for the next tokens) is named and small."""
    cache = filled(FullKV(), 1.0, prompt, dtype)
    g = cache.geometry
    for _ in range(50):
        grow(cache)
        held = measure(cache)
        room = held["full"] + held["spare"]
        assert held["other"] == held["codes"] == held["ledger"] == held["quant_meta"] == held["scores"] == 0
        assert full_bytes(cache) == g.full_bytes(cache.store.seen) <= room <= g.full_bytes(cache.store.seen + 2 * 16)
        assert held["total"] - room == held["ids"] + held["tables"] < 0.05 * room + 256


@pytest.mark.parametrize("name", POLICIES)
def test_generous_bytes(name):
    """More bytes than the text needs: nothing breaks, and no more than allowed is taken."""
    policy = POLICIES[name]
    budget = Budget(nbytes=400_000)
    cache = filled(policy, budget, 20)
    for _ in range(40):
        grow(cache)
        check(cache, budget, 20)


def test_measure_sees_foreign_tensors(llama):
    """A tensor that somebody hangs on the cache, however deep, is counted and shows up as `other`, at its full storage."""
    cache = filled(QEvict(), 0.5, 200)
    before = measure(cache)
    cache.store.notes = {"a": [torch.zeros(1000)[:1]]}
    after = measure(cache)
    assert before["other"] == 0
    assert after["other"] == 4000
    assert after["total"] == before["total"] + 4000


def test_parts_follow_the_units(llama):
    """Bytes by tier equal the number of units in it times a unit's bytes."""
    policy = QEvict()
    cache = TierCache(llama, policy, 0.4, "float16")
    stream = Stream(llama, cache, [300])
    stream.feed(300)
    g, ledger = cache.geometry, 0
    for _ in range(60):
        stream.feed(1)
        held, arena = measure(cache), cache.store
        full, coded = (p.grid("unit") for p in (arena.full, arena.coded))
        live, kept = int((coded >= 0).sum()), int((coded <= -3).sum())
        assert held["codes"] + held["quant_meta"] == live * g.kv_heads * arena.codec.unit_bytes()
        assert held["ledger"] == kept * g.kv_heads * arena.codec.unit_bytes()
        sinks = g.full_bytes(arena.layouts[0].sink)
        assert held["full"] == int((full >= 0).sum()) * policy.window * g.token_bytes + sinks
        ledger += held["ledger"]
    assert ledger > 0, "no window was ever promoted: the test proves nothing about the ledger"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_fractions_outside_the_range(llama, value):
    with pytest.raises(BudgetError, match=r"outside \(0, 1\]"):
        TierCache(llama, QEvict(), value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_fraction_that_is_no_number(value):
    with pytest.raises(BudgetError, match=f"budget={value} must be a number"):
        Budget(fraction=value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"fraction": 0.5, "nbytes": 10}, "exactly one"),
        ({"nbytes": 0}, "not positive"),
        ({"tokens": -5}, "not positive"),
        ({"fraction": 0.5, "basis": "later"}, "choose one of current, prompt, total"),
        ({"fraction": 0.5, "basis": "total"}, "max_new_tokens"),
    ],
)
def test_bad_budgets(fields, message):
    with pytest.raises(BudgetError, match=message):
        Budget(**fields)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("prompt", [40, 1000])
def test_a_tiny_budget_names_the_smallest_one(name, prompt):
    """Both fixes that the message offers work: the bytes, and the fraction if there is one."""
    policy = POLICIES[name]
    with pytest.raises(BudgetError, match="smallest workable") as caught:
        filled(policy, 0.0001, prompt)
    least = smallest(caught.value)
    assert measure(filled(policy, Budget(nbytes=least), prompt))["total"] <= least
    share = re.search(r"budget>=([0-9.e-]+)", str(caught.value))
    if share:
        assert measure(filled(policy, float(share[1]), prompt))["total"] <= int(float(share[1]) * 1e9)
    else:
        assert "budget=1" in str(caught.value)
        filled(policy, 1.0, prompt)


def test_fullkv_needs_the_whole_budget(llama):
    with pytest.raises(BudgetError, match="FullKV keeps everything"):
        filled(FullKV(), 0.5, 10)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_smallest_budget_works_for_any_depth(layers):
    """Bytes that do not divide evenly over the layers are not lost between the error and the plan."""
    model = build("llama", num_hidden_layers=layers)
    for policy in (QEvict(), SnapKV(), StreamingLLM()):
        with pytest.raises(BudgetError) as caught:
            filled(policy, Budget(nbytes=1), 100, model=model)
        budget = Budget(nbytes=smallest(caught.value))
        cache = filled(policy, budget, 100, model=model)
        for _ in range(40):
            grow(cache)
            check(cache, budget, 100)
