"""The efficiency task on a tiny model: complete records, honest baselines."""

import pytest
import torch
from transformers import DynamicCache

from conftest import build, call, forced_logits, gap, plain, tiny, tokens
from evals.benchmark import Session
from evals.efficiency import Efficiency
from evals.full_caches import NAMES, make
from qevict import Budget, QEvict, TierCache


@pytest.mark.parametrize("name", ["packed", "fullkv", "dynamic_sdpa"])
def test_full_caches_give_what_the_library_gives(name):
    ids, forced = tokens(2, 40), tokens(2, 15, seed=1)
    model = tiny()
    TierCache(model, QEvict(), 0.9)  # switches its attention
    got = forced_logits(model, make(name, model, 60, torch.float32), ids, None, forced)
    assert gap(got, forced_logits(plain(), DynamicCache(), ids, None, forced)) < 1e-5


def test_a_run_is_complete():
    model = build("llama", head_dim=16)
    session = Session(model, None, Budget(0.3), lambda b: TierCache(model, QEvict(), b, "float16"))
    task = Efficiency(
        context=200, batch=2, new_tokens=10, warmup=2, prefills=2, baselines=("dynamic_sdpa", "dynamic_eager", "packed", "fullkv")
    )
    items = task.items(None, 100)
    assert [i.id for i in items] == ["decode", "prefill"]
    assert task.meter(session, items)["decode"] > 0
    rows = list(task.rows(session, items))
    out = task.summary(rows)
    assert out["n"] == 2 and set(out["tpot"]) == {"method", "dynamic_sdpa", "dynamic_eager", "packed", "fullkv"}
    assert all(len(v) == 10 for v in rows[0]["tpot"].values()) and all(t > 0 for v in rows[0]["tpot"].values() for t in v)
    for name in ("tpot_vs_best_full", "tpot_vs_dynamic_sdpa", "ttft_vs_full"):
        assert out[name]["q1"] <= out[name]["q3"] and out[name]["median"] > 0
    assert out["best_full"] in NAMES and 0 < out["kv_ratio_peak"] <= 0.3 and out["budget_used_peak"] <= 1
    assert 0 <= out["routing_share"] < 1 and out["throughput_tok_s"] == pytest.approx(2e3 / out["tpot_ms"])
    assert set(out["attention_ms"]) == {"method", "dynamic_sdpa", "packed", "fullkv"}
    assert task.card()["clock"] in ("process CPU time", "wall time")
    assert model.config._attn_implementation == "tiered", "the eager baseline put the model's attention back"


def test_loading_equals_running_the_prompt():
    """A cache filled from a model's own keys and values decodes as one that saw the prompt."""
    ids, forced = tokens(2, 120), tokens(2, 12, seed=1)
    seen = {}

    class Recorder(TierCache):
        def attend(self, index, module, q, k, v, *args, **kwargs):
            if q.shape[-2] > 1:
                seen[index] = (q, k, v, module)
            return super().attend(index, module, q, k, v, *args, **kwargs)

    model = tiny()
    want = forced_logits(model, Recorder(model, QEvict(), 0.4, "float32"), ids, None, forced)
    cache = TierCache(model, QEvict(), 0.4, "float32")
    for index in sorted(seen):
        cache.load(index, *seen[index])
    assert cache.get_seq_length() == 120
    steps = []
    for t in range(12):
        out = call(model, cache, forced[:, t : t + 1], positions=torch.full((2, 1), 120 + t))
        steps.append(out.logits[:, -1])
    assert gap(torch.stack(steps, 1), want[:, 1:]) < 1e-5


@pytest.mark.parametrize(("bad", "words"), [({"batch": 0}, "task.batch=0"), ({"baselines": ("nothing",)}, "choose one or more of")])
def test_bad_fields_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        Efficiency(**bad)
