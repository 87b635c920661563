"""KIVI: keys coded per channel in blocks of tokens, values per token, the newest in full (arXiv 2402.02750).

The flow is the authors', in closed form, so that prefill and decoding in any split store the same: of ``n`` tokens the keys of
``residual * floor(n / residual)`` and the values of ``n - residual`` are coded. Attention sees a token in full at its own step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qevict.budget import Geometry
from qevict.quantizer import Quantizer, Tables
from qevict.store.codec import META_DTYPES, PLANES, affine, pack, packed_bytes, quantize, stored, unpack
from qevict.store.stream import Field, Run


@dataclass(frozen=True)
class GroupCodec:
    """Asymmetric codes; ``tokens`` consecutive tokens and ``channels`` consecutive channels share a scale and a zero."""

    heads: int
    dim: int
    bits: int
    tokens: int
    channels: int
    meta: str

    @property
    def spec(self) -> dict[str, Field]:
        meta = Field(self.heads, (self.dim // self.channels,), META_DTYPES[self.meta], self.tokens)
        return {
            "code": Field(self.heads, (packed_bytes(self.dim, self.bits),), META_DTYPES["uint8"]),
            "scale": meta,
            "zero": meta,
        }

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """``x [b, H, t, d]`` fp32, ``t`` a multiple of ``tokens``."""
        shape = x.shape
        # [b, H, token groups, channel groups, what shares a scale]
        x = x.unflatten(2, (-1, self.tokens)).unflatten(-1, (-1, self.channels)).transpose(3, 4)
        flat = x.flatten(-2)
        scale, zero = (stored(m, META_DTYPES[self.meta]) for m in affine(flat, -1, self.bits))
        codes = quantize(flat, scale.float(), zero.float(), self.bits).view(x.shape).transpose(3, 4).reshape(shape)
        return {"code": pack(codes, self.bits), "scale": scale.squeeze(-1), "zero": zero.squeeze(-1)}

    def decode(self, data: dict[str, Tensor]) -> Tensor:
        def spread(m: Tensor) -> Tensor:
            return m.float().repeat_interleave(self.tokens, 2).repeat_interleave(self.channels, -1)

        return unpack(data["code"], self.bits, self.dim) * spread(data["scale"]) + spread(data["zero"])

    def run(self, data: dict[str, Tensor], count: int) -> Run:
        return Run(count, data["code"], self.bits, self.tokens * self.channels, data["scale"], data["zero"])

    def select(self, index: Tensor) -> GroupCodec:
        return self

    def tables(self) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class KIVI(Quantizer):
    """2- or 4-bit codes of everything but the newest tokens. Keys are coded after RoPE.

    Args:
        bits: 2, 3, 4 or 8 (the authors have 2 and 4, and recommend 4 for models with grouped-query attention).
        group: tokens (keys) or channels (values) that share a scale.
        residual: newest tokens in full; keys are coded in blocks of so many.
        meta: type of scales and zeros.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128
    meta: str = "float16"

    kernels = ("cpu",)

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in PLANES:
            raise ValueError(f"method.bits={self.bits}: choose one of {', '.join(map(str, sorted(PLANES)))}")
        if self.meta not in ("float16", "bfloat16", "float32"):
            raise ValueError(f"method.meta={self.meta}: choose float16, bfloat16 or float32")
        if self.group < 1:
            raise ValueError(f"method.group={self.group} is below 1: choose a divisor of the head dimension, such as 32")
        if self.residual < 1 or self.residual % self.group:
            raise ValueError(f"method.residual={self.residual} must be a positive multiple of method.group={self.group}")

    @property
    def period(self) -> int:
        return self.residual

    def _both(self, g: Geometry) -> tuple[GroupCodec, GroupCodec]:
        if g.head_dim % self.group:
            raise ValueError(
                f"method.group={self.group} does not divide the head dimension {g.head_dim}: set method.group to a divisor, and "
                "method.residual to a multiple of it"
            )
        common = (g.kv_heads, g.head_dim, self.bits)
        return GroupCodec(*common, self.group, 1, self.meta), GroupCodec(*common, 1, self.group, self.meta)

    def specs(self, g: Geometry) -> tuple[dict[str, Field], dict[str, Field]]:
        keys, values = self._both(g)
        return keys.spec, values.spec

    def codecs(self, g: Geometry, k: Tensor, v: Tensor, tables: Tables | None) -> tuple[GroupCodec, GroupCodec]:
        return self._both(g)

    def coded(self, base: int, n: int) -> tuple[int, int]:
        return self.residual * (n // self.residual), max(0, n - self.residual)
