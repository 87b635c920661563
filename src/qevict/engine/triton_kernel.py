"""The decode step on a GPU, in Triton: what fused.cpp does on a CPU, over the same store. Imported only where it is used, so that
the package works without triton.

Per layer: ``_append`` stores the new token; ``_attend`` reads the layer's tokens in tiles, shared out evenly over programs so that
one sequence fills a GPU, each program with a softmax of its own; ``_merge`` joins these; ``_collect`` adds the attention that units
got. Codes are decoded in registers: nothing in memory is as long as the context but the attention of units, 4 bytes per query head
and unit. Arithmetic is fp32; tensor cores take their operands in tf32 if the model's type is a half one.

RoPE of coded keys: the rotation of a unit's position times that of the place in it. Unlike on a CPU all of it is applied to the
keys, none to the queries, so that one matrix product serves all units of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from qevict.engine import cpu

if TYPE_CHECKING:
    from qevict.store.arena import Arena
    from qevict.store.pool import Pool

INTERPRETED = not isinstance(tl.sum, triton.JITFunction)  # TRITON_INTERPRET=1 at Python's start: kernels run on a CPU, slowly
WIDEST = 256  # largest head dimension
TILE = 32, 4096  # tokens, and elements of a tile of keys, at most: what registers and shared memory hold
OCCUPANCY = 2  # programs per multiprocessor
MERGED = 16  # splits that are joined at a time
COUNTED = 128  # units that a program of _collect takes
CODE = ("k_code", "k_scale", "k_zero", "v_code", "v_scale", "v_zero", "super")
LOG2E = 1.4426950408889634
COARSE = tl.constexpr(cpu.COARSE)
HIDDEN = tl.constexpr(-1e30)  # logit of a token that is not seen; finite, so that differences are numbers
COUNTS = (  # integers that are not worth a compilation each
    "layer", "batch", "kv_heads", "groups", "heads", "sinks", "full_slots", "code_slots", "slots", "sink_tiles", "full_end",
    "tiles", "per", "splits", "origin", "seen", "inside", "offset", "stride",
)  # fmt: skip


@triton.jit
def _span(first, count, at, slots):
    """First slot of a head, and how many it has. ``at`` counts heads; ``first`` is None if all have ``slots``."""
    if first is None:
        return at * slots, slots
    else:
        return tl.load(first + at), tl.load(count + at)


@triton.jit
def _codes(row, channel, ok, D: tl.constexpr, BITS: tl.constexpr):
    """fp32 codes of some channels of packed rows (layout: store/codec.py); ``row`` points at their first bytes."""
    if BITS == 3:
        two = tl.load(row + channel % (D // 4), ok, 0).to(tl.int32) >> (channel // (D // 4) * 2)
        one = tl.load(row + D // 4 + channel % (D // 8), ok, 0).to(tl.int32) >> (channel // (D // 8))
        return ((two & 3) + (one & 1) * 4).to(tl.float32)
    else:
        byte = tl.load(row + channel % (D * BITS // 8), ok, 0).to(tl.int32)
        return ((byte >> (channel // (D * BITS // 8) * BITS)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _meta(scale, zero, at, ok, supers, slot, KIND: tl.constexpr):
    """fp32 scales and zeros; 8-bit ones by the super-scales of their slot, of keys (``KIND`` 0) or values (1)."""
    s, z = tl.load(scale + at, ok, 0).to(tl.float32), tl.load(zero + at, ok, 0).to(tl.float32)
    if supers is None:
        return s, z
    else:
        base = supers + slot * 6 + KIND * 3
        step, low, rise = tl.load(base).to(tl.float32), tl.load(base + 1).to(tl.float32), tl.load(base + 2).to(tl.float32)
        return s * step, z * rise + low


@triton.jit
def _absorb(logits, value, top, total, out, PRECISION: tl.constexpr):
    """Take a tile into a running softmax. What hidden tokens weigh before any visible one fades to 0 with the first of those."""
    new = tl.maximum(top, tl.max(logits, 1))
    fade = tl.exp2(top - new)
    weight = tl.exp2(logits - new[:, None])
    out = out * fade[:, None] + tl.dot(weight, value, input_precision=PRECISION)
    return new, total * fade + tl.sum(weight, 1), out


@triton.jit
def _note(logits, units, at, ok, GP: tl.constexpr, P: tl.constexpr, T: tl.constexpr):
    """Write what each piece of a tile weighs, as a logarithm, per query head."""
    pieces = tl.reshape(logits, (GP, P, T))
    top = tl.max(pieces, 2)
    tl.store(units + at, top + tl.log2(tl.sum(tl.exp2(pieces - top[:, :, None]), 2)), ok)


@triton.jit(do_not_specialize=COUNTS)
def _append(k, v, layer, full_k, full_v, write, batch, kv_heads, inside, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr):
    """Store one token of a head: program (sequence and head)."""
    at, d = tl.program_id(0).to(tl.int64), tl.arange(0, DP)
    to = (tl.load(write + layer * batch * kv_heads + at) * WINDOW + inside) * D + d
    tl.store(full_k + to, tl.load(k + at * D + d, d < D), d < D)
    tl.store(full_v + to, tl.load(v + at * D + d, d < D), d < D)


@triton.jit(do_not_specialize=COUNTS)
def _attend(
    q, sink_q, layer, factor, rows, fine, coarse, sink_k, sink_v, full_k, full_v, full_unit, full_first, full_count,
    k_code, k_scale, k_zero, v_code, v_scale, v_zero, supers, code_unit, code_first, code_count, parts, tops, totals, units,
    batch, kv_heads, groups, sinks, full_slots, code_slots, sink_tiles, full_end, tiles, per, splits, origin, seen,
    D: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, WINDOW: tl.constexpr, PIECES: tl.constexpr,
    P: tl.constexpr, T: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, SHARES: tl.constexpr,
    COLLECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a head's queries to some of its tiles: program (sequence and head, split).

    Tiles are counted over sinks, full slots and coded slots; one is ``P`` pieces of ``T`` tokens, ``PIECES`` pieces make a unit.
    ``HALF`` and ``GP``: half the head dimension, the query group, rounded up to what a matrix product takes. ``SHARES``: scales of
    a value. Logits are those of base 2.
    """
    N: tl.constexpr = P * T
    H: tl.constexpr = D // 2
    at, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = at // kv_heads, at % kv_heads
    head, group = layer * batch * kv_heads + at, (layer * batch + b) * groups + h * groups // kv_heads
    begun, shift, pad = tl.load(rows + b), tl.load(rows + batch + b), tl.load(rows + 2 * batch + b)
    g, d, i, n, p = tl.arange(0, GP), tl.arange(0, 2 * HALF), tl.arange(0, HALF), tl.arange(0, N), tl.arange(0, P)
    query = (at * G + g)[:, None] * D
    g_ok, d_ok, i_ok = (g < G)[:, None], (d < D)[None, :], (i < H)[None, :]
    start = split * per
    end = tl.minimum(start + per, tiles)
    noted = (at * G + g)[:, None] * (full_slots + code_slots) * PIECES
    top, total = tl.full((GP,), HIDDEN, tl.float32), tl.zeros((GP,), tl.float32)
    out = tl.zeros((GP, 2 * HALF), tl.float32)

    sink_query = tl.load(sink_q + query + d, g_ok & d_ok, 0).to(tl.float32)
    for tile in range(start, tl.minimum(end, sink_tiles)):
        token = tile * N + n
        visible = (token < sinks) & (pad + token < seen)
        where, ok = (head * sinks + token)[:, None] * D + d, visible[:, None] & d_ok
        key, value = tl.load(sink_k + where, ok, 0).to(tl.float32), tl.load(sink_v + where, ok, 0).to(tl.float32)
        logits = tl.dot(sink_query, tl.trans(key), input_precision=PRECISION) * factor
        top, total, out = _absorb(tl.where(visible[None, :], logits, HIDDEN), value, top, total, out, PRECISION)

    full_query = tl.load(q + query + d, g_ok & d_ok, 0).to(tl.float32)
    full_at, full_n = _span(full_first, full_count, head, full_slots)
    full_id, _ = _span(full_first, full_count, group, full_slots)
    for tile in range(tl.maximum(start, sink_tiles) - sink_tiles, tl.minimum(end, full_end) - sink_tiles):
        piece = tile * P + n // T
        slot, inside = piece // PIECES, piece % PIECES * T + n % T
        unit = tl.load(full_unit + full_id + slot, slot < full_n, -1)
        column = origin + unit * WINDOW + inside
        visible = (unit >= 0) & (inside < WINDOW) & (column >= begun) & (column < seen)
        where, ok = ((full_at + slot) * WINDOW + inside)[:, None] * D + d, visible[:, None] & d_ok
        key, value = tl.load(full_k + where, ok, 0).to(tl.float32), tl.load(full_v + where, ok, 0).to(tl.float32)
        logits = tl.dot(full_query, tl.trans(key), input_precision=PRECISION) * factor
        logits = tl.where(visible[None, :], logits, HIDDEN)
        if COLLECT:
            pieces = (tile * P + p)[None, :]
            _note(logits, units, noted + pieces, g_ok & (pieces < full_n * PIECES), GP, P, T)
        top, total, out = _absorb(logits, value, top, total, out, PRECISION)

    if k_code is not None:
        low_query = tl.load(q + query + i, g_ok & i_ok, 0).to(tl.float32)
        high_query = tl.load(q + query + H + i, g_ok & i_ok, 0).to(tl.float32)
        code_at, code_n = _span(code_first, code_count, head, code_slots)
        code_id, _ = _span(code_first, code_count, group, code_slots)
        t = tl.arange(0, T)
        t_cos, t_sin = tl.load(fine + t[:, None] * D + i, i_ok, 0)[None], tl.load(fine + t[:, None] * D + H + i, i_ok, 0)[None]
        share = d // (D // SHARES) if SHARES > 1 else tl.arange(0, 1)
        for tile in range(tl.maximum(start, full_end) - full_end, end - full_end):
            piece = tile * P + p
            slot, first = piece // PIECES, piece % PIECES * T
            unit = tl.load(code_unit + code_id + slot, slot < code_n, -1)
            column, inside = (origin + unit * WINDOW + first)[:, None] + t, first[:, None] + t
            visible = (unit >= 0)[:, None] & (inside < WINDOW) & (column >= begun) & (column < seen)
            slot = tl.where(unit >= 0, code_at + slot, 0)[:, None]  # what is not there is read from slot 0, and hidden
            row = slot * WINDOW + tl.minimum(inside, WINDOW - 1)

            position = tl.where(unit >= 0, origin + unit * WINDOW + first + shift, 0)[:, None]
            near = position & (COARSE - 1)
            far = tl.maximum((position - near) // COARSE, -1) + 1  # only what is hidden lies further before the text
            n_cos, n_sin = tl.load(fine + near * D + i, i_ok, 0), tl.load(fine + near * D + H + i, i_ok, 0)
            f_cos, f_sin = tl.load(coarse + far * D + i, i_ok, 0), tl.load(coarse + far * D + H + i, i_ok, 0)
            p_cos, p_sin = (f_cos * n_cos - f_sin * n_sin)[:, None, :], (f_sin * n_cos + f_cos * n_sin)[:, None, :]
            cos, sin = p_cos * t_cos - p_sin * t_sin, p_sin * t_cos + p_cos * t_sin

            bytes_at, ok = k_code + (row * (D * KEY_BITS // 8))[:, :, None], visible[:, :, None] & i_ok[None]
            scale, zero = _meta(k_scale, k_zero, slot * D + i, i_ok, supers, slot, 0)
            low = _codes(bytes_at, i, ok, D, KEY_BITS) * scale[:, None, :] + zero[:, None, :]
            scale, zero = _meta(k_scale, k_zero, slot * D + H + i, i_ok, supers, slot, 0)
            high = _codes(bytes_at, H + i, ok, D, KEY_BITS) * scale[:, None, :] + zero[:, None, :]
            key = tl.reshape(low * cos - high * sin, (N, HALF))
            logits = tl.dot(low_query, tl.trans(key), input_precision=PRECISION)
            key = tl.reshape(high * cos + low * sin, (N, HALF))
            logits = tl.dot(high_query, tl.trans(key), logits, input_precision=PRECISION) * factor
            visible, row = tl.reshape(visible, (N,)), tl.reshape(row, (N,))[:, None]
            logits = tl.where(visible[None, :], logits, HIDDEN)
            if COLLECT:
                pieces = piece[None, :]
                _note(logits, units, noted + full_slots * PIECES + pieces, g_ok & (pieces < code_n * PIECES), GP, P, T)

            shown = visible[:, None]
            scale, zero = _meta(v_scale, v_zero, row * SHARES + share, shown & (share < SHARES)[None], supers, row // WINDOW, 1)
            value = _codes(v_code + row * (D * VALUE_BITS // 8), d, shown & d_ok, D, VALUE_BITS) * scale + zero
            top, total, out = _absorb(logits, value, top, total, out, PRECISION)

    to = (at * splits + split) * G + g
    tl.store(tops + to, top, g < G)
    tl.store(totals + to, total, g < G)
    tl.store(parts + to[:, None] * D + d, out, g_ok & d_ok)


@triton.jit(do_not_specialize=COUNTS)
def _merge(out, parts, tops, totals, norms, splits, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """One softmax from those of the splits, ``S`` at a time: program (sequence and query head)."""
    at, d, s = tl.program_id(0).to(tl.int64), tl.arange(0, DP), tl.arange(0, S)
    top, total, result = tl.full((1,), HIDDEN, tl.float32), tl.zeros((1,), tl.float32), tl.zeros((DP,), tl.float32)
    for lo in range(0, splits, S):
        row, ok = ((at // G) * splits + lo + s) * G + at % G, lo + s < splits
        tops_here = tl.load(tops + row, ok, HIDDEN)
        new = tl.maximum(top, tl.max(tops_here, 0))
        fade, weight = tl.exp2(top - new), tl.exp2(tops_here - new)
        part = tl.load(parts + row[:, None] * D + d, ok[:, None] & (d < D)[None, :], 0)
        total = total * fade + tl.sum(weight * tl.load(totals + row, ok, 0), 0)
        result = result * fade + tl.sum(part * weight[:, None], 0)
        top = new
    tl.store(out + at * D + d, result / total, d < D)
    tl.store(norms + at + tl.arange(0, 1), top + tl.log2(total))


@triton.jit(do_not_specialize=COUNTS)
def _collect(
    layer, units, norms, score, peak, first, count, batch, groups, heads, slots, offset, stride,
    PIECES: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add to what ``S`` units of one pool have collected: program (sequence and group of ``heads`` query heads, units)."""
    at = tl.program_id(0).to(tl.int64)
    first_slot, n = _span(first, count, layer * batch * groups + at, slots)
    s = tl.program_id(1) * S + tl.arange(0, S)
    ok = s < n
    mean, high = tl.zeros((S,), tl.float32), tl.zeros((S,), tl.float32)
    for head in range(heads):
        norm = tl.load(norms + at * heads + head)
        share = tl.zeros((S,), tl.float32)
        for piece in range(PIECES):
            share += tl.exp2(tl.load(units + (at * heads + head) * stride + offset + s * PIECES + piece, ok, HIDDEN) - norm)
        mean += share / heads
        high = tl.maximum(high, share)
    to = first_slot + s
    if score is not None:
        tl.store(score + to, tl.load(score + to, ok) + mean, ok)
    if peak is not None:
        tl.store(peak + to, tl.maximum(tl.load(peak + to, ok), high), ok)


def supports(dim: int, device: torch.device) -> bool:
    return dim % 2 == 0 and dim <= WIDEST and (device.type == "cuda" or INTERPRETED)


@dataclass(frozen=True)
class Step:
    """What the layers of one step have in common: workspace, and arguments of the kernels behind those that change."""

    splits: int
    append: tuple
    attend: tuple
    merge: tuple
    collect: list[tuple]  # a grid and arguments for each pool


class Decoder:
    """Decodes one layer after the other of an arena. Rotary tables and workspace live for one step."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.step: Step | None = None
        self.furthest = int(arena.rows[1].max())  # position - column; sequences that leave the batch do not raise it
        on_gpu = arena.device.type == "cuda"
        self.programs = OCCUPANCY * (torch.cuda.get_device_properties(arena.device).multi_processor_count if on_gpu else 8)

    def begin(self) -> None:
        """Before the first layer of a step."""
        arena, g, full = self.arena, self.arena.geometry, self.arena.full
        pools = [pool for pool in arena.pools if pool.slots]
        coded = arena.coded if arena.coded in pools else None
        batch, kv_heads, group, dim, window = arena.batch, g.kv_heads, g.query_heads // g.kv_heads, g.head_dim, arena.policy.window
        half, padded = max(16, triton.next_power_of_2(dim // 2)), max(16, triton.next_power_of_2(group))
        tile = min(TILE[0], TILE[1] // (2 * half))
        tokens = min(tile, triton.next_power_of_2(window))
        pieces, fit = triton.cdiv(window, tokens), tile // tokens
        sinks, codes = arena.sink.shape[-2], coded.slots if coded else 0
        sink_tiles = triton.cdiv(sinks, tile)
        full_end = sink_tiles + triton.cdiv(full.slots * pieces, fit)
        tiles = full_end + triton.cdiv(codes * pieces, fit)
        per = triton.cdiv(tiles * batch * kv_heads, self.programs)
        splits, stride = triton.cdiv(tiles, per), (full.slots + codes) * pieces

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=arena.device)

        parts, tops, totals = (empty(batch * kv_heads, splits, group, *d) for d in ([dim], [], []))
        norms, units = empty(batch, g.query_heads), empty(batch, g.query_heads, stride if arena.channels else 0)
        dense, address = (full.payload["k"], full.payload["v"]), [_address(pool) for pool in pools]
        tables, code, bits = (None, None), (None,) * 10, (0, 0, 1)
        if coded:
            tables, codec = self._tables(), arena.codec
            code = (*(coded.payload.get(n) for n in CODE), *address[1])
            bits = codec.key_bits, codec.value_bits, dim // codec.group
        collect, offset = [], 0
        for pool, (_, *span) in zip(pools, address, strict=True):
            score, peak, heads = pool.record.get("score"), pool.record.get("peak"), g.query_heads // pool.groups
            args = (units, norms, score, peak, *span, batch, pool.groups, heads, pool.slots, offset, stride, pieces, COUNTED)
            collect.append(((batch * pool.groups, triton.cdiv(pool.slots, COUNTED)), args))
            offset += pool.slots * pieces
        self.step = Step(
            splits,
            append=(*dense, arena.write, batch, kv_heads, (arena.seen - 1 - arena.origin) % window, dim, 2 * half, window),
            attend=(
                arena.rows, *tables, *arena.sink, *dense, *address[0], *code, parts, tops, totals, units,
                batch, kv_heads, full.groups, sinks, full.slots, codes, sink_tiles, full_end, tiles, per, splits,
                arena.origin, arena.seen, dim, half, group, padded, window, pieces, fit, tokens, *bits,
            ),
            merge=(parts, tops, totals, norms, splits, dim, 2 * half, group, MERGED),
            collect=collect,
        )  # fmt: skip

    def _tables(self) -> tuple[Tensor, Tensor]:
        """Rotary tables ``[positions, head_dim]``, cosines, then sines: of the first positions, of multiples of ``COARSE``."""
        inv_freq = self.arena.rope.inv_freq.to(self.arena.device).double()
        last = (self.arena.seen + self.furthest) // cpu.COARSE
        near, far = (torch.arange(*r, device=inv_freq.device) for r in ((0, cpu.COARSE), (-1, last + 1)))
        return cpu.rotary_table(near, inv_freq), cpu.rotary_table(far * cpu.COARSE, inv_freq)

    def end(self) -> None:
        self.step = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, collect: bool, sink_q: Tensor | None) -> Tensor:
        """As :meth:`qevict.store.arena.Arena.decode`: stores k, v, adds to the scores if ``collect``, returns the output."""
        step, g, batch = self.step, self.arena.geometry, q.shape[0]
        q, k, v, sink_q = (x.contiguous() for x in (q, k, v, q if sink_q is None else sink_q))
        out = torch.empty_like(q)
        if INTERPRETED:  # its own rounding to bfloat16 is wrong
            k, v, out = k.to(g.dtype), v.to(g.dtype), out.float()
        precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
        with torch.cuda.device_of(q):
            _append[(batch * g.kv_heads,)](k, v, layer, *step.append)
            grid = (batch * g.kv_heads, step.splits)
            _attend[grid](q, sink_q, layer, scaling * LOG2E, *step.attend, collect, precision, num_stages=2)
            _merge[(batch * g.query_heads,)](out, *step.merge)
            if collect:
                for grid, args in step.collect:
                    _collect[grid](layer, *args)
        return out.to(q.dtype)


def _address(pool: Pool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Unit ids; of heads that differ, the first slot and the number of slots of each."""
    return (pool.record["unit"], None, None) if pool.ragged is None else (pool.record["unit"], pool.first(), pool.ragged)
