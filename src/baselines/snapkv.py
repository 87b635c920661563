"""SnapKV: each KV head keeps the prompt tokens that the last queries attend to (arXiv 2404.14469).

Score of a prefix token: attention of the last ``observe`` prompt queries, smoothed along the prefix, mean over the head's
query group; the observation window itself is always kept. Generated tokens are capped: every ``interval`` tokens the rule is
applied again to what is stored. The window's attention is then what the last ``observe`` generated queries gave; when events
are closer than ``observe`` tokens, older attention fades by ``1 - interval / observe`` per event instead of being kept query
by query, which would cost more bytes than the budget has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from qevict.budget import Budget, Geometry, Layout, protected_units, require
from qevict.policy import Candidates, Policy, PromptView


@dataclass(frozen=True)
class SnapKV(Policy):
    """Top tokens per KV head by pooled attention of an observation window.

    Args:
        observe: queries in the observation window (w); these tokens are always kept.
        kernel: odd length of the pooling (k).
        pooling: ``avg`` (w 32, k 5: the common setting; kvpress uses w 64) or ``max`` (w 32, k 7: the authors' LongBench files).
        interval: generated tokens between two selections; small budgets shorten it to a quarter of the free slots.
    """

    observe: int = 32
    kernel: int = 5
    pooling: str = "avg"
    interval: int = 32

    window = 1
    per_head = True
    channels = ("score",)

    def __post_init__(self):
        super().__post_init__()
        if self.pooling not in ("avg", "max"):
            raise ValueError(f"method.pooling={self.pooling!r}: choose avg or max")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"method.kernel={self.kernel} must be odd and positive")
        for name, value in (("observe", self.observe), ("interval", self.interval)):
            if value < 1:
                raise ValueError(f"method.{name}={value} is below 1: set method.{name} to 1 or more")

    @property
    def prompt_queries(self) -> int:
        return self.observe

    def layout(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        if budget.unlimited:
            return self.keep_everything(prompt)
        costs, least = self.costs(g, 0, budget.once), self.observe + 2
        what = f"an observation window of {self.observe} tokens, one selected and one new token"
        slots = least + require(g, costs, budget, least, what, prompt, seen) // costs.full_unit
        interval = 0 if budget.once else max(1, min(self.interval, (slots - self.observe) // 4))
        protected = protected_units(1, interval, self.observe)
        return Layout(
            1, interval, 0, self.observe, protected, slots - protected, 0,
            budget.resolve(g, prompt, seen), costs.total(g, slots, 0),
        )  # fmt: skip

    def pool(self, score: Tensor) -> Tensor:
        """Smooth ``[..., tokens]`` along the last axis. avg: zeros beyond the ends, always divided by the kernel length."""
        flat, pad = score.flatten(0, -2).unsqueeze(1), self.kernel // 2
        out = (avg_pool1d if self.pooling == "avg" else max_pool1d)(flat, self.kernel, stride=1, padding=pad)
        return out.view_as(score)

    def prompt_scores(self, view: PromptView) -> dict[str, Tensor]:
        mass = view.mass(self.observe)
        prefix = max(0, view.length - self.observe)
        if prefix:
            mass[..., :prefix] = self.pool(mass[..., :prefix])
        return {"score": mass}

    def refresh(self, c: Candidates) -> Candidates:
        """Pooled along the stored tokens in the order of their positions (slots are in no order)."""
        return replace(c, score=in_order(self.pool, c.score, c.unit))

    def carry(self, score: Tensor, interval: int) -> Tensor:
        return score * max(0.0, 1 - interval / self.observe)


def in_order(function: Callable[[Tensor], Tensor], x: Tensor, unit: Tensor) -> Tensor:
    """Apply a function along the last axis of ``x`` in the order of the units' ids; free slots (negative ids) count as zero."""
    order = unit.argsort(dim=-1, stable=True)
    x = x.masked_fill(unit < 0, 0)  # what a free slot last held
    return function(x.gather(-1, order)).gather(-1, order.argsort(-1))
