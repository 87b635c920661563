"""Tables and figures from the metrics of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

MIB = 1024 * 1024
# Okabe and Ito's colours, distinguishable for colour-blind readers, with a marker each for print.
STYLES = (("#000000", "o"), ("#E69F00", "s"), ("#56B4E9", "^"), ("#009E73", "D"), ("#D55E00", "v"), ("#CC79A7", "P"))


def _score(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + (f" ±{error:.2f}" if error is not None else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def show(rows: Sequence[dict], title: str | None = None) -> None:
    """Print one line per run: scores with standard error, measured bytes and times."""
    tasks = sorted({t for r in rows for t in r["per_task"]})
    table = Table(title=title)
    for name in ("method", "budget", *tasks, "mean", "n", "failed", "kv ratio", "KV MiB", "TTFT ms", "TPOT ms"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for r in rows:
        cells = [r["per_task"].get(t, {}) for t in tasks]
        table.add_row(
            r["method"],
            r["budget_asked"] + (" grow" if r["decode"] == "grow" else ""),
            *(_score(c.get("score"), c.get("stderr")) for c in cells),
            _score(r["score"], r["stderr"]),
            str(r["n"]),
            str(r["n_failed"]),
            _number(r["kv_ratio_peak"], ".3f"),
            _number(r["kv_bytes_peak"] and r["kv_bytes_peak"] / MIB, ".2f"),
            _number(r["ttft_ms"], ".0f"),
            _number(r["tpot_ms"], ".0f"),
        )
    Console(width=None if Console().is_terminal else 160).print(table)


def figure_score_bytes(rows: Sequence[dict], path: Path) -> None:
    """Score against persistent bytes, a line per method, bars of one standard error. Written as ``path`` and as SVG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5.2, 3.6), layout="constrained")
    methods = list(dict.fromkeys(r["method"] for r in rows if r["score"] is not None))
    for index, method in enumerate(methods):
        color, marker = STYLES[index % len(STYLES)]
        points = sorted(
            (r["kv_bytes_peak"] / MIB, r["score"], r["stderr"] or 0)
            for r in rows
            if r["method"] == method and r["score"] is not None
        )
        x, y, error = zip(*points, strict=True)
        axis.errorbar(x, y, error, color=color, marker=marker, capsize=3, label=method, linewidth=1.2)
    axis.set(xscale="log", xlabel="persistent KV bytes per sequence (MiB, peak)", ylabel="score", ylim=(-0.04, 1.04))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
    figure.savefig(path.with_suffix(".svg"))
    pyplot.close(figure)
