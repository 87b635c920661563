"""Non-uniform codes with outliers in full, as KVQuant defines them (arXiv 2401.18079, sections 3.2 to 3.4).

A value is shifted and scaled to ``y`` in [-1, 1] and stored as the index of the nearest of ``2^b`` centroids. The ``m`` outliers
of a token's row (all KV heads together) are stored apart, as value and index, in fixed slots. With an evictor, that keeps other
tokens in every head, each head has rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qevict.store.codec import pack, packed_bytes, stored, unpack
from qevict.store.stream import Field

HALF = torch.float16
RUNS = 256  # pieces of the sorted values that centroids are first chosen among
FREE = -1  # index of an outlier slot that is not used


def outlier_slots(channels: int, fraction: float) -> int:
    """Outliers of a row of ``channels`` values: as many high as low, at least one each if there are any."""
    return 2 * (int(fraction / 2 * channels) + 1) if fraction else 0


def nearest(y: Tensor, book: Tensor) -> Tensor:
    """Index of the nearest centroid. ``y [b, ...]``, ``book [1 or b, 2^b]`` ascending; half-way values go to the lower one."""
    middles = ((book[:, 1:] + book[:, :-1]) / 2).expand(len(y), -1).contiguous()
    return torch.searchsorted(middles, y.flatten(1).contiguous()).view(y.shape)


def kmeans_1d(x: Tensor, count: int, weight: Tensor | None = None, steps: int = 50) -> Tensor:
    """Centroids ``[count]``, ascending, of the values ``x [n]``: Lloyd's algorithm, exact by prefix sums over the sorted values,
    from the best partition of ``RUNS`` runs of them (found by dynamic programming; plain quantiles end in poor optima)."""
    x, order = x.double().sort()
    w = torch.ones_like(x) if weight is None else weight.double()[order]
    sums = [torch.cat((t.new_zeros(1), t.cumsum(0))) for t in (w, w * x, w * x * x)]
    at = torch.linspace(0, len(x), min(RUNS, len(x)) + 1, device=x.device).round().long()
    edge = at[_partition([t[at] for t in sums], count)]
    mass, moment, _ = sums
    book = None
    for _ in range(steps):
        inside = mass[edge[1:]] - mass[edge[:-1]]
        new = (moment[edge[1:]] - moment[edge[:-1]]) / inside.clamp_min(1e-300)
        if book is not None:
            new = torch.where(inside > 0, new, book)
            if torch.equal(new, book):
                break
        book = new.sort().values
        edge = torch.searchsorted(x, (book[1:] + book[:-1]) / 2, right=True)
        edge = torch.cat((edge.new_zeros(1), edge, edge.new_tensor([len(x)])))
    return book.float()


def _partition(sums: list[Tensor], count: int) -> Tensor:
    """Borders ``[count + 1]`` of the partition of runs into ``count`` clusters with the least squared error; ``sums`` are prefix
    sums ``[runs + 1]`` of mass, moment and square. With fewer runs than clusters some are empty."""
    mass, moment, square = (t[None, :] - t[:, None] for t in sums)
    cost = (square - moment * moment / mass.clamp_min(1e-300)).masked_fill(torch.ones_like(mass).tril(-1).bool(), float("inf"))
    best, choices = cost[0], []
    for _ in range(count - 1):
        best, choice = (best[:, None] + cost).min(0)
        choices.append(choice)
    border = [len(sums[0]) - 1]
    for choice in reversed(choices):
        border.append(int(choice[border[-1]]))
    return torch.tensor([0, *reversed(border)], device=sums[0].device)


def percentile(x: Tensor, q: float) -> Tensor:
    """Percentile of ``x`` along axis 0, ``q`` in [0, 1], linear between neighbours. (torch.quantile refuses large inputs.)"""
    ordered = x.sort(0).values
    place = q * (len(x) - 1)
    low = int(place)
    return ordered[low].lerp(ordered[min(low + 1, len(x) - 1)], place - low)


def q_norm(y: Tensor, book: Tensor) -> Tensor:
    """``[2]`` scale and offset that give the coded values the mean and deviation of ``y [n]`` (Q-Norm, section 3.6)."""
    coded = book[nearest(y[None], book[None])[0]]
    scale = y.std() / coded.std().clamp_min(1e-12) if len(y) > 1 and coded.std() > 0 else torch.ones(())
    return torch.stack((scale, y.mean() - coded.mean() * scale))


@dataclass(frozen=True)
class NuqCodec:
    """Codes of keys (``middle`` and ``half`` are static, per channel) or of values (they are of each token's row).

    Args:
        book: centroids ``[1 or b, 2^bits]`` fp16, ascending.
        norm: ``[1 or b, 2]`` fp16 scale and offset of the decoded centroids (Q-Norm), or None.
        middle, half: ``[1 or b, 1, H * d]`` fp16 centre and half width of each channel's range; None: per token.
        outliers: slots of a row.
        own: the tables belong to the sequences (not to the model).
        joint: a token's row is that of all KV heads together; else each head has a row of its own, which an evictor can then keep.
    """

    heads: int
    dim: int
    bits: int
    outliers: int
    book: Tensor
    norm: Tensor | None
    middle: Tensor | None
    half: Tensor | None
    own: bool
    joint: bool = True

    @staticmethod
    def fields(heads: int, dim: int, bits: int, outliers: int, static: bool, joint: bool) -> dict[str, Field]:
        rows, width = (1, heads * dim) if joint else (heads, dim)
        if width > torch.iinfo(torch.int16).max:
            raise ValueError(f"{heads} KV heads of {dim} channels: outlier indices of 16 bits reach {torch.iinfo(torch.int16).max}")
        spec = {"code": Field(heads, (packed_bytes(dim, bits),), torch.uint8)}
        if not static:
            spec |= {"middle": Field(rows, (1,), HALF), "half": Field(rows, (1,), HALF)}
        if outliers:
            spec |= {"outlier": Field(rows, (outliers,), HALF), "where": Field(rows, (outliers,), torch.int16)}
        return spec

    @property
    def spec(self) -> dict[str, Field]:
        return self.fields(self.heads, self.dim, self.bits, self.outliers, self.middle is not None, self.joint)

    def _rows(self, x: Tensor) -> Tensor:
        """``[b, H, t, d]`` as rows ``[b, 1, t, H * d]`` if joint."""
        return x.transpose(1, 2).flatten(2).unsqueeze(1) if self.joint else x

    def _heads(self, row: Tensor) -> Tensor:
        """The inverse."""
        return row.squeeze(1).unflatten(-1, (self.heads, self.dim)).transpose(1, 2) if self.joint else row

    def _static(self) -> tuple[Tensor, Tensor]:
        """Centre and half width of the channels, fp32, to be broadcast over rows."""
        rows = 1 if self.joint else self.heads
        return tuple(m.float().view(len(m), rows, 1, -1) for m in (self.middle, self.half))

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """``x [b, H, t, d]`` fp32."""
        row, out, side = self._rows(x), {}, self.outliers // 2
        if self.middle is not None:
            middle, half = self._static()
        else:
            (high, _), (low, _) = row.topk(side + 1), row.topk(side + 1, largest=False)
            high, low = high[..., -1:], low[..., -1:]
            out["middle"], out["half"] = stored((high + low) / 2, HALF), stored((high - low) / 2, HALF)
            middle, half = out["middle"].float(), out["half"].float()
        y = torch.where(half > 0, (row - middle) / torch.where(half > 0, half, 1), 0)
        if side:
            # of a token's own range exactly these are left out; a static range has outliers only where y leaves it
            ranked = row if self.middle is None else y
            (high, above), (low, below) = ranked.topk(side), ranked.topk(side, largest=False)
            if self.middle is not None:
                above, below = above.masked_fill(high <= 1, FREE), below.masked_fill(low >= -1, FREE)
            where = torch.cat((above, below), -1)
            out["outlier"], out["where"] = stored(row.gather(-1, where.clamp_min(0)), HALF), where.to(torch.int16)
        return out | {"code": pack(self._heads(nearest(y, self.book.float()).to(torch.uint8)), self.bits)}

    def decode(self, data: dict[str, Tensor]) -> Tensor:
        codes = self._rows(unpack(data["code"], self.bits, self.dim))
        book = self.book.float()
        if self.norm is not None:
            book = book * self.norm[:, :1].float() + self.norm[:, 1:].float()
        y = book.expand(len(codes), -1).gather(1, codes.flatten(1).long()).view(codes.shape)
        middle, half = self._static() if self.middle is not None else (data["middle"].float(), data["half"].float())
        row = y * half + middle
        if self.outliers:
            where = data["where"].long()
            where = torch.where(where < 0, row.shape[-1], where)  # a free slot writes beyond the row
            row = torch.nn.functional.pad(row, (0, 1)).scatter_(-1, where, data["outlier"].float())[..., :-1]
        return self._heads(row)

    def select(self, index: Tensor) -> NuqCodec:
        if not self.own:
            return self
        names = ("book", "norm", "middle", "half")
        return replace(self, **{n: t.index_select(0, index) for n in names if (t := getattr(self, n)) is not None})

    def tables(self) -> list[Tensor]:
        return [t for t in (self.book, self.norm, self.middle, self.half) if t is not None] if self.own else []
