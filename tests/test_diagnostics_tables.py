"""Errors of codes against arithmetic of our own; tables and figures of the diagnostics from records that are written here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from conftest import build, rotate, softmax, tokens
from evals.benchmark import Item, Session
from evals.diagnostics import codecs, figures, tables
from evals.diagnostics.codecs import CodecErrors, bits_per_element, coded, errors
from evals.diagnostics.metrics import TIERS
from evals.diagnostics.task import pooled
from evals.experiment import Cell, Experiment, load
from evals.figures import figures as figures_of
from evals.lookup import Record
from evals.page import page
from evals.render import markdown
from evals.tables import grids
from qevict.hf.rope import Rope
from qevict.store.codec import WindowCodec

# -- codecs --------------------------------------------------------------------------------------------------------------


def test_bits_per_element_are_those_of_the_fact_sheet():
    """d 64: key codes at INT2 and fp16 take 10, 6, 4, 3 bits at Omega 4, 8, 16, 32; K2 V2 Omega 8 4.25, with uint8 3.22."""
    names = ("K2 Omega 4", "K2", "K2 Omega 16", "K2 Omega 32", "V2", "K2 V2", "K2 V2 uint8", "K2 V3 Omega 16 uint8")
    assert [round(bits_per_element(n, 64), 2) for n in names] == [10, 6, 4, 3, 2.5, 4.25, 3.22, 3.17]


def test_errors_are_relative_changes_of_the_output():
    model, (batch, heads, length, dim) = build("llama"), (1, 2, 64, 16)
    rope = Rope(model.get_decoder().rotary_emb)
    torch.manual_seed(0)
    q, k, v = torch.randn(batch, 4, length, dim), torch.randn(batch, heads, length, dim), torch.randn(batch, heads, length, dim)
    out = errors(q, k, v, 0.25, rope, 7)
    inv_freq = model.get_decoder().rotary_emb.inv_freq.double().numpy()
    where = np.arange(64)
    plain = rotate(k[0].double().numpy(), np.broadcast_to(where, (2, 64)), inv_freq, -1)
    coded_k = plain.copy()
    for start in range(9, 57, 8):  # whole windows between the five sinks and the last seven tokens
        part = plain[:, start : start + 8]
        low, step = part.min(1, keepdims=True), (part.max(1, keepdims=True) - part.min(1, keepdims=True)) / 3
        coded_k[:, start : start + 8] = np.round((part - low) / step) * step + low
    coded_k = rotate(coded_k, np.broadcast_to(where, (2, 64)), inv_freq)
    for h in range(2):
        change, whole = [], []
        for member in (2 * h, 2 * h + 1):
            for row in range(57, 64):
                query = q[0, member, row].double().numpy() * 0.25
                said = [
                    softmax(keys[h, : row + 1] @ query) @ v[0, h, : row + 1].double().numpy() for keys in (k.numpy()[0], coded_k)
                ]
                change.append(said[1] - said[0])
                whole.append(said[0])
        assert float(out["K2"][0, h]) == pytest.approx(np.linalg.norm(change) / np.linalg.norm(whole), rel=2e-2)
    assert set(out) == set(codecs.VARIANTS) and all(0 < float(x.max()) < 2 for x in out.values())
    k2, k3, k4, v2, v4 = (float(out[n].mean()) for n in ("K2", "K3", "K4", "V2", "V4"))
    assert k4 < k3 < k2 and v4 < v2


def test_first_and_newest_tokens_stay_exact():
    rope = Rope(build("llama").get_decoder().rotary_emb)
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16)
    for x, y in zip((k, v), coded(k, v, WindowCodec(8, 16), rope, 40), strict=True):
        changed = (x != y).any(-1).any(1).any(0)
        assert changed.tolist() == [8 <= t < 40 for t in range(50)]


def test_codec_task_gives_a_row_per_text():
    model, task = build("llama"), CodecErrors(context=96, queries=8, batch=2)
    batch = [Item(f"x-{i}", f"s{i}", 96, 97, ("x", tokens(98, seed=i).tolist())) for i in range(3)]
    rows = list(task.rows(Session(model, None, None, None), batch))
    assert [r["id"] for r in rows] == ["x-0", "x-1", "x-2"]
    for r in rows:
        assert np.shape(r["errors_by_head"]["K2"]) == (2, 2) and r["score"] == 1 - r["errors"]["K2 V2"]
        assert r["bits"] == {n: round(bits_per_element(n, 16), 3) for n in codecs.VARIANTS}
        assert r["errors"]["V3"] == pytest.approx(np.mean(r["errors_by_head"]["V3"]))
    out = task.summary(rows)
    low, high = out["K2_interval"]
    assert out["n"] == 3 and low <= out["K2"] <= high
    with pytest.raises(ValueError, match=r"task.queries=90 is outside \[1, task.context - 37\]"):
        CodecErrors(context=96, queries=90)


# -- tables and figures -----------------------------------------------------------------------------------------------------


def row(i: int, fmm: float, kl: float) -> dict:
    """A text's record with everything that tables and figures read."""
    change = {"n": 4, "before": 0.02, "after": 0.03 + 0.01 * i, "bytes": 1500}
    shares = [0.1, 0.2, 0.1, 0.1, 0.5]
    return {
        "id": f"x-{i}", "task": "x", "prompt_sha": str(i), "prompt_tokens": 80, "status": "ok", "error": None, "score": 1.0,
        "top1": 1.0, "kl": kl, "nll_difference": 0.0, "attention_error": 0.1, "attention_error_by_layer": [0.1],
        "kl_by_token": [kl] * 16, "new_tokens": 16, "kv_bytes_peak": 2**20, "fmm": fmm, "missed_by_step": [fmm] * 16,
        "event_tokens": [0, 8, 16], "tier_shares": dict(zip(TIERS, shares, strict=True)), "tier_shares_by_event": [shares] * 2,
        "qsa": 0.9, "qsa_by_event": [1.0, 0.9, 0.8], "qsa_by_head": [[0.9, 0.8], [0.7, None]], "episodes": 10, "reentries": 2,
        "reentries_by_length": {"3": 1, "7": 1}, "reentries_at": {"8": 1, "16": 1}, "lir": 0.2, "changes": {"promoted": change},
    }  # fmt: skip


class Recorded(Experiment):
    """An experiment whose records are at hand."""

    def records(self):
        out = {}
        for shift, cell in enumerate(self.cells):
            out[cell.name] = Record(None, cell.name)
            rows = [row(i, 0.1 + 0.1 * i + 0.05 * shift, 1.0 - 0.25 * shift) for i in range(3)]
            status = {"state": "done", "total": 3} if shift == 0 else {"state": "running", "total": 21}
            out[cell.name].__dict__.update(rows=rows, status=status, card={"benchmark": "mechanism"}, start={})
        return out


@pytest.fixture
def experiment():
    task = {"_target_": "evals.diagnostics.task.Mechanism", "context": 80, "forced": 16, "sources": ["x"]}
    config = OmegaConf.create({"task": task, "model": {"path": "smollm2-135m"}, "budget": 0.2, "results_dir": "r/runs"})
    made = [Cell(f"c{i}", {"method": label, "budget": "20 %"}, config) for i, label in enumerate(("promotion on", "promotion off"))]
    return Recorded(
        "t", "cpu", "Title", tables.T18, (), ("fmm", "kl", "qsa_lowest_head", "ttr_pooled", "promotions"), None, tuple(made)
    )


def test_values_differences_and_changes(experiment):
    values, differences, changes = (markdown(g) for g in tables.grids(experiment))
    # FMM 10, 20, 30 % of three texts: mean 20, beside the paper's 16.1; then five points more on each of the texts
    assert "| promotion on | 3 | 20.00 (10.00 to 30.00) [16.1] | 1.0000 (1.0000 to 1.0000) | 0.7000 | 5.0 | 12 [639] |" in values
    assert "| promotion off | 3 of 21 | 25.00 (15.00 to 35.00) [16.8] |" in values
    assert "Protocol: benchmark mechanism." in values and "experiment=t scale=cpu` from the samples in r/runs" in values
    assert "| minus promotion on | FMM, % | KL, nat |" in differences
    assert "| promotion off | 5.00 (5.00 to 5.00) | -0.2500 (-0.2500 to -0.2500) |" in differences
    # errors of 2 % before and 3, 4, 5 % after
    assert "| promotion on | Q to F (promoted) | 12 | 2.000 | 4.000 | -2.000 (-3.000 to -1.000) | +1,500 |" in changes


def test_what_is_counted_over_all_texts():
    out = pooled([row(0, 0.1, 1.0), row(1, 0.2, 1.0) | {"reentries_by_length": {"3": 2}, "reentries": 2}])
    assert (out["episodes"], out["reentries"], out["ttr_pooled"], out["promotions"]) == (20, 4, 3, 8)
    assert out["qsa_lowest_layer"] == pytest.approx(0.7) and out["qsa_highest_layer"] == pytest.approx(0.85)
    assert pooled([]) == {}


def test_every_paper_figure_exists():
    missing = [at for at in tables.PAPER if tables.paper_value(*at) is None]
    assert missing == [(tables.T18, "promotion off", "promotions")]  # there are none without promotion
    assert tables.paper_value(tables.T18, "promotion off", "mass_ratio") == pytest.approx(0.887)
    assert tables.paper_value(tables.T14, "R2", "fmm") is None


def test_figures_are_written(experiment, tmp_path):
    cells = tables.cells(experiment)
    assert list(cells) == ["promotion on", "promotion off"]
    coded = {"x": ([error_row(0)], {})}
    for path in (
        figures.missed_and_tiers(cells, tmp_path / "a.png", "promotion on"),
        figures.drift(cells, tmp_path / "b.png"),
        figures.promotion(cells, tmp_path / "c.png"),
        figures.codec_errors(coded, tmp_path / "d.png"),
    ):
        assert path.stat().st_size > 5000 and path.with_suffix(".svg").is_file()


def written(name: str, where: Path, many: int, make) -> Experiment:
    """An experiment whose first ``many`` cells have run directories, each with two rows as ``make`` gives them by number."""
    experiment = load(name, overrides=[f"results_dir={where}"])
    for cell in experiment.cells[:many]:
        folder = where / cell.name
        folder.mkdir(parents=True)
        OmegaConf.save(cell.config, folder / "config.yaml")
        (folder / "samples.jsonl").write_text("".join(json.dumps(make(i)) + "\n" for i in range(2)))
        (folder / "status.json").write_text(json.dumps({"state": "done", "done": 2, "total": 2, "error": None}))
    return experiment


def error_row(i: int) -> dict:
    errors = {n: [[0.1 * (1 + i), 0.2]] for n in codecs.VARIANTS}
    means = {n: float(np.mean(x)) for n, x in errors.items()}
    bits = {n: bits_per_element(n, 64) for n in codecs.VARIANTS}
    out = {"id": f"x-{i}", "task": "x", "prompt_sha": "p", "status": "ok", "score": 0.5}
    return out | {"errors": means, "bits": bits, "errors_by_head": errors}


SHOWN = {  # tables and figures of each experiment once its first two cells have records
    "table14": (["table14-cpu", "table14-cpu-paired"], []),
    "table15": (["table15-cpu", "table15-cpu-paired"], []),
    "table16": (["table16-cpu", "table16-cpu-paired"], []),
    "table18": (["table18-cpu", "table18-cpu-paired", "table18-cpu-changes"], ["table18-cpu"]),
    "figure1": (["figure1-cpu", "figure1-cpu-paired"], ["figure1-cpu"]),
    "rankers": (["rankers-cpu", "rankers-cpu-paired"], []),
    "codecs": (["codecs-cpu", "codecs-cpu-paired"], []),
    "codec_errors": (["codec_errors-cpu"], ["codec_errors-cpu"]),
    "drift": (["drift-cpu", "drift-cpu-paired"], ["drift-cpu"]),
}


@pytest.mark.parametrize("name", SHOWN)
def test_every_experiment_is_made_and_shown_by_its_name(name, tmp_path):
    none = load(name, overrides=[f"results_dir={tmp_path}/none"])
    assert grids(none) == [] and figures_of(none, tmp_path / "drawn") == []
    assert f"<code>python run.py -m experiment={name} scale=cpu</code></li>" in page([(none, [], [])])
    make = error_row if name == "codec_errors" else lambda i: row(i, 0.1 + 0.1 * i, 1.0)
    experiment = written(name, tmp_path / "runs", 2, make)
    made, drawn = grids(experiment), figures_of(experiment, tmp_path / "drawn")
    assert ([g.name for g in made], [f.stem for f in drawn]) == SHOWN[name]
    if drawn:
        again = figures_of(experiment, tmp_path / "again")[0]
        assert drawn[0].with_suffix(".svg").read_bytes() == again.with_suffix(".svg").read_bytes()
        assert again.with_suffix(".pdf").is_file()
    shown = page([(experiment, made, drawn)])
    assert shown.count("<img ") == len(drawn) and all(f'<h3 id="{g.name}">' in shown for g in made)
    states = [r[1].plain() for r in made[0].rows]
    if name != "codec_errors":
        assert states == ["2", "2", *["missing"] * (len(experiment.cells) - 2)]


def test_a_comparison_needs_two_arms(tmp_path):
    assert figures_of(written("table18", tmp_path / "runs", 1, lambda i: row(i, 0.1, 1.0)), tmp_path / "drawn") == []
