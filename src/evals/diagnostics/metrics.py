"""The paper's diagnostics as pure functions of one text's attention mass and of where a policy held what.

Axis letters: N forced tokens (steps), E routing events, L layers, H KV heads, P places: the sinks together, then the units of
``window`` tokens in token order. ``mass [N, L, H, P]`` is the share of a step's attention on each place. ``time [E]`` is the number
of forced tokens that had passed at each event, ascending; 0 is the selection at the end of the prompt. ``tier [E, L, H, P]`` says
where a place was right after the event.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qevict.policy import rank_of

PROMOTED, PROTECTED, FUTURE = 3, 4, -1  # a full copy of a code; sinks, local region and units in progress; not yet there
TIERS = ("evicted", "coded", "full", "promoted", "protected")  # by their numbers


def missed_mass(mass: Tensor, missed: Tensor, tier: Tensor, time: Tensor, horizon: int) -> Tensor:
    """FMM_H: of the attention that the next ``horizon`` steps pay to places that exist at an event, the share on ``missed`` ones.

    ``missed [E, L, H, P]`` bool, usually ``tier == EVICTED``.

    Returns:
        ``[E', L, H]``; an event after the last step has no future and is left out.
    """
    out = []
    for e, t in enumerate(time.tolist()):
        if t < len(mass):
            ahead = mass[t : t + horizon].float().sum(0)
            out.append((ahead * missed[e]).sum(-1) / (ahead * (tier[e] != FUTURE)).sum(-1))
    return torch.stack(out)


def event_of_step(time: Tensor, steps: int) -> Tensor:
    """``[N]`` index of the last event before each step."""
    return torch.searchsorted(time, torch.arange(steps), right=True) - 1


def missed_by_step(mass: Tensor, missed: Tensor, tier: Tensor, time: Tensor) -> Tensor:
    """``[N]`` share of each step's attention to places of the last event that are ``missed``, mean over layers and heads."""
    out = []
    for step, e in zip(mass, event_of_step(time, len(mass)).tolist(), strict=True):
        step = step.float()
        out.append(((step * missed[e]).sum(-1) / (step * (tier[e] != FUTURE)).sum(-1)).mean())
    return torch.stack(out)


def tier_shares(mass: Tensor, tier: Tensor, time: Tensor) -> Tensor:
    """``[N, 5]`` share of each step's attention by tier, in the order of ``TIERS``, mean over layers and heads. What has come since
    the event is protected."""
    out = []
    for step, e in zip(mass, event_of_step(time, len(mass)).tolist(), strict=True):
        where = torch.where(tier[e] == FUTURE, PROTECTED, tier[e])
        out.append(torch.stack([(step.float() * (where == t)).sum(-1).mean() for t in range(len(TIERS))]))
    return torch.stack(out)


def churn(chosen: Tensor, tier: Tensor) -> Tensor:
    """Selection churn between neighbouring events: ``1 - |both| / |either|`` of the ``chosen [E, L, H, P]`` places.

    Only places that were in the history (neither protected nor still to come) at both events count, so that the steady slide of the
    local region is left out.

    Returns:
        ``[E - 1, L, H]``, NaN where nothing was chosen at either event.
    """
    history = (tier != PROTECTED) & (tier != FUTURE)
    both = history[:-1] & history[1:]
    before, after = chosen[:-1] & both, chosen[1:] & both
    return 1 - (before & after).sum(-1) / (before | after).sum(-1)


def collected(prompt: Tensor, mass: Tensor, time: Tensor) -> Tensor:
    """``[E, L, H, P]`` score of each place at each event: the prompt's ``[L, H, P]`` and the mass of all steps up to it."""
    out, total, done = [], prompt.float(), 0
    for t in time.tolist():
        total = total + mass[done:t].float().sum(0)
        done = t
        out.append(total)
    return torch.stack(out)


def agreement(own: Tensor, full: Tensor, coded: Tensor) -> Tensor:
    """QSA: cosine between scores of the coded places under the policy's own execution and under the full cache.

    All ``[E, L, H, P]``.

    Returns:
        ``[E, L, H]``, NaN where fewer than two places are coded (one number always agrees).
    """
    a, b = own * coded, full * coded
    cosine = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))
    return torch.where(coded.sum(-1) > 1, cosine, torch.nan)


def mass_on(mass: Tensor, chosen: Tensor, time: Tensor) -> Tensor:
    """``[L, H]`` attention that all steps pay to the places ``chosen [E, L, H, P]`` at their last event. RQ is this on the coded
    places under the policy's own execution, over this under the full cache."""
    total = torch.zeros(mass.shape[1:3])
    for step, e in zip(mass, event_of_step(time, len(mass)).tolist(), strict=True):
        total += (step.float() * chosen[e]).sum(-1)
    return total


@dataclass(frozen=True)
class Episodes:
    """Inactive episodes that were long enough: their number; of those that ended the lengths in events and in tokens, and ``when``
    (forced tokens that had passed)."""

    count: int
    events: tuple[int, ...]
    tokens: tuple[int, ...]
    when: tuple[int, ...]

    @property
    def rate(self) -> float | None:
        """Global LIR: share of the episodes that ended in the full tier."""
        return len(self.events) / self.count if self.count else None


def inactive_episodes(active: Tensor, candidate: Tensor, time: Tensor, least: int = 3) -> Episodes:
    """Runs of at least ``least`` events in which a candidate is not active. Those still open at the end count as not ended.

    ``active`` and ``candidate`` ``[E, ...]`` bool: in the full tier; in the history.
    """
    run = torch.zeros(active.shape[1:], dtype=torch.int64)
    start = torch.zeros_like(run)
    events, tokens, when, count = [], [], [], 0
    for e, t in enumerate(time.tolist()):
        ended = active[e] & (run >= least)
        count += int(ended.sum())
        events += run[ended].tolist()
        tokens += (t - start[ended]).tolist()
        when += [t] * int(ended.sum())
        idle = candidate[e] & ~active[e]
        start = torch.where(idle & (run == 0), t, start)
        run = torch.where(idle, run + 1, 0)
    return Episodes(count + int((run >= least).sum()), tuple(events), tuple(tokens), tuple(when))


def best(score: Tensor, candidate: Tensor, count: Tensor) -> Tensor:
    """The ``count [..., 1]`` candidates of the highest score, ``[..., P]`` bool."""
    return candidate & (rank_of(score.masked_fill(~candidate, float("-inf"))) < count)


def between(mass: Tensor, time: Tensor) -> Tensor:
    """``[E', L, H, P]`` mass of the steps between each event and the next; an event after the last step is left out."""
    ends = [*time.tolist()[1:], len(mass)]
    return torch.stack([mass[t:end].float().sum(0) for t, end in zip(time.tolist(), ends, strict=True) if t < len(mass)])


def ahead(mass: Tensor, time: Tensor, horizon: int) -> Tensor:
    """``[E, L, H, P]`` mass of the next ``horizon`` steps after each event: what a selection would have to know."""
    return torch.stack([mass[t : t + horizon].float().sum(0) for t in time.tolist()])


def by_group(score: Tensor, groups: int) -> Tensor:
    """Scores ``[..., H, P]`` averaged over the heads that choose together, given back to each of them."""
    heads = score.shape[-2]
    mean = score.unflatten(-2, (groups, heads // groups)).mean(-2)
    return mean.repeat_interleave(heads // groups, -2)
