"""Seeded bootstrap of a mean of task means, and of the difference between two runs on the same items.

A group of n values is drawn n - 1 at a time: the variance of the drawn means is then that of the mean without bias, also for
the few values of a short run (Rao and Wu, JASA 1988)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

ROUNDS, SEED, LEVEL = 2000, 0, 0.95


def _means(groups: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """``[ROUNDS]`` mean of the groups' means, each group drawn anew with replacement."""
    return np.mean([g[rng.integers(0, len(g), (ROUNDS, len(g) - 1))].mean(-1) for g in groups], 0)


def _drawn(groups: Mapping[str, Sequence[float]] | Sequence[float]) -> np.ndarray | None:
    """Drawn means of values that may be given by task; None below two values in a task."""
    parts = list(groups.values()) if isinstance(groups, Mapping) else [groups]
    parts = [np.asarray(p, dtype=float) for p in parts]
    if not parts or min(len(p) for p in parts) < 2:
        return None
    return _means(parts, np.random.default_rng(SEED))


def _inner(drawn: np.ndarray) -> tuple[float, float]:
    return tuple(np.quantile(drawn, ((1 - LEVEL) / 2, (1 + LEVEL) / 2)).tolist())


def interval(groups: Mapping[str, Sequence[float]] | Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean (of the task means, if values are given by task); None below two values in a task."""
    means = _drawn(groups)
    return None if means is None else _inner(means)


def stderr(groups: Mapping[str, Sequence[float]] | Sequence[float]) -> float | None:
    """Standard error of the same mean; None below two values in a task."""
    means = _drawn(groups)
    return None if means is None else float(means.std())


def paired(a: Mapping[str, Mapping[str, float]], b: Mapping[str, Mapping[str, float]]) -> dict:
    """Difference ``b - a`` of two runs over the items that both have.

    Args:
        a, b: values by task and item id.

    Returns:
        ``n`` items compared, ``only_a`` and ``only_b`` left out, ``a`` and ``b`` (means of task means), ``difference`` and its
        95 % ``interval``, ``ratio`` ``b / a`` and its ``ratio_interval`` (intervals None below two items in a task; of values that
        are not all positive there is no ratio).

    Raises:
        ValueError: the runs have no item in common.
    """
    common = {t: sorted(a[t].keys() & b[t].keys()) for t in sorted(a.keys() & b.keys())}
    common = {t: ids for t, ids in common.items() if ids}
    if not common:
        raise ValueError("the two runs have no sample in common: compare runs of the same task, length, n, seed, preset and shots")
    count = sum(len(ids) for ids in common.values())
    first, second = ({t: [x[t][i] for i in ids] for t, ids in common.items()} for x in (a, b))
    deltas = {t: np.subtract(second[t], first[t]) for t in common}
    mean_a, mean_b = (float(np.mean([np.mean(v) for v in x.values()])) for x in (first, second))
    positive = min(min(v) for x in (first, second) for v in x.values()) > 0
    drawn = (_drawn(first), _drawn(second)) if positive else (None, None)  # the same items in both, by the same seed
    return {
        "n": count,
        "only_a": sum(len(v) for v in a.values()) - count,
        "only_b": sum(len(v) for v in b.values()) - count,
        "a": mean_a,
        "b": mean_b,
        "difference": float(np.mean([np.mean(d) for d in deltas.values()])),
        "interval": interval(deltas),
        "ratio": mean_b / mean_a if positive else None,
        "ratio_interval": None if drawn[0] is None else _inner(drawn[1] / drawn[0]),
    }
