"""Rankers of QEvict: what they rank by, against arithmetic of our own; everything else stays QEvict's."""

import re
from dataclasses import fields

import numpy as np
import pytest
import torch

from conftest import Stream, build, call, candidates, full_logits, holdings, softmax, tokens
from qevict import QEvict, TierCache
from qevict.accounting import measure
from qevict.policy import PromptView
from qevict.rankers import RANKERS, Ranked


def view(batch=2, length=40, padding=(0, 0), seed=0):
    torch.manual_seed(seed)
    q, k, v = torch.randn(batch, 4, length, 16), torch.randn(batch, 2, length, 16), torch.randn(batch, 2, length, 16)
    real = torch.arange(length) >= torch.tensor(padding)[:, None]
    return PromptView(q, k, v, real, 0.25)


def stream_of(policy, budget, dtype, prompt):
    model = build("llama")
    stream = Stream(model, TierCache(model, policy, budget, dtype), [prompt])
    stream.feed(prompt)
    return stream


def test_cumulative_is_qevict():
    ids = tokens(2, 120)
    models = [build("llama") for _ in range(2)]
    caches = [TierCache(m, p, 0.4, "float16", backend="reference") for m, p in zip(models, (QEvict(), Ranked()), strict=True)]
    out = [call(m, c, ids).logits for m, c in zip(models, caches, strict=True)]
    assert torch.equal(*out) and holdings(caches[0].store) == holdings(caches[1].store)
    assert {f.name for f in fields(Ranked)} - {f.name for f in fields(QEvict)} == {
        "ranker", "half_life", "prompt_norm", "query_half_life", "prompt_weight", "follow",
    }  # fmt: skip


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_the_peak_of_the_prompt(granularity):
    policy, seen = Ranked(ranker="peak", q=0.0, last_queries=3, granularity=granularity), view(padding=(0, 6))
    peak = policy.prompt_scores(seen)["peak"].numpy()
    assert peak.shape == (2, 2 if granularity == "kv_head" else 1, 40)
    for b, first in ((0, 0), (1, 6)):
        units = np.zeros((2, 5))
        for h in range(4):
            for row in (37, 38, 39):
                weights = softmax((seen.q[b, h, row] @ seen.k[b, h // 2, first : row + 1].T).double().numpy() * 0.25)
                weights[:5] = 0  # sinks
                padded = np.concatenate((np.zeros(first), weights, np.zeros(39 - row)))
                units[h // 2] = np.maximum(units[h // 2], padded.reshape(5, 8).sum(-1))
        expected = units if granularity == "kv_head" else units.max(0, keepdims=True)
        assert np.allclose(peak[b].reshape(-1, 5, 8).sum(-1), expected, atol=1e-6)


def test_a_peak_is_kept_while_decoding():
    """Every step's highest attention of a window, over all heads and steps since the prompt."""
    stream = stream_of(Ranked(ranker="peak", q=0.0), 0.5, "float32", 96)
    store = stream.cache.store
    before = store.full.grid("peak").clone()
    stream.feed(1)
    unit, after = store.full.grid("unit"), store.full.grid("peak")
    q, k = stream.q[0, 0, :, 0].astype(np.float64), stream.k[0, 0].astype(np.float64)
    held = [i for i in range(97) if i < 5 or (i // 8) in unit[0, 0, 0].tolist()]
    weights = np.zeros((4, 13 * 8))
    for h in range(4):
        weights[h, held] = softmax(k[h // 2, held] @ q[h] * 0.25)
    weights[:, :5] = 0
    per_unit = weights.reshape(4, 13, 8).sum(-1).max(0)
    for slot, u in enumerate(unit[0, 0, 0].tolist()):
        if u >= 0:
            assert float(after[0, 0, 0, slot]) == pytest.approx(max(float(before[0, 0, 0, slot]), per_unit[u]), rel=1e-3)


def test_a_peak_follows_its_window_between_tiers():
    stream = stream_of(Ranked(ranker="peak"), 0.4, "float32", 160)
    store = stream.cache.store

    def peaks(pool):
        unit, peak = pool.grid("unit")[:, 0, 0], pool.grid("peak")[:, 0, 0]
        return {(i, u): p for i in range(2) for u, p in zip(unit[i].tolist(), peak[i].tolist(), strict=True) if u >= 0}

    demoted = 0
    for _ in range(5):
        for _ in range(store.next_due - store.seen - 1):
            stream.feed(1)
        full, everything = peaks(store.full), peaks(store.full) | peaks(store.coded)
        stream.feed(1)  # the routing event
        coded = peaks(store.coded)
        demoted += len(full.keys() & coded.keys())
        assert all(p >= everything[at] for at, p in (peaks(store.full) | coded).items() if at in everything)
    assert demoted


def test_key_norms_rank_short_keys_first():
    policy, seen = Ranked(ranker="key_norm"), view(padding=(0, 6))
    score = policy.prompt_scores(seen)["score"][:, 0]
    norm = seen.k.norm(dim=-1)
    for b, first in ((0, 0), (1, 6)):
        expected = (norm[b, :, first:].mean(-1, keepdim=True) - norm[b, :, first:]).mean(0)
        assert torch.allclose(score[b, first:] / 1000, expected, atol=1e-5) and abs(float(score[b, first:].sum())) < 1
    assert not policy.mass_every_step


def test_fading():
    score = torch.tensor([[8.0, 2.0]])
    assert Ranked(ranker="decayed", half_life=16).carry(score, 8).tolist() == [[pytest.approx(8 * 0.5**0.5), pytest.approx(2**0.5)]]
    assert Ranked(ranker="decayed", half_life=4).carry(score, 8).tolist() == [[2.0, 0.5]]
    assert Ranked(ranker="last_query").carry(score, 8).tolist() == [[0.0, 0.0]]
    assert Ranked().carry(score, 8) is score


def test_the_last_query_alone():
    policy, seen = Ranked(ranker="last_query"), view()
    weights = softmax((seen.q[0, :, -1:].reshape(2, 2, 16) @ seen.k[0].transpose(-1, -2)).double().numpy() * 0.25)
    assert torch.allclose(policy.prompt_scores(seen)["score"][0, 0].double(), torch.from_numpy(weights.mean((0, 1))), atol=1e-6)
    c = candidates(torch.tensor([[[1.0, 2.0]]]), peak=torch.tensor([[[4.0, 3.0]]]))
    assert policy.rank(c) is c.score and Ranked(ranker="peak", q=0.0).rank(c) is c.peak


@pytest.mark.parametrize("ranker", RANKERS)
def test_every_ranker_keeps_the_budget_and_is_exact_with_all_bytes(ranker):
    policy = Ranked(ranker=ranker)
    stream = stream_of(policy, 0.4, "float16", 160)
    for _ in range(40):
        stream.feed(1)
        size = measure(stream.cache)
        assert size["total"] <= 0.4 * stream.cache.geometry.full_bytes(stream.seen) and size["other"] == 0
    ids, forced = tokens(1, 60), tokens(1, 12, seed=1)
    model = build("llama")
    cache = TierCache(model, policy, 1.0, "float32")
    said = [call(model, cache, ids).logits[:, -1]]
    said += [call(model, cache, forced[:, i : i + 1], positions=torch.tensor([[60 + i]])).logits[:, -1] for i in range(12)]
    mask = torch.ones_like(ids)
    assert torch.allclose(torch.stack(said, 1), full_logits("llama", ids, mask, forced), atol=1e-3)


def test_bad_settings_are_named():
    for bad, words in (
        ({"ranker": "luck"}, "ranker='luck': choose one of cumulative"),
        ({"half_life": 0.0}, "half_life=0 is not positive"),
        ({"prompt_norm": 0.5}, "prompt_norm=0.5 is below 1"),
        ({"prompt_norm": float("nan")}, "prompt_norm=nan must be a number"),
        ({"half_life": float("inf")}, "half_life=inf must be a number"),
        ({"prompt_weight": 0.0}, "prompt_weight=0 is outside (0, 1e+09]"),
        (
            {"prompt_weight": 4.0, "ranker": "peak"},
            "ranker=peak has no use for prompt_weight=4: set method.prompt_weight=null, or method.ranker to cumulative",
        ),
        ({"prompt_weight": 1.0, "ranker": "last_query"}, "ranker=last_query has no use for prompt_weight=1: set"),
        ({"follow": 1.0}, "follow=1 is outside [0, 1): set method.follow to 0"),
        ({"follow": 0.5, "ranker": "peak"}, "ranker=peak has no use for follow=0.5: set method.follow=0, or"),
        ({"prompt_weight": 1e300}, "prompt_weight=1e+300 is outside (0, 1e+09]"),
        ({"query_half_life": -1.0}, "query_half_life=-1 is outside (0, 1e+09]"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            Ranked(**bad)


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
@pytest.mark.parametrize(("weight", "queries"), [(7.0, (7, 7)), (None, (4, 3))])
def test_the_norm_and_the_weight_of_the_prompt(granularity, weight, queries):
    """The norm of the queries asked, times as many as they count: all the same, or as many real ones as there are."""
    seen = view(padding=(0, 37))
    policy = Ranked(prompt_norm=3.0, prompt_weight=weight, query_half_life=2.0, granularity=granularity, last_queries=4)
    want = seen.norm(4, 3.0, 2.0) * torch.tensor(queries)[:, None, None]
    score = policy.prompt_scores(seen)["score"]
    assert torch.allclose(score, want if granularity == "kv_head" else want.mean(1, keepdim=True))
    plain = Ranked(prompt_weight=weight, last_queries=4, granularity=granularity).prompt_scores(seen)["score"]
    mass = Ranked(last_queries=4, granularity=granularity).prompt_scores(seen)["score"]
    assert torch.allclose(plain, mass * (1 if weight is None else torch.tensor([7 / 4, 7 / 3])[:, None, None]), atol=1e-5)


@pytest.mark.parametrize("granularity", ["layer", "kv_head"])
def test_what_is_looked_at_is_read_on_from(granularity):
    """A token has at least ``follow`` to the power of n of the score n windows before it; sinks and padding pass nothing on."""
    seen = view(padding=(0, 6))
    settings = {"last_queries": 4, "granularity": granularity, "window": 4}
    plain = Ranked(**settings).prompt_scores(seen)["score"].numpy()
    followed = Ranked(follow=0.6, **settings).prompt_scores(seen)["score"].numpy()
    normed = Ranked(follow=0.6, prompt_norm=2.0, **settings).prompt_scores(seen)["score"]
    assert followed.shape == plain.shape and not torch.allclose(normed, torch.from_numpy(followed))
    for b, first in ((0, 5), (1, 11)):  # after 5 sinks
        assert (followed[b, :, :first] == 0).all()
        for t in range(first, 40):
            reach = [0.6**n * plain[b, :, t - 4 * n] for n in range(10) if t - 4 * n >= first]
            assert np.allclose(followed[b, :, t], np.max(reach, 0), atol=1e-7)
    assert (followed > plain)[:, :, 11:].any()


def test_a_turn_counts_as_the_prompt_does():
    """Of a turn of 6 tokens the last 4 queries are asked; together they count as one generated token does with prompt_weight 1."""
    policies = (Ranked(last_queries=4), Ranked(last_queries=4, prompt_weight=1.0))
    gains = []
    for policy in policies:
        stream = stream_of(policy, 0.6, "float32", 96)
        store = stream.cache.store
        before = store.full.grid("score").clone()
        stream.cache.new_turn()
        stream.feed(6)
        gains.append((store.full.grid("score") - before)[:, :, :, :-2])
    assert torch.allclose(gains[0] / 4, gains[1], atol=1e-5) and float(gains[1].max()) > 0
