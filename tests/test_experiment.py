"""Experiments from the outside: cells, sweeps that go on after a failure, what is frozen, what is skipped. A tiny random model."""

import itertools
import json
import shlex
import shutil
import subprocess
import sys

import pytest
from filelock import FileLock
from omegaconf import OmegaConf

import evals.experiment as experiment_module
from evals.cli import task
from evals.experiment import CONF, Cell, _cells, load, names
from evals.lookup import Record, key, read_rows, records
from evals.sweep import launch, main, show_plan, speed, split, state
from test_runner import ROOT, SMALL, command, config_of, folder  # noqa: F401 - folder is a fixture

SWEEP = ["experiment=table2", "experiment.methods=[fullkv,qevict]", "experiment.budgets=[0.4]", "~experiment.scales.cpu.axes"]


def of_tiny(path, results, *more):
    """Arguments of a small sweep on the tiny model."""
    quoted = [f'{k}="{v}"' for k, v in (("model.path", path), ("results_dir", results / "runs"), ("hydra.sweep.dir", results))]
    return [*SWEEP, *quoted, *[s for s in SMALL if "task.n=" not in s], "task.n=1", *more]


@pytest.mark.parametrize("scale", ["cpu", "paper"])
@pytest.mark.parametrize("name", names())
def test_every_experiment_composes_and_its_header_is_its_command(name, scale, monkeypatch):
    if scale == "paper":  # mostly what the other scale has: some cells are enough
        monkeypatch.setattr(experiment_module, "_cells", lambda *given: itertools.islice(_cells(*given), 4))
    experiment = load(name, scale)
    assert len(experiment.cells) >= 2 and len({c.name for c in experiment.cells}) == len(experiment.cells)
    for cell in experiment.cells:
        assert cell.name.replace("-", "").replace(".", "").isalnum()
        assert cell.config.results_dir.startswith("results/")
        assert (cell.config.model.path == "smollm2-135m") == (scale == "cpu") or name == "table4"
    head = (CONF / f"experiment/{name}.yaml").read_text().split("title:")[0]
    assert f"python run.py -m experiment={name}\n" in head


def test_cells_are_methods_times_budgets_times_axes_and_fixed_methods_have_no_budget():
    cells = load("table2", overrides=["experiment.methods=[fullkv,snapkv,kivi]", "experiment.budgets=[0.1,0.2]"]).cells
    seen = [tuple(c.labels.values()) for c in cells]
    one = [("fullkv", "full"), ("snapkv", "10 %"), ("snapkv", "20 %"), ("kivi", "own")]
    assert seen == [(*c, length) for c in one for length in ("1024", "2048")]
    assert [c.config.budget for c in cells] == [1.0, 1.0, 0.1, 0.1, 0.2, 0.2, 1.0, 1.0]
    assert [c.config.task.n for c in cells[:2]] == [3, 2]


def test_labelled_methods_are_chosen_by_label():
    cells = load("table14", overrides=["experiment.methods=[R3,R1]"]).cells
    assert [c.labels["method"] for c in cells] == ["R3", "R1"]
    with pytest.raises(ValueError, match=r"experiment.methods: 'qevict' is none of experiment=table14: choose from 'R1'"):
        load("table14", overrides=["experiment.methods=[qevict]"])


def test_a_cell_is_the_run_that_compare_makes():
    (cell,) = [c for c in load("table2", overrides=["experiment.methods=[snapkv]"]).cells if c.labels["length"] == "1024"]
    made = config_of("method=snapkv", "budget=0.2", "task.length=1024", "task.n=3", "task.max_new_tokens=64")
    assert key(cell.config) == key(made)
    assert cell.config == OmegaConf.merge(made, {"results_dir": "results/ruler-1024/runs"})


def test_the_key_ignores_where_things_lie_and_nothing_else():
    base = config_of("method=qevict")
    same = ("results_dir=x", "progress=false", "logger=wandb", "model.path=elsewhere/smollm2-135m")
    other = ("budget=0.2", "budget_bytes=5000", "method.q=0.5", "task.n=3", "task.haystack=essays", "seed=1", "model.path=other")
    assert {key(config_of("method=qevict", o)) for o in same} == {key(base)}
    assert len({key(base), *(key(config_of("method=qevict", o)) for o in other)}) == len(other) + 1
    assert key(config_of("method=fullkv", "budget=0.2")) == key(config_of("method=fullkv"))


def test_the_key_of_a_record_from_before_a_field_is_that_of_its_default():
    base = config_of("method=qevict")
    older = OmegaConf.create(OmegaConf.to_container(base))
    del older.method["shares"]
    assert key(older) == key(base)
    base = config_of("method=qevict", "task=fidelity")
    older = OmegaConf.create(OmegaConf.to_container(base))
    del older.task["offset"]
    assert key(older) == key(base) != key(config_of("method=qevict", "task=fidelity", "task.offset=1"))


def test_a_sweep_does_what_is_left_lists_failures_and_goes_on(folder, tmp_path, capsys):  # noqa: F811
    odd = tmp_path / "a model=v1, c's (1)"
    shutil.copytree(folder, odd)
    results = tmp_path / "results=1 x"
    arguments = of_tiny(odd, results, "experiment.budgets=[0.4,0.001]")
    assert main(arguments, task) == 1
    out, err = capsys.readouterr()
    (bad,) = [line for line in err.splitlines() if line.startswith("not done: ")]
    assert bad.startswith("not done: qevict-0.1-") and "smallest workable" in bad
    assert "2 of 3 cells done" in out
    frozen = sorted((results / "table2-cpu/cells").glob("*.yaml"))
    assert len(frozen) == 3 and all("${" not in f.read_text() for f in frozen)
    before = {f: f.stat().st_mtime_ns for f in results.glob("runs/*/samples.jsonl")}
    assert len(before) == 2

    assert main(arguments, task) == 1  # the failed cell alone is tried again
    assert "3 cells, 1 to do" in capsys.readouterr().out
    assert {f: f.stat().st_mtime_ns for f in results.glob("runs/*/samples.jsonl")} == before

    assert main([*arguments, "plan=true"], task) == 0
    plan = capsys.readouterr().out
    print(plan)
    assert "2 of 3 cells done" in plan and "failed:" in plan
    assert main(of_tiny(odd, results), task) == 0
    assert "2 cells, 0 to do" in capsys.readouterr().out


def test_samples_that_failed_or_come_from_other_data_are_done_again(folder, tmp_path, capsys):  # noqa: F811
    arguments = of_tiny(folder, tmp_path, "experiment.methods=[qevict]")
    assert main(arguments, task) == 0
    (run_dir,) = tmp_path.glob("runs/*")
    samples, metrics = run_dir / "samples.jsonl", run_dir / "metrics.json"
    first = samples.read_text()
    samples.write_text(first.replace('"status": "ok"', '"status": "failed"', 1))
    assert main(arguments, task) == 0
    assert "1 cells, 1 to do" in capsys.readouterr().out
    assert len(read_rows(samples)) == 2 and all(r["status"] == "ok" for r in read_rows(samples))
    samples.write_text("\n".join(map(json.dumps, read_rows(samples)))[:-20])  # a line that can no longer be read
    assert main([*arguments, "plan=true"], task) == 0
    assert "damaged: 1 of 2 samples can be read" in capsys.readouterr().out
    assert main(arguments, task) == 0
    assert "1 cells, 1 to do" in capsys.readouterr().out and len(read_rows(samples)) == 2
    card = json.loads(metrics.read_text())
    card["card"]["haystack"] = "0" * 64
    metrics.write_text(json.dumps(card))
    main(arguments, task)
    assert "1 cells, 1 to do" in capsys.readouterr().out


def test_what_runs_is_what_was_frozen(folder, tmp_path, capsys):  # noqa: F811
    """A configuration that the files in ``conf`` know nothing of runs as it was frozen, whatever its names look like."""
    config = config_of(*of_tiny(folder, tmp_path)[4:6], "method=snapkv", "budget=0.4", *SMALL, "task.n=1")
    config.method_name = "mine/of=today v2"
    config.method = {"_target_": "baselines.snapkv.SnapKV", "observe": 16}
    launch([Cell("odd-1", {}, config)], tmp_path, [], task)
    (record,) = [r for same in records([config.results_dir]).values() for r in same]
    assert record.done and record.path.name.startswith("mine-of-today-v2-") and "done: odd-1: " in capsys.readouterr().out
    assert OmegaConf.load(record.path / "config.yaml").method.observe == 16


def test_missing_data_is_told_before_anything_is_submitted(folder, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("QEVICT_DATA", str(tmp_path / "none"))
    arguments = ["experiment=figure3", "experiment.methods=[qevict]", f"model.path={folder}", f"hydra.sweep.dir={tmp_path}"]
    assert main(arguments, task) == 1
    out, err = capsys.readouterr()
    assert "2 cells, 0 to do" in out and "scripts/prepare.py gsm8k" in err
    assert not (tmp_path / "figure3-cpu").exists()
    assert main([*arguments, "prefetch=true", "task.data=nowhere"], task) == 1
    out, err = capsys.readouterr()
    assert "ready: model" in out and "not ready: data of evals.gsm8k.GSM8K: gsm8k data is missing" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment=nope"], ["experiment/nope", "table12"]),
        (["experiment=table2", "scale=huge"], ["scale=huge", "cpu and paper"]),
        (["experiment=table2", "plan=yes"], ["plan=yes", "true or false"]),
        (["experiment=table2", "task.nope=1"], ["nope"]),
        (["experiment=table2,table3"], ["experiment=table2,table3", "name one"]),
        (["experiment=table2", "experiment.methods=[]"], ["experiment.methods=[]", "at least one"]),
        (["experiment=table2", "experiment.methods=qevict"], ["experiment.methods=qevict", "'experiment.methods=[qevict]'"]),
        (["experiment=table2", "experiment.budgets=[abc]"], ["budget='abc'", "a number"]),
        (["experiment=table2", "experiment.budgets=[0]"], ["budget=0", "(0, 1]"]),
        (["experiment=table2", "experiment.methods=[qevict]", "method.window=0"], ["window=0 is below 1"]),
        (["experiment=table2", "results_dir=/a=b/c"], ["mismatched input '='", "quoted twice"]),
        (["experiment=table11", "method.window=7"], ["method.window=7 would make 'Omega 4' and 'Omega 8' of window the same"]),
        (["experiment=plus_ablation", "method.window=8"], ["method.window=8 would make 'qevict_plus' and 'window 8' of methods"]),
        (["experiment=table2", "launch=nope"], ["launch/nope", "slurm"]),
    ],
)
def test_bad_arguments_are_one_line(arguments, words, capsys):
    assert main(arguments, task) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and all(word in line for word in words)


def test_arguments_are_told_apart():
    given = ["-m", "experiment=a", "launch=slurm", "hydra.launcher.partition=x", "+hydra.job.y=1", "task.n=3", "plan=true"]
    switches, hydras, cells = split(given)
    assert switches == {"experiment": "a", "scale": "cpu", "plan": "true", "prefetch": "false"}
    assert hydras == ["launch=slurm", "hydra.launcher.partition=x", "+hydra.job.y=1"] and cells == ["task.n=3"]


def test_speed_is_the_median_over_samples():
    class Fake:
        rows = [{"prompt_tokens": 100, "ttft_ms": t, "tpot_ms": t / 10} for t in (100.0, 300.0, 200.0)] + [{"ttft_ms": None}]

    assert speed([Fake]) == pytest.approx((0.002, 0.02))
    assert speed([]) is None


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three processes that import everything
def test_joblib_runs_cells_side_by_side(folder, tmp_path):  # noqa: F811
    done = subprocess.run(command("-m", *of_tiny(folder, tmp_path, "launch=joblib")), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 cells done" in done.stdout


def test_a_model_that_cannot_be_read_is_asked_for_once(monkeypatch, tmp_path, capsys):
    """A hub without a network answers after half a minute; an experiment has one model for many cells."""
    asked = []

    def load_config(path, revision):
        asked.append(path)
        raise ValueError("no such model")

    monkeypatch.setattr("qevict.hf.loading.load_config", load_config)
    experiment = load("table13", overrides=["model.path=/not/there/at-all", f"results_dir={tmp_path}"])
    show_plan(experiment, tmp_path)
    assert asked == ["/not/there/at-all"] and capsys.readouterr().out.count("no such model") == len(experiment.cells) > 1


def test_a_run_that_was_killed_is_not_called_running(folder, tmp_path):  # noqa: F811
    arguments = of_tiny(folder, tmp_path, "experiment.methods=[qevict]")
    assert main(arguments, task) == 0
    (run_dir,) = tmp_path.glob("runs/*")
    (run_dir / "status.json").write_text(json.dumps({"state": "running", "done": 1, "total": 2, "error": None}))
    (run_dir / ".lock").unlink(missing_ok=True)
    cell, record = Cell("x", {}, None), Record(run_dir, "")
    assert state(cell, record, tmp_path) == ("interrupted", "2 of 2 samples") and not (run_dir / ".lock").exists()
    with FileLock(run_dir / ".lock"):
        assert state(cell, record, tmp_path)[0] == "running"
    assert state(cell, record, tmp_path)[0] == "interrupted"


def test_tables_are_made_of_what_a_sweep_was_run_with(folder, tmp_path, capsys):  # noqa: F811
    arguments = of_tiny(folder, tmp_path, "experiment.methods=[qevict]")
    assert main(arguments, task) == 0
    (last,) = [line for line in capsys.readouterr().out.splitlines() if "cells done; " in line]
    command = shlex.split(last.partition("; ")[2])
    assert command[:3] == ["python", "scripts/tables.py", "table2"]
    made = subprocess.run([sys.executable, *command[1:], "--out", str(tmp_path / "t")], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0 and "| qevict | 40 % |" in made.stdout, made.stdout + made.stderr
