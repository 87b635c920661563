"""The methods against independent implementations, short prompts, and what their fields accept."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
import torch

from baselines.adakv import AdaKV
from baselines.criticalkv import CriticalKV
from baselines.fullkv import FullKV
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from conftest import (
    Stream,
    candidates,
    forced_logits,
    full_logits,
    gap,
    holdings,
    left_padded,
    plain,
    rotate,
    softmax,
    tiny,
    tokens,
)
from qevict import Budget, Policy, QEvict, TierCache
from qevict.engine.reference import projected_norm
from qevict.hf.cache import geometry_of
from qevict.policy import FULL

# -- StreamingLLM ------------------------------------------------------------------------------------------------------


def streaming_reference(model, ids, forced, sinks: int, recent: int, slots: bool) -> torch.Tensor:
    """StreamingLLM after a one-shot prefill, written from its description: un-rotated keys are stored, and at every step the
    kept ones are rotated by their slot and the query by its own."""
    decoder = model.get_decoder()
    inv_freq = decoder.rotary_emb.inv_freq.double().numpy()

    def turn(x: torch.Tensor, positions) -> torch.Tensor:
        positions = np.broadcast_to(np.asarray(positions), x.shape[:-1])
        return torch.from_numpy(rotate(x.double().numpy(), positions, inv_freq)).float()

    def project(layer, hidden):
        normed = layer.input_layernorm(hidden)
        parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        return [p(normed).unflatten(-1, (-1, layer.self_attn.head_dim)).transpose(0, 1) for p in parts]  # [heads, n, d]

    def finish(layer, hidden, q, k, v, visible):
        group = len(q) // len(k)
        logits = q @ k.repeat_interleave(group, 0).transpose(-1, -2) * q.shape[-1] ** -0.5
        out = logits.masked_fill(~visible, float("-inf")).softmax(-1) @ v.repeat_interleave(group, 0)
        hidden = hidden + layer.self_attn.o_proj(out.transpose(0, 1).flatten(-2))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    stored, logits = [], []
    hidden = decoder.embed_tokens(ids[0])
    here = np.arange(len(hidden))
    for layer in decoder.layers:
        q, k, v = project(layer, hidden)
        stored.append((k, v))
        hidden = finish(layer, hidden, turn(q, here), turn(k, here), v, torch.ones(len(here), len(here)).tril().bool())
    logits.append(model.lm_head(decoder.norm(hidden[-1])))
    for step, token in enumerate(forced[0]):
        now = len(here) + step
        kept = [p for p in range(now + 1) if p < sinks or p > now - recent]
        place = np.arange(len(kept)) if slots else np.array(kept)
        hidden = decoder.embed_tokens(token[None])
        for i, layer in enumerate(decoder.layers):
            q, k, v = project(layer, hidden)
            stored[i] = tuple(torch.cat(pair, 1) for pair in zip(stored[i], (k, v), strict=True))
            keys, values = (x[:, kept] for x in stored[i])
            hidden = finish(layer, hidden, turn(q, place[-1]), turn(keys, place), values, torch.ones(1, len(kept)).bool())
        logits.append(model.lm_head(decoder.norm(hidden[-1])))
    return torch.stack(logits)[None]


def streaming_bytes(sinks: int, recent: int) -> Budget:
    policy, g = StreamingLLM(), geometry_of(tiny().config, torch.float32)
    return Budget(nbytes=policy.costs(g, sinks).total(g, recent, 0))


@pytest.mark.parametrize("positions", ["slot", "original"])
@pytest.mark.parametrize(("length", "sinks", "recent"), [(60, 4, 20), (60, 0, 7), (3, 4, 9), (1, 4, 2), (15, 4, 30)])
def test_streaming_equals_its_description(positions, length, sinks, recent):
    ids, forced = tokens(1, length), tokens(1, 40, seed=1)
    policy = StreamingLLM(sink=sinks, positions=positions)
    cache = TierCache(tiny(), policy, streaming_bytes(sinks, recent))
    got = forced_logits(tiny(), cache, ids, None, forced)
    assert cache.store.layouts[0].dense == recent
    with torch.no_grad():
        expected = streaming_reference(plain(), ids, forced, sinks, recent, positions == "slot")
        other = streaming_reference(plain(), ids, forced, sinks, recent, positions != "slot")
    assert gap(got, expected) < 5e-5
    if sinks:
        assert gap(got, other) > 1e-2, "slot and original positions should differ once tokens are evicted"


def test_streaming_slots_in_a_padded_batch():
    lengths = [60, 9, 33]
    ids, mask = left_padded(lengths)
    forced = tokens(3, 30, seed=1)
    got = forced_logits(tiny(), TierCache(tiny(), StreamingLLM(), streaming_bytes(4, 16)), ids, mask, forced)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        with torch.no_grad():
            expected = streaming_reference(plain(), ids[one, -length:], forced[one], 4, 16, True)
        assert gap(got[one], expected) < 5e-5


def test_streaming_keeps_sinks_and_the_newest():
    cache = TierCache(tiny(), StreamingLLM(), streaming_bytes(4, 20))
    stream = Stream(tiny(), cache, [50])
    stream.feed(50)
    for _ in range(30):
        arena = cache.store
        for units in holdings(arena).values():
            assert sorted(units) == list(range(arena.seen - 19, arena.seen))
        stream.feed(1)


# -- SnapKV ------------------------------------------------------------------------------------------------------------


def snapkv_choice(q, k, real, scaling, policy: SnapKV, slots: int) -> list[set[int]]:
    """Tokens that each KV head keeps of one prompt: q ``[H_q, T, d]``, k ``[H, T, d]``, real ``[T]``."""
    q, k = q[:, real].astype(np.float64), k[:, real].astype(np.float64)
    heads, length = len(k), k.shape[1]
    group, prefix, pad = len(q) // heads, max(0, length - policy.observe), policy.kernel // 2
    kept = []
    for h in range(heads):
        mass = np.zeros(length)
        for query_head in range(h * group, (h + 1) * group):
            for u in range(prefix, length):
                mass[: u + 1] += softmax(q[query_head, u] @ k[h, : u + 1].T * scaling) / group / policy.observe
        score = np.zeros(prefix)
        for i in range(prefix):
            near = [mass[j] if 0 <= j < prefix else None for j in range(i - pad, i + pad + 1)]
            if policy.pooling == "avg":
                score[i] = sum(x or 0 for x in near) / policy.kernel
            else:
                score[i] = max(x for x in near if x is not None)
        best = sorted(range(prefix), key=lambda i: (score[i], i), reverse=True)[:slots]
        kept.append({int(np.flatnonzero(real)[i]) for i in (*best, *range(prefix, length))})
    return kept


@pytest.mark.parametrize("lengths", [[200], [200, 20, 90]], ids=["single", "padded"])
@pytest.mark.parametrize(
    "policy",
    [SnapKV(), SnapKV(kernel=1), SnapKV(observe=16, kernel=7, pooling="max"), SnapKV(observe=5, kernel=3)],
    ids=["avg-5", "avg-1", "max-7", "avg-3"],
)
def test_snapkv_keeps_what_the_formula_says(policy, lengths):
    seen = []

    class Recorder(TierCache):
        def attend(self, index, module, q, k, *args, **kwargs):
            seen.append((q.numpy(), k.numpy()))
            return super().attend(index, module, q, k, *args, **kwargs)

    cache = Recorder(tiny(), policy, Budget(nbytes=40_000))
    stream = Stream(tiny(), cache, lengths)
    stream.feed(200)
    layout = cache.store.layouts[0]
    assert 0 < layout.full < 200 - policy.observe
    scaling = tiny().get_decoder().layers[0].self_attn.scaling
    held = holdings(cache.store)
    for layer, (q, k) in enumerate(seen):
        for row, length in enumerate(lengths):
            want = snapkv_choice(q[row], k[row], np.arange(200) >= 200 - length, scaling, policy, layout.full)
            for head, kept in enumerate(want):
                assert set(held[layer, row, head]) == kept, f"layer {layer}, row {row}, head {head}"


def test_snapkv_heads_choose_for_themselves():
    cache = TierCache(tiny(), SnapKV(observe=8), Budget(nbytes=30_000))
    Stream(tiny(), cache, [200]).feed(200)
    held = holdings(cache.store)
    assert len({frozenset(units) for units in held.values()}) == len(held) == 4


def test_snapkv_attention_fades_after_an_event():
    policy = SnapKV(observe=8, interval=2)
    cache = TierCache(tiny(), policy, Budget(nbytes=30_000))
    stream = Stream(tiny(), cache, [100])
    stream.feed(100)
    arena, route, before = cache.store, cache.store.route, {}

    def watched():
        before.update(holdings(arena))
        return route()

    arena.route = watched
    stream.feed(1)
    assert holdings(arena)[0, 0, 0] == before[0, 0, 0], "no event after one token: nothing fades"
    stream.feed(1)
    for place, units in holdings(arena).items():
        for u, x in units.items():
            assert x["score"] == pytest.approx(before[place][u]["score"] * (1 - 2 / 8), abs=1e-6)


def test_snapkv_ignores_what_free_slots_last_held():
    """Smoothing runs over neighbouring tokens; a free slot (id -1) is none, whatever score it still has."""
    policy = SnapKV()
    unit = torch.tensor([[-1, 4, 9, -1, 2, 7]])
    score = torch.tensor([[0.0, 3.0, 1.0, 0.0, 2.0, 5.0]])
    stale = score.masked_fill(unit < 0, 100.0)
    want, got = (policy.refresh(candidates(x, unit=unit)).score for x in (score, stale))
    assert torch.equal(want[unit >= 0], got[unit >= 0])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [("avg", [0.6, 1.2, 2.2, 2.0, 1.6, 1.6]), ("max", [2.0, 3.0, 5.0, 5.0, 5.0, 5.0])],
)
def test_snapkv_pooling_follows_positions(pooling, expected):
    """Tokens 10..15 have scores 1, 2, 0, 3, 5, 0 and lie in no order."""
    policy = SnapKV(pooling=pooling)
    unit = torch.tensor([[13, 10, 15, 12, 14, 11]], dtype=torch.int32)
    score = torch.tensor([[3.0, 1.0, 0.0, 0.0, 5.0, 2.0]])
    got = dict(zip(unit[0].tolist(), policy.refresh(candidates(score, unit=unit)).score[0].tolist(), strict=True))
    assert [got[u] for u in range(10, 16)] == pytest.approx(expected)


# -- what is protected -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        QEvict(), QEvict(interval=3, granularity="kv_head"), QEvict(q=0, local_fraction=0), SnapKV(observe=8, interval=5),
        StreamingLLM(),
    ],
    ids=["qevict", "interval-3", "binary", "snapkv", "streaming"],
)  # fmt: skip
def test_the_newest_tokens_are_always_kept_in_full(policy):
    cache = TierCache(tiny(), policy, Budget(0.12))
    stream = Stream(tiny(), cache, [300])
    stream.feed(300)
    least = policy.observe if isinstance(policy, SnapKV) else policy.window
    for n in (*[1] * 30, 40, *[1] * 30):
        arena, window = cache.store, policy.window
        local = arena.layouts[0].local
        assert local >= least
        recent = set(
            range((arena.seen - local - arena.origin + window - 1) // window, (arena.seen - 1 - arena.origin) // window + 1)
        )
        for units in holdings(arena).values():
            assert recent <= {u for u, x in units.items() if x["tier"] == FULL and x["code"] is None}
        stream.feed(n)
    assert all(len(units) < arena.seen // window for units in holdings(arena).values()), "nothing was evicted"


SHORT = [
    (policy, length)
    for policy, width in ((QEvict(), 8), (QEvict(window=16, granularity="kv_head"), 16), (SnapKV(), 32), (StreamingLLM(), 4))
    for length in (1, width - 1, width, width + 1)
]


@pytest.mark.parametrize(("policy", "length"), SHORT, ids=lambda x: x if isinstance(x, int) else type(x).__name__)
@pytest.mark.parametrize("budget", [Budget(0.9, basis="total", max_new_tokens=200), Budget(nbytes=120_000)], ids=["total", "bytes"])
def test_short_prompts(policy, length, budget):
    """While everything fits, the answer is that of the whole cache; later it is finite and within the bytes."""
    ids, forced = tokens(1, length), tokens(1, 30, seed=1)
    cache = TierCache(tiny(), policy, budget)
    assert gap(forced_logits(tiny(), cache, ids, None, forced), full_logits("llama", ids, None, forced)) < 2e-5
    stream = Stream(tiny(), TierCache(tiny(), policy, budget), [length])
    stream.feed(length)
    for _ in range(300):
        assert np.isfinite(stream.feed(1)).all()


@pytest.mark.parametrize(("policy", "length"), SHORT, ids=lambda x: x if isinstance(x, int) else type(x).__name__)
def test_short_prompts_under_the_smallest_budget(policy, length):
    g = geometry_of(tiny().config, torch.float32)
    with pytest.raises(ValueError, match="smallest workable") as caught:
        policy.layout(g, Budget(nbytes=1), length, length)
    least = int(str(caught.value).split("smallest workable: ")[1].split(" ")[0])
    cache = TierCache(tiny(), policy, Budget(nbytes=least))
    assert forced_logits(tiny(), cache, tokens(1, length), None, tokens(1, 60, seed=1)).isfinite().all()


# -- shares of the budget ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0, 0.3, 0.7, 1])
@pytest.mark.parametrize("local_fraction", [0, 0.25, 0.6])
def test_bytes_are_shared_as_the_paper_says(q, local_fraction):
    """The local region gets its share of all bytes; of the rest, codes get ``q`` and full windows what remains."""
    policy, g = QEvict(q=q, local_fraction=local_fraction), geometry_of(tiny().config, torch.float16)
    budget = Budget(0.5)
    layout = policy.layout(g, budget, 4000, 4000)
    costs = policy.costs(g, 5)
    per_layer = budget.resolve(g, 4000, 4000) / g.layers
    protected = layout.protected * costs.full_unit
    assert abs(protected - max(local_fraction * per_layer, protected_least(policy) * costs.full_unit)) <= costs.full_unit
    history = per_layer - costs.fixed - protected
    assert 0 <= (1 - q) * history - layout.full * costs.full_unit < costs.full_unit + 64
    if q:
        assert -costs.code_unit - 64 <= layout.codes * costs.code_unit - q * history <= costs.full_unit
    else:
        assert layout.codes == 0


def protected_least(policy: QEvict) -> int:
    return -(-(policy.window + policy.step) // policy.window)


def test_a_base_policy_keeps_everything(llama):
    ids, forced = tokens(1, 20), tokens(1, 30, seed=1)
    assert gap(forced_logits(llama, TierCache(llama, Policy()), ids, None, forced), full_logits("llama", ids, None, forced)) < 2e-5


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"granularity": "head"}, "granularity='head': choose one of layer, kv_head"),
        ({"prompt_mass": "first"}, "prompt_mass='first': choose one of last, all"),
        ({"score_source": "never"}, "score_source='never': choose one of every_step, routing_step"),
        ({"promotion": True}, "promotion=True must be text"),
        ({"q": 1.2}, r"q=1.2 is outside \[0, 1\]"),
        ({"q": -0.1}, r"q=-0.1 is outside \[0, 1\]"),
        ({"q": float("nan")}, r"q=nan must be a number"),
        ({"local_fraction": 25}, r"local_fraction=25 is outside \[0, 1\]"),
        ({"window": 0}, "window=0 is below 1"),
        ({"interval": 0}, "interval=0 is below 1"),
        ({"sink": -1}, "sink=-1 is below 0"),
        ({"last_queries": 0}, "last_queries=0 is below 1"),
    ],
)
def test_qevict_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        QEvict(**changes)


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (SnapKV, {"pooling": "mean"}, "pooling='mean': choose avg or max"),
        (SnapKV, {"kernel": 4}, "kernel=4 must be odd and positive"),
        (SnapKV, {"kernel": -1}, "kernel=-1 must be odd and positive"),
        (SnapKV, {"observe": 0}, "observe=0 is below 1"),
        (SnapKV, {"interval": 0}, "interval=0 is below 1"),
        (StreamingLLM, {"positions": "cache"}, "positions='cache': choose slot or original"),
        (StreamingLLM, {"sink": -1}, "sink=-1 is below 0"),
    ],
)
def test_baselines_refuse(policy, changes, message):
    with pytest.raises(ValueError, match=message):
        policy(**changes)


@pytest.mark.parametrize("policy", [QEvict(), SnapKV(), StreamingLLM(), FullKV()])
def test_methods_are_frozen_and_compare_by_value(policy):
    assert policy == type(policy)()
    assert hash(policy) == hash(type(policy)())
    for field in fields(policy):
        with pytest.raises(FrozenInstanceError):
            setattr(policy, field.name, None)


# -- AdaKV and CriticalKV ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("safeguard", ["window", "prefix", "blend"])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.9, 1.0])
def test_adakv_shares_a_layer_exactly(safeguard, alpha):
    rng = np.random.default_rng(3)
    policy = AdaKV(observe=8, alpha=alpha, safeguard=safeguard)
    heads, units, full = 3, 40, 12
    score = torch.from_numpy(rng.exponential(size=(2, 1, heads, units)) * np.array([1.0, 3.0, 0.2])[:, None]).float()
    candidate = torch.from_numpy(rng.random((2, 1, heads, units)) < 0.9)
    got = policy.allocate(candidates(score, candidate, even=full))[..., 0]
    assert got.shape == (2, 1, heads)
    assert (got.sum(-1) == heads * full).all()
    keep = {"window": int(alpha * (full + 8)) - 8, "prefix": int(alpha * (full + 8)), "blend": 0}[safeguard]
    keep = min(max(keep, 0), full)
    for i in range(2):
        ranked = []
        for h in range(heads):
            own = sorted((float(s) for s, c in zip(score[i, 0, h], candidate[i, 0, h], strict=True) if c), reverse=True)
            ranked += [(r >= keep, -s, h) for r, s in enumerate(own)]
        counts = np.bincount([h for _, _, h in sorted(ranked)[: heads * full]], minlength=heads)
        if safeguard == "blend":
            want = counts * (1 - alpha) + int(alpha * full)
            assert np.abs(got[i, 0].numpy() - want - (heads * full - want.sum()) / heads).max() < 1
        else:
            assert got[i, 0].tolist() == counts.tolist()


def test_adakv_spreads_slots_that_no_candidate_needs():
    score = torch.rand(1, 3, 4)
    candidate = torch.zeros(1, 3, 4, dtype=torch.bool)
    assert AdaKV().allocate(candidates(score, candidate, even=5)).flatten().tolist() == [5, 5, 5]


@pytest.mark.parametrize("shares", ["heads", "layers"])
def test_coded_windows_are_shared_by_where_the_best_are(shares):
    """Against a count over the sorted list, ties apart; the windows that stay in full do not compete."""
    rng, full, even = np.random.default_rng(3), 2, 7
    score = torch.from_numpy(rng.random((3, 2, 4, 30)).astype(np.float32)) ** torch.tensor([1.0, 4.0, 9.0]).view(3, 1, 1, 1)
    policy = QEvict(granularity="kv_head", shares=shares, promotion="off")
    c = candidates(score, torch.from_numpy(rng.random(score.shape) < 0.8), even=even)
    got = policy.share(replace(c, full=torch.full_like(c.even, full)))
    assert int(got.full) == full and got.codes.shape == (3, 2, 4, 1)
    for b in range(2):
        rest = []
        for i in range(3):
            for h in range(4):
                mine = sorted((float(s), i, h) for s, ok in zip(score[i, b, h], c.candidate[i, b, h], strict=True) if ok)
                rest += mine[:-full]
        layers = [range(3)] if shares == "layers" else [[i] for i in range(3)]
        for together in layers:
            best = sorted(x for x in rest if x[1] in together)[-even * 4 * len(together) :]
            for i in together:
                assert got.codes[i, b, :, 0].tolist() == [sum(x[1:] == (i, h) for x in best) for h in range(4)]


@pytest.mark.parametrize("wrong", [{}, {"granularity": "kv_head"}, {"q": 1}, {"granularity": "kv_head", "q": 0}], ids=str)
def test_sharing_needs_heads_that_choose_and_codes_that_stay(wrong):
    with pytest.raises(ValueError, match=r"set method.granularity=kv_head, and method.q=1 or method.promotion=off"):
        QEvict(shares="layers", **wrong)


def test_criticalkv_takes_the_first_stage_by_score_and_the_rest_by_value():
    score = torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0]]]) * 8
    norm = torch.tensor([[[1.0, 1.0, 1.0, 9.0, 2.0]]])
    policy = CriticalKV(observe=8, epsilon=0.5, first_stage=0.6)
    rank = policy.rank(candidates(score, even=7, weight=norm))  # 0.6 * (7 + 8) - 8 = 1 entry by score alone
    assert rank.argsort(descending=True).flatten().tolist() == [0, 3, 1, 2, 4]
    assert rank[0, 0, 3].item() == pytest.approx(2.5 * 9)


def test_value_norm_is_that_of_the_output_projection():
    model, rng = tiny("llama"), np.random.default_rng(0)
    module = model.model.layers[0].self_attn
    heads, dim, group = 2, 16, 2
    v = rng.standard_normal((1, heads, 5, dim)).astype(np.float32)
    weight = module.o_proj.weight.detach().double().numpy()
    want = np.zeros((heads, 5))
    for h in range(heads):
        for j in range(group):
            block = weight[:, (h * group + j) * dim : (h * group + j + 1) * dim]
            want[h] += np.abs(v[0, h].astype(np.float64) @ block.T).sum(-1) / group
    assert np.allclose(projected_norm(torch.from_numpy(v), module)[0].detach().numpy(), want, rtol=1e-5)


@pytest.mark.parametrize(("bad", "words"), [({"alpha": 2}, "alpha=2"), ({"safeguard": "x"}, "window, prefix or blend")])
def test_bad_adakv_is_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        AdaKV(**bad)
