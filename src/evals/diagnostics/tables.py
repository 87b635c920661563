"""Tables of the diagnostics from records alone: values with intervals over texts, differences on the same texts, and the paper's
figures beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hydra.utils import instantiate

from evals.diagnostics.codecs import VARIANTS
from evals.experiment import Cell, Experiment
from evals.stats import paired
from evals.tables import PAPER_MODEL, Column, Entry, Grid, extent, paper_rows, provenance, values_by_task

VALUES = {
    "fmm": Column("FMM, %", 100),
    "fmm_full_only": Column("FMM, full tier only, %", 100),
    "fmm_oracle": Column("FMM, oracle, %", 100),
    "fmm_hindsight": Column("FMM, hindsight, %", 100),
    "churn": Column("churn", 1, 4),
    "churn_full": Column("churn of full tier", 1, 4),
    "qsa": Column("QSA", 1, 4),
    "qsa_first": Column("QSA, first event", 1, 4),
    "qsa_last": Column("QSA, last event", 1, 4),
    "qsa_fresh": Column("QSA between events", 1, 4),
    "qsa_lowest_layer": Column("QSA, lowest layer", 1, 4),
    "qsa_highest_layer": Column("QSA, highest layer", 1, 4),
    "qsa_lowest_head": Column("QSA, lowest head", 1, 4),
    "mass_ratio": Column("RQ", 1, 3),
    "mass_ratio_pooled": Column("RQ, pooled", 1, 3),
    "lir": Column("LIR(3), %", 100),
    "lir_oracle": Column("LIR(3), oracle, %", 100),
    "episodes": Column("episodes", 1, 0),
    "reentries": Column("re-entries", 1, 0),
    "ttr_pooled": Column("TTR, events", 1, 1),
    "ttr_oracle_pooled": Column("TTR, oracle, events", 1, 1),
    "ttr_tokens": Column("TTR, tokens", 1, 0),
    "promotions": Column("promotions", 1, 0),
    "kl": Column("KL, nat", 1, 4),
    "top1": Column("same top token, %", 100, 1),
    "attention_error": Column("attention error, %", 100),
    "kv_bytes_peak": Column("KV, MiB", 1 / 2**20, 3),
}

# The paper's figure for a cell's label and a value: its method, its item, the factor from its unit to the one that is shown.
T14, T15, T16, T18 = "Table 14 (mechanism)", "Table 15 (score agreement)", "Table 16 (re-entry)", "Table 18 (promotion pilot)"
PAPER = {
    **{(T14, r, v): (m, i, 1) for r, m in (("R1", "R1 (token level)"), ("R3", "R3 (QEvict Omega 8)"), ("R4", "R4 (Omega 32)"))
       for v, i in (("fmm", "FMM"), ("churn", "selection churn"))},
    (T14, "R3", "fmm_full_only"): ("R3 with the quantized tier made inaccessible", "FMM", 1),
    **{(T15, "R3", v): ("QEvict", i, 1) for v, i in (
        ("qsa", "QSA mean"), ("qsa_first", "QSA first routing event"), ("qsa_last", "QSA last routing event"),
        ("qsa_lowest_layer", "QSA lowest layer"), ("qsa_highest_layer", "QSA highest layer"),
        ("qsa_lowest_head", "QSA lowest head"), ("mass_ratio", "mean attention-mass ratio"),
    )},
    (T16, "R3", "lir"): ("R3 deployed policy", "Global LIR", 1),
    (T16, "R3", "lir_oracle"): ("R3 oracle top-K_f", "Global LIR", 1),
    (T16, "R3", "reentries"): ("R3 deployed policy", "rescued episodes", 1),
    **{(T16, r, "ttr_pooled"): (f"{r} deployed policy", "median time to re-entry", 1) for r in ("R3", "R4")},
    **{(T18, f"promotion {p}", v): (f"promotion {p}", i, f) for p in ("on", "off") for v, i, f in (
        ("fmm", "FMM", 1), ("qsa", "QSA", 1), ("mass_ratio", "quantized-tier mass ratio", 0.01), ("lir", "Global LIR", 1),
        ("promotions", "Q to F transitions", 1),
    )},
}  # fmt: skip


def paper_value(table: str | None, label: str, value: str) -> float | None:
    """The paper's figure, in the unit that the table shows."""
    method, item, factor = PAPER.get((table, label, value), (None, None, 1))
    found = [r for r in paper_rows() if (r["table"], r["method"], r["item"]) == (table, method, item)]
    return factor * float(found[0]["value"]) if found else None


def labels(experiment: Experiment) -> dict[str, Cell]:
    """All cells, by what sets them apart."""
    apart = [a for a in experiment.axes if len({c.labels[a] for c in experiment.cells}) > 1] or ["method"]
    return {", ".join(cell.labels[a] for a in apart): cell for cell in experiment.cells}


def cells(experiment: Experiment) -> dict[str, tuple[list[dict], dict]]:
    """Rows and numbers of each cell that has records, by what sets it apart. ``extent``: how many texts they rest on, in words."""
    found, out = experiment.records(), {}
    for label, cell in labels(experiment).items():
        if cell.name in found and (rows := [r for r in found[cell.name].rows if r["status"] == "ok"]):
            record = found[cell.name]
            on = {"extent": extent(record, {"n": len(rows), "n_failed": record.failed})}
            out[label] = (rows, instantiate(cell.config.task).summary(rows) | on)
    return out


def _number(x: float | None, value: Column) -> str:
    return Entry(None if x is None else x * value.factor, digits=value.digits).plain()


def _with_interval(x: float | None, interval: Sequence[float] | None, value: Column) -> str:
    if x is None or interval is None:
        return _number(x, value)
    return f"{_number(x, value)} ({_number(interval[0], value)} to {_number(interval[1], value)})"


def values_grid(experiment: Experiment, found: Mapping[str, tuple[list[dict], dict]]) -> Grid:
    """A line per cell, a column per value, each with its 95 % interval over texts."""
    shown = {n: VALUES.get(n, Column(n, 1, 4)) for n in experiment.values}
    lines, beside = [], False
    for label in labels(experiment):
        _, numbers = found.get(label, ((), {"extent": "missing"}))
        entries = [Entry(text=label), Entry(text=numbers["extent"])]
        for name, value in shown.items():
            paper = paper_value(experiment.paper, label.split(",")[0], name)
            beside |= paper is not None
            entries.append(Entry(text=_with_interval(numbers.get(name), numbers.get(f"{name}_interval"), value), paper=paper))
        lines.append(tuple(entries))
    header = ("", "texts", *(v.head for v in shown.values()))
    notes = [f"Mean over texts (95 % bootstrap interval over texts). {_about(experiment)}"]
    if beside:
        notes.append(f"[..]: the paper's figure, {experiment.paper}, {PAPER_MODEL}; other model and texts, for orientation only.")
    return Grid(experiment.sweep, experiment.title, header, 1, tuple(lines), tuple(notes))


def differences_grid(experiment: Experiment, found: Mapping[str, tuple[list[dict], dict]]) -> Grid | None:
    """Every cell minus the first, on the same texts."""
    if len(found) < 2:
        return None
    (first, (base, _)), *others = found.items()
    names = [n for n in experiment.values if values_by_task(base, n)]
    lines = []
    for label, (rows, _) in others:
        entries = [Entry(text=label)]
        for name in names:
            theirs = values_by_task(rows, name)
            d = paired(values_by_task(base, name), theirs) if theirs else {"difference": None, "interval": None}
            entries.append(Entry(text=_with_interval(d["difference"], d["interval"], VALUES.get(name, Column(name)))))
        lines.append(tuple(entries))
    header = (f"minus {first}", *(VALUES.get(n, Column(n)).head for n in names))
    notes = ("Mean difference on the same texts and forced tokens (95 % bootstrap interval over texts).",)
    return Grid(f"{experiment.sweep}-paired", f"{experiment.title}: paired differences", header, 1, tuple(lines), notes)


CHANGES = {
    "promoted": "Q to F (promoted)",
    "demoted": "F to Q, first time",
    "demoted_again": "F to Q, again",
    "evicted_full": "F to E",
    "evicted_promoted": "promoted to E",
    "evicted_code": "Q to E",
}


def changes_grid(experiment: Experiment, found: Mapping[str, tuple[list[dict], dict]]) -> Grid | None:
    """What one change of tier does to its layer's attention output at the next step, and what it costs. None: not asked for."""
    if "promotions" not in experiment.values:
        return None
    lines = []
    for label, (_, numbers) in found.items():
        for name, text in CHANGES.items():
            c = numbers.get("changes", {}).get(name)
            if c:
                percent = Column("", 100, 3)
                benefit = _with_interval(c["benefit"], c["benefit_interval"], percent)
                shown = (str(c["n"]), _number(c["before"], percent), _number(c["after"], percent), benefit, f"{c['bytes']:+,.0f}")
                lines.append(tuple(Entry(text=t) for t in (label, text, *shown)))
    header = ("", "change", "n", "error before, %", "error after, %", "benefit, % (95 % interval)", "bytes")
    notes = (
        "Error: L2 norm of what holding the window so changes in the layer's attention output, over that of the output, at "
        "the first step after the event; means of texts' means. Bytes of one change in one layer; negative ones are freed.",
    )
    return (
        Grid(f"{experiment.sweep}-changes", f"{experiment.title}: changes of tier", header, 2, tuple(lines), notes)
        if lines
        else None
    )


def codecs_grid(experiment: Experiment, found: Mapping[str, tuple[list[dict], dict]]) -> Grid:
    """Attention error of each codec, a column per cell."""
    percent = Column("", 100)
    lines, bits = [], next(iter(found.values()))[0][0]["bits"]
    for name in VARIANTS:
        values = [_with_interval(n.get(name), n.get(f"{name}_interval"), percent) for _, n in found.values()]
        lines.append(tuple(Entry(text=t) for t in (name, f"{bits[name]:.2f}", *values)))
    header = ("codec", "bits per element", *(f"{label}, error %" for label in found))
    notes = (
        f"Relative L2 error of attention outputs, mean over layers and heads (95 % interval over texts). {_about(experiment)}",
    )
    return Grid(experiment.sweep, experiment.title, header, 1, tuple(lines), notes)


def _about(experiment: Experiment) -> str:
    c = experiment.cells[0].config
    size = f"{c.task.context} + {c.task.forced} tokens" if c.task.forced > 1 else f"{c.task.context} tokens"
    model = "SmolLM2-135M-Instruct, 4-bit weights" if c.model.path == "smollm2-135m" else c.model.path
    return f"{model}; {', '.join(c.task.sources)}; {size}; budget {c.budget:g}."


def grids(experiment: Experiment) -> list[Grid]:
    """All tables of an experiment of ``task=mechanism``, ``task=codecs`` or ``task=fidelity``; none without records."""
    found = cells(experiment)
    if not found:
        return []
    if experiment.cells[0].config.task._target_.endswith("CodecErrors"):
        first, more = codecs_grid(experiment, found), ()
    else:
        first, more = values_grid(experiment, found), (differences_grid(experiment, found), changes_grid(experiment, found))
    how = provenance(experiment, experiment.cells, experiment.records())
    return [replace(first, notes=(*first.notes, *how)), *(g for g in more if g is not None)]
