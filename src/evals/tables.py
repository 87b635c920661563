"""Tables of experiments, made anew from raw samples: numbers with what they rest on, the paper's beside them."""

from __future__ import annotations

import csv
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.utils import get_class, instantiate
from omegaconf import DictConfig

from evals.benchmark import Benchmark
from evals.efficiency import Efficiency
from evals.efficiency_report import COLUMNS as TIMED
from evals.efficiency_report import lines as timed_lines
from evals.efficiency_report import notes as timed_notes
from evals.experiment import CONF, Cell, Experiment
from evals.fidelity import Fidelity
from evals.lookup import Record
from evals.metrics import summarize
from evals.records import readable
from evals.stats import paired, stderr

PAPER = CONF.parent / "results/paper/paper_numbers.csv"
PAPER_MODEL = "Llama-3.1-8B-Instruct"  # whose figures stand beside those of a model that the paper has not
PAPER_METHODS = {
    "fullkv": "FullKV",
    "qevict": "QEvict",
    "defensivekv": "DefensiveKV",
    "layer_defensivekv": "Layer-DefensiveKV",
    "kivi": "KIVI",
    "zipcache": "ZipCache",
}
MIB = 1024 * 1024


@dataclass(frozen=True)
class Column:
    """How a value is called and shown: times ``factor``, with ``digits`` decimals; whether ``less`` of it is better."""

    head: str
    factor: float = 1
    digits: int = 2
    less: bool = False


SCORE = Column("score, %", 100, 1)
COLUMNS = {
    "score": SCORE,
    "top1": Column("same top token, %", 100, 1),
    "kl": Column("KL, nat", digits=3, less=True),
    "nll_difference": Column("NLL difference, nat", digits=3, less=True),
    "attention_error": Column("attention error, %", 100, 1, less=True),
    "kv_bytes_peak": Column("KV, MiB", 1 / MIB, 2, less=True),
}
VALUES = {  # columns by task; of the others: scores
    "Fidelity": ("kl", "top1", "nll_difference", "attention_error"),
    "Mechanism": ("fmm", "qsa", "kl", "attention_error"),
}


@dataclass(frozen=True)
class Entry:
    """One place of a table. ``value`` and ``error`` (standard error) are as shown; ``paper`` is the paper's figure for it."""

    value: float | None = None
    error: float | None = None
    paper: float | None = None
    best: bool = False
    text: str | None = None
    digits: int = 1

    def plain(self) -> str:
        if self.text is not None:
            return self.text
        out = "-" if self.value is None else f"{round(self.value, self.digits) + 0.0:.{self.digits}f}"  # never -0.0
        if self.value is not None and self.error is not None:
            out += f" ±{self.error:.{self.digits}f}"
        return out

    def beside(self) -> str:
        return "" if self.paper is None else f"[{self.paper:g}]"


@dataclass(frozen=True)
class Grid:
    """A table, ready to be written: ``rows`` are as long as ``header``; the first ``left`` columns are labels."""

    name: str
    title: str
    header: tuple[str, ...]
    left: int
    rows: tuple[tuple[Entry, ...], ...]
    notes: tuple[str, ...]


# -- numbers ----------------------------------------------------------------------------------------------------------------


def summary(config: DictConfig, rows: Sequence[dict]) -> dict:
    """A run's numbers from its samples; ``NAME_stderr`` is the standard error of a value ``NAME`` that samples have."""
    task = get_class(config.task._target_)
    if issubclass(task, Benchmark):
        return summarize(rows, task.categories)  # without the data that the task itself would ask for
    errors = {f"{n}_stderr": _stderr(values_by_task(rows, n)) for n in columns_of(config)}
    return instantiate(config.task).summary(rows) | errors


def columns_of(config: DictConfig) -> tuple[str, ...]:
    """The values that a task is judged by."""
    return VALUES.get(config.task._target_.rsplit(".", 1)[-1], ("score",))


def _stderr(values: Mapping[str, Mapping[str, float]]) -> float | None:
    return stderr({task: list(by_id.values()) for task, by_id in values.items()}) if values else None


def values_by_task(rows: Iterable[dict], name: str) -> dict[str, dict[str, float]]:
    """A value of each finished sample, by task and by id and prompt: what a paired comparison needs."""
    out: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("status") == "ok" and isinstance(row.get(name), int | float):
            out.setdefault(row["task"], {})[f"{row['id']} {row['prompt_sha']}"] = row[name]
    return out


def leaders(groups: dict[str, dict[str, dict[str, float]]], less: bool) -> set[str]:
    """The best of several runs, and those that a paired 95 % interval cannot tell from it; nobody if that is all of them.

    Args:
        groups: values by task and sample, by run. Runs without values are out of the running.
        less: less is better.
    """
    alive = {name: values for name, values in groups.items() if values}
    if len(alive) < 2:
        return set()
    means = {n: sum(sum(v.values()) / len(v) for v in by.values()) / len(by) for n, by in alive.items()}
    best = min(means, key=means.get) if less else max(means, key=means.get)
    out = {best}
    for name in alive.keys() - {best}:
        try:
            interval = paired(alive[best], alive[name])["interval"]
        except ValueError:  # no sample in common: nothing can be said
            continue
        if interval is None or interval[0] <= 0 <= interval[1]:
            out.add(name)
    return out if out != alive.keys() else set()


# -- the paper's figures ----------------------------------------------------------------------------------------------------


@functools.cache
def paper_rows() -> tuple[dict, ...]:
    with open(PAPER, newline="") as file:
        return tuple(csv.DictReader(file))


def paper_figure(experiment: Experiment, cell: Cell, item: str) -> dict | None:
    """The paper's row for a cell: its method, its share of bytes, and axis labels in the paper's own words.

    Args:
        item: a task, or ``mean`` for the headline number.
    """
    model = Path(cell.config.model.path).name
    words = {"full": {"100%"}, "own": {"about 20%", "similar memory"}}.get(
        cell.labels["budget"], {f"budget {cell.labels['budget'].replace(' ', '')}"}
    )
    axes = [v for k, v in cell.labels.items() if k not in ("method", "budget", *experiment.panels)]
    mine = [r for r in paper_rows() if r["table"] == experiment.paper]
    model = model if any(r["model"] == model for r in mine) else PAPER_MODEL
    for row in mine:
        setting = [s.strip() for s in row["setting"].split(";")]
        named = row["item"].startswith(("macro average", "average of", "GSM8K")) if item == "mean" else row["item"] == item
        shares = {s for s in setting if s.startswith(("budget", "100%", "about", "similar"))}  # some tables have one throughout
        if (
            row["model"] == model
            and row["method"] == PAPER_METHODS.get(cell.labels["method"])
            and named
            and set(axes) <= set(setting)
            and (not shares or words & shares)
        ):
            return row
    return None


# -- tables -----------------------------------------------------------------------------------------------------------------


def panels_of(experiment: Experiment) -> list[tuple[str, str, list[Cell]]]:
    """An experiment's cells by table: name, title and cells of each combination of its panels."""
    panels = [p for p in experiment.panels if p in experiment.axes]
    parts: dict[tuple[str, ...], list[Cell]] = {}
    for cell in experiment.cells:
        parts.setdefault(tuple(cell.labels[p] for p in panels), []).append(cell)
    return [
        (
            readable(experiment.name, experiment.scale, *labels),
            "".join([experiment.title, *(f", {p} {v}" for p, v in zip(panels, labels, strict=True))]),
            cells,
        )
        for labels, cells in parts.items()
    ]


def grids(experiment: Experiment) -> list[Grid]:
    """An experiment's tables; none, if none of its cells has samples."""
    task = get_class(experiment.cells[0].config.task._target_)
    if issubclass(task, Fidelity) and (experiment.values or task is not Fidelity):
        from evals.diagnostics import tables as diagnostics  # it imports this module

        return diagnostics.grids(experiment)
    found = experiment.records()
    if not any(record.rows for record in found.values()):
        return []
    return [_grid(experiment, name, title, cells, found) for name, title, cells in panels_of(experiment)]


def _grid(experiment: Experiment, name: str, title: str, cells: Sequence[Cell], found: dict[str, Record]) -> Grid:
    if issubclass(get_class(cells[0].config.task._target_), Efficiency):
        return _timed(experiment, cells, found)
    rows = {c.name: found[c.name].rows for c in cells if c.name in found}
    numbers = {c.name: summary(c.config, rows[c.name]) for c in cells if rows.get(c.name)}
    names = experiment.values or columns_of(cells[0].config)
    tasks = sorted({t for n in numbers.values() for t in n["per_task"]}) if "score" in names else []
    for run, n in numbers.items():  # a mean of some tasks alone would stand beside those of all
        if not found[run].done and len(n["per_task"]) < len(tasks):
            n |= {"score": None, "stderr": None}
    labels = [a for a in experiment.axes if a not in experiment.panels]
    several = [a for a in labels if a in ("method", "budget") or len({c.labels[a] for c in cells}) > 1]

    columns = [*((t, SCORE) for t in tasks), *(("mean" if n == "score" else n, COLUMNS.get(n, Column(n))) for n in names)]
    heads = [value if column is SCORE else column.head for value, column in columns]
    whole = {c.name: rows[c.name] for c in cells if c.name in rows and found[c.name].done}  # others have other samples
    marked = {value: _marked(value, column, cells, whole) for value, column in columns}
    used, lines = [], []
    for cell in cells:
        entries = [_entry(value, column, numbers.get(cell.name), cell.name in marked[value]) for value, column in columns]
        for at, (value, _) in enumerate(columns):
            row = paper_figure(experiment, cell, value) if value != "mean" and experiment.paper else None
            if row is not None:
                used.append(row)
                entries[at] = replace(entries[at], paper=float(row["value"]))
        headline = paper_figure(experiment, cell, "mean") if experiment.paper else None
        used += [headline] if headline else []
        lines.append(
            (
                *(Entry(text=cell.labels[a]) for a in several),
                *entries,
                Entry(value=float(headline["value"]) if headline else None),
                Entry(text=extent(found.get(cell.name), numbers.get(cell.name))),
                _entry("kv_ratio_peak", Column("", 100, 1), numbers.get(cell.name), False),
                _entry("kv_bytes_peak", COLUMNS["kv_bytes_peak"], numbers.get(cell.name), False),
            )
        )
    header = (*several, *heads, "paper", "n", "KV ratio, %", "KV, MiB")
    keep = [i for i, head in enumerate(header) if head != "paper" or any(line[i].value is not None for line in lines)]
    return Grid(
        name,
        title,
        tuple(header[i] for i in keep),
        len(several),
        tuple(tuple(line[i] for i in keep) for line in lines),
        tuple(_notes(experiment, cells, found, used)),
    )


def _timed(experiment: Experiment, cells: Sequence[Cell], found: dict[str, Record]) -> Grid:
    """Time and memory: a line for every cache that ran beside a method, then the paper's figures."""
    runs, lines = [], []
    for cell in cells:
        record = found.get(cell.name)
        if record is None or not record.rows:
            lines.append((cell.labels["method"], cell.labels["budget"], "missing", *["-"] * (len(TIMED) - 3)))
            continue
        about = {"method": cell.labels["method"], "budget_asked": cell.labels["budget"], "decode": cell.config.cache.decode}
        about |= {"card": record.card, "meter": None, "backend": record.start.get("backend"), "model": cell.config.model.path}
        runs.append(about | summary(cell.config, record.rows))
        lines += timed_lines(runs[-1])
    places = {"TTFT": "TTFT ms", "TPOT": "TPOT ms", "throughput": "tok/s", "peak GPU": "peak MiB"}
    papers: dict[tuple[str, str], dict[str, str]] = {}
    for row in (r for r in paper_rows() if r["table"] == experiment.paper):
        value = f"{float(row['value']) * 1e9 / MIB:,.0f}" if row["metric"] == "GB" else row["value"]
        papers.setdefault((row["method"], row["setting"]), {})[places[row["item"]]] = value
    for (method, setting), values in papers.items():
        first = {"cache": f"paper: {method}, {PAPER_MODEL}, {setting}"}
        lines.append(tuple((first | values).get(name, "-") for name in TIMED))
    rows = tuple(tuple(Entry(text=text) for text in line[: len(TIMED)]) for line in lines)
    how = (*(timed_notes(runs) if runs else ()), *provenance(experiment, cells, found))
    return Grid(experiment.sweep, experiment.title, TIMED, 1, rows, how)


def _marked(name: str, column: Column, cells: Sequence[Cell], rows: dict[str, list[dict]]) -> set[str]:
    """Cells that lead a column, each among those that were given the same bytes."""
    out: set[str] = set()
    for budget in {c.labels["budget"] for c in cells} - {"full", "own"}:
        groups = {}
        for cell in (c for c in cells if c.labels["budget"] == budget and c.name in rows):
            values = values_by_task(rows[cell.name], "score" if column is SCORE else name)
            groups[cell.name] = values if column is not SCORE or name == "mean" else {name: values.get(name, {})}
        out |= leaders({n: {t: v for t, v in by.items() if v} for n, by in groups.items()}, column.less)
    return out


def _entry(name: str, column: Column, numbers: dict | None, best: bool) -> Entry:
    if numbers is None:
        return Entry()
    if column is SCORE and name != "mean":
        value, error = (numbers["per_task"].get(name, {}).get(k) for k in ("score", "stderr"))
    else:
        value = numbers.get("score" if name == "mean" else name)
        error = numbers.get("stderr") if column is SCORE else numbers.get(f"{name}_stderr")
    times = lambda x: None if x is None else x * column.factor  # noqa: E731
    return Entry(times(value), times(error), best=best, digits=column.digits)


def extent(record: Record | None, numbers: dict | None) -> str:
    """How many samples a row rests on."""
    if record is None or numbers is None:
        return "missing"
    n, total = numbers["n"], record.status["total"]
    text = str(n) if record.done and not numbers["n_failed"] else f"{n} of {total or '?'}"
    return text + (f", {numbers['n_failed']} failed" if numbers["n_failed"] else "")


def _notes(experiment: Experiment, cells: Sequence[Cell], found: dict[str, Record], used: Sequence[dict]) -> Iterable[str]:
    yield (
        "Scores: mean ± standard error over samples; the mean is that of the task means. Bold: best of those with the same bytes, "
        "and those whose paired 95 % bootstrap interval to it includes 0; nothing is bold where that holds for all. KV: measured "
        "persistent bytes, highest of any step."
    )
    if used:
        models = ", ".join(dict.fromkeys(r["model"] for r in used))
        settings = "; ".join(dict.fromkeys(r["setting"] for r in used))
        same = experiment.scale == "paper"
        hint = "" if same else " Other model, lengths and tasks than here: for orientation only."
        yield f"paper, [..]: the paper's figures, {experiment.paper}, {models}, {settings}.{hint}"
        for value, note in dict.fromkeys((r["value"], r["note"]) for r in used if r["note"]):
            yield f"{value}: {note}."
    yield from provenance(experiment, cells, found)


def provenance(experiment: Experiment, cells: Sequence[Cell], found: dict[str, Record]) -> Iterable[str]:
    """What a table was made from, in words: protocol, model, machine, versions, command, folders."""
    have = [found[c.name] for c in cells if c.name in found]
    for text in dict.fromkeys(json.dumps(r.card, sort_keys=True) for r in have if r.card):
        card = {k: (v[:12] if isinstance(v, str) and re.fullmatch("[0-9a-f]{40,}", v) else v) for k, v in json.loads(text).items()}
        yield "Protocol: " + ", ".join(f"{k} {_plain(v)}" for k, v in card.items() if v not in ("", None, [])) + "."
    starts = [r.start for r in have if r.start]
    if starts:
        sources = dict.fromkeys("{kind} {path} {sha}".format(**s["model"]) for s in starts if s.get("model"))
        device = dict.fromkeys(f"{s['device']} ({s['threads']} threads)" for s in starts)
        versions = dict.fromkeys(f"torch {s['packages']['torch']}, transformers {s['packages']['transformers']}" for s in starts)
        code = dict.fromkeys((s.get("git") or "unknown")[:7] + ("+changes" if "+" in (s.get("git") or "") else "") for s in starts)
        yield f"Model: {'; '.join(sources)}. On {'; '.join(device)}; {'; '.join(versions)}; code {', '.join(code)}."
    folders = ", ".join(dict.fromkeys(c.config.results_dir for c in cells))
    yield f"Made by `{experiment.command}` from the samples in {folders}."


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
