"""Figures of experiments, from the same samples as their tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evals.diagnostics import figures as diagnostics
from evals.experiment import Cell, Experiment
from evals.lookup import Record
from evals.report import MIB, canvas, draw_bytes, draw_steps, save
from evals.tables import COLUMNS, columns_of, panels_of, summary

KINDS = ("bytes", "axis")
MOST = 2  # values of a table that are drawn


def figures(experiment: Experiment, folder: Path) -> list[Path]:
    """Draw an experiment's figures, one per table; returns the PNG files (SVG and PDF lie beside them). Unfinished runs, which
    have other samples, are left out.

    ``bytes``: values against persistent bytes, a line per method. ``axis``: values along the axes that are no panels. Experiments
    in :data:`evals.diagnostics.figures.FIGURES` have figures of their own, from whatever records are there.

    Raises:
        ValueError: another kind is asked for.
    """
    if experiment.name in diagnostics.FIGURES:
        return diagnostics.figures(experiment, folder)
    if experiment.figure is None:
        return []
    if experiment.figure not in KINDS:
        raise ValueError(f"experiment.figure={experiment.figure}: choose {' or '.join(KINDS)}")
    found = experiment.records()
    paths = []
    for name, _, cells in panels_of(experiment):
        seen = [(c, found[c.name]) for c in cells if c.name in found and found[c.name].done]
        if seen:
            paths.append(folder / f"{name}.png")
            save(_draw(experiment, seen), paths[-1])
    return paths


def _draw(experiment: Experiment, seen: Sequence[tuple[Cell, Record]]):
    values = (experiment.values or columns_of(seen[0][0].config))[:MOST]
    figure, axes = canvas(len(values))
    numbers = [(cell, summary(cell.config, record.rows)) for cell, record in seen]
    inner = [a for a in experiment.axes if a not in ("method", "budget", *experiment.panels)]
    for axis, value in zip(axes, values, strict=True):
        column = COLUMNS[value]
        series: dict[str, list[tuple]] = {}
        for cell, n in numbers:
            if n.get(value) is None:
                continue
            error = (n.get("stderr") if value == "score" else n.get(f"{value}_stderr")) or 0
            point = (n[value] * column.factor, error * column.factor)
            if experiment.figure == "bytes":
                line = ", ".join([cell.labels["method"], *(cell.labels[a] for a in inner)])
                series.setdefault(line, []).append((n["kv_bytes_peak"] / MIB, *point))
            else:
                line = f"{cell.labels['method']}, {cell.labels['budget']}"
                series.setdefault(line, []).append((", ".join(cell.labels[a] for a in inner), *point))
        (draw_bytes if experiment.figure == "bytes" else draw_steps)(axis, series, column.head)
        if value == "kl" and experiment.figure == "bytes":
            axis.set_yscale("symlog", linthresh=0.01)
            axis.set_ylim(bottom=0)
    return figure
