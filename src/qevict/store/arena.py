"""What a cache holds: sinks, a pool of full-precision units, a pool of coded units; and how tokens and units move.

Columns are positions in the (left-padded) batch, shared by all sequences; ``position = column + shift`` per sequence.
Units are cut on one grid that ends where the prompt ends: unit ``u`` covers the columns ``origin + u * window ...``.
The first unit may reach into the sinks or the padding; those tokens are masked out of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from qevict.budget import Budget, Geometry, Layout, all_of
from qevict.engine.reference import Block, attend, projected_norm
from qevict.hf.rope import Rope
from qevict.policy import Candidates, Policy, PromptView
from qevict.store.pool import EMPTY, Pool
from qevict.store.prompt import ingest
from qevict.store.routing import route

BLOCK_TOKENS = 512  # tokens decoded or widened to fp32 at a time
GROWTH = 8  # tokens by which a cache without a limit grows
DECODERS = {"cpu": "qevict.engine.cpu", "triton": "qevict.engine.triton_kernel"}  # imported where they are used


class Arena:
    """The store of all layers of a batch.

    Args:
        real: ``[B, T]`` False where the prompt is padding (on the left).
        shift: ``[B]`` position minus column of each sequence.
        backend: ``reference``, ``cpu`` or ``triton`` (fused kernels), for single generated tokens.

    Raises:
        BudgetError: the budget cannot hold what the method must keep for one of the sequences.
    """

    def __init__(
        self,
        geometry: Geometry,
        policy: Policy,
        budget: Budget,
        rope: Rope,
        real: Tensor,
        shift: Tensor,
        backend: str = "reference",
    ):
        self.geometry, self.policy, self.budget, self.rope = geometry, policy, budget, rope
        self.batch, self.prompt = real.shape
        self.device = real.device
        self.codec = policy.codec(geometry)
        self.seen = self.prompt
        self.origin = self.prompt - policy.window * -(-self.prompt // policy.window)
        pad = (~real).sum(-1)
        self.lengths = [self.prompt - p for p in pad.tolist()]  # prompt tokens of each sequence
        self.layouts: list[Layout | None] = [None] * self.batch
        self.due: list[int | None] = [None] * self.batch  # column of each sequence's next routing event
        self._plan(self.everyone)
        sinks = self._most("sink")  # the same for all sequences
        self.sinks_end = int(pad.max()) + sinks  # first column that is a sink of no sequence
        # int64 [4, B]: first column after the sinks, position - column, padding, tokens evicted behind the sinks
        self.rows = torch.stack((pad + sinks, shift, pad, torch.zeros_like(pad)))
        g, heads = geometry, (geometry.layers, self.batch, geometry.kv_heads)
        groups, again = policy.groups(g), not budget.once  # what only a later selection needs is not kept if there is none
        self.channels = policy.channels if again else ()
        collected = dict.fromkeys(self.channels, (torch.float32, 0.0))
        if policy.weighs_values == "at_arrival" and again:
            collected["weight"] = (torch.float16, 0.0)
        link = {"link": (torch.int32, EMPTY)} if policy.linked and again else {}
        dense = dict.fromkeys(("k", "v"), ((policy.window, g.head_dim), g.dtype))

        def slots(tier: str, name: str) -> Tensor | int:
            if policy.shares and policy.shared == tier:
                return self.limits(self.everyone, name).expand(*heads, 1)[..., 0]
            return self._most(name)

        self.full = Pool(heads, groups, slots("full", "dense"), dense, collected | link, self.device)
        self.coded = Pool(heads, groups, slots("codes", "codes"), self.codec.spec(), collected, self.device) if self.codec else None
        self.sink = torch.zeros(2, *heads, sinks, g.head_dim, dtype=g.dtype, device=self.device)
        self.write = torch.zeros(*heads, dtype=torch.int64, device=self.device)  # flat slot that new tokens go to
        self.modules: dict[int, weakref.ref] = {}  # attention modules by layer; a copied cache must not copy the model
        self.fused = None if backend == "reference" else import_module(DECODERS[backend]).Decoder(self)
        self.event_rows = self.everyone  # sequences whose scores await `carry`
        self.held: dict[int, tuple[Tensor, Tensor, Candidates]] = {}  # prompts that wait for the layers to share slots
        self.turns: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}  # a turn that waits for all layers to see it

    @property
    def pools(self) -> list[Pool]:
        """The pools there are, in the order of their blocks."""
        return [self.full] if self.coded is None else [self.full, self.coded]

    @property
    def everyone(self) -> list[int]:
        return list(range(self.batch))

    # -- limits -------------------------------------------------------------------------------------------------------

    def _plan(self, rows: list[int]) -> None:
        """Work out the slots that the sequences ``rows`` may use from now on, and when their next event is due."""
        grown, lengths = self.seen - self.prompt, {self.lengths[r] for r in rows}
        slots = partial(self.policy.slots, self.geometry, self.budget)
        memo = dict(zip(lengths, all_of(partial(slots, n, n + grown) for n in lengths), strict=True))
        for r in rows:
            layout = self.layouts[r] = memo[self.lengths[r]]
            self.due[r] = self.seen + layout.interval if layout.interval else None

    def _most(self, name: str) -> int:
        return max(getattr(lay, name) for lay in self.layouts)

    def limits(self, rows: list[int], name: str) -> Tensor:
        """A field of the sequences' layouts as ``[1, rows, 1, 1]``."""
        values = [getattr(self.layouts[r], name) for r in rows]
        return torch.tensor(values, device=self.device).view(1, -1, 1, 1)

    @property
    def next_due(self) -> int | None:
        """Column at which the next routing event happens, None if there is none."""
        dues = [d for d in self.due if d is not None]
        return min(dues) if dues else None

    def _resize(self, pool: Pool, slots: int) -> None:
        open_slot = self.write - self.full.first()
        if pool.ragged is None:
            pool.resize(slots)
        else:
            pool.repartition(pool.ragged + (slots - pool.slots))
        self.write = self.full.first() + open_slot  # flat addresses depend on the number of slots

    # -- positions ----------------------------------------------------------------------------------------------------

    def columns(self, unit: Tensor) -> Tensor:
        """``[..., window]`` columns of units ``[...]``."""
        offsets = torch.arange(self.policy.window, device=self.device)
        return self.origin + unit.long().unsqueeze(-1) * self.policy.window + offsets

    def sink_columns(self) -> Tensor:
        """``[B, sinks]`` columns of the sinks, some perhaps still to come."""
        return self.rows[2].unsqueeze(-1) + torch.arange(self.sink.shape[-2], device=self.device)

    def held_tokens(self, unit: Tensor) -> Tensor:
        """``[B, G, n * window]`` True for tokens that units ``[B, G, n]`` really hold (neither empty, sink, pad nor future)."""
        column = self.columns(unit)
        held = (unit >= 0).unsqueeze(-1) & (column >= self.rows[0][:, None, None, None]) & (column < self.seen)
        return held.flatten(-2)

    # -- prompt -------------------------------------------------------------------------------------------------------

    def ingest(self, layer: int, view: PromptView, module: torch.nn.Module) -> None:
        """Select and store one layer's prompt. ``module`` is the attention module, for methods that weigh values by its
        output projection."""
        self.modules[layer] = weakref.ref(module)
        ingest(self, layer, view)

    def weigh(self, layer: int, v: Tensor) -> Tensor:
        """Weight of tokens ``v [B, H, t, d]`` that arrive, ``[B, H, t]``."""
        return self.policy.value_weight(projected_norm(v, self.modules[layer]()))

    def encode(self, k: Tensor, v: Tensor, b: Tensor, unit: Tensor) -> dict[str, Tensor]:
        """Codes of units ``[n, heads]``: k after RoPE and v, ``[n, heads, window, d]``. Of a first unit that is partly masked
        the first real token stands in for those before it, so that they widen no quantization range."""
        column = self.columns(unit)
        real = torch.maximum(column, self.rows[0][b].unsqueeze(-1))
        if not torch.equal(real, column):
            own = (real - column[..., :1]).clamp_max(self.policy.window - 1).unsqueeze(-1).expand_as(k)
            k, v = k.gather(2, own), v.gather(2, own)
        plain = self.rope.turn(k, real + self.rows[1][b].unsqueeze(-1), -1)
        data = self.codec.encode(plain.flatten(0, 1), v.flatten(0, 1))
        return {name: value.unflatten(0, k.shape[:2]) for name, value in data.items()}

    # -- decoding -----------------------------------------------------------------------------------------------------

    def begin(self, new: int) -> None:
        """``new`` tokens are on their way. Those of a turn are counted when they are stored."""
        if new > 1:
            return
        if (self.seen - self.origin) % self.policy.window == 0:
            self.open_unit()
        self.seen += 1
        if self.fused is not None:
            self.fused.begin()

    def open_unit(self) -> None:
        """Before a token that begins a unit: choose the free slot of every head that the unit goes to."""
        unit = self.full.grid("unit")
        if self.next_due is None and not bool((unit == EMPTY).any(-1).all()):  # without events a cache grows
            self._resize(self.full, self.full.slots + max(1, GROWTH // self.policy.window))
            unit = self.full.grid("unit")
        slot = (unit == EMPTY).to(torch.uint8).argmax(-1)
        first, per = self.full.first(), self.geometry.kv_heads // self.full.groups
        self.write.copy_(first + slot.repeat_interleave(per, -1))
        entry = (first[..., ::per] // per + slot).flatten()  # records are those of groups
        fresh = {name: value for name, (_, value) in self.full.records.items()}
        fresh["unit"] = (self.seen - self.origin) // self.policy.window
        for name, value in fresh.items():
            self.full.record[name].index_fill_(0, entry, value)  # a whole record, put back, waits for the GPU if heads differ

    def append(self, layers: slice | int, k: Tensor, v: Tensor) -> None:
        """Write tokens of one unit from column ``seen - n`` on. k, v ``[(l,) B, H, n, d]`` after RoPE."""
        n = k.shape[-2]
        offset = (self.seen - n - self.origin) % self.policy.window
        slot = self.write[layers].flatten()
        for name, new in (("k", k), ("v", v)):
            flat = self.full.payload[name]
            flat[slot, offset : offset + n] = new.flatten(0, -3).to(flat.dtype)
        self._note(layers, k, v)

    def _note(self, layers: slice | int, k: Tensor, v: Tensor) -> None:
        """What else there is to know about new tokens: weights of their values; sinks of a prompt shorter than the sinks."""
        n = k.shape[-2]
        if "weight" in self.full.record:
            each = [(layers, v)] if isinstance(layers, int) else enumerate(v)
            for layer, new in each:
                self.full.record["weight"][self.write[layer]] = self.weigh(layer, new)[..., 0].half()
        if self.seen - n < self.sinks_end:
            new = torch.stack((k, v)).to(self.sink.dtype)
            for row, start in enumerate((self.seen - n - self.rows[2]).tolist()):
                count = min(n, self.sink.shape[-2] - start)
                if count > 0:
                    self.sink[:, layers][..., row, :, start : start + count, :] = new[..., row, :, :count, :]

    def decode(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Store and attend one generated token: q ``[B, H_q, 1, d]``, k, v ``[B, H, 1, d]`` after RoPE; output like q."""
        wanted = bool(self.channels) and (self.policy.mass_every_step or self.seen == self.next_due)
        if self.fused is not None:
            self._note(layer, k, v)
            return self.fused(layer, q, k, v, scaling, wanted, self._sink_query(q))
        self.append(layer, k, v)
        out, mass = attend(q, self.blocks(layer, q), scaling, mass_queries=int(wanted), peak="peak" in self.channels)
        if wanted:
            self.collect(layer, mass)
        return out

    def turn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """Attend the ``n`` tokens of a new turn; they are stored when all layers have seen them."""
        n = q.shape[-2]
        causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()[None, None]
        queries = self.policy.prompt_queries if self.channels else 0
        blocks = [*self.blocks(layer, q), Block(k, v, causal, 1)]
        out, mass = attend(q, blocks, scaling, mass_queries=queries, peak="peak" in self.channels)
        own = None
        if mass is not None:
            weight = self.policy.turn_weight(n if queries is None else min(queries, n))
            mass = [m * weight for m in mass]
            own = mass.pop()
            self.collect(layer, mass)
        self.turns[layer] = (k, v, own)
        return out

    def end(self) -> None:
        """All layers have seen a call."""
        if self.turns:
            k, v, own = zip(*(self.turns.pop(i) for i in range(self.geometry.layers)), strict=True)
            self.extend(torch.stack(k), torch.stack(v), None if own[0] is None else torch.stack(own, -4))
        elif self.seen > self.prompt:
            self.route()
        else:
            self.count_evicted()
        self.carry()
        if self.fused is not None:
            self.fused.end()

    def extend(self, k: Tensor, v: Tensor, own_mass: Tensor | None) -> None:
        """Store a new turn, piece by piece, with the routing events that fall into it.

        k, v ``[L, B, H, n, d]`` after RoPE; ``own_mass [(channels,) L, B, H, n]`` what the turn's tokens collected of it.
        """
        done, n = 0, k.shape[-2]
        while done < n:
            if (self.seen - self.origin) % self.policy.window == 0:
                self.open_unit()
            piece = min(self.room(), n - done)
            part = slice(done, done + piece)
            self.seen += piece
            self.append(slice(None), k[..., part, :], v[..., part, :])
            if own_mass is not None:
                open_unit = self.full.grid("unit") == (self.seen - 1 - self.origin) // self.policy.window
                for name, new in self._by_channel(own_mass[..., part].sum(-1, keepdim=True)):
                    self.full.put(name, self._gain(name, self.full.grid(name), open_unit * new))
            done += piece
            self.route()

    def blocks(self, layer: int, q: Tensor | None = None) -> Iterator[Block]:
        """The stored tokens of one layer, in blocks. ``q`` (after RoPE) is needed for slot positions only."""
        yield from self.dense_blocks(layer, q)
        yield from self.coded_blocks(layer)

    def coded_blocks(self, layer: int) -> Iterator[Block]:
        """The coded ones, which stay as they are between two routing events."""
        if self.coded is not None:
            yield from self._pool_blocks(self.coded, layer)

    def dense_blocks(self, layer: int, q: Tensor | None = None) -> Iterator[Block]:
        """Those at full precision."""
        if self.sink.shape[-2]:
            count = self.sink.shape[-2]
            visible = self.sink_columns() < self.seen
            yield Block(*self.sink[:, layer], visible[:, None, None], count, self._sink_query(q))
        yield from self._pool_blocks(self.full, layer)

    def _pool_blocks(self, pool: Pool, layer: int) -> Iterator[Block]:
        window, heads = self.policy.window, self.geometry.kv_heads
        unit, step = pool.grid("unit", layer), max(1, BLOCK_TOKENS // window)
        for lo in range(0, pool.slots, step):
            hi = min(lo + step, pool.slots)
            ids = unit[..., lo:hi]
            visible = self.held_tokens(ids).unsqueeze(2)
            data = pool.read(layer, lo, hi, tuple(pool.spec))
            if pool is self.full:
                k, v = data["k"].flatten(2, 3), data["v"].flatten(2, 3)
            else:
                position = self.columns(ids) + self.rows[1][:, None, None, None]
                k = self.rope.turn(self.codec.decode_keys(data).flatten(2, 3), position.flatten(-2))
                v = self.codec.decode_values(data).flatten(2, 3)
            yield Block(k, v, visible if visible.shape[1] == heads else visible.expand(-1, heads, -1, -1), window)

    def _sink_query(self, q: Tensor | None) -> Tensor | None:
        """Queries as the sinks see them, where slots count as positions; else None."""
        if not (self.policy.slot_positions and self.sink.shape[-2]):
            return None
        return self.rope.turn(q, self.rows[3][:, None, None].expand(-1, 1, q.shape[2]), -1)

    def collect(self, layer: int, mass: list[Tensor]) -> None:
        """Add attention, one ``[(channels,) B, H, units]`` per block of :meth:`blocks`, to what one layer has collected."""
        units = torch.cat(mass[1:] if self.sink.shape[-2] else mass, -1)
        for pool, part in zip(self.pools, units.split([p.slots for p in self.pools], -1), strict=True):
            for name, new in self._by_channel(part):
                pool.put(name, self._gain(name, pool.grid(name, layer), new), layer)

    def _by_channel(self, new: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Attention of KV heads ``[(channels,) ..., H, n]`` as that of groups, ``[..., G, n]`` per channel."""
        parts = (new,) if len(self.channels) == 1 else new
        for name, part in zip(self.channels, parts, strict=True):
            heads = part.unflatten(-2, (self.full.groups, -1))
            yield name, heads.amax(-2) if name == "peak" else heads.mean(-2)

    @staticmethod
    def _gain(name: str, old: Tensor, new: Tensor) -> Tensor:
        return torch.maximum(old, new) if name == "peak" else old + new

    # -- routing ------------------------------------------------------------------------------------------------------

    def aged(self, unit: Tensor, rows: list[int]) -> Tensor:
        """Which units ``[L, rows, G, n]`` are complete and older than the local region."""
        end = self.origin + (unit.long() + 1) * self.policy.window
        return (unit >= 0) & (end <= self.seen - self.limits(rows, "local"))

    def route(self) -> bool:
        """Hold the routing event of all sequences that are due. Returns whether there was one."""
        rows = [r for r, due in enumerate(self.due) if due is not None and due <= self.seen]
        if not rows:
            return False
        before = [self.layouts[r] for r in rows]
        self._plan(rows)
        for pool, name in ((self.full, "dense"), (self.coded, "codes")):
            if pool is not None and pool.ragged is None and self._most(name) > pool.slots:
                self._resize(pool, self._most(name))
        # shares are renewed when there is more to share, or would be if the budget grew: pools are copied then
        route(self, rows, [self.layouts[r] != old for r, old in zip(rows, before, strict=True)])
        if self.coded is not None and self.coded.ragged is None and self._most("codes") < self.coded.slots:
            # the budget went to full slots instead
            moved = self.coded.shrink(self._most("codes"))
            if self.policy.linked:
                link = self.full.grid("link")
                self.full.put("link", torch.where(link >= 0, moved.gather(-1, link.clamp_min(0).long()), link))
        self.event_rows = sorted({*self.event_rows, *rows})
        self.count_evicted()
        return True

    def count_evicted(self) -> None:
        """For slot positions: how many tokens are missing between the sinks and the oldest one kept."""
        if self.policy.slot_positions:
            unit = self.full.grid("unit")[0, :, 0]
            oldest = torch.where(unit < 0, torch.iinfo(unit.dtype).max, unit).amin(-1)
            column = self.columns(oldest)[:, 0].clamp_max(self.seen)
            self.rows[3] = (column - self.rows[0]).clamp_min(0)

    def carry(self) -> None:
        """After a selection: let what units have collected fade as the method says."""
        if not self.event_rows:
            return
        for pool in self.pools:
            for name in self.channels:
                grid = pool.grid(name)
                for r in self.event_rows:
                    if self.due[r] is not None:
                        grid[:, r] = self.policy.carry(grid[:, r], self.layouts[r].interval)
                pool.put(name, grid)
        self.event_rows = []

    def room(self) -> int:
        """Tokens that can be written before a unit boundary or a routing event."""
        left = self.policy.window - (self.seen - self.origin) % self.policy.window
        return left if self.next_due is None else min(left, self.next_due - self.seen)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the sequences ``rows`` (in that order, repeats allowed)."""
        rows = rows.to(self.device)
        order = rows.tolist()
        slot = (self.write - self.full.first()).index_select(1, rows)  # a flat address depends on the sequence it is in
        self.full.select_rows(rows)
        if self.coded is not None:
            self.coded.select_rows(rows)
        self.sink = self.sink.index_select(2, rows)
        self.rows = self.rows[:, rows]
        self.lengths, self.layouts, self.due = ([x[r] for r in order] for x in (self.lengths, self.layouts, self.due))
        self.event_rows = [i for i, r in enumerate(order) if r in self.event_rows]
        self.batch = len(order)
        self.write = self.full.first() + slot

    def parts(self) -> Iterator[tuple[str, int]]:
        """Bytes by part, see :mod:`qevict.accounting`."""
        yield from self.full.parts(lambda name: "full")
        if self.coded is not None:
            yield from self.coded.parts(lambda name: "codes" if name.endswith("code") else "quant_meta")
        yield "full", self.sink.untyped_storage().nbytes()
        for tensor in (self.write, self.rows):
            yield "ids", tensor.untyped_storage().nbytes()
