"""The printed table of finished runs, and figures: colours, marks and files that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

MIB = 1024 * 1024
# Okabe and Ito's colours, distinguishable for colour-blind readers (yellow is too pale for print), with a marker each; later rounds
# have other markers, so that all methods of a table differ.
COLORS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2")
STYLES = tuple(zip(COLORS * 3, "os^DvPXhp<*>8d+x1234H", strict=True))
LINES = [line for line in ("-", "--", ":") for _ in COLORS]  # a colour's second and third line look otherwise


def _score(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" ±{error:.2f}" if error is not None else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def show(rows: Sequence[dict], title: str | None = None) -> None:
    """Print one line per run: scores with standard error, measured bytes and times."""
    tasks = sorted({t for r in rows for t in r["per_task"]})
    divergence = ["KL"] * any("kl" in r for r in rows)  # of tasks on forced tokens, whose score is the share of same top tokens
    table = Table(title=title)
    for name in ("method", "budget", *tasks, "mean", *divergence, "n", "failed", "kv ratio", "KV MiB", "TTFT ms", "TPOT ms"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for r in rows:
        cells = [r["per_task"].get(t, {}) for t in tasks]
        table.add_row(
            r["method"],
            r["budget_asked"] + (" grow" if r["decode"] == "grow" else ""),
            *(_score(c.get("score"), c.get("stderr")) for c in cells),
            _score(r["score"], r["stderr"]),
            *(_number(r.get("kl"), ".4f") for _ in divergence),
            str(r["n"]),
            str(r["n_failed"]),
            _number(r["kv_ratio_peak"], ".3f"),
            _number(r["kv_bytes_peak"] and r["kv_bytes_peak"] / MIB, ".2f"),
            _number(r["ttft_ms"], ".0f"),
            _number(r["tpot_ms"], ".0f"),
        )
    Console(width=None if Console().is_terminal else 160).print(table)


def figure_score_bytes(rows: Sequence[dict], path: Path) -> None:
    """Score against persistent bytes, a line per method, bars of one standard error. Written as ``path``, SVG and PDF."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    for r in rows:
        if r["score"] is not None:
            series.setdefault(r["method"], []).append((r["kv_bytes_peak"] / MIB, r["score"], r["stderr"] or 0))
    figure, (axis,) = canvas(1)
    draw_bytes(axis, series, "score")
    axis.set_ylim(-0.04, 1.04)
    save(figure, path)


def canvas(panels: int):
    """A figure with so many axes side by side, and these."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, panels, figsize=(1.6 + 3.8 * panels, 3.4), layout="constrained", squeeze=False)
    return figure, tuple(axes[0])


def draw_bytes(axis, series: Mapping[str, Sequence[tuple[float, float, float]]], ylabel: str) -> None:
    """A value against persistent bytes: by line, points ``(MiB, value, standard error)``."""
    for (name, points), (color, marker), line in zip(series.items(), STYLES * 9, LINES * 9, strict=False):
        x, y, error = zip(*sorted(points), strict=True)
        axis.errorbar(x, y, error, color=color, marker=marker, ls=line, markersize=5, capsize=3, label=name, linewidth=1.2)
    axis.set(xscale="log", xlabel="persistent KV bytes per sequence (MiB, peak)", ylabel=ylabel)
    axis.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.grid(alpha=0.3)


def draw_steps(axis, series: Mapping[str, Sequence[tuple[str, float, float]]], ylabel: str) -> None:
    """A value for each of a few settings: by line, points ``(setting, value, standard error)``, settings in the given order."""
    order = list(dict.fromkeys(x for points in series.values() for x, _, _ in points))
    for (name, points), (color, marker), line in zip(series.items(), STYLES * 9, LINES * 9, strict=False):
        x, y, error = zip(*points, strict=True)
        places = [order.index(v) for v in x]
        axis.errorbar(places, y, error, color=color, marker=marker, ls=line, markersize=5, capsize=3, label=name, linewidth=1.2)
    axis.set_xticks(range(len(order)), order)
    axis.set(ylabel=ylabel)
    axis.margins(x=0.1)
    axis.grid(alpha=0.3)


def save(figure, path: Path, legend: bool = True) -> None:
    """Write a figure as ``path`` (PNG), SVG and PDF, without dates: the same numbers give the same files.

    Args:
        legend: add that of the first axes beside them.
    """
    from matplotlib import pyplot

    if legend:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem, "pdf.fonttype": 42}):
        figure.savefig(path, dpi=150)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
    pyplot.close(figure)
