"""How a policy routes, held against the full cache's attention on the same forced tokens: the paper's diagnostics, text by text.

The full cache's trace is made once per text and kept in the user's cache (:mod:`evals.diagnostics.trace`); every policy is then
replayed on the same tokens with its own execution, its quantized attention feeding its own scores, so that all comparisons are
paired. Closeness to the full cache (KL divergence and so on) comes from the same pass. Texts are those of ``task=fidelity``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from evals.benchmark import Item, Session
from evals.diagnostics import metrics, trace
from evals.diagnostics.metrics import FUTURE, PROMOTED, PROTECTED
from evals.diagnostics.shadow import Shadow
from evals.diagnostics.texts import recall_text
from evals.fidelity import Fidelity
from evals.fidelity import Trace as Predictions
from evals.metrics import estimates
from evals.stats import interval
from qevict.budget import Budget
from qevict.hf.cache import TierCache
from qevict.policy import CODED, EVICTED, FULL
from qevict.quantizer import Quantizer

# Values of a text that a run's summary gives the mean and the interval of.
VALUES = (
    "fmm", "fmm_full_only", "fmm_oracle", "fmm_hindsight", "churn", "churn_full", "qsa", "qsa_first", "qsa_last", "qsa_fresh",
    "mass_ratio", "mass_ratio_pooled", "lir", "lir_oracle", "ttr_events", "ttr_tokens",
)  # fmt: skip
MIB = 1024 * 1024


@dataclass(frozen=True)
class Mechanism(Fidelity):
    """Diagnostics of routing on forced tokens. Beside the texts of ``task=fidelity`` there is ``recall``: told early, asked late.

    Args:
        horizon: steps after a routing event that count for its missed mass (H).
        least: routing events that make an inactive episode (m).
        grain: tokens that a trace stores as one; divides the method's window (1 for token-level methods).
        changes: also measure what each change of tier does to the attention output.
    """

    horizon: int = 32
    least: int = 3
    grain: int = 8
    changes: bool = True

    name: ClassVar[str] = "mechanism"

    def __post_init__(self):
        super().__post_init__()
        for field in ("horizon", "least", "grain"):
            if getattr(self, field) < 1:
                raise ValueError(f"task.{field}={getattr(self, field)}: it has to be 1 or more")
        object.__setattr__(self, "horizon", min(self.horizon, self.forced))  # the card says which it was

    def _texts(self, source: str) -> list[str]:
        if source == "recall":
            return [recall_text(i, self.context, self.forced) for i in range(self.n)]
        return super()._texts(source)

    # -- traces ---------------------------------------------------------------------------------------------------------

    def _path(self, session: Session, ids: list[int]) -> Path:
        return trace.path_of(trace.digest_of(session.model), ids, self.context, self.grain)

    def meter(self, session: Session, items: Sequence[Item]) -> dict[str, int | None]:
        """Nothing is measured: a method that cannot be watched is refused, what will be written to the user's cache is told."""
        policy = session.new_cache(session.budget).policy
        if isinstance(policy, Quantizer):
            raise ValueError(f"task=mechanism watches tiers, {type(policy).__name__} has none: use task=fidelity")
        trace.check_grain(self.grain, policy.window)
        missing = [p for p in (self._path(session, item.payload[1]) for item in items) if not trace.there(p)]
        if missing:
            size = trace.nbytes(session.model.config.get_text_config(), self.context, self.forced, self.grain) / MIB
            print(
                f"{len(missing)} traces of {size:.1f} MiB ({len(missing) * size:.0f} MiB in all) go to {missing[0].parent}",
                file=sys.stderr,
            )
        return super().meter(session, items)

    def _traces(self, session: Session, ids: Tensor) -> list[trace.Trace]:
        """Of a batch of texts ``ids [B, context + forced + 1]``; those that are missing are made."""
        paths = [self._path(session, row) for row in ids.tolist()]
        missing = [i for i, p in enumerate(paths) if not trace.there(p)]
        if missing:
            trace.make(session.model, ids[missing], self.context, self.grain, self._forced, [paths[i] for i in missing])
        return [trace.load(p, self.context, self.grain) for p in paths]

    def _reference(self, session: Session, ids: Tensor) -> Predictions:
        traces = self._traces(session, ids)
        with torch.inference_mode():
            hidden = torch.stack([t.hidden for t in traces]).to(ids.device, session.model.dtype)
            said = session.model.get_output_embeddings()(hidden).float().log_softmax(-1)
        return Predictions(said, torch.stack([t.attention for t in traces], 1).float().to(ids.device))

    # -- work -----------------------------------------------------------------------------------------------------------

    def _batch(self, session: Session, items: Sequence[Item]) -> list[dict]:
        shadows: list[Shadow] = []

        def watched(budget: Budget) -> TierCache:
            cache = session.new_cache(budget)
            shadows.append(Shadow(cache, self.context, self.forced, self.changes))
            return cache

        rows = super()._batch(replace(session, new_cache=watched), items)
        traces = self._traces(session, torch.tensor([item.payload[1] for item in items]))
        return [row | self.diagnose(t, shadows[0], i) for i, (row, t) in enumerate(zip(rows, traces, strict=True))]

    def diagnose(self, reference: trace.Trace, shadow: Shadow, row: int) -> dict:
        """All diagnostics of one text."""
        policy, store = shadow.cache.policy, shadow.cache.store
        mass, prompt = reference.places(policy.window, store.sink.shape[-2])
        own = torch.stack([m[row] for m in shadow.mass]).unflatten(0, (self.forced, -1))
        tier, time = torch.stack([t[:, row] for t in shadow.tier]), torch.tensor(shadow.time)
        evicted, coded, full = tier == EVICTED, tier == CODED, (tier == FULL) | (tier == PROMOTED)
        history = (tier != PROTECTED) & (tier != FUTURE)
        missed = metrics.missed_mass(mass, evicted, tier, time, self.horizon)
        wanted = metrics.by_group(metrics.collected(prompt, mass, time), store.full.groups)
        later = metrics.by_group(metrics.ahead(mass, time, self.horizon), store.full.groups)
        kept, in_full = ((coded | full).sum(-1, keepdim=True), full.sum(-1, keepdim=True))

        def missed_by(score: Tensor) -> float:
            return _mean(metrics.missed_mass(mass, history & ~metrics.best(score, history, kept), tier, time, self.horizon))

        shares = metrics.tier_shares(mass, tier, time)
        out = {
            "fmm": _mean(missed),
            "fmm_by_layer": _rounded(missed.mean((0, 2))),
            "fmm_by_event": _rounded(missed.mean((1, 2))),
            "fmm_full_only": _mean(metrics.missed_mass(mass, evicted | coded, tier, time, self.horizon)),
            "fmm_oracle": missed_by(wanted),
            "fmm_hindsight": missed_by(later),
            "missed_by_step": _rounded(metrics.missed_by_step(mass, evicted, tier, time)),
            "tier_shares": dict(zip(metrics.TIERS, _rounded(shares.mean(0)), strict=True)),
            "tier_shares_by_event": self._by_event(shares, time),
            "event_tokens": time.tolist(),
            "churn": _mean(metrics.churn(coded | full, tier)),
            "churn_full": _mean(metrics.churn(full, tier)),
            "held_tokens": {n: float((tier == i).sum(-1).float().mean()) * policy.window for i, n in enumerate(metrics.TIERS)},
        }
        apart = slice(None, None, tier.shape[2] // store.full.groups)  # heads that choose together count once
        for suffix, active in (("", full), ("_oracle", metrics.best(wanted, history, in_full))):
            out |= self._episodes(suffix, active[:, :, apart], history[:, :, apart], time)
        if store.codec is not None:
            out |= self._agreement(mass, own, prompt, coded, time)
        if shadow.changes:
            out["changes"] = self._changes(shadow, row)
        return out

    def _by_event(self, shares: Tensor, time: Tensor) -> list[list[float]]:
        """Shares of the tiers between one event and the next, in the order of ``TIERS``."""
        at = metrics.event_of_step(time, len(shares))
        return [_rounded(shares[at == e].mean(0)) for e in range(len(time)) if bool((at == e).any())]

    def _episodes(self, suffix: str, active: Tensor, history: Tensor, time: Tensor) -> dict:
        found = metrics.inactive_episodes(active, history, time, self.least)
        ended = torch.tensor([found.events, found.tokens]).float()
        return {
            f"lir{suffix}": found.rate,
            f"episodes{suffix}": found.count,
            f"reentries{suffix}": len(found.events),
            f"reentries{suffix}_by_length": dict(sorted(Counter(found.events).items())),  # in events
            f"reentries{suffix}_at": dict(sorted(Counter(found.when).items())),  # forced tokens
            f"ttr_events{suffix}": float(ended[0].median()) if ended.numel() else None,
            f"ttr_tokens{suffix}": float(ended[1].median()) if ended.numel() else None,
        }

    def _agreement(self, mass: Tensor, own: Tensor, prompt: Tensor, coded: Tensor, time: Tensor) -> dict:
        qsa = metrics.agreement(metrics.collected(prompt, own, time), metrics.collected(prompt, mass, time), coded)
        fresh = [metrics.between(m, time) for m in (own, mass)]
        on_codes = [metrics.mass_on(m, coded, time) for m in (own, mass)]
        ratio = on_codes[0] / on_codes[1]
        return {
            "qsa": _mean(qsa),
            "qsa_first": _mean(qsa[0]),
            "qsa_last": _mean(qsa[-1]),
            "qsa_fresh": _mean(metrics.agreement(*fresh, coded[: len(fresh[0])])),
            "qsa_by_event": _rounded(qsa.nanmean((1, 2))),
            "qsa_by_head": [_rounded(x) for x in qsa.nanmean(0)],  # [layers][KV heads]
            "mass_ratio": _mean(ratio),
            "mass_ratio_pooled": _mean(on_codes[0].sum() / on_codes[1].sum()),
            "mass_ratio_by_head": [_rounded(x) for x in ratio],
        }

    def _changes(self, shadow: Shadow, row: int) -> dict:
        """Means over changes of tier, and the bytes that one of them costs (negative: frees)."""
        policy, g = shadow.cache.policy, shadow.cache.geometry
        costs = policy.costs(g, 0)
        groups = policy.groups(g)
        full, code = costs.full_unit // groups, costs.code_unit // groups
        price = {"promoted": full, "demoted": code - full, "demoted_again": -full, "evicted_full": -full, "evicted_code": -code}
        price["evicted_promoted"] = -full - code
        return {
            name: {"n": int(s["n"]), "before": s["before"] / s["n"], "after": s["after"] / s["n"], "bytes": price[name]}
            for name, s in shadow.changes[row].items()
        }

    # -- numbers --------------------------------------------------------------------------------------------------------

    def summary(self, rows: Sequence[dict]) -> dict:
        """Fidelity's numbers, and means (of the sources' means) of the diagnostics with 95 % intervals over texts."""
        good = [r for r in rows if r["status"] == "ok"]
        known = [n for n in VALUES if any(r.get(n) is not None for r in good)]
        return super().summary(rows) | estimates(good, known) | pooled(good)

    def card(self) -> dict:
        return super().card() | {"horizon": self.horizon, "least": self.least, "grain": self.grain}


def pooled(rows: Sequence[dict]) -> dict:
    """What is counted over all texts together: episodes and re-entries, the extreme layers and heads of QSA, changes of tier."""
    out: dict = {}
    for suffix in ("", "_oracle"):
        if any(f"episodes{suffix}" in r for r in rows):
            lengths = [int(k) for r in rows for k, n in r[f"reentries{suffix}_by_length"].items() for _ in range(n)]
            out[f"episodes{suffix}"] = sum(r[f"episodes{suffix}"] for r in rows)
            out[f"reentries{suffix}"] = len(lengths)
            out[f"ttr{suffix}_pooled"] = median(lengths) if lengths else None
    by_head = [r["qsa_by_head"] for r in rows if "qsa_by_head" in r]
    if by_head:
        heads = torch.from_numpy(np.array(by_head, dtype=float)).nanmean(0)  # None became NaN
        layers = heads.nanmean(1)
        out |= {
            "qsa_lowest_layer": float(layers.nan_to_num(torch.inf).min()),
            "qsa_highest_layer": float(layers.nan_to_num(-torch.inf).max()),
            "qsa_lowest_head": float(heads.nan_to_num(torch.inf).min()),
        }
    changed = [r["changes"] for r in rows if "changes" in r]
    if changed:
        out["promotions"] = sum(c.get("promoted", {"n": 0})["n"] for c in changed)
        out["changes"] = {}
        for name in sorted({n for c in changed for n in c}):
            mine = [c[name] for c in changed if name in c]
            gains = [c["before"] - c["after"] for c in mine]  # of a text's mean change
            out["changes"][name] = {
                "n": sum(c["n"] for c in mine),
                **{k: mean(c[k] for c in mine) for k in ("before", "after", "bytes")},
                "benefit": mean(gains),
                "benefit_interval": interval(gains),
            }
    return out


def _mean(x: Tensor) -> float | None:
    """Mean of what is a number; None if nothing is."""
    value = float(x.nanmean())
    return None if value != value else value


def _rounded(x: Tensor) -> list[float | None]:
    """For records: five digits, None for what is no number."""
    return [None if v != v else round(v, 5) for v in x.tolist()]
