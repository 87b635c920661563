"""The efficiency task on a tiny model: complete records, honest baselines, tables. No claims about time."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import DynamicCache

import evals.efficiency
import qevict.hf.loading
from conftest import SMALL, build, call, forced_logits, gap, plain, tiny, tokens
from evals.benchmark import Session
from evals.efficiency import METERED, Efficiency
from evals.efficiency_report import curves, figure_growth, figure_memory, lines, notes, show_efficiency
from evals.experiment import load
from evals.full_caches import FULL, NAMES, QUANTIZED, attention_function, held, implementation, make, unavailable
from evals.records import read_json
from evals.runner import plan, run
from qevict import Budget, QEvict, TierCache
from qevict.accounting import measure
from qevict.hf.loading import ModelError, load_model, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
THIRD = Budget(0.3)
HEADS, DIM = 2, 16  # KV heads and head dimension of the tiny model, 2 layers, fp32
TOKEN = 2 * 2 * HEADS * DIM * 4  # bytes of a token in a full cache of its type


def session(budget=THIRD):
    model = build("llama", head_dim=DIM)
    return Session(model, None, budget, lambda b: TierCache(model, QEvict(), b, "float16"))


def measured(work, **fields):
    """A task, the rows of a run, and its summary."""
    task = Efficiency(**{"context": 200, "batch": 2, "new_tokens": 10, "warmup": 2, "prefills": 0} | fields)
    rows = list(task.rows(work, task.items(None, 100)))
    return task, {row["id"]: row for row in rows}, task.summary(rows)


@pytest.fixture(scope="module")
def finished():
    return measured(
        session(), prefills=2, baselines=("dynamic_sdpa", "dynamic_eager", "dynamic_flash", "packed", "fullkv", "hf_hqq")
    )


# -- caches -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["packed", "fullkv", "dynamic_sdpa"])
def test_full_caches_give_what_the_library_gives(name):
    ids, forced = tokens(2, 40), tokens(2, 15, seed=1)
    model = tiny()
    TierCache(model, QEvict(), 0.9)  # switches its attention
    got = forced_logits(model, make(name, model, 60, torch.float32), ids, None, forced)
    assert gap(got, forced_logits(plain(), DynamicCache(), ids, None, forced)) < 1e-5


@pytest.mark.parametrize("name", ["packed", "fullkv", "dynamic_sdpa"])
def test_a_repeated_cache_is_one_that_saw_every_sequence(name):
    model, one, forced = tiny(), tokens(2, 40), tokens(6, 9, seed=1)
    TierCache(model, QEvict(), 0.9)
    cache = make(name, model, 60, torch.float32)
    call(model, cache, one)
    cache.batch_repeat_interleave(3)
    steps = [call(model, cache, forced[:, t : t + 1], positions=torch.full((6, 1), 40 + t)).logits[:, -1] for t in range(9)]
    want = forced_logits(plain(), DynamicCache(), one.repeat_interleave(3, 0), None, forced)
    assert gap(torch.stack(steps, 1), want[:, 1:]) < 1e-5


@pytest.mark.parametrize("name", FULL)
def test_held_bytes_of_full_caches(name):
    model = build("llama", head_dim=DIM)
    TierCache(model, QEvict(), 0.9)
    cache = make(name, model, 60, torch.float32)
    call(model, cache, tokens(3, 60))
    want = 3 * 60 * TOKEN
    if name == "fullkv":  # ids, and the block in progress
        assert held(cache) == measure(cache)["total"] and want <= held(cache) < 1.2 * want
    else:
        assert held(cache) == want


def test_held_bytes_of_the_librarys_fp8_cache():
    model = build("llama", head_dim=DIM)
    if unavailable("hf_fp8", model):
        pytest.skip("this release of transformers has no fp8 cache")
    cache = make("hf_fp8", model, 0, torch.float32)
    call(model, cache, tokens(3, 60))
    assert held(cache) == 3 * 60 * TOKEN // 4 + 2 * 2 * 4  # a byte per value, and a scale for keys and for values of each layer


def test_what_cannot_run_here_says_why():
    model = tiny()
    assert all(unavailable(name, model) is None for name in ("dynamic_sdpa", "dynamic_eager", "packed", "fullkv"))
    if not torch.cuda.is_available():
        assert unavailable("dynamic_flash", model) == "flash_attention_2 needs a CUDA device"
    for name in QUANTIZED:
        why = unavailable(name, model)
        assert why is None or "\n" not in why


def test_implementations_are_the_librarys_own():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    module = tiny().get_decoder().layers[0].self_attn
    assert attention_function(implementation("dynamic_eager"), module) is eager_attention_forward
    assert attention_function(implementation("dynamic_sdpa"), module) is sdpa_attention_forward
    assert {implementation(n) for n in ("packed", "fullkv", "method")} == {"tiered"}


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


# -- runs ---------------------------------------------------------------------------------------------------------------------


def test_a_run_is_complete(finished):
    task, rows, out = finished
    wanted = {"method", "dynamic_sdpa", "dynamic_eager", "packed", "fullkv"} | set(NAMES) - set(out["skipped"]) - {
        "dynamic_flash", "hf_quanto", "hf_fp8"}  # fmt: skip
    assert out["n"] == 2 and set(out["tpot"]) == wanted
    assert all(len(v) == 10 and min(v) > 0 for v in rows["decode"]["tpot"].values())
    assert all(len(v) == 2 and min(v) > 0 for v in rows["prefill"]["ttft"].values())
    for name in ("tpot_vs_best_full", "tpot_vs_dynamic_sdpa", "ttft_vs_full"):
        assert out[name]["q1"] <= out[name]["q3"] and out[name]["median"] > 0
    assert out["best_full"] in FULL and 0 < out["kv_ratio_peak"] <= 0.3 and out["budget_used_peak"] <= 1
    assert 0 <= out["routing_share"] < 1 and out["throughput_tok_s"] == pytest.approx(2e3 / out["tpot_ms"])
    assert set(out["attention_ms"]) == set(out["tpot"])
    assert task.card()["clock"] in ("process CPU time", "wall time") and out["random_weights"] is False


def test_after_a_run_nothing_is_left_behind(finished):
    work = session()
    measured(work, baselines=("dynamic_eager",))
    assert work.model.config._attn_implementation == "tiered", "the eager baseline put the model's attention back"


def test_ratios_are_those_of_the_medians(finished):
    _, rows, out = finished
    tpot = rows["decode"]["tpot"]
    best = min((n for n in tpot if n in FULL), key=lambda n: median(tpot[n]))
    assert out["best_full"] == best
    assert out["tpot_vs_best_full"]["median"] == pytest.approx(median(tpot["method"]) / median(tpot[best]))
    ttft = rows["prefill"]["ttft"]
    assert out["ttft_vs_full"]["median"] == pytest.approx(median(ttft["method"]) / median(ttft["dynamic_sdpa"]))


def test_bytes_of_a_run(finished):
    """Of full caches by hand; the method's within its budget; the peak from its parts."""
    _, rows, out = finished
    tokens_in = 200 + METERED + 2 + 10
    assert out["caches"]["dynamic_sdpa"]["persistent_bytes"] == 2 * tokens_in * TOKEN
    assert out["caches"]["packed"]["persistent_bytes"] == 2 * (tokens_in + 5) * TOKEN  # room for the steps of attention alone
    method = out["caches"]["method"]
    assert method["persistent_bytes"] == 2 * out["kv_bytes_peak"] <= 0.3 * 2 * tokens_in * TOKEN / 2
    # DynamicCache copies a layer's keys, then its values: one of them is there twice
    assert out["caches"]["dynamic_sdpa"]["workspace_bytes_median"] >= 2 * 200 * TOKEN // 4
    weights = sum(p.nbytes for p in build("llama", head_dim=DIM).parameters())
    assert weights <= out["weight_bytes"] < weights + 1000  # rotary frequencies
    for name, cache in out["caches"].items():
        assert len(rows["decode"]["workspace"][name]) == METERED and cache["workspace_bytes"] >= cache["workspace_bytes_median"] > 0
        first = cache["prefill_workspace_bytes"] or 0  # one sequence of two is prefilled while the other is there
        decode = cache["persistent_bytes"] + cache["workspace_bytes"]
        assert cache["peak_bytes"] == out["weight_bytes"] + max(decode, cache["persistent_bytes"] // 2 + first)
    assert out["workspace_bytes_decode"] == method["workspace_bytes"]
    assert out["workspace_bytes_peak"] == max(out["workspace_bytes_decode"], out["workspace_bytes_prefill"])
    assert out["workspace_bytes_prefill"] == method["prefill_workspace_bytes"] >= 200 * TOKEN / 2 * 0.3 / 2


def test_what_was_skipped_is_in_the_record(finished):
    _, _, out = finished
    if torch.cuda.is_available():
        pytest.skip("nothing has to be skipped here")
    assert out["skipped"]["dynamic_flash"] == "flash_attention_2 needs a CUDA device" and "dynamic_flash" not in out["caches"]


def test_a_run_without_baselines():
    _, _, out = measured(session(), baselines=())
    assert out["best_full"] is None and out["tpot_vs_best_full"] is None and set(out["caches"]) == {"method"}
    assert out["ttft_ms"] is None and out["caches"]["method"]["ttft_ms"] is None


def test_more_sequences_than_are_drawn():
    _, _, out = measured(session(), batch=10, new_tokens=2, baselines=("packed", "fullkv"))
    _, _, small = measured(session(), batch=2, new_tokens=2, baselines=("packed", "fullkv"))
    assert out["kv_bytes_peak"] == pytest.approx(small["kv_bytes_peak"], rel=0.02)  # per sequence
    for name in ("packed", "method"):
        assert out["caches"][name]["persistent_bytes"] == pytest.approx(5 * small["caches"][name]["persistent_bytes"], rel=0.02)


def test_the_largest_batch_is_the_largest():
    """Computed from at most eight sequences; here against real batches at the bound."""
    work, memory = session(), 800_000
    task, rows, out = measured(work, batch=1, baselines=("packed", "dynamic_sdpa"), memory_bytes=memory, memory_steps=2)
    assert out["memory_bytes"] == memory and out["largest_batch_how"] == ("tried" if torch.cuda.is_available() else "computed")
    assert out["largest_batch"]["packed"] < out["largest_batch"]["method"]
    for name, batch in out["largest_batch"].items():
        assert batch >= 2
        assert task._ending(batch)._need(work, name) <= memory * 1.03  # workspace is not quite linear
        assert task._ending(batch + 1)._need(work, name) > memory * 0.97
        alone = rows["capacity"]["tpot"][name]
        assert len(alone) == 2 and out["caches"][name]["largest_batch_tok_s"] == pytest.approx(batch * 1e3 / median(alone))
    need = task._ending(2)._need(work, "dynamic_sdpa")
    assert need > 2 * (200 + 2 + 10 + METERED) * TOKEN, "caches are as full as at the end"


def test_nothing_fits_into_nothing():
    _, _, out = measured(session(), batch=1, baselines=("packed",), memory_bytes=1000, memory_steps=2)
    assert out["largest_batch"] == {"method": 0, "packed": 0} and out["caches"]["packed"]["largest_batch_tok_s"] is None


def test_a_budget_of_the_total_counts_what_will_be_generated():
    _, _, out = measured(session(Budget(0.3, basis="total", max_new_tokens=1)), baselines=())
    assert out["budget_bytes"] == int(0.3 * (200 + METERED + 2 + 10) * TOKEN / 2)  # fp16


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"batch": 0}, "task.batch=0: it has to be 1 or more"),
        ({"warmup": -1}, "task.warmup=-1: it has to be 0 or more"),
        ({"memory_bytes": 0}, "task.memory_bytes=0"),
        ({"baselines": ("nothing",)}, "choose from"),
        ({"memory_steps": 3}, "task.memory_steps=3: .* task.memory_bytes"),
    ],
)
def test_bad_fields_are_refused(bad, words):
    with pytest.raises(ValueError, match=words):
        Efficiency(**bad)


def test_baselines_count_once():
    assert Efficiency(baselines=("packed", "fullkv", "packed")).baselines == ("packed", "fullkv")


def test_what_cannot_fit_into_memory_is_refused_before_anything_is_filled(monkeypatch):
    with pytest.raises(
        ValueError, match=r"task.context=200 x task.batch=100000000: the caches of method, packed take .* GiB, .* lower task"
    ):
        measured(session(), batch=100_000_000, baselines=("packed",))
    monkeypatch.setattr(evals.efficiency, "free_bytes", lambda device: None)  # not known: tried
    assert measured(session(), baselines=("packed",))[2]["n_failed"] == 0


# -- random weights, records, experiments ---------------------------------------------------------------------------------------


@pytest.fixture
def random_tiny(monkeypatch):
    shape = {k: v for k, v in SMALL.items() if not k.endswith("_id") and k != "tie_word_embeddings"}
    monkeypatch.setitem(qevict.hf.loading.RANDOM, "random-tiny", shape)
    return "random-tiny"


def config_of(*overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def test_random_weights_are_the_same_each_time_and_leave_other_draws_alone(random_tiny):
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    first, source = load_model(random_tiny, device="cpu")
    assert torch.equal(torch.rand(4), want)
    second, _ = load_model(random_tiny, device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert source.random and source.kind == "random weights" and first.config.random_weights
    assert first.get_decoder().layers[0].self_attn.q_proj.weight.std() > 0


def test_only_random_weights_are_called_random():
    from dataclasses import asdict

    from qevict.hf.loading import EMBEDDED, resolve

    assert "random" not in asdict(resolve(EMBEDDED)[1]), "the identity of other runs would change"


def test_a_model_without_a_tokenizer_says_so(random_tiny):
    tokenizer = load_tokenizer(random_tiny)
    for use in (lambda: tokenizer("text"), lambda: tokenizer.eos_token_id, lambda: plan(config_of(f"model.path={random_tiny}"))):
        with pytest.raises(ModelError, match="no tokenizer: use task=efficiency"):
            use()


def test_a_run_of_random_weights_is_marked(random_tiny, tmp_path):
    fields = ["context=200", "new_tokens=2", "prefills=1", "baselines=[packed]"]
    overrides = [f"model.path={random_tiny}", "task=efficiency", *(f"task.{f}" for f in fields), f"results_dir={tmp_path}"]
    out = run(config_of(*overrides, "model.device=cpu", "budget=0.4", "progress=false"), announce=lambda text: None)
    stored = read_json(Path(out["path"]) / "metrics.json")
    (start,) = read_json(Path(out["path"]) / "env.json")["starts"]
    assert stored["random_weights"] is True and start["model"]["random"] is True and start["model"]["kind"] == "random weights"
    assert any("random weights, for time and bytes only" in line for line in notes([stored]))
    assert stored["workspace_bytes_decode"] > 0 and stored["workspace_bytes_prefill"] > 0 and stored["meter"] == "dispatch"


@pytest.mark.parametrize(("scale", "shape"), [("cpu", (256, 64, 4)), ("paper", (256, 1024, 32))])
def test_table4_can_be_planned(scale, shape):
    """Nothing is downloaded and no weight is made."""
    for cell in load("table4", scale).cells:
        job = plan(cell.config)
        assert (job.task.context, job.task.new_tokens, job.task.batch) == shape and job.task.prefill_batch == job.task.batch
        assert ("random-llama-3.1-8b" in job.name) == (scale == "paper")
    assert qevict.hf.loading.load_config("random-llama-3.1-8b").rope_parameters["rope_type"] == "llama3"


# -- tables ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(finished):
    """Runs as their records have them."""
    task, _, out = finished
    more = {"method": "qevict", "budget_asked": "0.3", "decode": "capped", "backend": "cpu", "meter": "dispatch", "model": "tiny"}
    run = json.loads(json.dumps(out | more | {"card": task.card()}))
    return [run, run | {"context": 400}]


def test_a_line_of_the_table(table):
    spread = {"median": 50.0, "q1": 49.0, "q3": 123.4}
    full = {"tpot_ms": {"median": 100.0, "q1": 99.0, "q3": 101.0}} | dict.fromkeys(
        ("ttft_ms", "throughput_tok_s", "attention_ms", "persistent_bytes", "workspace_bytes", "peak_bytes")
    )
    own = full | {"tpot_ms": spread, "throughput_tok_s": 40.0, "persistent_bytes": 3 * 2**20, "peak_bytes": 2**31}
    run = table[0] | {"batch": 2, "routing_share": 0.0123, "best_full": "packed", "caches": {"method": own, "packed": full}}
    first, second = lines(run)
    assert first == ("qevict *", "0.3", "200", "2", "-", "50.0 [49.0, 123.4]", "0.50", "40.0", "-", "1.2%", "3.00", "-", "2,048")
    assert second == ("packed", "-", "200", "2", "-", "100 [99, 101]", "1.00", *"------")
    with_memory = run | {"memory_bytes": 2**30, "caches": {"method": own | {"largest_batch": 1234, "largest_batch_tok_s": 5.0}}}
    assert lines(with_memory | {"best_full": None})[0][-2:] == ("1,234", "5.0")


def test_the_table_and_the_figures(table, tmp_path, capsys):
    show_efficiency(table, "speed")
    said = capsys.readouterr().out
    for word in ("qevict *", "packed", "dynamic_eager", "routing", "[quartiles]", "decoded by backend cpu"):
        assert word in said
    points = curves(table)
    assert [tokens_in for tokens_in, _ in points["packed"]] == [200, 400] and "qevict, 0.3" in points
    figure_growth(table, tmp_path / "growth.png")
    batch = {name: cache | {"largest_batch": 3, "largest_batch_tok_s": None} for name, cache in table[0]["caches"].items()}
    figure_memory([table[0] | {"caches": batch}], tmp_path / "memory.png")
    assert {f.name for f in tmp_path.iterdir()} == {
        f"{name}.{kind}" for name in ("growth", "memory") for kind in ("png", "svg", "pdf")
    }


def test_the_summary_needs_only_what_is_done(finished):
    task, rows, out = finished
    half = task.summary([rows["prefill"]])
    assert half["ttft_ms"] == out["ttft_ms"] and half["tpot_ms"] is None and half["caches"]["method"]["peak_bytes"] is None
    failed = replace(task).summary([rows["decode"], rows["prefill"] | {"status": "failed"}])
    assert failed["n"] == 1 and failed["n_failed"] == 1 and failed["ttft_ms"] is None
