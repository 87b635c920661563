"""DefensiveKV: guard against the worst case instead of the average (arXiv 2510.13334), after FFY0/DefensiveKV@9251b95.

Risk of a token: the highest attention that any query of the observation window and any head of the query group pays to it,
smoothed, and at least the head's mean (prior risk). It is weighed by the token's projected value norm relative to the other
heads'. A first stage keeps, by plain attention mass, the entries that together hold ``mass`` of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baselines.snapkv import SnapKV, in_order
from qevict.allocation import among_heads, among_layers
from qevict.budget import Budget, Geometry, Layout
from qevict.policy import Candidates, PromptView, rank_of


@dataclass(frozen=True)
class DefensiveKV(SnapKV):
    """Slots are shared by the heads of a layer.

    Args:
        mass: share of a head's attention that the first stage holds, before the bias is taken off (tau).
        bias: what is taken off: attention on the ``prefix`` keys just before the window (the authors' code) or on the
            ``window`` itself (their intent).
    """

    mass: float = 0.9
    bias: str = "prefix"

    shares = "heads"
    weighs_values = "at_arrival"
    channels = ("score", "peak")

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.mass <= 1:
            raise ValueError(f"method.mass={self.mass:g} is outside (0, 1]")
        if self.bias not in ("prefix", "window"):
            raise ValueError(f"method.bias={self.bias!r}: choose prefix or window")

    def smooth(self, peak: Tensor, token: Tensor) -> Tensor:
        """Pooled along the last axis; each row keeps its sum. ``token`` is False on what is none (padding, free slots)."""
        pooled = self.pool(peak) * token
        return pooled * (peak.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp_min(torch.finfo(peak.dtype).tiny))

    def prompt_scores(self, view: PromptView) -> dict[str, Tensor]:
        prefix = max(0, view.length - self.observe)
        rows = torch.arange(prefix, view.length, device=view.k.device)
        attention = view.attention(rows)
        score = attention.sum(-2).mean(2)
        if prefix:
            attention[..., :prefix] = self.smooth(attention[..., :prefix], view.real[:, None, None, None, :prefix])
        return {"score": score, "peak": attention.amax((2, 3))}

    def value_weight(self, norm: Tensor) -> Tensor:
        """A token's norm in each KV head as a share of all heads'."""
        return norm / norm.sum(1, keepdim=True).clamp_min(torch.finfo(norm.dtype).tiny)

    def refresh(self, c: Candidates) -> Candidates:
        held = (c.unit >= 0).sum(-1, keepdim=True)  # in order, free slots come first
        token = torch.arange(c.unit.shape[-1], device=c.unit.device) >= c.unit.shape[-1] - held
        return replace(c, peak=in_order(lambda peak: self.smooth(peak, token), c.peak, c.unit))

    def rank(self, c: Candidates) -> Tensor:
        """Risk times weight; the first stage and the newest ``observe`` tokens share the layer's highest value."""
        newest = c.unit.amax((-2, -1), keepdim=True)
        held, recent = c.unit >= 0, c.unit > newest - self.observe
        prefix = c.candidate & ~recent
        count = prefix.sum(-1, keepdim=True)
        floor = (c.peak * prefix).sum(-1, keepdim=True) / count.clamp_min(1)
        risk = (torch.maximum(c.peak, floor) * c.weight.float()).masked_fill(~prefix, float("-inf"))
        # first stage: the largest masses, up to but without the one that reaches tau
        score = c.score.masked_fill(~prefix, 0)
        ordered, _ = score.sort(dim=-1, descending=True, stable=True)
        share = ordered.cumsum(-1) / ordered.sum(-1, keepdim=True).clamp_min(torch.finfo(score.dtype).tiny)
        reached = share >= self.mass - self._bias(c, held, recent, newest)
        first = torch.where(reached.any(-1, keepdim=True), reached.to(torch.uint8).argmax(-1, keepdim=True), 0)
        mean = count.float().mean((-2, -1), keepdim=True)  # prefix tokens per head
        window = self.observe * (c.candidate & recent).any()
        kept = c.even + self.observe - window  # slots per head, the window's included
        limit = (mean * kept / (mean + self.observe) - self.observe + 1e-4).floor().clamp_min(0)
        chosen = prefix & (rank_of(score.masked_fill(~prefix, -1)) < torch.minimum(first, limit))
        top = risk.amax((-2, -1), keepdim=True)
        top = torch.where(top.isfinite(), top, 0)
        return torch.where(chosen | (c.candidate & recent), top, risk)

    def _bias(self, c: Candidates, held: Tensor, recent: Tensor, newest: Tensor) -> Tensor:
        """``[..., 1, 1]`` share of attention, mean over heads, that the threshold is lowered by."""
        near = recent if self.bias == "window" else (c.unit > newest - 2 * self.observe) & ~recent
        part, whole = ((c.score * m).sum(-1, keepdim=True) for m in (near & held, held))
        return (part / whole.clamp_min(torch.finfo(c.score.dtype).tiny)).mean(-2, keepdim=True)

    def allocate(self, c: Candidates) -> Tensor:
        """Slots per head: how many of the layer's best entries it has."""
        return among_heads(self.rank(c), c.candidate, c.even)


@dataclass(frozen=True)
class LayerDefensiveKV(DefensiveKV):
    """Slots are shared by all heads of all layers, by scores as they are. The prompt stays uncompressed until the last layer.

    Args:
        keep_window: every head keeps its newest ``observe`` tokens. The authors' code has no such floor: at small budgets a
            layer can lose its window, or everything.
    """

    keep_window: bool = False

    shares = "layers"

    def layout(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        layout = super().layout(g, budget, prompt, seen)
        if budget.unlimited or self.keep_window:
            return layout
        local = layout.local
        return replace(layout, local=0, protected=layout.protected - local, full=layout.full + local)

    def allocate(self, c: Candidates) -> Tensor:
        return among_layers(self.rank(c), c.candidate, c.even)
