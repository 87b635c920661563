"""AdaKV: the heads of a layer share its slots by how concentrated their attention is (arXiv 2407.11550, Ada-SnapKV).

Scores are SnapKV's. The best entries of a layer, whatever their head, decide how many slots each head gets; a safeguard keeps
a share for every head. The authors' code and kvpress differ in the safeguard, see ``safeguard``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baselines.snapkv import SnapKV
from qevict.allocation import best_per_head, exact_sum
from qevict.policy import Candidates, rank_of


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV with slots shared among the heads of a layer.

    Args:
        alpha: share of a head's even part that it always keeps (kvpress 0.2; the authors' function 0.5, their scripts 0.2).
        safeguard: ``window`` counts the observation window into the kept share (kvpress); ``prefix`` keeps that many entries
            beyond the window (the authors' later code); ``blend`` mixes the even part with the shares of the best entries
            (the authors' first code, rounded by largest remainder so that the layer's total is exact).
    """

    alpha: float = 0.2
    safeguard: str = "window"

    shares = "heads"

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"method.alpha={self.alpha:g} is outside [0, 1]")
        if self.safeguard not in ("window", "prefix", "blend"):
            raise ValueError(f"method.safeguard={self.safeguard!r}: choose window, prefix or blend")

    def allocate(self, c: Candidates) -> Tensor:
        """Slots per head, ``[..., H, 1]``, summing to ``H * even``."""
        full, heads = c.even, c.score.shape[-2]
        keep = (self.alpha * (full + self.observe) + 1e-9).floor() - (self.observe if self.safeguard == "window" else 0)
        keep = torch.zeros_like(keep) if self.safeguard == "blend" else torch.minimum(keep.clamp_min(0), full)
        score = c.score.masked_fill(~c.candidate, float("-inf"))
        score = score.masked_fill(c.candidate & (rank_of(score) < keep), float("inf"))
        share = best_per_head(score, c.candidate, heads * full)
        if self.safeguard == "blend":
            share = share * (1 - self.alpha) + (self.alpha * full).floor()
        return exact_sum(share, heads * full)
