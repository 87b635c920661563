"""A store that keeps every token: the oldest at low bits, the newest (and the first) in full. Keys and values age apart.

Sequences of equal length are held together, so nothing is padded and a batch gives what each sequence alone would. With an
evictor only the tokens that it keeps are held, per KV head, as if they were a shorter sequence.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qevict.budget import Budget, Geometry, Layout, all_of
from qevict.engine import cpu
from qevict.engine.reference import Block, attend, projected_norm
from qevict.hf.rope import Rope
from qevict.policy import FULL, Candidates, PromptView, select
from qevict.store.stream import Field, Growing, Run, Side

if TYPE_CHECKING:
    from qevict.quantizer import Quantizer, Tables

BLOCK_TOKENS = 512  # tokens decoded at a time


class HistoryLayer:
    """One layer of sequences of equal length.

    Args:
        view: the layer's prompt, that a method may calibrate itself by.
        first: ``[b]`` position of each sequence's first token.
        tables: what was calibrated before, for this layer.
    """

    def __init__(self, policy: Quantizer, g: Geometry, rope: Rope, view: PromptView, first: Tensor, tables: Tables | None):
        self.policy, self.g, self.rope, self.first = policy, g, rope, first
        self.n = self.seen = 0  # tokens held, tokens passed
        self.fused = False  # single tokens are decoded by the fused CPU kernel
        self.position: Tensor | None = None  # [b, H, n] int32, only if tokens were evicted and keys are coded before RoPE
        self.score: Growing | None = None
        k = view.k.to(g.dtype).float()
        if policy.plain_keys:
            k = rope.turn(k, self.positions(k.shape[2]), -1)
        self.codecs = policy.codecs(g, k, view.v.to(g.dtype).float(), tables)
        self.clear()

    def clear(self) -> None:
        full = Field(self.g.kv_heads, (self.g.head_dim,), self.g.dtype)
        rope = self.rope if self.policy.plain_keys else None
        make = (self.policy.sink, len(self.first), full)
        self.keys = Side(self.codecs[0], *make, rope, self.first.device)
        self.values = Side(self.codecs[1], *make, None, self.first.device)
        self.n = self.base = 0

    def positions(self, n: int) -> Tensor:
        """``[b, H or 1, n]`` of the stored tokens."""
        if self.position is not None:
            return self.position
        return self.first[:, None, None] + torch.arange(n, device=self.first.device)

    # -- tokens in --------------------------------------------------------------------------------------------------------

    def fill(self, k: Tensor, v: Tensor) -> None:
        """The first tokens ``[b, H, n, d]``, after RoPE."""
        self.append(k, v)
        self.base = self.n
        self.age(None)

    def append(self, k: Tensor, v: Tensor) -> None:
        self.keys.append(k)
        self.values.append(v)
        self.n += k.shape[2]

    def age(self, attention: Tensor | None) -> None:
        """Code what has aged. ``attention [b, H, n]`` of the last query, if the method wants it."""
        position = self.positions(self.n)
        for side, count in zip((self.keys, self.values), self.policy.coded(self.base, self.n), strict=True):
            side.age(count, position)

    # -- attention --------------------------------------------------------------------------------------------------------

    def read(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Keys (after RoPE) and values of tokens ``lo:hi``, ``[b, H, hi - lo, d]`` fp32."""
        position = self.positions(self.n)
        return self.keys.read(lo, hi, position), self.values.read(lo, hi, position)

    def blocks(self) -> Iterator[Block]:
        for lo in range(0, self.n, BLOCK_TOKENS):
            yield Block(*self.read(lo, min(lo + BLOCK_TOKENS, self.n)), None, 1)

    def runs(self) -> tuple[list[Run], list[Run]]:
        """Keys and values, in equally many runs and in one order of tokens, for the fused kernel."""
        return self.keys.runs(), self.values.runs()

    def attend(self, q: Tensor, scaling: float, wanted: bool) -> tuple[Tensor, Tensor | None]:
        """Output of one query per sequence over all tokens, and ``[b, H, n]`` the attention they get, if ``wanted``."""
        if self.fused:
            return cpu.attend(q, *self.runs(), scaling, wanted)
        out, mass = attend(q, self.blocks(), scaling, mass_queries=int(wanted))
        return out, torch.cat(mass, -1) if wanted else None

    def decode(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Store and attend one generated token."""
        policy = self.policy
        self._arrive(k, v)
        if policy.codes_first:
            self.age(None)
        wanted = self.score is not None or policy.wants_attention(self.base, self.n)
        out, mass = self.attend(q, scaling, wanted)
        self._collect(mass)
        self.age(mass)
        return out

    def turn(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Store and attend the ``n`` tokens of a new turn; they see each other in full, as a prompt's tokens do."""
        n = q.shape[-2]
        causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()[None, None]
        queries = self.policy.evict.prompt_queries if self.score is not None else 1
        out, mass = attend(q, [*self.blocks(), Block(k, v, causal, 1)], scaling, mass_queries=queries)
        self._arrive(k, v)
        self._collect(torch.cat(mass, -1))
        self.age(torch.cat(mass, -1))
        return out

    def _arrive(self, k: Tensor, v: Tensor) -> None:
        new = k.shape[2]
        self.append(k, v)
        if self.score is not None:
            self.score.append(k.new_zeros(*k.shape[:3]))
        if self.position is not None:
            last = self.first[:, None, None] + self.seen + torch.arange(new, device=k.device)
            self.position = torch.cat((self.position, last.expand(*k.shape[:3]).int()), -1)
        self.seen += new

    def _collect(self, mass: Tensor | None) -> None:
        if self.score is not None:
            self.score.data[:, :, : self.score.count] += mass

    # -- an evictor's selection -------------------------------------------------------------------------------------------

    def keep(self, k: Tensor, v: Tensor, score: Tensor, count: int, module: torch.nn.Module, again: bool) -> Tensor:
        """Hold only the ``count`` tokens of each head that the evictor prefers.

        Args:
            k, v: ``[b, H, n, d]`` after RoPE, to choose from.
            score: ``[b, H, n]`` what they have collected.
            again: this is not the first selection: they are stored here already.

        Returns:
            ``[b, H, count]`` what the kept ones have collected.
        """
        evict, n = self.policy.evict, k.shape[2]
        unit = torch.arange(n, device=k.device).expand(score.shape)
        candidate = (unit >= self.policy.sink) & (unit < n - evict.observe)
        weight = projected_norm(v, module) if evict.weighs_values else None
        room = torch.tensor(count - int((~candidate[0, 0]).sum()), device=k.device).view(1, 1, 1)
        c = Candidates(unit, candidate, score, None, weight, room, room, torch.zeros_like(room))
        c = evict.refresh(c) if again else c
        tier = select(evict.rank(c), unit, candidate, torch.zeros_like(candidate), c.full, c.codes, "on")
        index = (~candidate | (tier == FULL)).nonzero()[:, -1].view(*score.shape[:2], count)
        if self.policy.plain_keys:
            self.position = self.positions(n).expand(score.shape).gather(-1, index).int()
        self.regroup(index, score)
        if again and self.policy.keeps_codes:
            self.keys.take(index)
            self.values.take(index)
            self.n = self.base = count
        else:
            take = index.unsqueeze(-1).expand(-1, -1, -1, k.shape[-1])
            self.clear()
            self.fill(k.gather(2, take), v.gather(2, take))
        return score.gather(-1, index)

    def regroup(self, index: Tensor, score: Tensor) -> None:
        """For methods that classify tokens: only those at ``index [b, H, count]`` will be left; ``score [b, H, n]`` they
        collected."""

    def remember(self, score: Tensor) -> None:
        """Scores ``[b, H, n]`` that count for the next selection."""
        self.score = Growing(len(score), Field(self.g.kv_heads, (), torch.float32), score.device)
        self.score.append(score)

    # -- bookkeeping ------------------------------------------------------------------------------------------------------

    def select(self, index: Tensor) -> None:
        """Keep the sequences ``index``."""
        self.first = self.first.index_select(0, index)
        self.keys.select(index)
        self.values.select(index)
        self.codecs = (self.keys.codec, self.values.codec)
        if self.position is not None:
            self.position = self.position.index_select(0, index)
        if self.score is not None:
            self.score.select(index)

    def parts(self) -> Iterator[tuple[str, int]]:
        """Bytes by part, see :mod:`qevict.accounting`."""
        yield from self.keys.parts()
        yield from self.values.parts()
        for tensor in (t for codec in self.codecs for t in codec.tables()):
            yield "tables", tensor.untyped_storage().nbytes()
        if self.position is not None:
            yield "ids", self.position.untyped_storage().nbytes()
        if self.score is not None:
            yield from self.score.parts("scores")


class Group:
    """Sequences of equal length."""

    def __init__(self, rows: list[int], length: int, first: Tensor):
        self.rows, self.length, self.first = rows, length, first
        self.layers: list[HistoryLayer] = []
        self.due: int | None = None  # tokens seen at the next selection
        self.count: int | None = None  # tokens that the last selection kept, the same in all layers


class History:
    """The store of all layers of a batch, for quantizers.

    Args: as for :class:`qevict.store.arena.Arena`; ``tables`` is what was calibrated before, per layer; ``fused``: single tokens
        are decoded by the fused CPU kernel (needs ``policy.kernels``).

    Raises:
        BudgetError: the budget is below what the method holds.
    """

    def __init__(
        self,
        g: Geometry,
        policy: Quantizer,
        budget: Budget,
        rope: Rope,
        real: Tensor,
        shift: Tensor,
        tables: list[Tables] | None,
        fused: bool = False,
    ):
        self.geometry, self.policy, self.budget, self.rope, self.tables, self.fused = g, policy, budget, rope, tables, fused
        self.batch, self.prompt = real.shape
        self.seen, self.device = self.prompt, real.device
        self.modules: dict[int, weakref.ref] = {}
        pad = (~real).sum(-1)
        self.groups = []
        lengths = sorted({self.prompt - p for p in pad.tolist()})
        layouts = all_of(partial(policy.layout, g, budget, n, n) for n in lengths)
        for length, layout in zip(lengths, layouts, strict=True):
            rows = [r for r, p in enumerate(pad.tolist()) if self.prompt - p == length]
            group = Group(rows, length, (shift + pad)[rows])
            group.layout = layout
            group.due = self._next(group)
            if policy.evict is not None:
                group.count = self._fit(group, length)
            self.groups.append(group)

    @property
    def grown(self) -> int:
        return self.seen - self.prompt

    @property
    def layouts(self) -> list[Layout]:
        by_row = {r: g.layout for g in self.groups for r in g.rows}
        return [by_row[r] for r in range(self.batch)]

    @property
    def next_due(self) -> int | None:
        """Column at which the next selection happens, None if there is none."""
        return min((g.due for g in self.groups if g.due is not None), default=None)

    def _next(self, group: Group) -> int | None:
        return self.seen + group.layout.interval if group.layout.interval else None

    def _fit(self, group: Group, held: int) -> int:
        """How many of the ``held`` tokens to keep."""
        if self.budget.unlimited:
            return held
        seen, interval = group.length + self.grown, group.layout.interval
        return self.policy.fit(self.geometry, self.budget, group.length, seen, interval, min(held, group.layout.full))

    def ingest(self, layer: int, view: PromptView, module: torch.nn.Module) -> None:
        """Store one layer's prompt."""
        self.modules[layer] = weakref.ref(module)
        evict = self.policy.evict
        for group in self.groups:
            part = view.rows(group.rows, group.length)
            tables = None if self.tables is None else self.tables[layer]
            held = self.policy.new_layer(self.geometry, self.rope, part, group.first, tables)
            held.fused = self.fused
            group.layers.append(held)
            if evict is None:
                held.fill(part.k, part.v)
            else:
                score = held.keep(part.k, part.v, evict.prompt_scores(part)["score"], group.count, module, False)
                if group.due is not None:
                    held.remember(evict.carry(score, group.layout.interval))
            held.seen = group.length

    def begin(self, new: int) -> None:
        """``new`` tokens are on their way.

        Raises:
            BudgetError: they would not fit, and nothing may be evicted.
        """
        if self.policy.evict is None and not (self.budget.once or self.budget.unlimited):
            for group in self.groups:
                seen = group.length + self.grown + new
                if self.policy.total(self.geometry, group.length, seen) > self.budget.resolve(self.geometry, group.length, seen):
                    self.policy.check(self.geometry, self.budget, group.length, seen)  # says so in full
        self.seen += new

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Store and attend one generated token: q ``[B, H_q, 1, d]``, k, v ``[B, H, 1, d]`` after RoPE; output like q."""
        return self._each(layer, "decode", q, k, v, scaling)

    def turn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The same for the ``n`` tokens of a new turn."""
        return self._each(layer, "turn", q, k, v, scaling)

    def _each(self, layer: int, call: str, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        if len(self.groups) == 1:
            return getattr(self.groups[0].layers[layer], call)(q, k, v, scaling)
        out = torch.empty_like(q)
        for group in self.groups:
            r = group.rows
            out[r] = getattr(group.layers[layer], call)(q[r], k[r], v[r], scaling)
        return out

    def end(self) -> None:
        """All layers have seen a call: hold the selections that are due."""
        for group in self.groups:
            if group.due is None or self.seen < group.due:
                continue
            group.layout = self.policy.layout(self.geometry, self.budget, group.length, group.length + self.grown)
            group.count = self._fit(group, group.layers[0].n)
            for i, layer in enumerate(group.layers):
                score = layer.keep(*layer.read(0, layer.n), layer.score.read(), group.count, self.modules[i](), True)
                layer.remember(self.policy.evict.carry(score, group.layout.interval))
            group.due = self._next(group)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the sequences ``rows`` (in that order, repeats allowed)."""
        order, groups = rows.tolist(), []
        for group in self.groups:
            places = [i for i, r in enumerate(order) if r in group.rows]
            if places:
                index = torch.tensor([group.rows.index(order[i]) for i in places], device=self.device)
                for layer in group.layers:
                    layer.select(index)
                group.rows, group.first = places, group.layers[0].first
                for layer in group.layers:  # one tensor, counted once
                    layer.first = group.first
                groups.append(group)
        self.groups, self.batch = groups, len(order)

    def parts(self) -> Iterator[tuple[str, int]]:
        """Bytes by part, see :mod:`qevict.accounting`."""
        for group in self.groups:
            yield "ids", group.first.untyped_storage().nbytes()
            for layer in group.layers:
                yield from layer.parts()
