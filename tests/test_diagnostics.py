"""The diagnostics: metrics against examples worked out by hand, traces and shadows against attention computed another way."""

import copy
import re

import pytest
import torch
from torch import tensor

from baselines.fullkv import FullKV
from baselines.kivi import KIVI
from baselines.snapkv import SnapKV
from conftest import build, holdings, tokens
from evals.benchmark import Item, Session
from evals.diagnostics import metrics, trace
from evals.diagnostics.metrics import FUTURE, PROMOTED, PROTECTED, TIERS
from evals.diagnostics.shadow import Shadow, tiers
from evals.diagnostics.task import VALUES, Mechanism
from evals.diagnostics.texts import recall_text
from evals.fidelity import Fidelity
from qevict import Budget, QEvict, TierCache
from qevict.policy import CODED, EVICTED, FULL

# -- metrics, one layer and one head: places are the sinks and four units; events before step 0 and before step 2 ---------------

MASS = tensor([[0.5, 0.2, 0.3, 0.0, 0.0], [0.4, 0.1, 0.3, 0.2, 0.0], [0.3, 0.2, 0.1, 0.3, 0.1]])[:, None, None]
TIME = tensor([0, 2])
TIER = tensor([[PROTECTED, CODED, EVICTED, FUTURE, FUTURE], [PROTECTED, EVICTED, EVICTED, FULL, PROTECTED]])[:, None, None]


def test_missed_mass():
    missed = metrics.missed_mass(MASS, TIER == EVICTED, TIER, TIME, 2)
    # first event: steps 0 and 1, unit 1 evicted: 0.6 of (0.5 + 0.2 + 0.3) + (0.4 + 0.1 + 0.3); second: step 2, units 0 and 1
    assert missed.shape == (2, 1, 1) and missed.flatten().tolist() == pytest.approx([0.6 / 1.8, 0.3])
    one = metrics.missed_mass(MASS, TIER == EVICTED, TIER, TIME, 1)
    assert one.flatten().tolist() == pytest.approx([0.3, 0.3])
    late = metrics.missed_mass(MASS, (TIER == EVICTED)[[0, 0]], TIER[[0, 0]], tensor([1, 3]), 8)
    assert late.shape == (1, 1, 1) and float(late) == pytest.approx(0.4 / 1.4)  # nothing follows the second event


def test_missed_and_tiers_by_step():
    missed = metrics.missed_by_step(MASS, TIER == EVICTED, TIER, TIME)
    assert missed.tolist() == pytest.approx([0.3, 0.3 / 0.8, 0.3])
    shares = metrics.tier_shares(MASS, TIER, TIME)
    expected = [[0.3, 0.2, 0, 0, 0.5], [0.3, 0.1, 0, 0, 0.6], [0.3, 0, 0.3, 0, 0.4]]  # what comes after an event is protected
    assert shares.shape == (3, len(TIERS)) and torch.allclose(shares, tensor(expected))


def test_churn_leaves_out_what_slides_into_history():
    kept = tensor([[0, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 1, 0, 0, 1]], dtype=torch.bool)[:, None, None]
    history = [[False, True, True, True, False], [False, True, True, True, True], [False, True, True, True, True]]
    tier = torch.where(tensor(history), CODED, PROTECTED)[:, None, None]
    # {1, 2} to {1, 3} of the shared history 1..3: one of three stays; then {1, 3, 4} to {1, 4}
    assert metrics.churn(kept, tier).flatten().tolist() == pytest.approx([2 / 3, 1 / 3])
    assert metrics.churn(kept & False, tier).isnan().all()


def test_scores_and_their_agreement():
    prompt = tensor([1.0, 0.0, 2.0, 0.0, 0.0])[None, None]
    scores = metrics.collected(prompt, MASS, TIME)
    assert torch.allclose(scores[:, 0, 0], tensor([[1, 0, 2, 0, 0], [1.9, 0.3, 2.6, 0.2, 0]]))
    own, full = tensor([[9.0, 3.0, 4.0], [9.0, 1.0, 5.0]])[:, None, None], tensor([[0.0, 4.0, 3.0], [1.0, 1.0, 1.0]])[:, None, None]
    coded = tensor([[0, 1, 1], [0, 0, 1]], dtype=torch.bool)[:, None, None]
    cosine = metrics.agreement(own, full, coded).flatten()
    assert float(cosine[0]) == pytest.approx(24 / 25) and cosine[1].isnan()  # a single coded place says nothing
    other = MASS * tensor([1, 0.5, 1, 1, 1])
    own, full = (metrics.mass_on(m, TIER == CODED, TIME) for m in (other, MASS))
    assert full.tolist() == [[pytest.approx(0.3)]] and own.tolist() == [[pytest.approx(0.15)]]


def test_sums_ahead_and_between():
    assert torch.allclose(metrics.ahead(MASS, TIME, 2)[:, 0, 0], tensor([[0.9, 0.3, 0.6, 0.2, 0], [0.3, 0.2, 0.1, 0.3, 0.1]]))
    assert torch.allclose(metrics.between(MASS, tensor([0, 1, 3]))[:, 0, 0, 0], tensor([0.5, 0.7]))


def test_inactive_episodes():
    #                     in F at event 0 ... 6
    active = tensor([[1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).T.bool()
    candidate = torch.ones_like(active)
    candidate[:5, 2] = False  # this one ages at event 5: two events are too few
    time = tensor([0, 8, 16, 24, 32, 40, 48])
    found = metrics.inactive_episodes(active, candidate, time, 3)
    assert found == metrics.Episodes(2, (3, 3), (24, 24), (32, 48)) and found.rate == 1
    found = metrics.inactive_episodes(active, candidate, time, 2)  # two more are open at the end, one more ends
    assert found == metrics.Episodes(5, (2, 3, 3), (16, 24, 24), (16, 32, 48)) and found.rate == 0.6
    assert metrics.inactive_episodes(active, candidate, time, 8).rate is None


def test_best_and_groups():
    score = tensor([[3.0, 9.0, 1.0, 2.0], [1.0, 0.0, 5.0, 7.0]])
    candidate = tensor([[True, False, True, True], [True, True, True, True]])
    chosen = metrics.best(score, candidate, tensor([[2], [1]]))
    assert chosen.tolist() == [[True, False, False, True], [False, False, False, True]]
    assert metrics.by_group(score, 1).tolist() == [[2.0, 4.5, 3.0, 4.5]] * 2 and metrics.by_group(score, 2).equal(score)


# -- trace ---------------------------------------------------------------------------------------------------------------

CONTEXT, STEPS, SINK = 60, 20, 5


@pytest.fixture(autouse=True)
def _own_traces(monkeypatch, tmp_path):
    monkeypatch.setattr("qevict.artifact.cache_dir", lambda: tmp_path)


def items(n=3, context=CONTEXT, steps=STEPS):
    need = context + steps + 1
    return [Item(f"x-{i}", f"s{i}", context, need - 1, ("x", tokens(need, seed=i).tolist())) for i in range(n)]


def session(policy, budget, dtype="float32"):
    model = build("llama")
    return Session(model, None, budget, lambda b: TierCache(model, policy, b, dtype))


def eager(ids):
    """Attention ``[N, L, H, tokens]`` (mean over the query group) and log probabilities of an eager model without a cache."""
    model = build("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(tensor([ids[:-1]]), output_attentions=True)
    weights = torch.stack([w[0].unflatten(0, (2, 2)).mean(1) for w in out.attentions])  # [L, H, T, T]
    return weights.permute(2, 0, 1, 3), out.logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("grain", [1, 4])
def test_a_trace_is_the_attention_of_the_full_cache(grain):
    task, work, batch = Mechanism(context=CONTEXT, forced=STEPS, grain=grain), session(FullKV(), Budget(1.0)), items(2)
    ids = tensor([item.payload[1] for item in batch])
    made = task._traces(work, ids)
    said = task._reference(work, ids).log_probs
    for i, item in enumerate(batch):
        weights, log_probs = eager(item.payload[1])
        origin = CONTEXT - 64  # units of 8 end where the prompt does
        unit = torch.arange(CONTEXT + STEPS).sub(origin) // 8
        unit[:SINK] = -1
        expected = torch.stack([weights[..., unit == u].sum(-1) for u in range(-1, 11)], -1)
        mass, prompt = made[i].places(8, SINK)
        assert torch.allclose(mass, expected[CONTEXT:], atol=1e-3) and torch.allclose(mass.sum(-1), torch.ones(()), atol=3e-3)
        assert torch.allclose(prompt, expected[CONTEXT - trace.PROMPT_QUERIES : CONTEXT].sum(0), atol=1e-4)
        assert torch.allclose(said[i], log_probs[CONTEXT:], atol=1e-4)


def test_traces_are_made_once_and_their_size_is_told(monkeypatch, capsys):
    task, work = Mechanism(context=CONTEXT, forced=STEPS), session(QEvict(), Budget(0.5))
    task.meter(work, items())
    told = capsys.readouterr().err
    ids = tensor([item.payload[1] for item in items()])
    task._traces(work, ids[:2])
    path = task._path(work, ids[0].tolist())
    size = trace.nbytes(work.model.config, CONTEXT, STEPS, task.grain)
    assert (
        size < path.stat().st_size < size + 1000
        and told == f"3 traces of {size / 2**20:.1f} MiB (0 MiB in all) go to {path.parent}\n"
    )
    calls = []
    make = trace.make
    monkeypatch.setattr(trace, "make", lambda *a: (calls.append(len(a[1])), make(*a)))
    task._traces(work, ids)
    task._traces(work, ids)
    task.meter(work, items())
    assert calls == [1] and capsys.readouterr().err == ""


def test_a_trace_belongs_to_all_weights_of_a_model(monkeypatch):
    work = session(FullKV(), Budget(1.0))
    first = trace.digest_of(work.model)
    assert trace.digest_of(work.model) == first
    for other in (copy.deepcopy(work.model), copy.deepcopy(work.model).bfloat16()):
        if other.dtype == work.model.dtype:
            other.get_decoder().layers[0].mlp.down_proj.weight.data[0, 0] += 1
        assert trace.digest_of(other) != first


def test_a_damaged_trace_is_made_again():
    task, work = Mechanism(context=CONTEXT, forced=STEPS), session(FullKV(), Budget(1.0))
    ids = tensor([items(1)[0].payload[1]])
    made = copy.deepcopy(task._traces(work, ids)[0])  # it reads the file only when asked
    path = task._path(work, ids[0].tolist())
    for damaged in (path.read_bytes()[:-1], b"", b"x" * 100):
        path.write_bytes(damaged)
        (again,) = task._traces(work, ids)
        assert torch.equal(again.mass, made.mass) and trace.there(path)


def test_what_a_trace_cannot_give_is_refused():
    task, work = Mechanism(context=CONTEXT, forced=STEPS, grain=4), session(FullKV(), Budget(1.0))
    (made,) = task._traces(work, tensor([items(1)[0].payload[1]]))
    with pytest.raises(ValueError, match=r"task.grain=4 does not divide the method's window of 6: set task.grain"):
        made.places(6, 5)
    with pytest.raises(ValueError, match=r"9 sink tokens: .* set method.sink to 8 or less"):
        made.places(8, 9)
    with pytest.raises(ValueError, match=r"task.grain=8 does not divide"):
        Mechanism(context=CONTEXT, forced=STEPS).meter(session(SnapKV(), Budget(0.5)), items(1))
    with pytest.raises(ValueError, match=r"task.horizon=0"):
        Mechanism(horizon=0)
    assert Mechanism(horizon=64, forced=16).card()["horizon"] == 16
    with pytest.raises(
        ValueError, match=r"task.context=1024: source recall tells 16 facts there, set task.context to (\d+) or more"
    ) as told:
        Mechanism(sources=("recall",), n=1)._texts("recall")
    least = int(re.search(r"to (\d+) or more", str(told.value))[1])
    assert Mechanism(sources=("recall",), n=1, context=least)._texts("recall")
    with pytest.raises(ValueError, match=r"KIVI has none: use task=fidelity"):
        Mechanism(context=200, forced=4).meter(session(KIVI(group=16), Budget(1.0)), items(1, 200, 4))


# -- shadow --------------------------------------------------------------------------------------------------------------


def replay(policy, budget, batch, steps=STEPS, context=CONTEXT, dtype="float32", each=lambda cache, shadow: None):
    work = session(policy, budget, dtype)
    cache = work.new_cache(budget)
    shadow = Shadow(cache, context, steps)
    ids = tensor([item.payload[1] for item in batch])
    for _ in Mechanism(context=context, forced=steps)._forced(work.model, cache, ids):
        each(cache, shadow)
    return cache, shadow, work


def test_a_full_cache_attends_as_the_trace_says():
    batch = items(2)
    _, shadow, work = replay(QEvict(), Budget(1.0), batch)
    task = Mechanism(context=CONTEXT, forced=STEPS)
    made = task._traces(work, tensor([item.payload[1] for item in batch]))
    for row in range(2):
        own = torch.stack([m[row] for m in shadow.mass]).unflatten(0, (STEPS, -1)).float()
        assert torch.allclose(own, made[row].places(8, 0)[0], atol=1e-3)
    assert shadow.time == [0] and set(shadow.tier[0].flatten().tolist()) <= {PROTECTED, FUTURE}


@pytest.mark.parametrize("policy", [QEvict(), QEvict(granularity="kv_head"), QEvict(q=0.0), SnapKV(observe=8, interval=4)])
def test_tiers_and_scores_are_those_of_the_store(policy):
    seen = []

    def each(cache, shadow):
        store = cache.store
        now = tiers(store, shadow.units)
        per = 2 // store.full.groups
        for (layer, row, group), held in holdings(store).items():
            aged = {
                u for u in range(shadow.units) if store.origin + (u + 1) * policy.window <= store.seen - store.layouts[row].local
            }
            for u in range(shadow.units):
                tier = int(now[layer, row, group * per, 1 + u])
                if u in held and u in aged:
                    promoted = held[u]["tier"] == FULL and held[u]["code"] is not None
                    assert tier == (PROMOTED if promoted else held[u]["tier"])
                elif u in held:
                    assert tier in (PROTECTED, FUTURE)
                else:
                    assert tier in (EVICTED, FUTURE) or store.origin + (u + 1) * policy.window <= store.layouts[row].sink
        seen.append(set(now.flatten().tolist()))

    cache, shadow, _ = replay(policy, Budget(0.3), items(2, 200, 40), 40, 200, "float16", each)
    assert seen[-1] >= {EVICTED, FULL, PROTECTED} and (CODED in seen[-1]) == (cache.store.coded is not None)
    interval = cache.store.layouts[0].interval
    assert shadow.time == list(range(0, 41, interval)) and len(shadow.tier) == len(shadow.time)
    own = torch.stack(shadow.mass).unflatten(0, (40, -1)).float()
    assert torch.allclose(own.sum(-1), torch.ones(()), atol=5e-3)
    if not policy.per_head and policy.codec(cache.geometry):  # what a unit has collected is its prompt score and all of this mass
        for (layer, row, _), held in holdings(cache.store).items():
            for u, x in held.items():
                gained = float(own[:, layer, row, :, 1 + u].mean(1).sum())
                assert x["score"] >= gained - 2e-3 and (u < 25 or x["score"] == pytest.approx(gained, abs=2e-3))


def test_watching_changes_nothing():
    batch, budget = items(2, 160, 24), Budget(0.4)
    work = session(QEvict(), budget, "float16")
    plain = list(Fidelity(context=160, forced=24, batch=2).rows(work, batch))
    rows = list(Mechanism(context=160, forced=24, batch=2).rows(work, batch))
    for a, b in zip(plain, rows, strict=True):
        assert a["kv_bytes_peak"] == b["kv_bytes_peak"] and a["kv_ratio_peak"] == b["kv_ratio_peak"]
        for name in ("kl", "top1", "nll_difference", "attention_error"):
            assert b[name] == pytest.approx(a[name], abs=2e-3)


# -- changes of tier -------------------------------------------------------------------------------------------------------


def test_a_promotion_brings_nothing_back_and_costs_a_full_window():
    """Under flat scores windows change places often: later queries decide, and one change can be checked by plain arithmetic."""
    task = Mechanism(context=200, forced=64, batch=2)
    rows = list(task.rows(session(QEvict(), Budget(0.5), "float16"), items(2, 200, 64)))
    changes = [r["changes"] for r in rows]
    assert all(c["promoted"]["n"] > 3 and c["demoted"]["n"] > 3 for c in changes)
    for c in changes:
        assert c["promoted"]["after"] == pytest.approx(c["promoted"]["before"], rel=2e-3) and c["promoted"]["before"] > 1e-3
        assert c["demoted"]["before"] == 0 and c["demoted"]["after"] > 1e-3
        assert (
            c["promoted"]["bytes"] == 2 * 8 * 2 * 16 * 2 + 12
        )  # keys and values of 8 tokens, 2 heads, 16 channels in fp16, and records
    fine = next(task.rows(session(QEvict(key_bits=8, value_bits=8), Budget(0.7), "float16"), items(1, 200, 64)))["changes"]
    assert fine["demoted"]["after"] < 0.1 * changes[0]["demoted"]["after"]


def test_the_error_of_a_missing_window_is_its_share_of_the_output():
    """Against its part of plain attention over the original keys and values, the denominator kept."""
    noted = []

    class Noting(Shadow):
        def _weigh(self, layer, q, out, scaling):
            if self.pending and layer == 0 and not noted:
                layers, *place = self.pending["demoted"]
                place = [x[layers == 0] for x in place]
                total = self._log_total(0, q, scaling)
                noted.extend(
                    (q.double(), out.double(), scaling, total.double(), place, self._errors(0, q, out, scaling, total, *place))
                )
            super()._weigh(layer, q, out, scaling)

    work, batch = session(QEvict(), Budget(0.3)), items(2, 200, 9)
    shadow = Noting(work.new_cache(work.budget), 200, 9)
    list(Mechanism(context=200, forced=9)._forced(work.model, shadow.cache, tensor([i.payload[1] for i in batch])))
    q, out, scaling, total, (rows, _, units), (coded, copy, gone) = noted
    assert len(rows) >= 2
    for i, (row, unit) in enumerate(zip(rows.tolist(), units.tolist(), strict=True)):
        k, v = (x[row, :, unit * 8 : unit * 8 + 8].double() for x in shadow.kv[0])  # the grid of 200 tokens begins at 0
        parts = [(q[row, h, 0] @ k[h // 2].T * scaling - total[row, h // 2, h % 2]).exp() @ v[h // 2] for h in range(4)]
        expected = float(torch.cat(parts).norm() / out[row].norm())
        assert float(gone[i]) == pytest.approx(expected, rel=1e-4) and expected > 1e-4
        assert float(coded[i]) > 0 and float(copy[i]) == pytest.approx(float(coded[i]), rel=1e-3)


# -- task ------------------------------------------------------------------------------------------------------------------


def test_rows_do_not_depend_on_the_batch():
    def run(batch):
        return list(Mechanism(context=160, forced=40, batch=batch).rows(session(QEvict(), Budget(0.25)), items(3, 160, 40)))

    for a, b in zip(run(3), run(1), strict=True):
        for name in VALUES:
            assert b[name] == pytest.approx(a[name], abs=2e-3), name
        assert a["event_tokens"] == list(range(0, 41, 8)) and len(a["missed_by_step"]) == 40
        assert len(a["qsa_by_head"]) == 2 and len(a["fmm_by_layer"]) == 2
        assert 0 < a["fmm_hindsight"] <= a["fmm"] + 1e-6 < a["fmm_full_only"] < 1 and a["qsa_first"] == pytest.approx(1, abs=1e-4)
        assert sum(a["tier_shares"].values()) == pytest.approx(1, abs=2e-3)


def test_summary_has_intervals_over_texts():
    task = Mechanism(context=160, forced=24)
    out = task.summary(list(task.rows(session(QEvict(), Budget(0.25)), items(3, 160, 24))))
    for name in ("kl", "fmm", "qsa", "mass_ratio", "churn"):
        low, high = out[f"{name}_interval"]
        assert low <= out[name] <= high
    assert "lir" in out and out["n"] == 3


def test_an_evictor_without_codes_is_diagnosed_too():
    row = next(
        Mechanism(context=160, forced=24, grain=1).rows(session(SnapKV(observe=8, interval=8), Budget(0.3)), items(1, 160, 24))
    )
    assert 0 < row["fmm"] == pytest.approx(row["fmm_full_only"]) and "qsa" not in row and row["tier_shares"]["coded"] == 0


def test_recall_tells_early_and_asks_late():
    text = recall_text(0, 4096, 2048)
    told, asked = text.split("The code of the ")[1:], text.split("Question: What is the code of the ")[1:]
    facts = {name.split(" is ")[0]: name.split(" is ")[1][:5] for name in told}
    assert len(facts) == len(told) == 16 and len(asked) > 10
    assert all(facts[q.split("?")[0]] == q.split("Answer: ")[1][:5] for q in asked)
    assert text.index("The code of") > 4 * 409 and text.rindex("The code of") < 4 * 4096 < text.index("Question:")
    assert recall_text(0, 4096, 2048) == text != recall_text(1, 4096, 2048)
