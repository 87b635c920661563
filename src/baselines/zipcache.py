"""ZipCache: tokens that queries attend to get more bits (arXiv 2405.14256).

Saliency of a prompt token: attention it gets from probe queries, divided by how many of them can see it. Every ``interval``
generated tokens everything is coded anew; the new tokens' classes come from the attention of the newest query. How the two
classes are coded is in :mod:`qevict.store.twoclass`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qevict.budget import Geometry
from qevict.engine.reference import QUERY_BLOCK
from qevict.hf.rope import Rope
from qevict.policy import PromptView
from qevict.quantizer import Quantizer, Tables
from qevict.store.codec import packed_bytes
from qevict.store.stream import Field
from qevict.store.twoclass import TwoClassLayer


def probes(length: int, share: float) -> Tensor:
    """Columns of the probe queries: the newest half of them, and as many others, drawn evenly with a fixed seed."""
    recent = length - int((1 - share / 2) * length)
    older = torch.randperm(length - recent, generator=torch.Generator().manual_seed(length))[: int(share / 2 * length)]
    return torch.cat((older.sort().values, torch.arange(length - recent, length)))


@dataclass(frozen=True)
class ZipCache(Quantizer):
    """Two classes of tokens. Keys are coded after RoPE.

    Args:
        salient: share of tokens with ``high_bits`` (rho), per KV head.
        high_bits, low_bits: of the salient tokens and of the others.
        probes: share of the prompt's queries that are looked at.
        normalizer: ``probes`` divides by the probe queries that see a token (the paper), ``causal`` by all queries that do (the
            authors' code).
        interval: generated tokens between two codings; they are held in full until then.
    """

    salient: float = 0.6
    high_bits: int = 4
    low_bits: int = 2
    probes: float = 0.1
    normalizer: str = "probes"
    interval: int = 100

    kernels = ("cpu",)

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.salient <= 1:
            raise ValueError(f"method.salient={self.salient:g} is outside [0, 1]")
        if not 0 < self.probes <= 1:
            raise ValueError(f"method.probes={self.probes:g} is outside (0, 1]")
        for name, value in (("high_bits", self.high_bits), ("low_bits", self.low_bits)):
            if value not in (2, 3, 4, 8):
                raise ValueError(f"method.{name}={value}: choose 2, 3, 4 or 8")
        if self.low_bits > self.high_bits:
            raise ValueError(f"method.low_bits={self.low_bits} is above method.high_bits={self.high_bits}")
        if self.normalizer not in ("probes", "causal"):
            raise ValueError(f"method.normalizer={self.normalizer!r}: choose probes or causal")
        if self.interval < 1:
            raise ValueError(f"method.interval={self.interval} is below 1: set method.interval to 1 or more")

    @property
    def period(self) -> int:
        return self.interval

    def saliency(self, view: PromptView) -> Tensor:
        """``[B, H, T]`` of the prompt's tokens, summed over the query heads of a KV head."""
        rows, column = probes(view.length, self.probes).to(view.k.device), torch.arange(view.length, device=view.k.device)
        total = sum(view.attention(part).sum((2, 3)) for part in rows.split(QUERY_BLOCK))
        seen = (rows[:, None] >= column).sum(0) if self.normalizer == "probes" else view.length - column
        return total / seen

    def few(self, base: int, count: int) -> int:
        """How many of ``count`` coded tokens have low bits; ``base`` of them were coded first."""
        share = 1 - self.salient + 1e-9
        return int(share * base) + int(share * (count - base)) if count else 0

    def codec(self, g: Geometry) -> None:
        packed_bytes(g.head_dim, self.high_bits), packed_bytes(g.head_dim, self.low_bits)

    def codecs(self, g: Geometry, k: Tensor, v: Tensor, tables: Tables | None) -> tuple:
        return ()

    def new_layer(self, g: Geometry, rope: Rope, view: PromptView, first: Tensor, tables: Tables | None) -> TwoClassLayer:
        return TwoClassLayer(self, g, rope, view, first)

    def coded(self, base: int, n: int) -> tuple[int, int]:
        return (n - (n - base) % self.interval,) * 2

    def wants_attention(self, base: int, n: int) -> bool:
        return (n - base) % self.interval == 0

    def layer_bytes(self, g: Geometry, base: int, n: int) -> int:
        count, _ = self.coded(base, n)
        low = self.few(base, count)
        codes = (count - low) * packed_bytes(g.head_dim, self.high_bits) + low * packed_bytes(g.head_dim, self.low_bits)
        row = g.kv_heads * g.head_dim
        full = Field(g.kv_heads, (g.head_dim,), g.dtype)
        per_token = 1 if self.evict is None else g.kv_heads
        # codes; scale and zero of keys per channel and class, of values per token; channel scales; bitmap; newest tokens
        fixed = 2 * g.kv_heads * codes + 8 * row + 4 * count * per_token + 2 * row + g.kv_heads * -(-count // 8)
        return fixed + 2 * full.nbytes(n - count)
