"""The engine against oracles that keep every original token and recompute everything the slow way."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from baselines.adakv import AdaKV
from baselines.criticalkv import AdaCriticalKV, CriticalKV
from baselines.fullkv import FullKV
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from conftest import (
    FAMILIES,
    Stream,
    call,
    forced_logits,
    full_logits,
    gap,
    holdings,
    left_padded,
    rotate,
    softmax,
    tiny,
    tokens,
)
from qevict import Budget, QEvict, TierCache
from qevict.engine.reference import Block, attend, causal_attention_mass, causal_attention_norm, raised
from qevict.policy import CODED, EVICTED, FULL, PROMOTIONS, select
from qevict.store.pool import Pool

METHODS = {
    "fullkv": FullKV(),
    "streaming": StreamingLLM(),
    "snapkv": SnapKV(),
    "adakv": AdaKV(),
    "ada-criticalkv": AdaCriticalKV(),
    "qevict": QEvict(),
    "qevict-kv-head": QEvict(granularity="kv_head", window=4, interval=6),
}

# -- keep everything ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[61], [74, 13, 61]], ids=["single", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_keeping_everything_equals_the_librarys_cache(family, lengths):
    ids, mask = left_padded(lengths)
    forced = tokens(len(lengths), 24, seed=1)
    expected = full_logits(family, ids, mask, forced)
    assert expected.std() > 0.5, "flat logits would hide errors"
    for name, policy in METHODS.items():
        got = forced_logits(tiny(family), TierCache(tiny(family), policy), ids, mask, forced)
        assert gap(got, expected) < 2e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_equals_the_librarys_cache(family):
    """Keep everything; several tokens at once on a cache that is not empty."""
    ids, forced = tokens(2, 30), tokens(2, 5, seed=1)
    turn = torch.cat((ids, forced, tokens(2, 40, seed=2)), 1)
    expected = full_logits(family, turn, None, tokens(2, 5, seed=3))
    for name, policy in METHODS.items():
        cache = TierCache(tiny(family), policy)
        forced_logits(tiny(family), cache, ids, None, forced)
        got = [call(tiny(family), cache, turn[:, 35:]).logits[:, -1]]
        got += [call(tiny(family), cache, token[:, None]).logits[:, -1] for token in tokens(2, 5, seed=3).unbind(-1)]
        assert gap(torch.stack(got, 1), expected) < 2e-5, name


# -- the oracle --------------------------------------------------------------------------------------------------------


def routed(policy, units: dict[int, dict], aged, layout) -> dict[int, int]:
    """The routing rule, one unit at a time: tier of every candidate."""
    rank = {u: x["score"] for u, x in units.items()}
    if isinstance(policy, SnapKV):
        rank = pooled(policy, rank)
    ranked = sorted((u for u in units if aged(u)), key=lambda u: (rank[u], u), reverse=True)
    owns = {u: units[u]["code"] is not None for u in ranked}
    if policy.promotion == "original_only":
        full = [u for u in ranked if not owns[u]][: layout.full]
    elif policy.promotion == "off":
        full = [u for u in ranked[: layout.full] if not owns[u]]
    else:
        full = ranked[: layout.full]
    room = layout.codes - sum(owns[u] for u in full)
    rest = [u for u in ranked if u not in full]
    return dict.fromkeys(full, FULL) | {u: CODED if i < room else EVICTED for i, u in enumerate(rest)}


def pooled(policy: SnapKV, score: dict[int, float]) -> dict[int, float]:
    """SnapKV's smoothing over the stored tokens in the order of their positions."""
    order, half = sorted(score), policy.kernel // 2
    out = {}
    for i, u in enumerate(order):
        near = [np.float64(score[x]) for x in order[max(0, i - half) : i + half + 1]]
        out[u] = sum(near) / policy.kernel if policy.pooling == "avg" else max(near)
    return out


class Oracle:
    """Runs a stream and checks attention, scores, routing and codes of the cache under test at every step."""

    def __init__(self, policy, budget, lengths, seed=0, dtype="float32", shuffle=False):
        self.model = tiny("llama")
        self.cache = TierCache(self.model, policy, budget, dtype)
        self.stream = Stream(self.model, self.cache, lengths, seed)
        self.policy, self.lengths, self.shuffle = policy, lengths, shuffle
        self.stored = np.float16 if dtype == "float16" else np.float32
        self.scaling = self.model.get_decoder().layers[0].self_attn.scaling
        self.score = [np.zeros((len(lengths), self.stream.heads, 0)) for _ in range(self.stream.layers)]  # per token
        self.counts: Counter = Counter()
        self.codes: dict[tuple, list[bytes]] = {}
        self.decoded: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
        self.gone: set[tuple] = set()

    # -- where the tokens of a unit are

    def grid(self, unit: int) -> np.ndarray:
        """Units are cut on a grid that ends where the prompt ends."""
        window = self.policy.window
        return self.stream.width - -(-self.stream.width // window) * window + unit * window + np.arange(window)

    def columns(self, unit: int, row: int, seen: int) -> np.ndarray:
        """Columns that a unit really holds: without padding, sinks, and what has not come yet."""
        column = self.grid(unit)
        return column[(column >= self.stream.pad[row] + self.cache.store.layouts[row].sink) & (column < seen)]

    def heads(self, group: int) -> slice:
        per = self.stream.heads // self.cache.store.full.groups
        return slice(group * per, (group + 1) * per)

    # -- attention

    def dense(self, layer: int, held: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys and values ``[B, H, tokens, d]`` and visibility ``[B, H, tokens]`` as the next call should see them."""

        def rounded(x):
            return x.astype(self.stored).astype(np.float64)

        k, v, seen = rounded(self.stream.k[layer]), rounded(self.stream.v[layer]), self.stream.seen
        visible = np.zeros(k.shape[:-1], bool)
        for b, pad in enumerate(self.stream.pad):
            visible[b, :, pad : min(pad + self.cache.store.layouts[b].sink, seen)] = True
        for (i, b, g), units in held.items():
            for u, x in units.items() if i == layer else ():
                column, heads = self.columns(u, b, seen), self.heads(g)
                visible[b, heads, column] = True
                if x["code"] is not None:
                    for store, approximate in zip((k, v), self.decoded[i, b, g, u], strict=True):
                        part = approximate[:, column - self.grid(u)[0]]
                        store[b, heads][:, column] = rounded(part) if x["tier"] == FULL else part
        return k, v, visible

    def attention(self, layer: int, q: np.ndarray, held: dict | None) -> np.ndarray:
        """Plain softmax in fp64; adds the attention mass to the scores. q ``[B, H_q, n, d]``."""
        batch, _, n, dim = q.shape
        total, old = self.stream.k.shape[3], self.stream.seen
        if held is None:
            k, v = self.stream.k[layer].astype(np.float64), self.stream.v[layer].astype(np.float64)
            visible = np.zeros(k.shape[:-1], bool)
        else:
            k, v, visible = self.dense(layer, held)
            if n > 1:  # a chunk sees itself before it is stored
                k[:, :, old:], v[:, :, old:] = self.stream.k[layer, :, :, old:], self.stream.v[layer, :, :, old:]
        visible = np.repeat(visible[:, :, None], n, 2)
        causal = np.arange(old, total) <= np.arange(old, total)[:, None]
        visible[..., old:] = causal & (np.arange(old, total) >= self.stream.pad[:, None, None, None])
        real = np.arange(old, total) >= self.stream.pad[:, None]  # queries that are not padding, [B, n]
        grouped = q.astype(np.float64).reshape(batch, self.stream.heads, -1, n, dim)
        logits = grouped @ k[:, :, None].swapaxes(-1, -2) * self.scaling
        logits = np.where(visible[:, :, None] | ~real[:, None, None, :, None], logits, -np.inf)
        weights = softmax(logits)
        count = n if (last := self.policy.prompt_queries) is None or n == 1 else min(last, n)
        if n == 1 and not self.counted(old + 1):
            count = 0
        mass = (weights * real[:, None, None, :, None])[..., n - count :, :].sum(-2).mean(2)
        self.score[layer] = np.concatenate((self.score[layer], np.zeros((*mass.shape[:2], n))), -1) + mass
        return (weights @ v[:, :, None]).reshape(q.shape)

    def counted(self, seen: int) -> bool:
        return self.policy.mass_every_step or (seen - self.stream.width) % self.policy.step == 0

    # -- one call

    def feed(self, n: int) -> None:
        first = self.cache.store is None
        held = None if first else holdings(self.cache.store)
        expected = []
        real = np.arange(self.stream.seen, self.stream.seen + n) >= self.stream.pad[:, None]
        out = self.stream.feed(n, lambda i, q, k, v: expected.append(self.attention(i, q, held)))
        worst = (np.abs(out - np.stack(expected)) * real[None, :, None, :, None]).max()
        assert worst < 1e-5, f"attention is {worst:.2g} off at {self.stream.seen} tokens"
        if first:
            self.watch()

    # -- scores, routing, codes

    def watch(self) -> None:
        """Check what the prompt was turned into, then every routing event from now on."""
        arena = self.cache.store
        held = holdings(arena)
        self.check_scores(held)
        if not isinstance(self.policy, SnapKV):  # its smoothed prompt scores are tested with the method
            for place, units in held.items():
                everything = range((self.stream.width - self.grid(0)[0]) // self.policy.window)
                fresh = {u: {"tier": FULL, "code": None, "score": self.unit_score(*place, u)} for u in everything}
                fresh = {u: x for u, x in fresh.items() if len(self.columns(u, place[1], arena.seen))}
                self.compare(place, fresh, units)
        self.remember_codes(held)
        route = arena.route

        def watched() -> bool:
            due = [b for b, at in enumerate(arena.due) if at is not None and at <= arena.seen]
            if self.shuffle:
                for pool in (arena.full, arena.coded):
                    pool.record["score"].random_(0, 9)
            before = holdings(arena)
            happened = route()
            assert happened == bool(due)
            if happened:
                self.check_scores(before)
                after = holdings(arena)
                for place, units in before.items():
                    if place[1] in due:
                        self.compare(place, units, after[place])
                    else:
                        assert units == after[place]
                self.remember_codes(after)
                self.counts["events"] += 1
            return happened

        arena.route = watched

    def unit_score(self, layer: int, row: int, group: int, unit: int) -> float:
        tokens = self.score[layer][row, self.heads(group)][:, self.columns(unit, row, self.cache.store.seen)]
        return float(tokens.sum(-1).mean(0)) if self.policy.scored else 0.0

    def check_scores(self, held: dict) -> None:
        """Scores of complete units equal the attention mass that the oracle saw on their tokens."""
        if self.shuffle or not isinstance(self.policy, QEvict):  # the others let it fade
            return
        for place, units in held.items():
            for u, x in units.items():
                if self.grid(u)[-1] < self.cache.store.seen:
                    assert x["score"] == pytest.approx(self.unit_score(*place, u), abs=2e-4), f"score of unit {u} at {place}"

    def compare(self, place: tuple, before: dict, after: dict) -> None:
        """Tiers after an event against the slow re-selection."""
        arena = self.cache.store
        layout = arena.layouts[place[1]]
        if self.policy.shares and self.policy.shared == "codes":  # how many each head gets is tested in test_policies.py
            layout = replace(layout, codes=int(arena.coded.ragged[place]))
        if isinstance(self.policy, AdaKV | CriticalKV):  # who is chosen is tested with the methods; here, what becomes of it
            want = {u: after[u]["tier"] if u in after else EVICTED for u in before}
        else:
            want = routed(self.policy, before, lambda u: self.grid(u)[-1] < arena.seen - layout.local, layout)
        for u, x in before.items():
            tier = want.get(u, FULL)
            got = after[u]["tier"] if u in after else EVICTED
            assert got == tier, f"unit {u} at {place}: tier {got}, expected {tier}"
            was = "again" if x["code"] is not None else "first"
            if x["tier"] == FULL and tier == CODED:
                self.counts[f"demoted {was}"] += 1
            elif x["tier"] == CODED and tier == FULL:
                self.counts["promoted"] += 1
            elif tier == EVICTED:
                self.counts["evicted" if x["tier"] == CODED else f"evicted from full, {was}"] += 1
                self.gone.add((*place, u))
        assert set(after) <= set(before)

    def remember_codes(self, held: dict) -> None:
        """A code is written once: it is compared with the first sight of it, wherever it is now."""
        arena = self.cache.store
        for (i, b, g), units in held.items():
            for u, x in units.items():
                key = (i, b, g, u)
                assert key not in self.gone, f"evicted unit {u} is back"
                if x["code"] is None:
                    assert key not in self.codes, f"unit {u} has lost its code but counts as original"
                    continue
                index = arena.coded.index(*(torch.tensor([at]) for at in (i, b, g, x["code"])))[0]
                data = {name: flat[index] for name, flat in arena.coded.payload.items()}
                raw = [data[name].contiguous().view(torch.uint8).numpy().tobytes() for name in sorted(data)]
                if key not in self.codes:
                    self.codes[key] = raw
                    self.first_code(key, arena.codec.decode_keys(data).numpy(), arena.codec.decode_values(data).numpy())
                assert raw == self.codes[key], f"the code of unit {u} at {key[:3]} changed"

    def first_code(self, key: tuple, k: np.ndarray, v: np.ndarray) -> None:
        """Remember what a code stands for. It is within half a step of the right tokens, keys before RoPE."""
        i, b, g, u = key
        position = np.broadcast_to(self.grid(u) - self.stream.pad[b], k.shape[:-1])
        self.decoded[key] = rotate(k, position, self.stream.inv_freq), v
        column = self.columns(u, b, self.cache.store.seen)
        own = column - self.grid(u)[0]
        if not len(own):
            return
        keys, values = (x[i, b, self.heads(g)][:, column].astype(np.float64) for x in (self.stream.k, self.stream.v))
        keys = rotate(keys, position[:, own], self.stream.inv_freq, -1)
        slack = 0.1 if self.policy.meta == "uint8" else 0.01
        step = np.ptp(keys, -2, keepdims=True) / (2**self.policy.key_bits - 1)
        worst = (np.abs(k[:, own] - keys) - step / 2).max()
        assert worst < slack, f"keys of unit {u} are {worst:.2g} further off than half a step"
        step = np.ptp(values, -1, keepdims=True) / (2**self.policy.value_bits - 1)
        worst = (np.abs(v[:, own] - values) - step / 2).max()
        assert worst < slack, f"values of unit {u} are {worst:.2g} further off than half a step"


TRANSITIONS = {"demoted first", "demoted again", "promoted", "evicted"}
ORACLES = {
    "layer": (QEvict(q=0.4, local_fraction=0.1), 24_000, TRANSITIONS),
    "kv-head": (QEvict(q=0.4, local_fraction=0.1, granularity="kv_head"), 24_000, TRANSITIONS),
    "uint8-3-4-bit": (QEvict(q=0.5, window=4, meta="uint8", key_bits=3, value_bits=4, last_queries=5), 24_000, TRANSITIONS),
    "interval-3": (QEvict(q=0.4, interval=3, local_fraction=0.1), 24_000, TRANSITIONS),
    "interval-20": (QEvict(q=0.4, interval=20, sink=0, window=4, local_fraction=0), 30_000, TRANSITIONS),
    "routing-step": (QEvict(q=0.4, score_source="routing_step", last_queries=1), 24_000, TRANSITIONS),
    "prompt-all": (QEvict(q=0.4, prompt_mass="all"), 24_000, {"demoted first", "evicted from full, first"}),
    "promotion-off": (QEvict(q=0.4, promotion="off"), 30_000, {"demoted first", "evicted"}),
    "original-only": (QEvict(q=0.4, promotion="original_only", last_queries=1), 24_000, {"demoted first", "evicted"}),
    "binary": (QEvict(q=0), 24_000, {"evicted from full, first"}),
    "shared-layers": (QEvict(q=1, granularity="kv_head", shares="layers", window=4), 34_000, {"demoted first", "evicted"}),
    "shared-heads": (
        QEvict(q=0.6, granularity="kv_head", shares="heads", promotion="off", meta="uint8", interval=6),
        26_000,
        {"demoted first", "evicted"},
    ),
    "snapkv": (SnapKV(observe=8, interval=4), 24_000, {"evicted from full, first"}),
    "adakv": (AdaKV(observe=8, interval=4), 24_000, {"evicted from full, first"}),
    "criticalkv": (CriticalKV(observe=8, interval=4), 24_000, {"evicted from full, first"}),
    "ada-criticalkv": (AdaCriticalKV(observe=8, interval=4), 24_000, {"evicted from full, first"}),
    "snapkv-max": (SnapKV(observe=8, interval=8, kernel=7, pooling="max"), 24_000, {"evicted from full, first"}),
    "streaming": (StreamingLLM(positions="original"), 24_000, {"evicted from full, first"}),
}


@pytest.mark.parametrize("lengths", [[163], [163, 45, 120]], ids=["single", "padded"])
@pytest.mark.parametrize("name", ORACLES)
def test_every_step_equals_the_oracle(name, lengths):
    policy, nbytes, transitions = ORACLES[name]
    oracle = Oracle(policy, Budget(nbytes=nbytes), lengths)
    oracle.feed(max(lengths))
    for _ in range(64):
        oracle.feed(1)
    assert transitions <= set(oracle.counts), f"the run proves too little: {oracle.counts}"


@pytest.mark.parametrize("lengths", [[163], [163, 45, 120]], ids=["single", "padded"])
@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize("promotion", PROMOTIONS)
def test_random_scores_equal_the_oracle(promotion, granularity, lengths):
    """Scores are drawn anew before every event, with many ties: every move between tiers happens, and often."""
    torch.manual_seed(0)
    policy = QEvict(q=0.4, local_fraction=0, promotion=promotion, granularity=granularity, interval=5)
    oracle = Oracle(policy, Budget(nbytes=30_000), lengths, shuffle=True)
    oracle.feed(163)
    for n in (*[1] * 20, 19, *[1] * 20):
        oracle.feed(n)
    expected = {"demoted first", "evicted", "evicted from full, first"}
    assert expected | ({"promoted", "demoted again", "evicted from full, again"} if promotion == "on" else set()) == (
        set(oracle.counts) - {"events"}
    )


@pytest.mark.parametrize("name", ["layer", "kv-head", "interval-3", "routing-step", "binary", "snapkv", "streaming"])
def test_every_step_of_a_second_turn_equals_the_oracle(name):
    """A turn that is longer than the local region, with routing events inside, then further decoding."""
    policy, nbytes, _ = ORACLES[name]
    oracle = Oracle(policy, Budget(nbytes=nbytes), [163])
    for n in (163, *[1] * 11, 70, *[1] * 20, 5, *[1] * 10):
        oracle.feed(n)
    assert oracle.counts["events"] > 10 // policy.window


@pytest.mark.parametrize("lengths", [[163], [100, 163]], ids=["single", "padded"])
@pytest.mark.parametrize("name", ["layer", "kv-head", "interval-3", "interval-20", "binary", "snapkv", "streaming"])
def test_a_growing_budget_equals_the_oracle(name, lengths):
    """`current`: slots are added while decoding, also in the middle of a unit, and the shares of the tiers move."""
    policy, _, _ = ORACLES[name]
    oracle = Oracle(policy, Budget(0.4), lengths)
    oracle.feed(163)
    slots = oracle.cache.store.full.slots
    for n in (*[1] * 50, 23, *[1] * 50):
        oracle.feed(n)
    assert oracle.counts["events"] >= 123 // 20
    assert oracle.cache.store.full.slots > slots


@pytest.mark.parametrize("lengths", [[1], [3], [30, 2, 4]], ids=["1", "3", "padded"])
@pytest.mark.parametrize("name", ["layer", "kv-head", "interval-3", "binary", "streaming"])
def test_prompts_shorter_than_the_sinks_equal_the_oracle(name, lengths):
    """The first generated tokens are sinks as well."""
    oracle = Oracle(ORACLES[name][0], Budget(nbytes=20_000), lengths)
    oracle.feed(max(lengths))
    for n in (*[1] * 80, 12, *[1] * 10):
        oracle.feed(n)
    assert any("evicted" in key for key in oracle.counts)


def test_rounded_storage_equals_the_oracle():
    """An fp16 store under fp32 arithmetic."""
    policy, nbytes, transitions = ORACLES["promotion-off"]
    oracle = Oracle(policy, Budget(nbytes=nbytes // 2), [163], dtype="float16")
    oracle.feed(163)
    for _ in range(40):
        oracle.feed(1)
    assert transitions <= set(oracle.counts)


# -- the reference attention by itself ---------------------------------------------------------------------------------


def random_blocks(rng, batch, heads, dim, sizes):
    """Blocks of (tokens, window) with random visibility; the first token of every head is visible."""
    blocks = []
    for tokens_, window in sizes:
        k, v = (rng.standard_normal((batch, heads, tokens_, dim)).astype(np.float32) for _ in range(2))
        visible = rng.random((batch, heads, 1, tokens_)) < 0.7
        visible[..., 0] |= not blocks
        blocks.append((k * 2, v, visible, window))
    return blocks


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("mass_queries", [0, 1, 3, 50, None])
def test_attend_equals_softmax(group, mass_queries):
    rng = np.random.default_rng(group)
    batch, heads, n, dim, scaling = 2, 3, 5, 16, 0.3
    q = rng.standard_normal((batch, heads * group, n, dim)).astype(np.float32) * 2
    blocks = random_blocks(rng, batch, heads, dim, [(4, 4), (24, 8), (7, 1), (16, 16)])
    given = [Block(*(torch.from_numpy(x) for x in b[:3]), b[3]) for b in blocks]
    out, mass = attend(torch.from_numpy(q), given, scaling, mass_queries)
    k, v, visible = (np.concatenate([b[i] for b in blocks], 3 if i == 2 else 2).astype(np.float64) for i in range(3))
    logits = q.reshape(batch, heads, group, n, dim).astype(np.float64) @ k[:, :, None].swapaxes(-1, -2) * scaling
    weights = softmax(np.where(visible[:, :, None] > 0, logits, -np.inf))
    assert np.abs(out.numpy() - (weights @ v[:, :, None]).reshape(q.shape)).max() < 1e-5
    if mass_queries == 0:
        assert mass is None
        return
    count = n if mass_queries is None else min(n, mass_queries)
    per_token = weights[..., n - count :, :].sum(-2).mean(2)
    start = 0
    for (k_, _, _, window), m in zip(blocks, mass, strict=True):
        part = per_token[..., start : start + k_.shape[2]].reshape(batch, heads, -1, window).sum(-1)
        assert np.abs(m.numpy() - part).max() < 1e-5
        start += k_.shape[2]
    assert torch.cat(mass, -1).sum(-1).numpy() == pytest.approx(count, abs=1e-4)


def test_attend_survives_blocks_without_a_visible_token():
    rng = np.random.default_rng(0)
    q = torch.from_numpy(rng.standard_normal((1, 2, 1, 16)).astype(np.float32))
    nothing, something = (torch.from_numpy(rng.standard_normal((2, 1, 2, 8, 16)).astype(np.float32)) for _ in range(2))
    hidden = torch.zeros(1, 2, 1, 8, dtype=torch.bool)
    want, mass = attend(q, [Block(*something, None, 8)], 0.25, 1)
    for order in (0, 1):
        blocks = [Block(*something, None, 8)]
        blocks.insert(order, Block(*nothing, hidden, 8))
        out, masses = attend(q, blocks, 0.25, 1)
        assert gap(out, want) < 1e-6
        assert not masses[order].any()
        assert gap(masses[1 - order], mass[0]) < 1e-6


@pytest.mark.parametrize("last", [1, 32, 200, None])
def test_prompt_mass_equals_softmax(last):
    """In blocks of queries, with padding: padded queries give nothing, padded keys get nothing."""
    rng = np.random.default_rng(5)
    batch, heads, group, length, dim = 2, 2, 2, 290, 16
    q = rng.standard_normal((batch, heads * group, length, dim)).astype(np.float32)
    k = rng.standard_normal((batch, heads, length, dim)).astype(np.float32)
    pad = np.array([0, 270])
    real = np.arange(length) >= pad[:, None]
    got = causal_attention_mass(torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(real), 0.25, last).numpy()
    visible = (np.arange(length) <= np.arange(length)[:, None]) & real[:, None]
    logits = q.reshape(batch, heads, group, length, dim).astype(np.float64) @ k[:, :, None].swapaxes(-1, -2) * 0.25
    weights = softmax(np.where(visible[:, None, None] | ~real[:, None, None, :, None], logits, -np.inf))
    weights = weights * real[:, None, None, :, None]
    first = 0 if last is None else max(0, length - last)
    assert np.abs(got - weights[..., first:, :].sum(-2).mean(2)).max() < 1e-4
    queries = np.minimum(length - first, length - pad)
    assert got.sum(-1) == pytest.approx(np.repeat(queries[:, None], heads, 1), rel=1e-5)
    assert not got[1, :, :270].any()


@pytest.mark.parametrize(
    ("p", "half_life", "last"), [(1.0, 20.0, 200), (3.0, None, None), (8.0, 8.0, 200), (6.0, 3.0, 32), (8.0, None, 4)]
)
def test_prompt_norm_equals_its_definition(p, half_life, last):
    rng = np.random.default_rng(6)
    length, pad = 290, np.array([0, 250])
    q, k = (3 * rng.standard_normal((2, h, length, 16)).astype(np.float32) for h in (4, 2))
    real = np.arange(length) >= pad[:, None]
    got = causal_attention_norm(torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(real), 0.25, last, p, half_life).numpy()
    for b in range(2):
        rows = np.arange(max(pad[b], length - (last or length)), length)
        weight = np.ones(len(rows)) if half_life is None else 0.5 ** ((length - 1 - rows) / half_life)
        for h in range(2):
            total = np.zeros(length)
            for g in range(2):
                for row, w in zip(rows, weight, strict=True):
                    seen = slice(pad[b], row + 1)
                    total[seen] += w * softmax(k[b, h, seen].astype(np.float64) @ q[b, 2 * h + g, row] * 0.25) ** p / 2
            want = (total / weight.sum()) ** (1 / p)
            assert np.abs(got[b, h] - want).max() < 1e-6 + 2 * 2 ** (-212 / p)
            assert got[b, h] == pytest.approx(want, rel=1e-3, abs=2 * 2 ** (-212 / p) + 1e-9)
    assert raised(torch.tensor([3.0]), 12.0).item() == 3.0**12 and raised(torch.tensor([2.0]), 2.5).item() == pytest.approx(2**2.5)


# -- selection ---------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_newer_unit():
    unit = torch.tensor([4, 0, 3, 1, 2])
    one = torch.ones(5, dtype=torch.bool)
    tier = select(torch.zeros(5), unit, one, ~one, torch.tensor([2]), torch.tensor([2]), "on")
    assert dict(zip(unit.tolist(), tier.tolist(), strict=True)) == {4: FULL, 3: FULL, 2: CODED, 1: CODED, 0: EVICTED}


@pytest.mark.parametrize("promotion", PROMOTIONS)
def test_selection_equals_the_slow_rule(promotion):
    """Random units, many ties, empty slots, more codes owned than there is room for."""
    rng = np.random.default_rng(0)
    policy = QEvict(promotion=promotion)
    seen = Counter()
    for _ in range(300):
        n = int(rng.integers(1, 15))
        unit = rng.permutation(20)[:n]
        score, owns, candidate = rng.integers(0, 4, n), rng.random(n) < 0.5, rng.random(n) < 0.8
        full, codes = int(rng.integers(0, 6)), int(rng.integers(0, 8))
        units = {int(u): {"score": float(s), "code": 0 if o else None} for u, s, o in zip(unit, score, owns, strict=True)}
        chosen = {int(u) for u, c in zip(unit, candidate, strict=True) if c}
        layout = type("Slots", (), {"full": full, "codes": codes})
        want = routed(policy, units, chosen.__contains__, layout)
        args = (torch.tensor(score, dtype=torch.float32), torch.tensor(unit), torch.tensor(candidate), torch.tensor(owns))
        tier = select(*args, torch.tensor([full]), torch.tensor([codes]), promotion)
        got = {int(u): t for u, t, c in zip(unit, tier.tolist(), candidate, strict=True) if c}
        assert got == want
        seen.update(got.values())
        # the slots that are promised are never exceeded by what is newly coded or full
        assert sum(t == FULL for t in got.values()) <= full
    assert len(seen) == 3


# -- batches -----------------------------------------------------------------------------------------------------------

# fp32 metadata: rounding to fp16 turns the last bit of a matrix product into a whole step of a scale
BATCHED = {
    "streaming": (StreamingLLM(), 17_000),
    "streaming-original": (StreamingLLM(positions="original"), 17_000),
    "snapkv": (SnapKV(observe=8), 17_000),
    "adakv": (AdaKV(observe=8), 17_000),
    "adakv-prefix": (AdaKV(observe=8, safeguard="prefix"), 17_000),
    "criticalkv": (CriticalKV(observe=8), 17_000),
    "ada-criticalkv": (AdaCriticalKV(observe=8), 17_000),
    "snapkv-max": (SnapKV(observe=8, kernel=7, pooling="max", interval=5), 17_000),
    "qevict": (QEvict(meta="float32"), 21_000),
    "qevict-kv-head": (QEvict(meta="float32", granularity="kv_head", window=4, interval=3), 21_000),
    "qevict-binary": (QEvict(q=0), 21_000),
}


@pytest.mark.parametrize("basis", ["bytes", "current", "prompt"])
@pytest.mark.parametrize("name", BATCHED)
def test_a_padded_batch_equals_each_prompt_alone(name, basis):
    policy, nbytes = BATCHED[name]
    lengths = [130, 77, 101]
    budget = Budget(nbytes=nbytes) if basis == "bytes" else Budget(0.55, basis=basis)
    ids, mask = left_padded(lengths)
    forced = tokens(3, 40, seed=1)
    together = forced_logits(tiny(), TierCache(tiny(), policy, budget), ids, mask, forced)
    everything = full_logits("llama", ids, mask, forced)
    for row, length in enumerate(lengths):
        one = forced_logits(tiny(), TierCache(tiny(), policy, budget), ids[row : row + 1, -length:], None, forced[row : row + 1])
        assert gap(together[row : row + 1], one) < 3e-5, f"row {row}"
    assert gap(together, everything) > 1e-2, "nothing was evicted or coded: the test proves nothing"


@pytest.mark.parametrize("name", BATCHED)
def test_rows_shorter_than_the_sinks_equal_each_prompt_alone(name):
    policy, nbytes = BATCHED[name]
    lengths = [60, 2, 4, 9]
    ids, mask = left_padded(lengths)
    forced = tokens(4, 30, seed=1)
    together = forced_logits(tiny(), TierCache(tiny(), policy, Budget(nbytes=nbytes)), ids, mask, forced)
    for row, length in enumerate(lengths):
        cache = TierCache(tiny(), policy, Budget(nbytes=nbytes))
        one = forced_logits(tiny(), cache, ids[row : row + 1, -length:], None, forced[row : row + 1])
        assert gap(together[row : row + 1], one) < 1e-5, f"row {row}"


# -- heads with different numbers of slots -------------------------------------------------------------------------------


def test_a_ragged_pool_attends_like_each_head_alone():
    rng = np.random.default_rng(2)
    layers, batch, heads, group, window, dim = 2, 2, 3, 2, 4, 16
    slots = torch.from_numpy(rng.integers(1, 7, (layers, batch, heads)))
    spec = dict.fromkeys(("k", "v"), ((window, dim), torch.float32))
    pool = Pool((layers, batch, heads), heads, slots, spec, {}, torch.device("cpu"))
    unit = pool.grid("unit").clone()
    unit[unit == -1] = torch.arange(int((unit == -1).sum()), dtype=unit.dtype)
    unit[1, 0, 2, 0] = -1  # a free slot; its content must not count
    pool.put("unit", unit)
    for tensor in pool.payload.values():
        tensor.copy_(torch.from_numpy(rng.standard_normal(tensor.shape)))
    q = torch.from_numpy(rng.standard_normal((batch, heads * group, 1, dim)).astype(np.float32))
    unit[1, 0, 2, 1:2] = unit[1, 0, 2, 1:2]
    for i in range(layers):
        data = pool.read(i, 0, pool.slots, ("k", "v"))
        visible = (pool.grid("unit")[i] >= 0).repeat_interleave(window, -1).unsqueeze(2)
        if i == 1 and int(slots[1, 0, 2]) == 1:
            visible[0, 2, 0, :window] = True
        half = max(1, pool.slots // 2)
        blocks = [
            Block(data["k"][:, :, part].flatten(2, 3), data["v"][:, :, part].flatten(2, 3), seen, window)
            for part, seen in ((slice(0, half), visible[..., : half * window]), (slice(half, None), visible[..., half * window :]))
        ]
        out, mass = attend(q, blocks, 0.25, 1)
        mass = torch.cat(mass, -1)
        for b in range(batch):
            for h in range(heads):
                place = (torch.tensor([x]) for x in (i, b, h))
                where = [t.expand(int(slots[i, b, h])) for t in place]
                index = pool.index(*where, torch.arange(int(slots[i, b, h])))[:, 0]
                index = index[pool.grid("unit")[i, b, h, : len(index)] >= 0]
                k, v = (pool.payload[n][index].flatten(0, 1).double().numpy() for n in ("k", "v"))
                mine = q[b, h * group : (h + 1) * group, 0].double().numpy()
                weights = softmax(mine @ k.T * 0.25)
                assert np.abs(out[b, h * group : (h + 1) * group, 0].numpy() - weights @ v).max() < 1e-5
                got = mass[b, h, : pool.slots][pool.grid("unit")[i, b, h] >= 0]
                assert np.abs(got.numpy() - weights.mean(0).reshape(-1, window).sum(-1)).max() < 1e-5
        assert (mass[pool.grid("unit")[i] < 0] == 0).all()
