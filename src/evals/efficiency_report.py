"""Tables and figures of efficiency runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evals.report import COLORS, MIB, STYLES, canvas, save

COLUMNS = ("cache", "budget", "tokens", "batch", "TTFT ms", "TPOT ms", "x best full", "tok/s", "attention ms", "routing", "KV MiB",
           "work MiB", "peak MiB")  # fmt: skip
MOST = ("most seq.", "tok/s there")  # where a largest batch was asked for


def _time(value: dict | None) -> str:
    """Median with quartiles."""
    if value is None:
        return "-"
    digits = 1 if value["median"] < 100 else 0
    return " ".join((f"{value['median']:.{digits}f}", f"[{value['q1']:.{digits}f}, {value['q3']:.{digits}f}]"))


def _number(value: float | None, form: str, unit: int = 1) -> str:
    return "-" if value is None else format(value / unit, form)


def lines(run: dict) -> list[tuple[str, ...]]:
    """A run's table lines, as text: its method, then every cache that ran beside it."""
    best = run["caches"].get(run["best_full"])
    out = []
    for name, cache in run["caches"].items():
        own, tpot = name == "method", cache["tpot_ms"]
        out.append((
            f"{run['method']} *" if own else name,
            run["budget_asked"] + (" grow" if run["decode"] == "grow" else "") if own else "-",
            f"{run['context']:,}",
            str(run["batch"]),
            _time(cache["ttft_ms"]),
            _time(tpot),
            _number(tpot and best and tpot["median"] / best["tpot_ms"]["median"], ".2f"),
            _number(cache["throughput_tok_s"], ".1f"),
            _time(cache["attention_ms"]),
            _number(run["routing_share"], ".1%") if own else "-",
            _number(cache["persistent_bytes"], ",.2f", MIB),
            _number(cache["workspace_bytes"], ",.2f", MIB),
            _number(cache["peak_bytes"], ",.0f", MIB),
        ))  # fmt: skip
        if run.get("memory_bytes"):
            out[-1] += (_number(cache["largest_batch"], ",.0f"), _number(cache["largest_batch_tok_s"], ".1f"))
    return out


def notes(runs: Sequence[dict]) -> list[str]:
    """What a reader of the table has to know, each thing once."""
    out = [
        "* the run's own method; medians [quartiles]; bytes are the batch's, peak with the weights, work the most of a decode step"
    ]
    for run in runs:
        own = run["method"] + (" and fullkv" if "fullkv" in run["caches"] else "")
        out.append(f"{own}: {run['cache_dtype']} in full precision; dynamic and packed caches: {run['model_dtype']}")
        card = run["card"]
        out.append(f"{card['clock']}, threads: {card['threads']}, workspace meter: {run['meter']}")
        out += [f"{run['method']}: decoded by backend {run['backend']}"]
        out += [f"{name} was skipped: {why}" for name, why in run.get("skipped", {}).items()]
        if run.get("random_weights"):
            out.append(f"{run['model']}: random weights, for time and bytes only")
        if run.get("memory_bytes"):
            out.append(f"most sequences in {run['memory_bytes'] / MIB:,.0f} MiB beside the weights: {run['largest_batch_how']}")
    return list(dict.fromkeys(out))


def show_efficiency(runs: Sequence[dict], title: str | None = None) -> None:
    """Print the table of finished efficiency runs (their ``metrics.json``), then what has to be known of it."""
    most = any(run.get("memory_bytes") for run in runs)
    table = Table(title=title, caption=escape("\n".join(notes(runs))), caption_justify="left")
    for name in (*COLUMNS, *(MOST if most else ())):
        table.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    for run in runs:
        for line in lines(run):
            table.add_row(*line)
        table.add_section()
    Console(width=None if Console().is_terminal else 200).print(table)


def curves(runs: Sequence[dict]) -> dict[str, list[tuple[int, dict]]]:
    """By cache, its points ``(context, line of the table)`` by ascending context. A cache that runs beside several methods is
    taken from the first of them."""
    out: dict[str, dict[int, dict]] = {}
    for run in runs:
        for name, cache in run["caches"].items():
            if cache["tpot_ms"]:
                what = f"{run['method']}, {run['budget_asked']}" if name == "method" else name
                out.setdefault(what, {}).setdefault(run["context"], cache)
    return {name: sorted(points.items()) for name, points in out.items()}


def figure_growth(runs: Sequence[dict], path: Path) -> None:
    """Time per token (with quartiles) and persistent bytes against context, a line per cache."""
    figure, axes = canvas(2)
    for (name, points), (color, marker) in zip(curves(runs).items(), STYLES * 9, strict=False):
        x, times = [tokens for tokens, _ in points], [cache["tpot_ms"] for _, cache in points]
        error = [[max(0, t["median"] - t["q1"]) for t in times], [max(0, t["q3"] - t["median"]) for t in times]]
        style = {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.2, "label": name}
        axes[0].errorbar(x, [t["median"] for t in times], error, capsize=3, **style)
        axes[1].plot(x, [cache["persistent_bytes"] / MIB for _, cache in points], **style)
    for axis, what in zip(axes, ("time per token (ms)", "persistent KV bytes (MiB)"), strict=True):
        axis.set(xscale="log", xlabel="context (tokens)", ylabel=what)
        axis.set_xticks(sorted({run["context"] for run in runs}))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.grid(alpha=0.3)
    axes[0].set_ylim(bottom=0)
    axes[1].set_yscale("log")
    axes[1].yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    save(figure, path)


def figure_memory(runs: Sequence[dict], path: Path) -> None:
    """Largest batch and throughput there, a bar per cache, in the same bytes."""
    bars: dict[str, dict] = {}
    for run in runs:
        for name, cache in run["caches"].items():
            if cache["largest_batch"] is not None:
                bars.setdefault(f"{run['method']}, {run['budget_asked']}" if name == "method" else name, cache)
    figure, axes = canvas(2)
    fields = {"largest_batch": "largest batch (sequences)", "largest_batch_tok_s": "throughput there (tok/s)"}
    for axis, (field, what) in zip(axes, fields.items(), strict=True):
        drawn = axis.barh(list(bars), [cache[field] or 0 for cache in bars.values()], color=COLORS[2])
        axis.bar_label(drawn, fmt="{:,.0f}", padding=3)
        axis.set(xlabel=what)
        axis.margins(x=0.2)
        axis.invert_yaxis()
    axes[1].tick_params(labelleft=False)
    save(figure, path)
