"""Figures of the diagnostics from records alone: :data:`FIGURES` says which experiment has which."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np

from evals.diagnostics.codecs import VARIANTS
from evals.diagnostics.metrics import TIERS
from evals.diagnostics.tables import cells as cells_of
from evals.experiment import Experiment
from evals.report import STYLES, save

TIER_COLORS = {"protected": "#999999", "full": "#0072B2", "promoted": "#CC79A7", "coded": "#56B4E9", "evicted": "#D55E00"}
LINES = ("-", "-.", ":")  # for curves that may cover each other
Cells = Mapping[str, tuple[Sequence[dict], dict]]  # label -> rows and numbers, as evals.diagnostics.tables.cells gives


def _figure(path: Path, draw: Callable, columns: int = 1, rows: int = 1, size: tuple[float, float] = (4.6, 3.3)) -> Path:
    """Written as ``path``, SVG and PDF."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(size[0] * columns, size[1] * rows), layout="constrained", squeeze=False)
    draw(figure, axes)
    save(figure, path, legend=False)
    return path


def _mean(rows: Sequence[dict], name: str) -> np.ndarray:
    """Mean over texts of a list that every row has (None: no number)."""
    return np.nanmean(np.array([r[name] for r in rows], dtype=float), 0)


def _smooth(x: np.ndarray, width: int) -> np.ndarray:
    """Moving mean over ``width`` steps (at most all of them), shorter at the ends."""
    kernel = np.ones(min(width, len(x)))
    return np.convolve(x, kernel, "same") / np.convolve(np.ones_like(x), kernel, "same")


def missed_and_tiers(cells: Cells, path: Path, stacked: str = "R3", width: int = 8) -> Path:
    """Figure 1: attention of the full cache that falls on evicted tokens, step by step; and its split by tier for ``stacked``, or
    for the first cell where that has no records."""
    stacked = stacked if stacked in cells else next(iter(cells))

    def draw(figure, axes):
        left, right = axes[0]
        for (color, _), (label, (rows, _)) in zip(STYLES, cells.items(), strict=False):
            left.plot(100 * _smooth(_mean(rows, "missed_by_step"), width), color=color, label=label, linewidth=1.2)
        left.set(xlabel="forced tokens", ylabel="missed attention mass (%)", ylim=(0, None))
        left.grid(alpha=0.3)
        left.legend(frameon=False, fontsize=8)
        rows = cells[stacked][0]
        shares, at = 100 * _mean(rows, "tier_shares_by_event").T, rows[0]["event_tokens"]
        order = list(TIER_COLORS)
        parts = [shares[TIERS.index(t)] for t in order]
        right.stackplot(at[: shares.shape[1]], parts, labels=order, colors=TIER_COLORS.values(), alpha=0.85)
        right.set(xlabel="forced tokens", ylabel=f"attention mass by tier, {stacked} (%)", ylim=(0, 100))
        right.margins(x=0)
        handles, labels = right.get_legend_handles_labels()
        right.legend(handles[::-1], labels[::-1], fontsize=8, loc="lower left")

    return _figure(path, draw, 2)


def drift(cells: Cells, path: Path, width: int = 64) -> Path:
    """Along long texts: missed mass, KL divergence, QSA, re-entries per event."""

    def draw(figure, axes):
        (missed, kl), (qsa, entries) = axes
        for (color, _), line, (label, (rows, _)) in zip(STYLES, cycle(LINES), cells.items(), strict=False):
            style = {"color": color, "linestyle": line, "label": label, "linewidth": 1.1}
            missed.plot(100 * _smooth(_mean(rows, "missed_by_step"), width), **style)
            kl.plot(_smooth(_mean(rows, "kl_by_token"), width), **style)
            at = rows[0]["event_tokens"]
            if "qsa_by_event" in rows[0]:
                qsa.plot(at, _mean(rows, "qsa_by_event"), **style)
                low = np.nanmin([r["qsa_by_event"] for r in rows], 0)
                qsa.fill_between(at, low, _mean(rows, "qsa_by_event"), color=color, alpha=0.15, linewidth=0)
            count = np.array([[r["reentries_at"].get(str(t), r["reentries_at"].get(t, 0)) for t in at] for r in rows], dtype=float)
            entries.plot(at, _smooth(count.mean(0), 8), **style)
        for axis, text in (
            (missed, f"missed attention mass (%), mean of {width} steps"),
            (kl, f"KL to the full cache (nat), mean of {width} steps"),
            (qsa, "QSA, mean and lowest text"),
            (entries, "re-entries per event and text"),
        ):
            axis.set(xlabel="forced tokens")
            axis.set_title(text, fontsize=10)
            axis.grid(alpha=0.3)
        missed.legend(frameon=False, fontsize=8)

    return _figure(path, draw, 2, 2)


def promotion(cells: Cells, path: Path) -> Path:
    """KL against FMM, an arrow per text from the first arm to each other; and the error that single changes of tier make."""

    def draw(figure, axes):
        left, right = axes[0]
        (first, (base, _)), *others = cells.items()
        by_id = {r["id"]: r for r in base}
        for (color, marker), (label, (rows, _)) in zip(STYLES[1:], others, strict=False):
            pairs = [(by_id[r["id"]]["kl"], r["kl"]) for r in rows if r["id"] in by_id]
            left.plot(*zip(*pairs, strict=True), color=color, marker=marker, linestyle="none", label=label, markersize=5)
        top = max(left.get_xlim()[1], left.get_ylim()[1])
        left.plot([0, top], [0, top], color="black", linewidth=0.8)
        left.set(xlabel=f"KL, {first} (nat)", ylabel="KL, other arm (nat)", xlim=(0, top), ylim=(0, top))
        left.legend(frameon=False, fontsize=8)
        left.grid(alpha=0.3)
        changes = cells[first][1].get("changes", {})
        kinds = [k for k in ("promoted", "demoted", "demoted_again", "evicted_code") if k in changes]
        place = np.arange(len(kinds))
        right.bar(place - 0.2, [100 * changes[k]["before"] for k in kinds], 0.4, label="before", color="#56B4E9")
        right.bar(place + 0.2, [100 * changes[k]["after"] for k in kinds], 0.4, label="after", color="#D55E00")
        right.set_xticks(place, [f"{k.replace('_', ' ')}\n{changes[k]['bytes']:+,.0f} B" for k in kinds], fontsize=8)
        right.set(ylabel="error of the window (% of the output)", title=f"changes of tier, {first}")
        right.legend(frameon=False, fontsize=8)

    return _figure(path, draw, 2)


def codec_errors(cells: Cells, path: Path) -> Path:
    """Errors of INT2 keys and INT2 values by layer and head; and of all codecs over their bits."""

    def draw(figure, axes):
        rows = [r for part, _ in cells.values() for r in part]
        heads = {side: 100 * np.mean([r["errors_by_head"][f"{side}2"] for r in rows], 0) for side in "KV"}
        top = max(x.max() for x in heads.values())
        for axis, (side, x) in zip(axes[0], heads.items(), strict=False):
            image = axis.imshow(x.T, aspect="auto", cmap="viridis", vmin=0, vmax=top)
            axis.set(
                xlabel="layer",
                ylabel="KV head",
                title=f"INT2 {'keys' if side == 'K' else 'values'}",
                yticks=range(x.shape[1]),
                xticks=range(0, len(x), 5),
            )
            figure.colorbar(image, ax=axis, label="error of the output (%)")
        axis = axes[0][2]
        kinds, named = {"both": (1, 1), "values alone": (0, 1), "keys alone": (1, 0)}, []
        for (color, marker), (label, sides) in zip(STYLES, kinds.items(), strict=False):
            names = [n for n, (k, v, *_) in VARIANTS.items() if (bool(k), bool(v)) == (bool(sides[0]), bool(sides[1]))]
            points = [(rows[0]["bits"][n], 100 * np.mean([r["errors"][n] for r in rows])) for n in names]
            axis.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle="none", label=label)
            for name, point in zip(names, points, strict=True):
                if any(abs(point[0] - x) < 2.2 and abs(point[1] - y) < 0.8 for x, y in named):
                    continue  # it would cover another name; the table has them all
                named.append(point)
                axis.annotate(name, point, fontsize=6, xytext=(4, 2), textcoords="offset points")
        axis.set(xlabel="bits per element, metadata included", ylabel="error of the output (%)", ylim=(0, None), xlim=(2, 12))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)

    return _figure(path, draw, 3, size=(4.4, 3.4))


FIGURES = {"figure1": missed_and_tiers, "table18": promotion, "drift": drift, "codec_errors": codec_errors}


def figures(experiment: Experiment, folder: Path) -> list[Path]:
    """Draw an experiment's figure from the cells that have records (a comparison needs two); returns the PNG files."""
    draw, cells = FIGURES[experiment.name], cells_of(experiment)
    return [draw(cells, folder / f"{experiment.sweep}.png")] if len(cells) > (draw is promotion) else []
