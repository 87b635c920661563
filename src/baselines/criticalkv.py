"""CriticalKV: attention says who is looked at, the projected value norm says how much it matters (arXiv 2502.03805).

Half of the entries are chosen by the base score alone, the rest by ``(score + epsilon) * ||V W_o||_1``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.adakv import AdaKV
from baselines.snapkv import SnapKV
from qevict.policy import Candidates, rank_of


def two_stages(c: Candidates, first: Tensor, queries: int, epsilon: float) -> Tensor:
    """Priority ``[..., H, U]``: the best ``first [..., 1]`` candidates by score lead, then (score per query + epsilon) * norm."""
    score = (c.score / queries).masked_fill(~c.candidate, float("-inf"))
    return ((score + epsilon) * c.weight).masked_fill(rank_of(score) < first, float("inf"))


def check_stages(epsilon: float, first_stage: float) -> None:
    """Raise a ValueError for values that make no sense."""
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"method.epsilon={epsilon:g} must be 0 or more")
    if not 0 <= first_stage <= 1:
        raise ValueError(f"method.first_stage={first_stage:g} is outside [0, 1]")


@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """SnapKV's scores, weighed by values in a second stage.

    Args:
        epsilon: added to the score, so that large values count even where attention is small.
        first_stage: share of a head's entries (window included) chosen by the score alone.
    """

    epsilon: float = 1e-4
    first_stage: float = 0.5

    weighs_values = "at_event"

    def __post_init__(self):
        super().__post_init__()
        check_stages(self.epsilon, self.first_stage)

    def rank(self, c: Candidates) -> Tensor:
        first = (self.first_stage * (c.full + self.observe)).clamp_min(1).floor() - self.observe
        return two_stages(c, first, self.observe, self.epsilon)


@dataclass(frozen=True)
class AdaCriticalKV(AdaKV):
    """AdaKV's slots per head, filled as CriticalKV does. The safeguard's entries are chosen by the score alone as well."""

    epsilon: float = 1e-4
    first_stage: float = 0.5

    weighs_values = "at_event"

    def __post_init__(self):
        super().__post_init__()
        check_stages(self.epsilon, self.first_stage)

    def rank(self, c: Candidates) -> Tensor:
        safe = (self.alpha * (c.even + self.observe) + 1e-9).floor().clamp_min(1)
        first = torch.maximum(safe, (self.first_stage * (c.full + self.observe)).floor()) - self.observe
        return two_stages(c, first, self.observe, self.epsilon)
