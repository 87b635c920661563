"""The runner from the outside: records, resume, locks, errors. A tiny random model with the embedded tokenizer."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import instantiate
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import calibrate
from evals.cli import EXPECTED, one_line
from evals.metrics import summarize
from evals.records import RunDir, RunError, digest, readable, write_json
from evals.report import show
from evals.runner import plan, run
from qevict.budget import BudgetError
from qevict.hf.cache import geometry_of
from qevict.hf.loading import load_model, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["task.tasks=[niah_single_1,niah_multikey_1]", "task.length=512", "task.n=3", "task.max_new_tokens=8", "progress=false"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model folder: two random layers, the embedded model's tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer("smollm2-135m")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def on(folder):
    """Overrides of a small run on the tiny model."""
    return ["budget=0.4", f"model.path={folder}", *SMALL]


def config_of(*overrides):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def command(*overrides):
    return [sys.executable, str(ROOT / "run.py"), *overrides]


def rows_of(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "samples.jsonl").read_text().splitlines()]


def test_every_method_composes_and_leaves_a_complete_record(folder, tmp_path):
    for file in sorted((ROOT / "conf/method").glob("*.yaml")):
        config = config_of(f"method={file.stem}", f"results_dir={tmp_path}", *on(folder))
        policy = instantiate(config.method)
        if policy.fixed:
            config.budget = 1
        if "calibration" in config.method:
            model = load_model(str(folder), device="cpu")[0]
            geometry = geometry_of(model.config, torch.float16)
            config.method.calibration = calibrate(policy, geometry, model, tmp_path / "calibration.safetensors")
        metrics = run(config, announce=lambda text: None)
        where = Path(metrics["path"])
        stored = json.loads((where / "metrics.json").read_text())
        wanted = """method model task budget budget_bytes n n_failed score stderr per_task kv_ratio_peak kv_ratio_final
                    kv_bytes_peak workspace_bytes_peak meter ttft_ms tpot_ms"""
        assert set(wanted.split()) <= set(stored)
        assert stored["n"] == 6 and stored["n_failed"] == 0 and stored["method"] == file.stem
        assert stored["meter"] == "dispatch" and stored["workspace_bytes_peak"] > 0
        if not policy.fixed:
            assert stored["kv_ratio_peak"] <= 0.4
            for row in rows_of(where):
                assert row["kv_bytes_peak"] <= row["budget_bytes"]
                assert sum(v for k, v in row["kv_parts_peak"].items() if k != "total") == row["kv_parts_peak"]["total"]
        for name in ("config.yaml", "env.json", "status.json"):
            assert (where / name).exists()
        assert json.loads((where / "status.json").read_text())["state"] == "done"


def test_the_same_command_again_computes_nothing(folder, tmp_path):
    overrides = [f"results_dir={tmp_path}", *on(folder)]
    first = run(config_of(*overrides), announce=lambda text: None)
    before = (Path(first["path"]) / "samples.jsonl").stat().st_mtime_ns
    second = run(config_of(*overrides), announce=lambda text: None)
    assert second == first
    assert (Path(first["path"]) / "samples.jsonl").stat().st_mtime_ns == before
    metrics = Path(first["path"]) / "metrics.json"
    metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"score": 0.123}))
    assert run(config_of(*overrides), announce=lambda text: None)["score"] == first["score"], "numbers come from the samples"


def test_what_changes_a_result_changes_the_run_and_what_does_not_does_not(folder, tmp_path):
    def name(*overrides):
        from evals.runner import plan

        return plan(config_of(*on(folder), *overrides)).name

    base = name()
    assert name(f"results_dir={tmp_path}") == base and name("logger=wandb") == base and name("progress=true") == base
    changes = (
        "budget=0.3",
        "method.window=4",
        "seed=1",
        "cache.dtype=bfloat16",
        "cache.basis=prompt",
        "task.n=2",
        "model.dtype=bfloat16",
    )
    others = [name(change) for change in changes]
    assert len({base, *others}) == len(changes) + 1


def test_killed_at_any_moment_then_resumed_equals_an_undisturbed_run(folder, tmp_path):
    overrides = [*on(folder), "task.n=12"]
    calm = run(config_of(*overrides, f"results_dir={tmp_path / 'calm'}"), announce=lambda text: None)
    torn = tmp_path / "torn"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(*overrides, f"results_dir={torn}"), stdout=subprocess.DEVNULL, env=env)
    deadline = time.time() + 240
    while time.time() < deadline and process.poll() is None:
        lines = list(torn.glob("*/samples.jsonl"))
        if lines and lines[0].read_bytes().count(b"\n") >= 3:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    process.wait()
    (run_dir,) = torn.iterdir()
    kept = len(rows_of(run_dir)) if (run_dir / "samples.jsonl").read_bytes().endswith(b"\n") else None
    assert kept is None or kept >= 3
    with open(run_dir / "samples.jsonl", "a") as file:
        file.write('{"id": "half a li')  # what a kill in the middle of a write leaves
    resumed = run(config_of(*overrides, f"results_dir={torn}"), announce=lambda text: None)
    rows = rows_of(run_dir)
    assert len(rows) == len({r["id"] for r in rows}) == 24
    same = ("score", "stderr", "per_task", "n", "n_failed", "kv_bytes_peak", "kv_ratio_peak", "budget_bytes", "new_tokens")
    assert {k: resumed[k] for k in same} == {k: calm[k] for k in same}
    key = lambda r: (r["id"], r["prediction"], r["prompt_sha"])  # noqa: E731
    assert sorted(map(key, rows)) == sorted(map(key, rows_of(calm["path"])))


def test_two_processes_do_not_write_one_run(tmp_path):
    held = RunDir(tmp_path, "one", "a: 1\n")
    with pytest.raises(RunError, match="another process"):
        RunDir(tmp_path, "one", "a: 1\n")
    held.close()
    RunDir(tmp_path, "one", "a: 1\n").close()


def test_a_failed_sample_is_counted_and_never_scored(folder, tmp_path, monkeypatch):
    import evals.benchmark

    real = evals.benchmark.generate
    calls = iter(range(100))

    def sometimes(*args):
        if next(calls) == 1:
            raise RuntimeError("made to fail\nsecond line")
        return real(*args)

    monkeypatch.setattr(evals.benchmark, "generate", sometimes)
    said = []
    config = config_of(f"results_dir={tmp_path}", *on(folder))
    metrics = run(config, announce=said.append)
    assert metrics["n"] == 5 and metrics["n_failed"] == 1
    assert any("1 of 6 samples failed" in text for text in said)
    (bad,) = [r for r in rows_of(metrics["path"]) if r["status"] == "failed"]
    assert bad["score"] is None and bad["error"] == "RuntimeError: made to fail"


def test_failed_samples_are_tried_again(folder, tmp_path, monkeypatch):
    import evals.benchmark

    def never(*args):
        raise RuntimeError("made to fail")

    config = config_of(f"results_dir={tmp_path}", *on(folder))
    with monkeypatch.context() as patch:
        patch.setattr(evals.benchmark, "generate", never)
        with pytest.raises(RunError, match="all 6 samples failed, the first: RuntimeError: made to fail"):
            run(config, announce=lambda text: None)
    metrics = run(config, announce=lambda text: None)
    assert metrics["n"] == 6
    assert metrics["n_failed"] == 0


@pytest.mark.parametrize("damage", [b"no json at all\n", b"\x80\xff\xfe\n", b"{}\n", b"[]\n", b"5\n"])
def test_damaged_lines_cost_only_their_samples(folder, tmp_path, damage):
    config = config_of(f"results_dir={tmp_path}", *on(folder))
    first = run(config, announce=lambda text: None)
    samples = Path(first["path"]) / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
    (Path(first["path"]) / "env.json").write_text("{half")
    said = []
    again = run(config, announce=said.append)
    assert any("damaged lines of samples.jsonl dropped (1)" in text for text in said)
    assert samples.read_bytes().splitlines(keepends=True)[:5] == [*lines[:2], *lines[3:]]
    assert again["per_task"] == first["per_task"]


@pytest.mark.parametrize("field", ["score", "task", "prompt_sha"])
def test_a_row_without_a_field_is_done_again(folder, tmp_path, field):
    config = config_of(f"results_dir={tmp_path}", *on(folder))
    first = run(config, announce=lambda text: None)
    samples = Path(first["path"]) / "samples.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    del rows[1][field]
    samples.write_text("\n".join(map(json.dumps, rows)))  # and the last line lacks its end, which costs nothing
    again = run(config, announce=lambda text: None)
    assert again["per_task"] == first["per_task"]
    assert len(samples.read_text().splitlines()) == len(rows) + 1


@pytest.mark.parametrize("content", ["", "{half", "[]"])
def test_a_damaged_summary_is_made_anew(folder, tmp_path, content):
    config = config_of(f"results_dir={tmp_path}", *on(folder))
    first = run(config, announce=lambda text: None)
    (Path(first["path"]) / "metrics.json").write_text(content)
    again = run(config, announce=lambda text: None)
    assert again["per_task"] == first["per_task"]
    assert again["kv_bytes_peak"] == first["kv_bytes_peak"]


def test_other_weights_are_another_run(folder, tmp_path):
    from evals.runner import plan

    other = tmp_path / folder.name
    shutil.copytree(folder, other)
    weights = load_file(other / "model.safetensors")
    base = ["budget=0.4", *SMALL]
    same = plan(config_of(f"model.path={other}", *base)).name
    assert same == plan(config_of(f"model.path={folder}", *base)).name
    save_file({n: -t for n, t in weights.items()}, other / "model.safetensors", metadata={"format": "pt"})
    assert plan(config_of(f"model.path={other}", *base)).name != same


def test_an_interrupt_is_one_line_and_resumes(folder, tmp_path):
    overrides = [f"results_dir={tmp_path}", *on(folder), "task.n=200"]
    process = subprocess.Popen(command(*overrides), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 240
    while time.time() < deadline and process.poll() is None and not list(tmp_path.glob("*/samples.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1].strip()
    assert process.returncode == 130, said
    assert said.splitlines()[-1] == "interrupted: what is finished is kept, the same command goes on from there"
    (run_dir,) = tmp_path.iterdir()
    assert json.loads((run_dir / "status.json").read_text())["state"] == "interrupted"


def test_a_full_disk_ends_in_one_line_and_loses_nothing_finished(folder, tmp_path):
    script = (
        "import resource, sys; sys.argv = sys.argv[1:]; resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500));"
        "sys.path.insert(0, '.'); import run; run.main()"
    )
    overrides = [f"results_dir={tmp_path}", *on(folder)]
    done = subprocess.run([sys.executable, "-c", script, *command(*overrides)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: ") and len(done.stderr.strip().splitlines()) == 1
    (run_dir,) = tmp_path.iterdir()
    metrics = run(config_of(*overrides), announce=lambda text: None)
    assert metrics["n"] == 6 and len(rows_of(run_dir)) == 6


BAD = {
    "budget=0": ["budget=0", "(0, 1]"],
    "budget=-1": ["budget=-1", "(0, 1]"],
    "budget=1.5": ["budget=1.5", "(0, 1]"],
    "budget=abc": ["budget='abc'", "a number"],
    "budget_bytes=1.5": ["budget_bytes=1.5", "whole number"],
    "seed=abc": ["seed='abc'", "whole number"],
    "method.sink=2.5": ["sink=2.5", "whole number"],
    "method.window=null": ["window=None", "whole number"],
    "task.n=1.5": ["n=1.5", "whole number"],
    "model.path=null": ["model.path=None", "text"],
    "logger.name=foo": ["foo", "wandb"],
    "method.nothing=1": ["there is no field method.nothing:", "--cfg job"],
    "tsk=ruler": ["there is no field tsk:", "--cfg job"],
    "method=nothing": ["nothing", "qevict_plus"],
    "+method.nothing=1": ["QEvict has no field nothing"],
    "budget=0.0001": ["smallest workable", "budget>="],
    "task.length=4096": ["2048 positions", "task.length"],
    "task.length=50": ["task.length=50", "too small"],
    "model.path=/not/there": ["/not/there", "model folder"],
    "model.path=CORRUPT": ["weights cannot be loaded"],
    "model.path=UNSUPPORTED": ["gpt2", "supported: llama"],
    "results_dir=PLAINFILE/x": ["cannot be written", "results_dir"],
    "model.device=cuda": ["CUDA"],
    "cache.dtype=int8": ["int8", "float16"],
    "cache.basis=later": ["later", "current"],
    "backend.name=magic": ["magic", "reference"],
    "method.key_bits=5": ["key_bits=5", "2, 3, 4, 8 for method.key_bits"],
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_sentence_that_names_the_way_out(folder, tmp_path, override):
    if override == "model.device=cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    (tmp_path / "file").touch()
    corrupt, other = tmp_path / "corrupt", tmp_path / "gpt2"
    corrupt.mkdir()
    for file in folder.iterdir():
        data = file.read_bytes()
        (corrupt / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    places = {"PLAINFILE": tmp_path / "file", "CORRUPT": corrupt, "UNSUPPORTED": other}
    given = override
    for word, place in places.items():
        given = given.replace(word, str(place))
    base = [b for b in (f"results_dir={tmp_path / 'out'}", *on(folder)) if b.split("=")[0] != given.split("=")[0]]
    with pytest.raises((HydraException, *EXPECTED)) as error:
        run(config_of(*base, given), announce=lambda text: None)
    said = one_line(error.value)
    assert "\n" not in said
    for word in BAD[override]:
        assert word in said


def test_the_budget_that_a_refusal_names_is_enough_for_all_prompts(folder, tmp_path):
    base = [f"results_dir={tmp_path}", *on(folder)]
    with pytest.raises(BudgetError) as refused:
        plan(config_of(*base, "budget=0.0001"))
    assert f"budget>={refused.value.least:g}" in str(refused.value)
    plan(config_of(*base, f"budget={refused.value.least}"))


def test_what_may_grow_must_fit_at_the_end_of_the_prompt_only(folder, tmp_path):
    base = [f"results_dir={tmp_path}", *on(folder), "method=kivi", "budget=null", "budget_bytes=1", "task.max_new_tokens=200"]
    least = []
    for decode in ("capped", "grow"):
        with pytest.raises(BudgetError) as refused:
            plan(config_of(*base, f"cache.decode={decode}"))
        least.append(refused.value.least)
    assert least[1] < least[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=nope"], ["method/nope", "qevict"]),
        (["method.nope=1"], ["method.nope"]),
        (["nonsense"], ["nonsense"]),
        (["model.path=/not/there"], ["/not/there"]),
    ],
)
def test_the_command_fails_with_one_line(overrides, words):
    done = subprocess.run(command(*overrides), capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


def test_help_is_readable_and_quick_to_find_the_choices():
    done = subprocess.run(command("--help"), capture_output=True, text=True)
    assert done.returncode == 0
    methods = ", ".join(sorted(f.stem for f in (ROOT / "conf/method").glob("*.yaml")))
    assert f"method: {methods}\n" in done.stdout
    assert "budget:" in done.stdout


def test_the_last_line_names_the_run(folder, tmp_path):
    done = subprocess.run(command(f"results_dir={tmp_path}", *on(folder)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("run: ") and (Path(last[5:]) / "metrics.json").exists()


def test_agnostic_protocol_feeds_the_question_after_compression(folder, tmp_path):
    config = config_of(f"results_dir={tmp_path}", "task.protocol=agnostic", *on(folder))
    metrics = run(config, announce=lambda text: None)
    assert metrics["n_failed"] == 0 and metrics["kv_ratio_peak"] <= 0.4


def test_wandb_offline_mirror(folder, tmp_path):
    overrides = [f"results_dir={tmp_path}", "logger=wandb", *on(folder)]
    metrics = run(config_of(*overrides), announce=lambda text: None)
    assert list(Path(metrics["path"]).glob("wandb/offline-run-*/*.wandb"))


def test_summary_of_rows():
    def row(task, score, status="ok"):
        return {"task": task, "score": score, "status": status, "stopped": "eos", "kv_ratio_peak": 0.2, "ttft_ms": 1.0}

    rows = [row("a", 1.0), row("a", 0.0), row("b", 1.0), row("b", 1.0), row("b", None, "failed")]
    out = summarize(rows)
    assert out["score"] == 0.75 and out["n"] == 4 and out["n_failed"] == 1
    assert out["per_task"]["a"] == {"score": 0.5, "stderr": pytest.approx(0.5, rel=0.05), "n": 2, "n_failed": 0}
    assert out["stderr"] == pytest.approx(0.25, rel=0.05) and out["interval"] == (0.5, 1.0) and out["tpot_ms"] is None


def test_names_and_digests(tmp_path):
    assert readable("my/method=x", "model 1", None, 0.05) == "my-method-x-model-1-0.05"
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})
    write_json(tmp_path / "x.json", {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1} and len(list(tmp_path.iterdir())) == 1


def test_the_printed_table_has_the_divergence_where_there_is_one(capsys):
    (file,) = (ROOT / "results/fidelity-2k/runs").glob("qevict-smollm2-135m-fidelity-0.05-*/metrics.json")
    row = json.loads(file.read_text())
    show([row, {k: v for k, v in row.items() if k != "kl"}])
    said = capsys.readouterr().out
    assert " KL " in said and f" {row['kl']:.4f} " in said
    show([{k: v for k, v in row.items() if k != "kl"}])
    assert " KL " not in capsys.readouterr().out
