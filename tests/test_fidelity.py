"""The fidelity task: exact for a cache that loses nothing, independent of the batch, and equal to plain arithmetic."""

import pytest
import torch
from transformers import DynamicCache

import evals.fidelity
from baselines.fullkv import FullKV
from baselines.kivi import KIVI
from baselines.snapkv import SnapKV
from conftest import build, call, tokens
from evals.benchmark import Item, Session
from evals.fidelity import Fidelity
from qevict import Budget, QEvict, TierCache
from qevict.hf.loading import load_tokenizer


@pytest.fixture(autouse=True)
def _forget():
    evals.fidelity._references.clear()


def items(task, n=3):
    need = task.context + task.forced + 1
    return [Item(f"x-{i}", f"s{i}", task.context, need - 1, ("x", tokens(need, seed=i).tolist())) for i in range(n)]


def session(policy, budget, dtype="float32"):
    model = build("llama")
    return Session(model, None, budget, lambda b: TierCache(model, policy, b, dtype))


def test_a_full_cache_is_faithful():
    task = Fidelity(context=60, forced=20, batch=2)
    for row in task.rows(session(FullKV(), Budget(1.0)), items(task)):
        assert abs(row["kl"]) < 1e-6 and row["top1"] == 1 and abs(row["nll_difference"]) < 1e-5 and row["attention_error"] < 1e-5


def test_values_are_what_they_say():
    """One text, against log-softmax differences computed here."""
    task, policy, budget = Fidelity(context=100, forced=12, batch=1), SnapKV(observe=8, interval=4), Budget(0.3)
    work = session(policy, budget)
    (item,) = items(task, 1)
    (row,) = task.rows(work, [item])
    ids = torch.tensor([item.payload[1]])
    said = []
    for cache in (DynamicCache(), TierCache(work.model, policy, budget, "float32")):
        call(work.model, cache, ids[:, :100])
        steps = [call(work.model, cache, ids[:, t : t + 1], positions=torch.tensor([[t]])).logits[0, -1] for t in range(100, 112)]
        said.append(torch.stack(steps).double().log_softmax(-1))
    full, got = said
    assert row["kl"] == pytest.approx(float((full.exp() * (full - got)).sum(-1).mean()), abs=1e-5) and row["kl"] > 1e-4
    assert row["top1"] == float((full.argmax(-1) == got.argmax(-1)).double().mean())
    true = ids[0, 101:113, None]
    assert row["nll_difference"] == pytest.approx(float((full - got).gather(-1, true).mean()), abs=1e-5)
    assert len(row["kl_by_token"]) == 12 and len(row["attention_error_by_layer"]) == 2
    assert row["budget_used_peak"] <= 1 and row["kv_ratio_peak"] <= 0.3


def test_batches_and_repeats_change_nothing():
    def run(batch, subset=slice(None)):
        task = Fidelity(context=80, forced=20, batch=batch)
        return {r["id"]: r for r in task.rows(session(QEvict(), Budget(0.4)), items(task)[subset])}

    whole, single, part = run(3), run(1), run(2, slice(1, 3))
    for name, row in whole.items():
        assert row["kl"] == pytest.approx(single[name]["kl"], abs=1e-5)
        assert row["kv_bytes_peak"] <= single[name]["kv_bytes_peak"]
    assert part.keys() == {"x-1", "x-2"} and part["x-2"]["kl"] == pytest.approx(whole["x-2"]["kl"], abs=1e-5)


@pytest.mark.parametrize("policy", [QEvict(), SnapKV(observe=8, interval=4), KIVI(bits=4, group=16, residual=32)])
def test_a_prompt_that_is_read_once_gives_what_reading_it_again_gives(policy, monkeypatch):
    task, work = Fidelity(context=80, forced=12, batch=2), session(policy, Budget(1.0 if policy.fixed else 0.4))
    known = list(task.rows(work, items(task)))
    evals.fidelity._references.clear()
    monkeypatch.setattr(evals.fidelity, "REMEMBERED", 0)
    assert task._prompt(work, torch.zeros(1, 80)) is None
    for a, b in zip(known, task.rows(work, items(task)), strict=True):
        assert a["kl_by_token"] == b["kl_by_token"] and a["attention_error_by_layer"] == b["attention_error_by_layer"]
    assert len(evals.fidelity._references) == 1


def test_summary_has_intervals_over_texts():
    task = Fidelity(context=80, forced=10)
    out = task.summary(list(task.rows(session(QEvict(), Budget(0.4)), items(task, 4))))
    assert out["n"] == 4 and out["forced_tokens"] == 40 and out["score"] == out["top1"]
    for name in ("kl", "top1", "nll_difference", "attention_error"):
        low, high = out[f"{name}_interval"]
        assert low <= out[name] <= high
    assert len(out["attention_error_by_layer"]) == 2


def test_texts(tmp_path):
    tokenizer = load_tokenizer("smollm2-135m")
    made = Fidelity(n=3, context=200, forced=20).items(tokenizer, 8192)
    assert [i.id for i in made] == ["pydoc-0000", "pydoc-0001", "pydoc-0002"] and len({i.sha for i in made}) == 3
    assert all(len(i.payload[1]) == 221 for i in made)
    others = Fidelity(n=2, context=200, forced=20, offset=3).items(tokenizer, 8192)
    assert others[0].id == "pydoc-0003" and not {i.sha for i in others} & {i.sha for i in made}
    file = tmp_path / "own.txt"
    file.write_text("word " * 400)
    assert [i.id for i in Fidelity(sources=(str(file),), n=1, context=100, forced=9).items(tokenizer, 8192)] == ["own-0000"]
    for bad, words in (
        ({"sources": (str(file),), "n": 9, "context": 100}, "fewer than task.n=9 pieces"),
        ({"n": 2, "context": 2000, "offset": 1000}, "from task.offset=1000 on"),
        ({"sources": ("nowhere",)}, "is no text file: choose pydoc, multi_news, gsm8k or a file"),
        ({"sources": ("multi_news",), "data": str(tmp_path)}, "multi_news.jsonl"),
        ({"context": 9000}, "the model has 8192 positions"),
    ):
        with pytest.raises(ValueError, match=words):
            Fidelity(**bad).items(tokenizer, 8192)
    file.write_bytes(b"\x87\xff")
    with pytest.raises(ValueError, match=r"task.sources: .* is no UTF-8 text"):
        Fidelity(sources=(str(file),), n=1).items(tokenizer, 8192)
    with pytest.raises(ValueError, match=r"task.sources is empty"):
        Fidelity(sources=())
    with pytest.raises(ValueError, match=r"task.forced=0"):
        Fidelity(forced=0)
