"""The contract of a method: score x allocation x storage.

A method is a frozen dataclass of hyper-parameters that answers these questions and touches neither model nor cache:

* ``layout``: how do bytes become slots (storage and allocation)?
* ``prompt_scores``: how important is each prompt token (score)?
* ``allocate``: how do heads, or heads and layers, share the slots (allocation)?
* ``refresh`` and ``rank``: how are units ranked, at the end of the prompt and at a routing event (score)?
* ``carry``: what remains of a unit's score after an event?

A selection happens at the end of the prompt and, unless the budget says ``decode: grow``, at every routing event after it.

Axis letters: B sequences, H KV heads, G groups that choose alike (1: the whole layer, H: each KV head), T tokens,
U units of ``window`` consecutive tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from qevict.budget import Budget, BudgetError, Costs, Geometry, Layout
from qevict.engine.reference import causal_attention, causal_attention_mass, causal_attention_norm
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
        shares: who shares the slots of one tier as ``allocate`` says: the ``heads`` of a layer, or all heads of all ``layers``
            (the prompt then stays uncompressed until the last layer); needs ``per_head``.
        shared: that tier, a field of the layout: ``full`` (needs window 1), or ``codes`` (of units that are not promoted).
        weighs_values: ``rank`` wants a weight of each unit's values. ``at_event``: their projected norm, computed from what
            is stored; ``at_arrival``: ``value_weight`` of a new token's norms in all heads, kept in 2 bytes (needs window 1).
        channels: what units collect, 4 bytes each: ``score`` (attention mass: sum over queries, mean over a KV head's query
            group) and perhaps ``peak`` (highest attention of any query and group member).
        prompt_queries: how many of the last prompt queries ``prompt_scores`` reads; ``None`` means all of them.
        mass_every_step: attention mass is collected at every decode step (else only at the step of a routing event).
        promotion: ``on`` copies a coded window back to full precision, ``off`` only changes its rank (it stays coded),
            ``original_only`` fills the full tier with windows that were never coded.
        kernels: the fused kernels that read what the method stores.
        slot_positions: sinks are seen at their slot in the cache instead of their true position (StreamingLLM).
    """

    window = 8
    per_head = False
    shares: ClassVar[str | None] = None
    shared: ClassVar[str] = "full"
    weighs_values: ClassVar[str | None] = None
    channels: ClassVar[tuple[str, ...]] = ()
    prompt_queries = 0
    mass_every_step = True
    promotion = "on"
    kernels: ClassVar[tuple[str, ...]] = ("cpu", "triton")
    slot_positions = False

    def __post_init__(self):
        check_fields(self)

    @property
    def scored(self) -> bool:
        return bool(self.channels)

    @property
    def unlimited(self) -> bool:
        """Keeps everything at full precision: there is no budget to choose."""
        return type(self).layout is Policy.layout

    @property
    def fixed(self) -> bool:
        """Its bytes follow from the number of tokens alone: one point on the byte axis, which budget=1 gives."""
        return self.unlimited

    def calibration_id(self, model: torch.nn.Module) -> str | None:
        """Identity of what the method was calibrated to on other text; None: nothing."""
        return None

    def groups(self, g: Geometry) -> int:
        return g.kv_heads if self.per_head else 1

    def codec(self, g: Geometry) -> WindowCodec | None:
        """Codec of the low-bit tier, or ``None`` if units are kept in full or dropped."""
        return None

    @property
    def linked(self) -> bool:
        """Full units may own a code in the ledger (4 bytes each to find it)."""
        return False

    def costs(self, g: Geometry, sink: int, once: bool = False) -> Costs:
        """Bytes of what a layout holds; with ``once`` nothing is kept for a later selection."""
        return Costs.of(
            g,
            window=self.window,
            groups=self.groups(g),
            sink=sink,
            codec=self.codec(g),
            channels=0 if once else len(self.channels),
            weighted=self.weighs_values == "at_arrival" and not once,
            linked=self.linked and not once,
            ragged=self.shares is not None,
        )

    def layout(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        """Slots for a sequence of ``prompt`` prompt tokens of which ``seen`` tokens in all have passed.

        Raises:
            BudgetError: the budget cannot hold what the method must keep.
        """
        if not budget.unlimited:
            raise BudgetError(f"{type(self).__name__} keeps everything: run it with budget=1")
        return self.keep_everything(prompt)

    def slots(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        """:meth:`layout`, without slots that nothing could fill before the next selection: a budget above what a short prompt
        needs costs no bytes until they are needed. What generated tokens add is granted in steps, see :func:`granted`."""
        reckoned = max(prompt, granted(seen))
        layout = self.layout(g, budget, prompt, reckoned)
        if budget.unlimited:
            return layout
        end = seen - prompt + self.window * -(-prompt // self.window)  # tokens on the grid of units
        protected = min(layout.protected, -(-(end + layout.interval) // self.window))
        candidates = max(0, end - layout.local) // self.window
        full = min(layout.full, candidates)
        codes = min(layout.codes, candidates) if full == layout.full else 0
        held = self.costs(g, layout.sink, budget.once).total(g, protected + full, codes)
        return replace(layout, protected=protected, full=full, codes=codes, persistent_bytes=held, reckoned=reckoned)

    def keep_everything(self, prompt: int) -> Layout:
        units = -(-(prompt + 1) // self.window)
        return Layout(self.window, None, 0, EVERYTHING, units, 0, 0, None, None)

    def prompt_scores(self, view: PromptView) -> dict[str, Tensor]:
        """What each prompt token has collected, ``[B, G, T]`` per channel. Called only if ``scored``."""
        raise NotImplementedError

    def turn_weight(self, queries: int) -> float:
        """What one of a later turn's last ``queries`` queries counts, whose attention is collected as that of the prompt's is."""
        return 1.0

    def value_weight(self, norm: Tensor) -> Tensor:
        """For ``weighs_values: at_arrival``: weight of tokens from their projected norms, both ``[B, H, t]``."""
        return norm

    def refresh(self, c: Candidates) -> Candidates:
        """At a routing event, before ranking: what units have collected, as the prompt's scores were made (smoothing)."""
        return c

    def allocate(self, c: Candidates) -> Tensor:
        """For ``shares``: units of each head, ``[..., H, 1]`` integers that sum to ``H * even`` per layer (``heads``,
        leading axes may be layers and sequences) or to ``L * H * even`` per sequence (``layers``, leading axes ``[L, B]``)."""
        raise NotImplementedError

    def share(self, c: Candidates) -> Candidates:
        """With what ``allocate`` says."""
        return replace(c, **{self.shared: self.allocate(c)})

    def rank(self, c: Candidates) -> Tensor:
        """Priority of units ``[..., G, U]``, higher is better."""
        return c.score

    def carry(self, score: Tensor, interval: int) -> Tensor:
        """What units start the next ``interval`` tokens with, for each channel."""
        return score


@dataclass(frozen=True)
class Candidates:
    """Units to select from. All ``[..., G, U]`` unless said; leading axes are sequences, or layers and sequences.

    Attributes:
        unit: ids (token order); negative where a slot is free.
        candidate: may be kept or dropped; the others are protected, or free slots.
        score, peak: what the units have collected; None where the method has no such channel.
        weight: of the units' values, None unless the method weighs them.
        even: ``[..., 1, 1]`` units per group beside the protected ones, of the tier that is shared, if all had the same.
        full, codes: ``[..., G or 1, 1]`` full and coded units per group.
    """

    unit: Tensor
    candidate: Tensor
    score: Tensor
    peak: Tensor | None
    weight: Tensor | None
    even: Tensor
    full: Tensor
    codes: Tensor

    @staticmethod
    def stack(layers: list[Candidates]) -> Candidates:
        """Those of single layers as one, ``[L, ...]``."""
        names = Candidates.__dataclass_fields__
        columns = {n: [getattr(c, n) for c in layers] for n in names}
        return Candidates(**{n: None if c[0] is None else torch.stack(c) for n, c in columns.items()})


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

    def norm(self, last: int | None, p: float, half_life: float | None = None) -> Tensor:
        """``[B, H, T]`` p-norm mean of the attention of those queries and a head's query group; later queries may count more,
        see :func:`causal_attention_norm`."""
        return causal_attention_norm(self.q, self.k, self.real, self.scaling, last, p, half_life)

    def asked(self, last: int | None) -> Tensor:
        """``[B]`` how many real queries those are."""
        return self.real.sum(-1) if last is None else self.real[:, -last:].sum(-1)

    def attention(self, rows: Tensor) -> Tensor:
        """``[B, H, group, rows, T]`` attention of the queries at columns ``rows``; zero where a query is padding."""
        return causal_attention(self.q, self.k, self.real, self.scaling, rows)

    def rows(self, rows: list[int], length: int) -> PromptView:
        """Only the sequences ``rows``, without the padding before their last ``length`` tokens."""
        if len(rows) == len(self.q) and length == self.length:
            return self
        q, k, v = (x[rows][:, :, -length:] for x in (self.q, self.k, self.v))
        return PromptView(q, k, v, self.real[rows][:, -length:], self.scaling)

    @cached_property
    def length(self) -> int:
        return self.k.shape[-2]


def granted(seen: int) -> int:
    """Tokens that a growing budget is reckoned by: those seen, or up to 0.8 % fewer from 4,096 on. A pool is copied when it grows
    or is shared anew, which at every routing event took a fifth of the time of a step there."""
    step = 1 << max(0, seen.bit_length() - 8)
    return seen - seen % step if seen >= 4096 else seen


def rank_of(score: Tensor) -> Tensor:
    """Place of each entry of the last axis when the highest comes first; ties: the lower index first."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order))


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
