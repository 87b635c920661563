"""Two classes of tokens with different bits, coded together, as ZipCache defines them (arXiv 2405.14256, sections 3.2 and 3.3).

Keys: per channel over all tokens of a class. Values: channels are brought to one scale, then per token of a class over the channels
of all KV heads (row ``r`` takes the r-th such token of every head). A bitmap names each token's class.

An evictor selects more often than the method codes anew, and rounding would add up. With one, values are coded per token and KV
head, tokens keep their class as far as the classes' sizes allow, and the channel scales and the ranges of keys stay once they are
those of ``SETTLED`` tokens (later keys are clamped to them), so that what was coded before gets the same codes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from qevict.budget import Geometry
from qevict.hf.rope import Rope
from qevict.policy import PromptView, rank_of
from qevict.store.codec import affine, pack, quantize, stored, unpack
from qevict.store.history import HistoryLayer
from qevict.store.stream import Field, Growing, Run

if TYPE_CHECKING:
    from baselines.zipcache import ZipCache

HALF = torch.float16
SETTLED = 64  # tokens of a class that say what keys are like


def channel_scale(v: Tensor) -> Tensor:
    """``[b, H, 1, d]`` what a value's channels are divided by; 1 for a dead channel, that would make everything NaN."""
    scale = stored(v.abs().amax(2, keepdim=True).sqrt(), HALF).float()
    return torch.where(scale > 0, scale, 1)


class TwoClassLayer(HistoryLayer):
    """Codes of all tokens up to the last coding, by class; newer tokens in full."""

    def __init__(self, policy: ZipCache, g: Geometry, rope: Rope, view: PromptView, first: Tensor):
        self.coded: dict[str, Tensor] = {}
        super().__init__(policy, g, rope, view, first, None)
        self.importance: Tensor | None = policy.saliency(view)  # [b, H, n] of tokens to be coded, if not their attention

    def clear(self) -> None:
        g, batch, device = self.g, len(self.first), self.first.device
        self.n = self.base = self.count = 0
        self.tails = [Growing(batch, Field(g.kv_heads, (g.head_dim,), g.dtype), device) for _ in range(2)]
        self.bitmap = torch.zeros(batch, g.kv_heads, 0, dtype=torch.uint8, device=device)

    def regroup(self, index: Tensor, score: Tensor) -> None:
        """Kept tokens are classed by the prompt's saliency, later by the class they had and what they have collected."""
        if self.importance is None:
            new = score[..., self.count :]
            few = self.policy.few(0, new.shape[-1])
            high = torch.cat((self.salient(), rank_of(-new) >= few), -1)
            self.importance = high * score.shape[-1] - rank_of(score).float()
        self.importance = self.importance.gather(-1, index)

    def append(self, k: Tensor, v: Tensor) -> None:
        for tail, x in zip(self.tails, (k, v), strict=True):
            tail.append(x)
        self.n += k.shape[2]

    def salient(self) -> Tensor:
        """``[b, H, count]`` bool: class of each coded token."""
        bits = (self.bitmap.unsqueeze(-1) >> torch.arange(8, device=self.bitmap.device)) & 1
        return bits.flatten(-2)[..., : self.count].bool()

    def age(self, attention: Tensor | None) -> None:
        target, _ = self.policy.coded(self.base, self.n)
        if target <= self.count:
            return
        k, v = self.read(0, target)
        new = (attention if self.importance is None else self.importance)[..., self.count : target]
        self.importance = None
        few = self.policy.few(self.base, target) - self.policy.few(self.base, self.count)
        high = torch.cat((self.salient(), rank_of(-new) >= few), -1)
        for tail in self.tails:
            tail.drop(target - self.count)
        self.count = target
        weight = 2 ** torch.arange(8, device=k.device)
        padded = pad(high, (0, -target % 8)).unflatten(-1, (-1, 8))
        self.bitmap = (padded * weight).sum(-1).to(torch.uint8)
        old = {} if self.policy.evict is None else self.coded
        settled = "channel" in old and sum(old[f"{name}_k_code"].shape[2] for name in ("high", "low")) >= SETTLED
        self.coded = {"channel": old["channel"] if settled else channel_scale(v).to(HALF)}
        for name, bits, mask in self._classes(high):
            part = mask.nonzero()[:, -1].view(*mask.shape[:2], -1)  # as many in every head
            take = part.unsqueeze(-1).expand(-1, -1, -1, k.shape[-1])
            self._encode(name, bits, k.gather(2, take), v.gather(2, take) / self.coded["channel"].float(), old)

    def _classes(self, high: Tensor) -> list[tuple[str, int, Tensor]]:
        return [("high", self.policy.high_bits, high), ("low", self.policy.low_bits, ~high)]

    def _encode(self, name: str, bits: int, k: Tensor, v: Tensor, old: dict[str, Tensor]) -> None:
        """One class, ``[b, H, r, d]`` each; row ``r`` of the values is the r-th such token of every head together, or, with an
        evictor, of each head. ``old`` are the codes before, whose ranges of keys are kept if they are those of many."""
        joint = self.policy.evict is None
        row = v.transpose(1, 2).flatten(2).unsqueeze(1) if joint else v
        for kind, x, dim in (("k", k, 2), ("v", row, 3)):
            code, scale, zero = (f"{name}_{kind}_{part}" for part in ("code", "scale", "zero"))
            if kind == "k" and code in old and old[code].shape[2] >= SETTLED:
                meta = old[scale], old[zero]
            elif x.shape[2]:
                meta = affine(x, dim, bits)
            else:
                meta = (x.new_zeros(*x.shape[:dim], 1, *x.shape[dim + 1 :]),) * 2
            self.coded[scale], self.coded[zero] = (stored(m, HALF) for m in meta)
            codes = quantize(x, self.coded[scale].float(), self.coded[zero].float(), bits)
            if kind == "v" and joint:
                codes = codes.squeeze(1).unflatten(2, v.shape[1::2]).transpose(1, 2)
            self.coded[code] = pack(codes, bits).contiguous()

    def runs(self) -> tuple[list[Run], list[Run]]:
        """One class after the other, then the newest."""
        runs, heads, dim = ([], []), self.g.kv_heads, self.g.head_dim
        for name, bits in (("high", self.policy.high_bits), ("low", self.policy.low_bits)):
            for side, kind in zip(runs, "kv", strict=True):
                code, scale, zero = (self.coded[f"{name}_{kind}_{part}"] for part in ("code", "scale", "zero"))
                count = code.shape[2]
                if kind == "k":
                    side.append(Run(count, code, bits, max(1, count), scale, zero))
                else:
                    meta = (x.expand(-1, heads, -1, -1) for x in (scale, zero))
                    side.append(Run(count, code, bits, dim, *meta, self.coded["channel"]))
        for side, tail in zip(runs, self.tails, strict=True):
            side.append(Run(tail.count, tail.data))
        return runs

    def attend(self, q: Tensor, scaling: float, wanted: bool) -> tuple[Tensor, Tensor | None]:
        out, mass = super().attend(q, scaling, wanted)
        if self.fused and wanted:  # by class, see runs
            high = self.salient()
            place = torch.where(high, high.cumsum(-1), high.sum(-1, keepdim=True) + (~high).cumsum(-1)) - 1
            mass = torch.cat((mass.gather(-1, place), mass[..., self.count :]), -1)
        return out, mass

    def read(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        parts = [[], []]
        end = min(hi, self.count)
        if lo < end:
            high = self.salient()
            k = v = None
            for name, bits, mask in self._classes(high):
                rank = (mask.cumsum(-1) - 1)[..., lo:end].clamp_min(0)
                if not self.coded[f"{name}_k_code"].shape[2]:
                    continue
                new_k, new_v = self._decode(name, bits, rank)
                mine = mask[..., lo:end].unsqueeze(-1)
                k, v = (new_k, new_v) if k is None else (torch.where(mine, new_k, k), torch.where(mine, new_v, v))
            parts = [[k], [v]]
        if hi > self.count:
            for part, tail in zip(parts, self.tails, strict=True):
                part.append(tail.read(max(lo, self.count) - self.count, hi - self.count).float())
        k, v = (torch.cat(p, 2) for p in parts)
        return k, v

    def _decode(self, name: str, bits: int, rank: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of a class at places ``rank [b, H, t]``, ``[b, H, t, d]`` each."""
        data, dim = (
            {n: self.coded[f"{name}_{n}"] for n in ("k_code", "k_scale", "k_zero", "v_code", "v_scale", "v_zero")},
            self.g.head_dim,
        )

        def codes(packed: Tensor) -> Tensor:
            return unpack(packed.gather(2, rank.unsqueeze(-1).expand(-1, -1, -1, packed.shape[-1])), bits, dim)

        def of_row(meta: Tensor) -> Tensor:  # [b, 1 or H, r, 1] -> [b, H, t, 1]
            return meta[..., 0].expand(-1, rank.shape[1], -1).gather(2, rank).unsqueeze(-1).float()

        k = codes(data["k_code"]) * data["k_scale"].float() + data["k_zero"].float()
        v = codes(data["v_code"]) * of_row(data["v_scale"]) + of_row(data["v_zero"])
        return k, v * self.coded["channel"].float()

    def select(self, index: Tensor) -> None:
        self.first, self.bitmap = (x.index_select(0, index) for x in (self.first, self.bitmap))
        self.coded = {n: x.index_select(0, index) for n, x in self.coded.items()}
        for tensor in (*self.tails, *((self.score,) if self.score is not None else ())):
            tensor.select(index)

    def parts(self) -> Iterator[tuple[str, int]]:
        for tail in self.tails:
            yield from tail.parts("full")
        yield "ids", self.bitmap.untyped_storage().nbytes()
        for name, x in self.coded.items():
            yield "codes" if name.endswith("code") else "quant_meta", x.untyped_storage().nbytes()
        if self.score is not None:
            yield from self.score.parts("scores")
