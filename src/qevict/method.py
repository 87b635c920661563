"""QEvict: recoverable quantized KV eviction (arXiv 2608.05326).

Contiguous windows of the history move between Full, Quantized (low-bit, read by every step) and Evicted. Full and
Quantized are two-way, Evicted is final. Keys are quantized before RoPE, per channel along the window's tokens; values per
token along the channels. A window's code is written once, at its first demotion; promotion rebuilds the same
approximation from it, a later demotion takes the same code again.

Where the paper is silent the fields below name the choice; ``docs/methods.md`` lists them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qevict.allocation import among_heads, among_layers
from qevict.budget import Budget, Geometry, Layout, protected_units, require
from qevict.policy import PROMOTIONS, Candidates, Policy, PromptView, rank_of
from qevict.store.codec import WindowCodec


@dataclass(frozen=True)
class QEvict(Policy):
    """Three tiers of windows, routed by accumulated attention.

    Args:
        window: Omega, tokens per window.
        interval: generated tokens between routing events; None: Omega (the paper ties them).
        sink: first tokens, always Full.
        local_fraction: share of the budget's bytes for the newest tokens, always Full (at least ``window`` tokens).
        q: share of the history's bytes for the quantized tier; 0 is binary window eviction (R2 of the paper).
        key_bits, value_bits: 2, 3, 4 or 8.
        meta: type of scales and zeros: float16, bfloat16, float32, or uint8 with fp16 super-scales per window.
        value_group: channels that share a value scale; None: the whole head.
        granularity: ``layer`` (all heads share the windows, the score averages all query heads) or ``kv_head``.
        prompt_mass: ``last`` scores the prompt by its final ``last_queries`` queries, ``all`` by every query.
        score_source: ``every_step`` or ``routing_step`` (what FlashAttention-2 allows in the paper).
        promotion: ``on``, ``off`` or ``original_only``, see :class:`Policy`.
        shares: who shares the slots of coded windows by where the best windows are: None (all have the same), the ``heads`` of
            a layer, or all heads of all ``layers``. Needs ``granularity=kv_head`` and no promotion (``q=1`` or ``promotion=off``).
    """

    window: int = 8
    interval: int | None = None
    sink: int = 5
    local_fraction: float = 0.25
    q: float = 0.70
    key_bits: int = 2
    value_bits: int = 2
    meta: str = "float16"
    value_group: int | None = None
    granularity: str = "layer"
    prompt_mass: str = "last"
    last_queries: int = 32
    score_source: str = "every_step"
    promotion: str = "on"
    shares: str | None = None

    channels = ("score",)
    shared = "codes"

    def __post_init__(self):
        super().__post_init__()
        for name, value, allowed in (
            ("granularity", self.granularity, ("layer", "kv_head")),
            ("prompt_mass", self.prompt_mass, ("last", "all")),
            ("score_source", self.score_source, ("every_step", "routing_step")),
            ("promotion", self.promotion, PROMOTIONS), ("shares", self.shares, (None, "heads", "layers")),
        ):  # fmt: skip
            if value not in allowed:
                choice = ", ".join("null" if a is None else a for a in allowed)
                raise ValueError(f"{name}={value!r}: choose one of {choice} for method.{name}")
        for name, value, low, high in (("q", self.q, 0, 1), ("local_fraction", self.local_fraction, 0, 1)):
            if not low <= value <= high:
                raise ValueError(f"{name}={value:g} is outside [{low}, {high}]: set method.{name} to a share in it")
        for name, value, low in (
            ("window", self.window, 1), ("sink", self.sink, 0), ("last_queries", self.last_queries, 1),
            ("interval", self.step, 1),
        ):  # fmt: skip
            if value < low:
                raise ValueError(f"{name}={value} is below {low}: set method.{name} to {low} or more")
        if self.shares and (self.q == 0 or self.linked or not self.per_head):
            raise ValueError(
                f"shares={self.shares!r} needs coded windows that each KV head chooses and that are not promoted (q={self.q:g}, "
                f"granularity={self.granularity!r}): set method.granularity=kv_head, and method.q=1 or method.promotion=off"
            )

    @property
    def step(self) -> int:
        return self.window if self.interval is None else self.interval

    @property
    def per_head(self) -> bool:
        return self.granularity == "kv_head"

    @property
    def prompt_queries(self) -> int | None:
        return self.last_queries if self.prompt_mass == "last" else None

    @property
    def mass_every_step(self) -> bool:
        return self.score_source == "every_step"

    @property
    def linked(self) -> bool:
        return 0 < self.q < 1 and self.promotion == "on"

    def codec(self, g: Geometry) -> WindowCodec | None:
        if self.q == 0:
            return None
        return WindowCodec(self.window, g.head_dim, self.key_bits, self.value_bits, self.meta, self.value_group)

    def layout(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        """K_f and K_q of the paper's budget equations, in real bytes. A promoted window keeps its slot among the K_q."""
        if budget.unlimited:
            return self.keep_everything(prompt)
        costs, step = self.costs(g, self.sink, budget.once), 0 if budget.once else self.step
        what = f"{self.sink} sink tokens, {self.window} recent tokens and the {step} up to the next routing event"
        least = protected_units(self.window, step, self.window)
        history = require(g, costs, budget, least, what, prompt, seen)
        share = int(self.local_fraction * budget.resolve(g, prompt, seen) / g.layers)
        # The local share also holds the tokens on their way to the next event, and never eats what sinks and ids need.
        extra = min(max(share // costs.full_unit - least, 0), history // costs.full_unit)
        protected, history = least + extra, history - extra * costs.full_unit
        full = int((1 - self.q) * history) // costs.full_unit
        # What the floor of K_f leaves over is spent on codes, so that the budget is met to within one coded window.
        codes = (history - full * costs.full_unit) // costs.code_unit if self.q else 0
        local = (protected - protected_units(self.window, step, 0)) * self.window
        return Layout(
            self.window, step, self.sink, local, protected, full, codes,
            budget.resolve(g, prompt, seen), costs.total(g, protected + full, codes),
        )  # fmt: skip

    def prompt_scores(self, view: PromptView) -> dict[str, Tensor]:
        """Attention mass of the prompt's queries, mean over the heads that choose together: S_0 of the paper."""
        return {"score": self.together(view.mass(self.prompt_queries))}

    def together(self, score: Tensor) -> Tensor:
        """``[B, H, T]`` of single heads as ``[B, G, T]``: mean over those that choose together."""
        return score if self.per_head else score.mean(1, keepdim=True)

    def allocate(self, c: Candidates) -> Tensor:
        """Coded windows of each head: how many of the best it has, beside those in full."""
        priority = self.rank(c)
        rest = c.candidate & (rank_of(priority.masked_fill(~c.candidate, float("-inf"))) >= c.full)
        return (among_heads if self.shares == "heads" else among_layers)(priority, rest, c.even)
