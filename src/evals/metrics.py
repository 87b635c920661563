"""From finished samples to the numbers of a run. Failed samples are counted, never scored as answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

from evals.stats import interval, stderr

EXTRA = ("strict", "flexible", "numeric", "rouge_overflow")  # scores that some benchmarks report beside the main one


def estimates(rows: Sequence[dict], names: Sequence[str], value: Callable[[dict, str], float | None] = dict.get) -> dict:
    """For each name the mean of the task means of a value that finished rows have, and ``NAME_interval``, its 95 % interval over
    rows; None where no row has it."""
    out = {}
    for name in names:
        by_task: dict[str, list[float]] = {}
        for r in rows:
            if r["status"] == "ok" and (x := value(r, name)) is not None:
                by_task.setdefault(r["task"], []).append(x)
        out[name] = mean(map(mean, by_task.values())) if by_task else None
        out[f"{name}_interval"] = interval(by_task)
    return out


def summarize(rows: Sequence[dict], categories: Mapping[str, str] | None = None) -> dict:
    """Scores (mean of the task means, with bootstrapped standard error and 95 % interval) and measurements of a run's rows.
    ``categories``: of each task; their means (of task means) are given too.

    Bytes are means over samples of each sample's peak; ratios are bytes over FullKV's bytes, the peak ratio is the highest
    that any sample reached at any step; times are medians, in ms.
    """
    good = [r for r in rows if r["status"] == "ok"]
    by_task: dict[str, list[float]] = {}
    per_task = {}
    for task in sorted({r["task"] for r in rows}):
        scores = [r["score"] for r in good if r["task"] == task]
        if scores:
            by_task[task] = scores
        failed = sum(r["task"] == task and r["status"] != "ok" for r in rows)
        per_task[task] = {
            "score": mean(scores) if scores else None,
            "stderr": stderr(scores),
            "n": len(scores),
            "n_failed": failed,
        }

    def of(name: str, reduce) -> float | None:
        values = [r[name] for r in good if r.get(name) is not None]
        return reduce(values) if values else None

    by_category: dict[str, list[float]] = {}
    for task, scores in by_task.items():
        if task in (categories or {}):
            by_category.setdefault(categories[task], []).append(mean(scores))
    return {
        "n": len(good),
        "n_failed": len(rows) - len(good),
        "score": mean(map(mean, by_task.values())) if by_task else None,
        "stderr": stderr(by_task),
        "interval": interval(by_task),
        "per_task": per_task,
        **({"per_category": {k: mean(v) for k, v in by_category.items()}} if by_category else {}),
        **{name: of(name, mean) for name in EXTRA if any(name in r for r in good)},
        "budget_bytes": of("budget_bytes", mean),
        "kv_bytes_peak": of("kv_bytes_peak", mean),
        "kv_bytes_final": of("kv_bytes_final", mean),
        "kv_ratio_peak": of("kv_ratio_peak", max),
        "kv_ratio_final": of("kv_ratio_final", mean),
        "budget_used_peak": of("budget_used_peak", max),
        "ttft_ms": of("ttft_ms", median),
        "tpot_ms": of("tpot_ms", median),
        "new_tokens": of("new_tokens", mean),
        "n_cut": sum(r.get("stopped") == "length" for r in good),
        "n_truncated": sum(r.get("prompt_cut", 0) > 0 for r in good),
    }
