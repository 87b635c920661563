"""The same checks for every conf/method/*.yaml. A new file takes part by itself.

Defaults that do not fit a model of 16 channels and prompts of 60 tokens are made smaller by rules that go by the names of fields.
"""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from functools import cache as once
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import DynamicCache

from conftest import Stream, build, calibrate, call, forced_logits, gap, holdings, left_padded, plain, tiny, tokens
from qevict import Budget, Policy, TierCache
from qevict.accounting import PARTS, _tensors, full_bytes, measure
from qevict.budget import BudgetError, Geometry
from qevict.hf.cache import geometry_of
from qevict.policy import FULL
from qevict.quantizer import Quantizer
from qevict.store.history import History

FOLDER = Path(__file__).resolve().parent.parent / "conf/method"
METHODS = sorted(f.stem for f in FOLDER.glob("*.yaml"))
each = pytest.mark.parametrize("name", METHODS)  # nearest to the function: the method comes first in the test's id

LENGTHS, STEPS = (60, 1, 33), 26
SMALL = {"observe": 8, "interval": 8}  # larger values of these fields are cut to this
NEAR, ROUNDED = 1e-4, 1e-2  # of fp32 logits that reach 5 or so; where noise may move the rounding of a scale in fp16


# -- from a file to a cache that fits -----------------------------------------------------------------------------------


def small(policy: Policy, head_dim: int | None) -> Policy:
    """The method for short prompts; with ``head_dim`` its groups of channels divide it."""
    values = {f.name: getattr(policy, f.name) for f in fields(policy)}
    new = {n: small(x, head_dim) for n, x in values.items() if isinstance(x, Policy)}
    new |= {n: most for n, most in SMALL.items() if values.get(n) and values[n] > most}
    if "group" in values:
        size = values["group"]
        if head_dim is not None:
            size = max(x for x in range(1, size + 1) if head_dim % x == 0)
        new |= {"group": size, "residual": size * max(1, 16 // size)}
    return replace(policy, **new)


@once
def budget_for(policy: Policy, g: Geometry, lengths: tuple[int, ...], steps: int, decode: str, times: float) -> Budget:
    """``times`` the least that the method works with, so that it has to choose; everything for one that cannot choose. Codes are
    so small that with more than the least nothing would be dropped."""
    times = 1 if isinstance(policy, Quantizer) else times
    for count in range(2, 200, 2):
        budget = Budget(tokens=count, decode=decode)
        try:
            layouts = [policy.layout(g, budget, n, n + more) for n in lengths for more in (0, steps)]
        except BudgetError:
            continue
        if decode == "grow" or all(x.interval for x in layouts):
            return Budget(tokens=int(count * times), decode=decode)
    assert keeps_everything(policy), "no budget is enough"
    return Budget(fraction=1.0, decode=decode)


def codes(policy: Policy) -> bool:
    return isinstance(policy, Quantizer) or policy.codec(geometry_of(tiny().config, torch.float32)) is not None


def near(policy: Policy) -> float:
    return ROUNDED if codes(policy) else NEAR


def keeps_everything(policy: Policy) -> bool:
    return type(policy).layout is Policy.layout or (isinstance(policy, Quantizer) and policy.evict is None)


class Lab:
    """Methods, caches and runs, each made once."""

    def __init__(self, folder: Path):
        self.folder, self.policies, self.runs = folder, {}, {}

    def policy(self, name: str, model=None, fit: bool = True) -> Policy:
        """With ``fit`` groups of channels divide the model's head dimension."""
        model = model or tiny()
        if (name, model, fit) not in self.policies:
            g = geometry_of(model.config, model.dtype)
            policy = small(instantiate(OmegaConf.load(FOLDER / f"{name}.yaml").method), g.head_dim if fit else None)
            if any(f.name == "calibration" for f in fields(policy)):
                path = self.folder / f"{len(self.policies)}.safetensors"
                policy = replace(policy, calibration=calibrate(policy, g, model, path))
            self.policies[name, model, fit] = policy
        return self.policies[name, model, fit]

    def cache(self, name: str, lengths, steps: int = STEPS, model=None, decode="capped", fit=True, times=1.5) -> TierCache:
        model = model or tiny()
        policy, g = self.policy(name, model, fit), geometry_of(model.config, model.dtype)
        return TierCache(model, policy, budget_for(policy, g, tuple(lengths), steps, decode, times))

    def fresh(self, name: str, rows: tuple[int, ...]) -> tuple[torch.Tensor, TierCache]:
        """Logits of some of the shared prompts together, without padding that none of them needs."""
        cache = self.cache(name, LENGTHS)
        return forced_logits(tiny(), cache, *prompts(rows)), cache

    def run(self, name: str, rows: tuple[int, ...]) -> torch.Tensor:
        if (name, rows) not in self.runs:
            self.runs[name, rows] = self.fresh(name, rows)[0]
        return self.runs[name, rows]


def prompts(rows: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, mask = left_padded(list(LENGTHS))
    width = max(LENGTHS[r] for r in rows)
    return ids[rows, -width:], mask[rows, -width:], tokens(len(LENGTHS), STEPS, seed=1)[list(rows)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("calibration"))


# -- reading a cache ----------------------------------------------------------------------------------------------------


def stored(cache: TierCache) -> torch.Tensor:
    """``[L, B, H]`` tokens that are held, in full or coded."""
    store, g = cache.store, cache.geometry
    out = torch.zeros(g.layers, store.batch, g.kv_heads, dtype=torch.int64)
    for i in range(g.layers):
        if isinstance(store, History):
            for group in store.groups:
                out[i, group.rows] = group.layers[i].n
            continue
        for pool in store.pools:
            out[i] += store.held_tokens(pool.grid("unit", i)).sum(-1)
        out[i] += (store.sink_columns() < store.seen).sum(-1, keepdim=True)
    return out


def intact(cache: TierCache) -> bool:
    """Whether every token of every head is there in full."""
    store, bytes_of = cache.store, measure(cache)
    length = torch.tensor([n + store.seen - store.prompt for n in prompt_lengths(store)])
    return not bytes_of["codes"] + bytes_of["ledger"] and bool((stored(cache) == length[None, :, None]).all())


def prompt_lengths(store) -> list[int]:
    if not isinstance(store, History):
        return store.lengths
    return [next(g.length for g in store.groups if r in g.rows) for r in range(store.batch)]


def contents(cache: TierCache) -> list[torch.Tensor]:
    return list(_tensors(cache.store).values())


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def advance(model, cache, mask: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
    """Logits ``[B, n, vocab]`` after each of ``n`` more tokens; ``mask`` is of all before."""
    out = []
    for token in forced.unbind(-1):
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), -1)
        out.append(call(model, cache, token[:, None], mask, mask.sum(-1, keepdim=True) - 1).logits[:, -1])
    return torch.stack(out, 1).float()


def close_while_intact(model, reference, cache, ids: torch.Tensor, steps: int) -> int:
    """Compare with an untouched model for as long as nothing is dropped or coded. Returns how many calls were compared."""
    forced, mask, same_until = tokens(len(ids), steps, seed=1), torch.ones_like(ids), 0
    expected = forced_logits(reference, DynamicCache(), ids, None, forced)
    got = [call(model, cache, ids).logits[:, -1].float()]
    while intact(cache) and same_until == len(got) - 1:
        assert gap(got[-1], expected[:, same_until]) < NEAR
        same_until += 1
        if same_until > steps:
            break
        done = torch.ones(len(ids), ids.shape[1] + same_until - 1, dtype=mask.dtype)
        got.append(advance(model, cache, done, forced[:, same_until - 1 : same_until])[:, 0])
    done = torch.ones(len(ids), ids.shape[1] + len(got) - 1, dtype=mask.dtype)
    if len(got) <= steps:
        got += advance(model, cache, done, forced[:, len(got) - 1 :]).unbind(1)
    assert all(x.isfinite().all() for x in got)
    return same_until


def assert_alone(lab: Lab, name: str, model, lengths: list[int], steps: int, times: float = 1) -> None:
    """Logits of a padded batch are finite and those of each prompt alone, within ``times`` the usual."""
    ids, mask = left_padded(lengths)
    forced = tokens(len(lengths), steps, seed=1)
    cache = lab.cache(name, lengths, steps, model)
    got = forced_logits(model, cache, ids, mask, forced)
    assert got.isfinite().all()
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = forced_logits(model, lab.cache(name, lengths, steps, model), ids[one, -length:], None, forced[one])
        assert gap(got[one], alone) < times * near(cache.policy), f"the prompt of {length} tokens"


# -- batches ------------------------------------------------------------------------------------------------------------


@each
def test_batch_equals_each_alone(lab, name):
    got, cache = lab.fresh(name, (0, 1, 2))
    lab.runs[name, (0, 1, 2)] = got
    dropped = int(stored(cache)[:, 0].max()) < LENGTHS[0] + STEPS
    assert dropped != keeps_everything(cache.policy) or cache.store.layouts[0].codes, "a budget at which nothing has to be chosen"
    for row in range(3):
        assert gap(got[row], lab.run(name, (row,))[0]) < near(cache.policy), f"the prompt of {LENGTHS[row]} tokens"


@each
def test_order_is_irrelevant(lab, name):
    assert gap(lab.run(name, (2, 0, 1)), lab.run(name, (0, 1, 2))[[2, 0, 1]]) < near(lab.policy(name))
    first, second = lab.run(name, (0,)), lab.run(name, (2,))  # and now the other way round
    assert torch.equal(lab.fresh(name, (2,))[0], second)
    assert torch.equal(lab.fresh(name, (0,))[0], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@each
def test_dtypes(lab, name, dtype):
    model, lengths = tiny("llama", dtype), [40, 9]
    cache = lab.cache(name, lengths, 12, model)
    ids, mask = left_padded(lengths)
    assert forced_logits(model, cache, ids, mask, tokens(2, 12, seed=1)).isfinite().all()
    held = measure(cache)
    assert held["other"] == 0 and held["total"] == sum(held[p] for p in PARTS) and min(held.values()) >= 0
    assert held["full"] > 0 and cache.geometry.dtype == dtype
    if not cache.budget.unlimited:
        assert held["total"] <= 2 * cache.budget.resolve(cache.geometry, 0, 0)


# -- sizes --------------------------------------------------------------------------------------------------------------


def edge(policy: Policy) -> int:
    """The number of tokens at which a method begins to do something else."""
    for part in (policy, getattr(policy, "evict", None)):
        for f in () if part is None else fields(part):
            if f.name in ("observe", "window", "residual"):
                return getattr(part, f.name)
    return 4


@pytest.mark.parametrize("length", ["1", "w-1", "w", "w+1"])
@each
def test_short_prompts(lab, name, length):
    policy = lab.policy(name)
    w = edge(policy)
    n = {"1": 1, "w-1": w - 1, "w": w, "w+1": w + 1}[length]
    budget = Budget(fraction=1.0) if keeps_everything(policy) else Budget(tokens=64)
    compared = close_while_intact(tiny(), plain(), TierCache(tiny(), policy, budget), tokens(2, n), 5)
    assert codes(policy) or compared == 6, "something was dropped although everything fits"


@once
def llama(**changes):
    return build("llama", **changes)


@once
def untouched(**changes):
    return build("llama", **changes)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@each
def test_head_dims(lab, name, head_dim):
    model, refused = llama(head_dim=head_dim), None
    try:
        cache = lab.cache(name, [50], 10, model, fit=False)
    except ValueError as error:
        refused = str(error)
        cache = lab.cache(name, [50], 10, model)
    assert refused is None or any(f"method.{f.name}" in refused for f in fields(cache.policy)), f"{refused!r} names no field"
    out = forced_logits(model, cache, tokens(1, 50), None, tokens(1, 10, seed=1))
    assert out.isfinite().all()
    assert torch.equal(out[:, 0], call(untouched(head_dim=head_dim), DynamicCache(), tokens(1, 50)).logits[:, -1])


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@each
def test_query_groups(lab, name, group):
    sizes = {"num_attention_heads": 2 * group, "head_dim": 16, "hidden_size": 32 * group}
    model, reference = llama(**sizes), untouched(**sizes)
    assert_alone(lab, name, model, [30, 12], 9)
    policy = lab.policy(name, model)
    budget = Budget(fraction=1.0) if keeps_everything(policy) else Budget(tokens=64)
    close_while_intact(model, reference, TierCache(model, policy, budget), tokens(1, 12), 3)


# -- unusual keys, values and scores ------------------------------------------------------------------------------------


@once
def odd(kind: str):
    """A model some of whose channels are dead or constant (before RoPE), or whose values are all zero."""
    model = build("llama", attention_bias=True)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                rows = slice(0, None) if kind == "nothing" else slice(2, 20)  # a whole head and some of the other
                part.weight[rows] = 0
                part.bias[rows] = 3.0 if kind == "constant" else 0.0
    return model


@pytest.mark.parametrize("kind", ["dead", "constant", "nothing"])
@each
def test_dead_and_constant_channels(lab, name, kind):
    lengths = [40, 9]
    ids, mask = left_padded(lengths)
    cache = lab.cache(name, lengths, 20, odd(kind))
    assert forced_logits(odd(kind), cache, ids, mask, tokens(2, 20, seed=1)).isfinite().all()
    assert all(t.isfinite().all() for t in contents(cache))


@once
def biased():
    """Qwen2 with large key biases."""
    model = build("qwen2")
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.k_proj.bias[::8] = 20.0
            layer.self_attn.k_proj.bias[3::8] = -20.0
    return model


@each
def test_biased_keys(lab, name):
    assert_alone(lab, name, biased(), [40, 9], 18, times=10)  # logits of attention are as many times as large


@once
def indifferent():
    """Every query attends to all tokens alike: every score is a tie."""
    model = build("llama")
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.self_attn.q_proj.weight.zero_()
    return model


@each
def test_ties(lab, name):
    model, forced = indifferent(), tokens(3, 18, seed=1)[[0, 0, 2]]
    ids = tokens(3, 40)[[0, 0, 2]]
    first, second = (lab.cache(name, [40], 18, model) for _ in range(2))
    out = forced_logits(model, first, ids, None, forced)
    assert torch.equal(out, forced_logits(model, second, ids, None, forced))
    assert same(contents(first), contents(second))
    assert torch.equal(out[0], out[1])
    for row, cache in enumerate((first, second)):
        cache.batch_select_indices(torch.tensor([row]))
        if hasattr(cache.store, "write"):  # where the last token went; chosen anew before the next one is stored
            cache.store.write.zero_()
    assert same(contents(first), contents(second)), "equal rows hold different content"


# -- what is kept -------------------------------------------------------------------------------------------------------


def assert_newest_in_full(cache: TierCache) -> None:
    """The newest ``local`` tokens are held in full by every head (sinks are held apart)."""
    arena = cache.store
    size, sinks = arena.policy.window, arena.rows[0].tolist()
    for (_, row, _), units in holdings(arena).items():
        first = max(arena.seen - arena.layouts[row].local, sinks[row])
        for column in range(first, arena.seen):
            unit = units.get((column - arena.origin) // size)
            assert unit is not None, f"token {column} of {arena.seen} was dropped"
            assert unit["tier"] == FULL and unit["code"] is None, f"token {column} of {arena.seen} is coded"


def assert_newest_known(cache: TierCache, stream: Stream) -> None:
    """The newest ``observe`` tokens (all, without an evictor) are what the stored ones resemble most. Those that are not coded are
    exact, unless they came through a selection (it may have read them from codes)."""
    policy = cache.policy
    (group,) = cache.store.groups
    for i, layer in enumerate(group.layers):
        newest = layer.n if policy.evict is None else min(policy.evict.observe, layer.n)
        held = layer.read(0, layer.n)
        truth = [torch.from_numpy(x[i]) for x in (stream.k, stream.v)]
        for x, y, coded in zip(held, truth, policy.coded(layer.base, layer.n), strict=True):
            tail = layer.n - policy.sink - coded
            if policy.evict is not None:
                tail = min(tail, newest, layer.n - layer.base)
            assert tail <= 0 or torch.equal(x[:, :, -tail:], y[:, :, -tail:]), "a token that is not coded is not exact"
        distance = torch.cdist(torch.cat(held, -1)[:, :, -newest:], torch.cat(truth, -1))
        expected = torch.arange(stream.seen - newest, stream.seen)
        assert bool((distance.argmin(-1) == expected).all()), "one of the newest tokens is missing"


@each
def test_protected_window(lab, name):
    cache = lab.cache(name, [50], 24)
    stream = Stream(tiny(), cache, [50])
    stream.feed(50)
    for _ in range(24):
        assert_newest_known(cache, stream) if isinstance(cache.store, History) else assert_newest_in_full(cache)
        stream.feed(1)


@each
def test_prefill_is_exact(lab, name):
    ids, mask = left_padded(list(LENGTHS))
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    expected = call(plain(), DynamicCache(), ids, mask, positions).logits
    got = call(tiny(), lab.cache(name, LENGTHS), ids, mask, positions).logits
    assert torch.equal(got[mask.bool()], expected[mask.bool()])
    ids[0, -1] = ids[0, -1] % 100 + 1  # another last token changes nothing before it
    other = call(tiny(), lab.cache(name, LENGTHS), ids, mask, positions).logits
    assert torch.equal(other[0, :-1], got[0, :-1]) and not torch.equal(other[0, -1], got[0, -1])


# -- bytes --------------------------------------------------------------------------------------------------------------


def capped(policy: Policy, g: Geometry) -> tuple[Budget, int]:
    """A share that the method works with from here on, a little above its floor, or everything; and a prompt. It is longer where
    codes of all units would take less than that share."""
    for prompt, least in ((100, 20), (400, 10)):
        for percent in range(least, 100, 5):
            budget = Budget(fraction=percent / 100)
            try:
                wanted, there = ([f(g, budget, prompt, prompt + n).codes for n in (0, 100)] for f in (policy.layout, policy.slots))
            except BudgetError:
                continue
            if wanted == there:
                return budget, prompt
            break
    return Budget(fraction=1.0), 100


def one_unit(policy: Policy, g: Geometry) -> int:
    """Bytes by which a layout may miss the budget: its smallest unit in every layer."""
    costs = policy.costs(g, 0)
    return g.layers * (costs.code_unit or costs.full_unit)


@each
def test_measured_bytes(lab, name):
    policy, g = lab.policy(name), geometry_of(tiny().config, torch.float32)
    budget, prompt = capped(policy, g)
    cache = TierCache(tiny(), policy, budget)
    stream = Stream(tiny(), cache, [prompt])
    selections = fullest = 0
    for n in (prompt, *[1] * 60, 20, *[1] * 20):
        before = cache.store.next_due if cache.store else -1
        stream.feed(n)
        held, store = measure(cache), cache.store
        assert held["other"] == 0 and min(held.values()) >= 0
        if budget.unlimited:
            assert held["total"] >= full_bytes(cache) or isinstance(policy, Quantizer)
            continue
        allowed = budget.resolve(g, prompt, store.seen)
        assert held["total"] <= allowed, f"at {store.seen} tokens"
        fullest = max(fullest, held["total"] / allowed)
        if store.next_due != before and not isinstance(policy, Quantizer):
            selections += 1  # a turn goes on after the last one, and its tokens raise the budget
            allowed = budget.resolve(g, prompt, store.next_due - store.layouts[0].interval)
            assert allowed - held["total"] < max(0.005 * allowed, one_unit(policy, g)), f"at {store.seen} tokens"
    if isinstance(policy, Quantizer) and policy.evict is not None:
        assert fullest > 0.9
    assert selections > 5 or isinstance(policy, Quantizer) or budget.unlimited


def expected_bytes(cache: TierCache) -> int:
    """The closed form for a single sequence."""
    policy, store, g = cache.policy, cache.store, cache.geometry
    if isinstance(store, History):
        layer = store.groups[0].layers[0]
        return policy.total(g, layer.base, layer.n, cache.budget.once)
    return store.layouts[0].persistent_bytes or policy.costs(g, 0).total(g, store.full.slots, 0)


@each
def test_bytes_have_a_closed_form(lab, name):
    cache = lab.cache(name, [50], 30)
    stream = Stream(tiny(), cache, [50])
    for n in (50, *[1] * 18, 7, *[1] * 5):
        stream.feed(n)
        assert measure(cache)["total"] == expected_bytes(cache), f"at {stream.seen} tokens"


@each
def test_grow(lab, name):
    cache = lab.cache(name, [60], 24, decode="grow")
    stream = Stream(tiny(), cache, [60])
    stream.feed(60)
    total, count = [measure(cache)["total"]], stored(cache)
    assert cache.budget.unlimited or total[0] <= cache.budget.resolve(cache.geometry, 60, 60)
    for step in range(1, 25):
        stream.feed(1)
        total.append(measure(cache)["total"])
        assert torch.equal(stored(cache), count + step), f"{step} tokens after the prompt"
    # coded tokens are smaller, so a quantizer's bytes fall again where a block of them is coded
    assert max(total) > total[0] and (isinstance(cache.policy, Quantizer) or total == sorted(total))


@once
def lopsided():
    """The first layer attends to all tokens alike, and the values of one of its heads are almost zero: a method that shares slots
    by risk gives it nothing."""
    model = build("llama")
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.q_proj.weight.zero_()
        model.get_decoder().layers[0].self_attn.v_proj.weight[:16] *= 1e-6
    return model


@pytest.mark.parametrize("decode", ["capped", "grow"])
@each
def test_heads_that_get_nothing(lab, name, decode):
    model, lengths, steps = lopsided(), [60, 45], 18
    cache = lab.cache(name, lengths, steps, model, decode, times=1)
    ids, mask = left_padded(lengths)
    forced = tokens(2, steps, seed=1)
    out = call(model, cache, ids, mask, (mask.cumsum(-1) - 1).clamp_min(0)).logits[:, -1]
    if cache.policy.shares == "layers" and all(x.local == 0 for x in cache.store.layouts):
        assert (stored(cache) == 0).any(), "every head got something"
    assert out.isfinite().all() and advance(model, cache, mask, forced).isfinite().all()
    assert measure(cache)["other"] == 0


# -- a cache's life -----------------------------------------------------------------------------------------------------


@each
def test_reset_and_copies(lab, name):
    cache = lab.cache(name, LENGTHS)
    ids, mask, forced = prompts((0, 2))
    forced_logits(tiny(), cache, *prompts((0, 1, 2))[:2], tokens(3, 3))
    cache.reset()
    half = forced_logits(tiny(), cache, ids, mask, forced[:, :9])
    fresh = forced_logits(tiny(), lab.cache(name, LENGTHS), ids, mask, forced[:, :9])
    assert torch.equal(half, fresh)
    mask = torch.cat((mask, torch.ones_like(forced[:, :9])), -1)
    twin = copy.deepcopy(cache)
    there = advance(tiny(), twin, mask, forced[:, 9:])
    assert torch.equal(advance(tiny(), cache, mask, forced[:, 9:]), there)
    assert same(contents(cache), contents(twin))


@each
def test_selected_rows_continue(lab, name):
    cache, rows = lab.cache(name, LENGTHS), torch.tensor([1, 0, 1])
    ids, mask, forced = prompts((0, 2))
    forced_logits(tiny(), cache, ids, mask, forced[:, :9])
    mask = torch.cat((mask, torch.ones_like(forced[:, :9])), -1)
    twin = copy.deepcopy(cache)
    twin.batch_select_indices(rows)
    assert torch.equal(stored(twin), stored(cache)[:, rows])
    expected = advance(tiny(), cache, mask, forced[:, 9:])
    assert gap(advance(tiny(), twin, mask[rows], forced[rows][:, 9:]), expected[rows]) < near(cache.policy)
    assert torch.equal(stored(twin), stored(cache)[:, rows])
