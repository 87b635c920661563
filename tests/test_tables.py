"""Tables and figures from records written by hand: every number is computed here too. No model."""

import csv
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from evals.experiment import load
from evals.figures import figures
from evals.page import page
from evals.render import between, comma_separated, latex, markdown, overview
from evals.report import COLORS, STYLES
from evals.tables import PAPER, Entry, Grid, grids, leaders, paper_figure, values_by_task

MIB = 1024 * 1024
SCORES = {  # of niah_single_1 and vt, four samples each
    "fullkv": ([1, 1, 1, 1], [1, 1, 1, 0]),
    "qevict": ([1, 1, 1, 0], [1, 0, 1, 0]),
    "snapkv": ([0, 0, 0, 0], [0, 0, 0, 0]),
}


def experiment_of(results, *more, name="table2"):
    switches = ["experiment.methods=[fullkv,qevict,snapkv,defensivekv]", f"results_dir={results}", "task.length=1024"]
    return load(name, overrides=[*switches, "~experiment.scales.cpu.axes", *more])


def write_run(cell, scores, state="done", total=None, **extra):
    """A run directory of a cell. Its ``metrics.json`` has wrong numbers: nobody is to read them."""
    folder = Path(cell.config.results_dir) / cell.name
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cell.config, folder / "config.yaml")
    rows = [
        {"id": f"{task}-{i}", "task": task, "prompt_sha": "p", "status": "ok", "score": float(s), "error": None, "stopped": "eos"}
        | {"kv_bytes_peak": 3 * MIB, "kv_ratio_peak": 0.2, "new_tokens": 5}
        | extra
        for task, values in scores.items()
        for i, s in enumerate(values)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "status.json").write_text(json.dumps({"state": state, "done": len(rows), "total": total or len(rows), "error": None}))
    wrong = {"score": 0.123, "per_task": {}, "n": 999, "card": {"benchmark": "ruler", "protocol": "aware", "raw_suffix": ""}}
    (folder / "metrics.json").write_text(json.dumps(wrong))
    model = {"kind": "folder", "path": "m", "sha": "abc"}
    start = {"model": model, "device": "cpu", "threads": 1, "packages": {"torch": "1", "transformers": "2"}, "git": "f" * 40}
    (folder / "env.json").write_text(json.dumps({"starts": [start]}))
    return folder


@pytest.fixture
def written(tmp_path):
    experiment = experiment_of(tmp_path)
    for cell in experiment.cells:
        if cell.labels["method"] in SCORES:
            write_run(cell, dict(zip(("niah_single_1", "vt"), SCORES[cell.labels["method"]], strict=True)))
    return experiment


def places(grid):
    """Entries by method and head."""
    return {row[0].plain(): dict(zip(grid.header, row, strict=True)) for row in grid.rows}


def test_numbers_come_from_samples_and_missing_cells_say_so(written):
    (grid,) = grids(written)
    assert grid.header == ("method", "budget", "niah_single_1", "vt", "mean", "paper", "n", "KV ratio, %", "KV, MiB")
    at = places(grid)
    assert [e.plain() for e in at["fullkv"].values()][:2] == ["fullkv", "full"]
    assert at["qevict"]["niah_single_1"].value == 75 and at["qevict"]["vt"].value == 50 and at["qevict"]["mean"].value == 62.5
    assert at["qevict"]["niah_single_1"].error == pytest.approx(25, rel=0.1)  # sqrt(1/4 * 3/4 / 3), bootstrapped
    assert at["qevict"]["n"].plain() == "8" and at["qevict"]["KV, MiB"].plain() == "3.00"
    assert at["qevict"]["KV ratio, %"].plain() == "20.0"
    assert at["defensivekv"]["n"].plain() == "missing" and at["defensivekv"]["mean"].plain() == "-"


def test_bold_is_the_best_at_the_same_bytes_and_what_cannot_be_told_from_it(written):
    at = places(grids(written)[0])
    assert at["qevict"]["niah_single_1"].best and at["qevict"]["mean"].best
    assert not at["snapkv"]["niah_single_1"].best and not at["snapkv"]["mean"].best
    assert not any(e.best for e in at["fullkv"].values())  # other bytes
    one = {"t": {str(i): float(i) for i in range(8)}}
    near = {"t": {k: v + (0.5 if int(k) % 2 else -0.5) for k, v in one["t"].items()}}
    worse = {"t": {k: v - 1 for k, v in one["t"].items()}}
    assert leaders({"a": one, "b": near, "c": worse}, less=False) == {"a", "b"}
    assert leaders({"a": one, "b": near, "c": worse}, less=True) == {"c"}
    assert leaders({"a": one, "b": near}, less=False) == set()  # nothing to tell them apart
    assert leaders({"a": one, "b": {}}, less=False) == set()


def test_partial_and_failed_samples_are_said(tmp_path):
    experiment = experiment_of(tmp_path)
    write_run(experiment.cells[1], {"vt": [1, 1]}, state="running", total=8)
    failed = write_run(experiment.cells[2], {"vt": [1, 0]})
    lines = (failed / "samples.jsonl").read_text().splitlines()
    bad = json.loads(lines[0]) | {"status": "failed", "score": None, "id": "vt-9"}
    (failed / "samples.jsonl").write_text("\n".join([*lines, json.dumps(bad), "{half a li"]))
    write_run(experiment.cells[3], {"niah_single_1": [0, 0], "vt": [1, 1]})
    at = places(grids(experiment)[0])
    assert at["qevict"]["n"].plain() == "2 of 8" and not at["qevict"]["vt"].best
    assert at["qevict"]["vt"].value == 100 and at["qevict"]["mean"].value is None, "of one of two tasks"
    assert at["defensivekv"]["mean"].value == 50
    assert at["snapkv"]["n"].plain() == "2 of 2, 1 failed" and at["snapkv"]["vt"].value == 50


def test_the_papers_figures_stand_beside(written):
    at = places(grids(written)[0])
    assert [at[m]["paper"].value for m in ("fullkv", "qevict", "snapkv")] == [90.0, 87.6, None]
    full = experiment_of("x", "task.tasks=[cwe]")
    cells = {c.labels["method"]: c for c in full.cells}
    assert paper_figure(full, cells["qevict"], "cwe")["value"] == "43.98"
    assert paper_figure(full, cells["fullkv"], "cwe")["value"] == "45.22"
    assert paper_figure(full, cells["defensivekv"], "niah_multikey_3")["value"] == "97.0"
    assert paper_figure(full, cells["qevict"], "nothing") is None
    notes = " ".join(grids(written)[0].notes)
    assert "derived: about 2.4 above QEvict" in notes and "for orientation only" in notes


@pytest.mark.parametrize(
    ("name", "label", "item", "value"),
    [
        ("table11", "Omega 16", "mean", "42.89"),
        ("table12", "q 0.10", "mean", "41.87"),
        ("table12", "q 0.20", "mean", None),
        ("table12", "q 0.90", "musique", "32.58"),
        ("table13", "INT4", "triviaqa", "88.94"),
    ],
)
def test_swept_settings_find_their_line_of_the_paper(name, label, item, value):
    experiment = load(name, "paper")
    (cell,) = [c for c in experiment.cells if label in c.labels.values()]
    row = paper_figure(experiment, cell, item)
    assert (row and row["value"]) == value


def test_quantizers_and_models_find_their_line_of_the_paper():
    experiment = load("figure3", "paper", ["experiment.methods=[qevict,kivi]", "experiment.budgets=[0.4]"])
    found = {(c.labels["method"], c.labels["model"]): paper_figure(experiment, c, "mean") for c in experiment.cells}
    assert found["kivi", "Qwen2.5-7B-Instruct"]["value"] == "84.61" and found["qevict", "Qwen2.5-7B-Instruct"]["value"] == "80.51"
    assert found["qevict", "Mistral-7B-Instruct-v0.2"] is None  # 40 % is not in the paper for it


def test_the_copy_of_the_papers_numbers_is_readable():
    with open(PAPER, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 106 and all(float(r["value"]) >= 0 for r in rows)


def test_every_format_says_the_same(written):
    (grid,) = grids(written)
    text = markdown(grid)
    assert "| qevict | 20 % | **75.0 ±" in text and "| defensivekv | 20 % | - | - | - | - | missing | - | - |" in text
    assert "Protocol: benchmark ruler, protocol aware." in text and "code fffffff." in text
    made = latex(grid)
    assert r"\toprule" in made and r"\bottomrule" in made and r"niah\_single\_1" in made and r"\textbf{75.0 $\pm$" in made
    assert r"20 \%" in made and made.count("&") == 8 * 5
    rows = list(csv.DictReader(comma_separated(grid).splitlines()))
    (one,) = [r for r in rows if r["method"] == "qevict" and r["column"] == "niah_single_1"]
    assert one["value"] == "75" and one["best"] == "1"
    html = page([(written, [grid], [])])
    assert "<b>75.0" in html and '<td class="missing">missing</td>' in html
    assert "http" not in html.replace("http-equiv", "")  # nothing is loaded from elsewhere


def test_no_samples_no_table(tmp_path):
    assert grids(experiment_of(tmp_path)) == []


def test_an_overview_has_a_line_per_method_and_a_column_per_share():
    def grid(title, *rows):
        lines = tuple((Entry(text=m), Entry(text=b), Entry(value=v, best=best), Entry(text=n)) for m, b, v, best, n in rows)
        return Grid("g", title, ("method", "budget", "mean", "n"), 2, lines, ())

    a = grid("A", ("full", "full", 1, False, "3"), ("x", "5 %", 2, True, "2 of 3"), ("x", "10 %", 3, False, "3"))
    b = grid("B", ("x", "20 %", 4, False, "9"), ("y", "own", 5, False, "9"))
    assert overview({"KL, nat": (a, "mean"), "R": (b, "mean")}).splitlines() == [
        "| method | KL, nat, 5 % | KL, nat, 10 % | KL, nat, own bytes | R, 20 % | R, own bytes |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| full |  |  | 1.0 |  |  |",
        "| x | **2.0** | 3.0 |  | 4.0 |  |",
        "| y |  |  |  |  | 5.0 |",
        "",
        "KL, nat: A, n 3, 2 of 3. R: B, n 9.",
    ]


def test_what_is_between_marks_is_replaced():
    assert between("a<b>old\n<e>c<e>", "<b>", "<e>", r"\1 new") == r"a<b>\1 new<e>c<e>"
    assert between("a<b><e>c", "<b>", "<e>", "new") == "a<b>new<e>c"
    with pytest.raises(ValueError, match=r"no <b> followed by <e>: put the marks back"):
        between("a<e><b>", "<b>", "<e>", "new")


def test_values_of_samples_by_task():
    rows = [
        {"id": "a", "task": "t", "prompt_sha": "p", "status": "ok", "kl": 0.5},
        {"id": "b", "task": "t", "prompt_sha": "p", "status": "failed", "kl": None},
    ]
    assert values_by_task(rows, "kl") == {"t": {"a p": 0.5}}
    assert Entry(value=-0.0001, digits=3).plain() == "0.000"


def test_closeness_has_columns_of_its_own_and_less_is_better(tmp_path):
    experiment = load(
        "fidelity", overrides=["experiment.methods=[qevict,snapkv]", "experiment.budgets=[0.1]", f"results_dir={tmp_path}"]
    )
    for cell, kl in zip(experiment.cells, (0.1, 0.4), strict=True):
        extra = {"kl": kl, "top1": 0.5, "nll_difference": 0.0, "attention_error": 0.3, "attention_error_by_layer": [0.3]}
        write_run(cell, {"pydoc": [0.5, 0.5, 0.5]}, **extra)
    at = places(grids(experiment)[0])
    assert at["qevict"]["KL, nat"].value == pytest.approx(0.1) and at["qevict"]["KL, nat"].error < 1e-9
    assert at["qevict"]["KL, nat"].best and not at["snapkv"]["KL, nat"].best
    assert at["qevict"]["attention error, %"].value == pytest.approx(30) and "paper" not in at["qevict"]


def test_figures_are_vectors_and_bitmaps_and_the_same_every_time(written, tmp_path):
    (first,) = figures(written, tmp_path / "a")
    (again,) = figures(written, tmp_path / "b")
    assert {f.suffix for f in first.parent.iterdir()} == {".png", ".svg", ".pdf"}
    for suffix in (".svg", ".pdf"):
        assert first.with_suffix(suffix).read_bytes() == again.with_suffix(suffix).read_bytes()
    assert len(set(STYLES)) == len(STYLES) >= len(load("table2").cells) / 2 and len(set(COLORS)) == 7
    assert "data:image/svg+xml;base64," in page([(written, grids(written), [first])])
    steps = load("table13", overrides=[f"results_dir={tmp_path}/c"])
    for cell in steps.cells:
        extra = {"kl": 0.1, "top1": 0.5, "nll_difference": 0.0, "attention_error": 0.3, "attention_error_by_layer": [0.3]}
        write_run(cell, {"pydoc": [0.5, 1.0]}, **extra)
    assert [f.stem for f in figures(steps, tmp_path / "d")] == ["table13-cpu-fidelity", "table13-cpu-needles"]
    with pytest.raises(ValueError, match=r"experiment.figure=pie: choose bytes or axis"):
        figures(experiment_of(tmp_path, "experiment.figure=pie"), tmp_path)
