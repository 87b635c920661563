"""The contract of a method: score x allocation x storage.

A method is a frozen dataclass of hyper-parameters that answers these questions and touches neither model nor cache:

* ``layout``: how do bytes become slots (storage and allocation)?
* ``prompt_scores``: how important is each prompt token (score)?
* ``allocate``: how do the heads of a layer share its slots (allocation)?
* ``refresh`` and ``rank``: how are units ranked, at the end of the prompt and at a routing event (score)?
* ``carry``: what remains of a unit's score after an event?

Axis letters: B sequences, H KV heads, G groups that choose alike (1: the whole layer, H: each KV head), T tokens,
U units of ``window`` consecutive tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from qevict.budget import Budget, BudgetError, Costs, Geometry, Layout
from qevict.engine.reference import causal_attention_mass
from qevict.fields import check_fields
from qevict.store.codec import WindowCodec

EVICTED, CODED, FULL = 0, 1, 2
PROMOTIONS = ("on", "off", "original_only")
EVERYTHING = 1 << 40  # a local region that no sequence outgrows


@dataclass(frozen=True)
class Policy:
    """Base of all methods: keeps everything until overridden.

    Class attributes that a method sets (as dataclass fields or properties):

    Attributes:
        window: tokens per unit.
        per_head: each KV head chooses for itself (G = H) instead of the whole layer (G = 1).
        adaptive: the heads of a layer share its full-precision slots as ``allocate`` says (needs ``per_head`` and window 1).
        weighs_values: ``rank`` wants the norm of each unit's projected values.
        scored: units carry a score, which costs 4 bytes each.
        prompt_queries: how many of the last prompt queries ``prompt_scores`` reads; ``None`` means all of them.
        mass_every_step: attention mass is collected at every decode step (else only at the step of a routing event).
        promotion: ``on`` copies a coded window back to full precision, ``off`` only changes its rank (it stays coded),
            ``original_only`` fills the full tier with windows that were never coded.
        slot_positions: sinks are seen at their slot in the cache instead of their true position (StreamingLLM).
    """

    window = 8
    per_head = False
    adaptive = False
    weighs_values = False
    scored = False
    prompt_queries = 0
    mass_every_step = True
    promotion = "on"
    slot_positions = False

    def __post_init__(self):
        check_fields(self)

    def groups(self, g: Geometry) -> int:
        return g.kv_heads if self.per_head else 1

    def codec(self, g: Geometry) -> WindowCodec | None:
        """Codec of the low-bit tier, or ``None`` if units are kept in full or dropped."""
        return None

    @property
    def linked(self) -> bool:
        """Full units may own a code in the ledger (4 bytes each to find it)."""
        return False

    def costs(self, g: Geometry, sink: int) -> Costs:
        return Costs.of(
            g,
            window=self.window,
            groups=self.groups(g),
            sink=sink,
            scored=self.scored,
            codec=self.codec(g),
            linked=self.linked,
            adaptive=self.adaptive,
        )

    def layout(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        """Slots for a sequence of ``prompt`` prompt tokens of which ``seen`` tokens in all have passed.

        Raises:
            BudgetError: the budget cannot hold what the method must keep.
        """
        if not budget.unlimited:
            raise BudgetError(f"{type(self).__name__} keeps everything: run it with budget=1")
        return self.keep_everything(prompt)

    def keep_everything(self, prompt: int) -> Layout:
        units = -(-(prompt + 1) // self.window)
        return Layout(self.window, None, 0, EVERYTHING, units, 0, 0, None, None)

    def prompt_scores(self, view: PromptView) -> Tensor:
        """``[B, G, T]`` importance of the prompt's tokens (higher is better). Called only if ``scored``."""
        raise NotImplementedError

    def refresh(self, score: Tensor, unit: Tensor) -> Tensor:
        """At a routing event, before ranking: what units have collected, as the prompt's scores were made (smoothing).
        ``unit`` holds ids, negative where a slot is free. Both ``[..., U]``."""
        return score

    def allocate(self, score: Tensor, candidate: Tensor, full: Tensor) -> Tensor:
        """For ``adaptive``: full units of each head, ``[..., H, 1]`` integers that sum to ``H * full`` (``full [..., 1, 1]``)."""
        raise NotImplementedError

    def rank(self, score: Tensor, candidate: Tensor, full: Tensor, norm: Tensor | None) -> Tensor:
        """Priority of candidates, higher is better. All ``[..., G, U]``; ``full [..., G or 1, 1]`` is how many stay in full;
        ``norm`` is the mean projected value norm of each unit, if ``weighs_values``."""
        return score

    def carry(self, score: Tensor, interval: int) -> Tensor:
        """Score that units start the next ``interval`` tokens with."""
        return score


@dataclass(frozen=True)
class PromptView:
    """One layer at the end of its prefill.

    q ``[B, H_q, T, d]`` and k ``[B, H, T, d]`` after RoPE, v ``[B, H, T, d]``; ``real [B, T]`` is False on padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor
    scaling: float

    def mass(self, last: int | None) -> Tensor:
        """``[B, H, T]`` attention mass of the last ``last`` real queries (``None``: all), mean over each head's query group."""
        return causal_attention_mass(self.q, self.k, self.real, self.scaling, last)

    @cached_property
    def length(self) -> int:
        return self.k.shape[-2]


def rank_of(score: Tensor) -> Tensor:
    """Place of each entry of the last axis when the highest comes first; ties: the lower index first."""
    return score.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def select(priority: Tensor, unit: Tensor, candidate: Tensor, coded: Tensor, full: Tensor, codes: Tensor, promotion: str) -> Tensor:
    """Tier of every candidate: the best ``full`` in Full, the next in the coded tier, the rest evicted.

    All of ``priority``, ``unit``, ``candidate``, ``coded`` are ``[..., n]``; ``full`` and ``codes`` broadcast to ``[..., 1]``.
    A full window that owns a code keeps its code slot (write-once ledger), so it leaves one slot less for coded windows.
    Ties in priority go to the larger unit id (the more recent window), so results never depend on the sort.

    Returns:
        ``[..., n]`` int8 of EVICTED, CODED, FULL; meaningless where ``candidate`` is False.
    """
    order = unit.argsort(dim=-1, descending=True, stable=True)
    ranked = priority.masked_fill(~candidate, float("-inf")).gather(-1, order).argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, ranked)
    candidate, coded = candidate.gather(-1, order), coded.gather(-1, order)
    if promotion == "original_only":
        is_full = candidate & ~coded
        is_full &= is_full.cumsum(-1) <= full
    else:
        is_full = candidate & (candidate.cumsum(-1) <= full)
        if promotion == "off":
            is_full &= ~coded
    rest = candidate & ~is_full
    is_coded = rest & (rest.cumsum(-1) <= codes - (is_full & coded).sum(-1, keepdim=True))
    tier = is_full.to(torch.int8) * FULL + is_coded.to(torch.int8) * CODED
    return torch.empty_like(tier).scatter_(-1, order, tier)
