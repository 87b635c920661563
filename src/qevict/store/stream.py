"""Tokens in a row: the newest in full, older ones coded; tensors that grow at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qevict.hf.rope import Rope

GROWTH = 8  # tokens by which a tensor grows


@dataclass(frozen=True)
class Field:
    """One tensor of a codec: ``[b, heads, rows, *shape]``, one row per ``stride`` tokens."""

    heads: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: int = 1

    def rows(self, tokens: int, step: int = GROWTH) -> int:
        """Rows that are allocated for so many tokens."""
        per, need = max(1, step // self.stride), -(-tokens // self.stride)
        return -(-need // per) * per

    def nbytes(self, tokens: int, step: int = GROWTH) -> int:
        """Bytes that are allocated for so many tokens of one sequence, spare rows included."""
        return self.rows(tokens, step) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.heads * torch.Size(self.shape).numel() * self.dtype.itemsize


class TokenCodec(Protocol):
    """Codes of a run of tokens ``[b, H, t, d]``; ``t`` is a multiple of every stride."""

    spec: dict[str, Field]

    def encode(self, x: Tensor) -> dict[str, Tensor]: ...

    def decode(self, data: dict[str, Tensor]) -> Tensor: ...

    def select(self, index: Tensor) -> TokenCodec:
        """Of the sequences ``index``."""
        ...

    def tables(self) -> list[Tensor]:
        """What each sequence was calibrated to."""
        ...


@dataclass(frozen=True)
class Run:
    """Tokens in a row as the fused CPU kernel reads them; the rows of a head lie together, there may be more than ``count``.

    Args:
        rows: tokens in full ``[b, H, rows, d]``, or packed codes.
        bits: of a code; 0: tokens are in full.
        shared: consecutive tokens (of keys, after RoPE) or channels (of values) that have one scale and one zero.
        scale, zero: of keys ``[b, H, count / shared, d]``, of values ``[b, H, count, d / shared]``.
        channel: ``[b, H, 1, d]`` fp16 that a decoded value is multiplied by.
    """

    count: int
    rows: Tensor
    bits: int = 0
    shared: int = 1
    scale: Tensor | None = None
    zero: Tensor | None = None
    channel: Tensor | None = None


class Growing:
    """A tensor ``[b, heads, rows, ...]`` of a field that rows are added to."""

    def __init__(self, batch: int, field: Field, device: torch.device, step: int = GROWTH):
        self.field, self.step, self.count = field, step, 0  # count: rows in use
        self.data = torch.zeros(batch, field.heads, 0, *field.shape, dtype=field.dtype, device=device)

    def append(self, x: Tensor) -> None:
        end = self.count + x.shape[2]
        if end > self.data.shape[2]:
            spare = self.field.rows(end * self.field.stride, self.step) - self.data.shape[2]
            self.data = torch.cat((self.data, self.data.new_zeros(*self.data.shape[:2], spare, *self.field.shape)), 2)
        self.data[:, :, self.count : end] = x.to(self.data.dtype)
        self.count = end

    def read(self, lo: int = 0, hi: int | None = None) -> Tensor:
        return self.data[:, :, lo : self.count if hi is None else hi]

    def drop(self, rows: int) -> None:
        """Forget the first rows."""
        rest = self.read(rows)
        room = self.field.rows(rest.shape[2] * self.field.stride, self.step)
        data = self.data.new_zeros(*self.data.shape[:2], room, *self.field.shape)
        data[:, :, : rest.shape[2]] = rest
        self.data, self.count = data, rest.shape[2]

    def take(self, index: Tensor) -> None:
        """Keep the rows ``index [b, heads, count]``."""
        old, self.count = self.data, index.shape[-1]
        self.data = old.new_zeros(*old.shape[:2], self.field.rows(self.count, self.step), *self.field.shape)
        wide = index.view(*index.shape, *(1 for _ in self.field.shape)).expand(-1, -1, -1, *self.field.shape)
        self.data[:, :, : self.count] = old.gather(2, wide)

    def select(self, index: Tensor) -> None:
        """Keep the sequences ``index``."""
        self.data = self.data.index_select(0, index)

    def parts(self, part: str) -> Iterator[tuple[str, int]]:
        """Bytes in use, as ``part``, and spare bytes."""
        used = self.count * self.field.row_bytes * self.data.shape[0]
        yield part, used
        yield "spare", self.data.untyped_storage().nbytes() - used


class Side:
    """Keys or values of one layer: ``sink`` first tokens in full, then coded ones, then the newest in full.

    Args:
        full: how a token is kept in full.
        rope: given if tokens are coded before RoPE.
    """

    def __init__(self, codec: TokenCodec, sink: int, batch: int, full: Field, rope: Rope | None, device: torch.device):
        self.codec, self.limit, self.rope = codec, sink, rope
        self.sink = Growing(batch, full, device, step=1)
        self.tail = Growing(batch, full, device)
        self.coded = {name: Growing(batch, field, device) for name, field in codec.spec.items()}
        self.count = 0  # coded tokens
        self.align = max((field.stride for field in codec.spec.values()), default=1)

    def append(self, x: Tensor) -> None:
        """New tokens ``[b, H, t, d]`` after RoPE."""
        first = min(self.limit - self.sink.count, x.shape[2])
        if first:
            self.sink.append(x[:, :, :first])
        self.tail.append(x[:, :, first:])

    def age(self, count: int, position: Tensor) -> None:
        """Code the oldest tokens of the tail, so that ``count`` are coded. ``position [b, H or 1, n]`` of all tokens."""
        new = count - self.count
        if new <= 0:
            return
        x = self.tail.read(0, new).float()
        if self.rope is not None:
            x = self.rope.turn(x, position[..., self.sink.count + self.count :][..., :new], -1)
        for name, data in self.codec.encode(x).items():
            self.coded[name].append(data)
        self.tail.drop(new)
        self.count = count

    def take(self, index: Tensor) -> None:
        """Keep the tokens ``index [b, H, count]``, the first ones and coded ones, with their codes."""
        rows = index[..., self.sink.count :] - self.sink.count
        self.count = rows.shape[-1]
        for tensor in self.coded.values():
            tensor.take(rows)

    def read(self, lo: int, hi: int, position: Tensor) -> Tensor:
        """Tokens ``lo:hi`` as attention sees them, ``[b, H, hi - lo, d]`` fp32 after RoPE."""
        sinks, end = self.sink.count, self.sink.count + self.count
        parts = []
        if lo < sinks:
            parts.append(self.sink.read(lo, min(hi, sinks)).float())
        a, b = max(lo, sinks), min(hi, end)
        if a < b:
            first = (a - sinks) // self.align * self.align
            last = min(-(-(b - sinks) // self.align) * self.align, self.count)
            data = {n: g.read(first // g.field.stride, -(-last // g.field.stride)) for n, g in self.coded.items()}
            x = self.codec.decode(data)
            if self.rope is not None:
                x = self.rope.turn(x, position[..., sinks + first : sinks + last])
            parts.append(x[:, :, a - sinks - first : b - sinks - first])
        if hi > end:
            parts.append(self.tail.read(max(lo, end) - end, hi - end).float())
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def runs(self) -> list[Run]:
        """All tokens, for the fused kernel. The codec's ``run(data, count)`` describes ``count`` coded ones; its tensors may have
        spare rows."""
        coded = self.codec.run({name: x.data for name, x in self.coded.items()}, self.count)
        return [Run(self.sink.count, self.sink.data), coded, Run(self.tail.count, self.tail.data)]

    def select(self, index: Tensor) -> None:
        self.codec = self.codec.select(index)
        for tensor in (self.sink, self.tail, *self.coded.values()):
            tensor.select(index)

    def parts(self) -> Iterator[tuple[str, int]]:
        """Bytes by part, see :mod:`qevict.accounting`."""
        yield from self.sink.parts("full")
        yield from self.tail.parts("full")
        for name, tensor in self.coded.items():
            yield from tensor.parts("codes" if name.endswith("code") else "quant_meta")
