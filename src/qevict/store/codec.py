"""Low-bit codecs: what one window of keys and values becomes in the quantized tier.

Notation: ``W`` tokens of a window, ``d`` head dimension, ``b`` bits. All arithmetic is fp32; the metadata is rounded to
its storage type *before* the codes are computed, so that encoding and decoding use the same numbers.

Packed layout (shared by every backend): a token's ``d`` codes are split into bit planes of 8, 4, 2 or 1 bits (3 bits are
a plane of 2 and a plane of 1). In a plane of ``p`` bits, byte ``j`` holds channels ``j, j + d*p/8, j + 2*d*p/8, ...``,
lowest bits first, so that one shift and one mask turn a byte vector into a run of neighbouring channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
META_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "uint8": torch.uint8}


def packed_bytes(channels: int, bits: int, name: str = "bits") -> int:
    """Bytes of one packed row of ``channels`` codes; ``name`` is what the user calls the bits.

    Raises:
        ValueError: the codes do not fill whole bytes.
    """
    runs = 8 // min(PLANES[bits])
    if channels % runs:
        raise ValueError(f"{name}={bits} needs a head dimension that is a multiple of {runs}, got {channels}")
    return sum(channels * plane // 8 for plane in PLANES[bits])


def pack(codes: Tensor, bits: int) -> Tensor:
    """``[..., d]`` integer codes -> ``[..., packed_bytes(d, bits)]`` uint8."""
    channels = codes.shape[-1]
    packed_bytes(channels, bits)  # refuses what does not fit
    out, shift = [], 0
    for plane in PLANES[bits]:
        runs = 8 // plane
        part = ((codes >> shift) & (2**plane - 1)).to(torch.uint8).unflatten(-1, (runs, channels // runs))
        byte = part[..., 0, :].clone()
        for run in range(1, runs):
            byte |= part[..., run, :] << (run * plane)
        out.append(byte)
        shift += plane
    return torch.cat(out, -1)


def unpack(packed: Tensor, bits: int, channels: int) -> Tensor:
    """Inverse of :func:`pack`: ``[..., packed_bytes(d, bits)]`` uint8 -> ``[..., d]`` uint8 codes."""
    out, start, shift = None, 0, 0
    for plane in PLANES[bits]:
        width = channels * plane // 8
        byte = packed[..., start : start + width]
        runs = [((byte >> (run * plane)) & (2**plane - 1)) << shift for run in range(8 // plane)]
        part = torch.cat(runs, -1)
        out = part if out is None else out | part
        start, shift = start + width, shift + plane
    return out


def affine(x: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """Asymmetric scale and zero of ``x`` along ``dim`` (kept): ``zero = min``, ``scale = range / (2^b - 1)``."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)  # aminmax takes several times as long
    return (high - low) / (2**bits - 1), low


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in a storage type, clamped to its range."""
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


def quantize(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes of ``x``; half to even, clamped; a constant group (scale 0) has code 0 and decodes to its value."""
    step = torch.where(scale > 0, scale, float("inf"))
    return (x - zero).div_(step).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


@dataclass(frozen=True)
class WindowCodec:
    """Asymmetric codes of one window: keys per channel along the window's tokens, values per token along the channels.

    Keys are expected *before* RoPE. ``meta`` is the type of scales and zeros; ``uint8`` keeps them as 8-bit codes with
    fp16 super-scales per window (a step for the scales, an origin and a step for the zeros, for keys and for values).
    ``value_group`` channels share a value scale (``None``: the whole head).
    """

    window: int
    head_dim: int
    key_bits: int = 2
    value_bits: int = 2
    meta: str = "float16"
    value_group: int | None = None

    def __post_init__(self):
        for name, bits in (("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if bits not in PLANES:
                raise ValueError(f"{name}={bits}: choose one of {', '.join(map(str, sorted(PLANES)))} for method.{name}")
            packed_bytes(self.head_dim, bits, name)
        if self.meta not in META_DTYPES:
            raise ValueError(f"meta={self.meta}: choose one of {', '.join(sorted(META_DTYPES))} for method.meta")
        if self.value_group is not None and (self.value_group < 1 or self.head_dim % self.value_group):
            raise ValueError(f"value_group={self.value_group} does not divide the head dimension {self.head_dim}")

    @property
    def group(self) -> int:
        return self.value_group or self.head_dim

    def spec(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensors of one window of one KV head: name -> (shape, dtype). The store allocates and counts exactly these."""
        w, d, meta = self.window, self.head_dim, META_DTYPES[self.meta]
        out = {
            "k_code": ((w, packed_bytes(d, self.key_bits)), torch.uint8),
            "k_scale": ((1, d), meta),
            "k_zero": ((1, d), meta),
            "v_code": ((w, packed_bytes(d, self.value_bits)), torch.uint8),
            "v_scale": ((w, d // self.group), meta),
            "v_zero": ((w, d // self.group), meta),
        }
        if self.meta == "uint8":
            out["super"] = ((6,), torch.float16)
        return out

    def unit_bytes(self) -> int:
        """Bytes of one window of one KV head (M_q / H_kv of the paper), metadata included."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.spec().values())

    def encode(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        """Keys before RoPE and values, each ``[n, W, d]``, to the tensors of :meth:`spec`, each with a leading ``n``."""
        k, v = k.float(), v.float().unflatten(-1, (-1, self.group))
        k_meta, v_meta = affine(k, -2, self.key_bits), affine(v, -1, self.value_bits)
        v_meta = tuple(m.squeeze(-1) for m in v_meta)
        out = {}
        if self.meta == "uint8":
            (k_meta, v_meta), out = self._compress_meta(k_meta, v_meta)
        else:
            for name, pair in (("k", k_meta), ("v", v_meta)):
                out[f"{name}_scale"], out[f"{name}_zero"] = (stored(m, META_DTYPES[self.meta]) for m in pair)
            k_meta = tuple(out[f"k_{m}"].float() for m in ("scale", "zero"))
            v_meta = tuple(out[f"v_{m}"].float() for m in ("scale", "zero"))
        out["k_code"] = pack(quantize(k, *k_meta, self.key_bits), self.key_bits)
        v_codes = quantize(v, *(m.unsqueeze(-1) for m in v_meta), self.value_bits)
        out["v_code"] = pack(v_codes.flatten(-2), self.value_bits)
        return out

    @staticmethod
    def _compress_meta(k_meta, v_meta):
        """8-bit metadata. Returns the decoded (scale, zero) pairs and the stored tensors."""
        kept, decoded, supers = {}, [], []
        for name, (scale, zero) in (("k", k_meta), ("v", v_meta)):
            limit = torch.finfo(torch.float16).max
            top = scale.amax((-2, -1)).div(255).clamp_max(limit).half()
            low, high = zero.amin((-2, -1)), zero.amax((-2, -1))
            origin = low.clamp(-limit, limit).half()
            step = (high - origin.float()).clamp_min(0).div(255).clamp_max(limit).half()
            wide = [s.float()[:, None, None] for s in (top, origin, step)]
            kept[f"{name}_scale"] = quantize(scale, wide[0], torch.zeros_like(wide[0]), 8)
            kept[f"{name}_zero"] = quantize(zero, wide[2], wide[1], 8)
            supers += [top, origin, step]
            decoded.append((kept[f"{name}_scale"] * wide[0], kept[f"{name}_zero"] * wide[2] + wide[1]))
        kept["super"] = torch.stack(supers, -1)
        return decoded, kept

    def _meta_of(self, data: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        scale, zero = data[f"{name}_scale"].float(), data[f"{name}_zero"].float()
        if self.meta != "uint8":
            return scale, zero
        first = 0 if name == "k" else 3
        top, origin, step = data["super"][..., first : first + 3, None, None].float().unbind(-3)
        return scale * top, zero * step + origin

    def decode_keys(self, data: dict[str, Tensor]) -> Tensor:
        """fp32 keys before RoPE, ``[..., W, d]``."""
        scale, zero = self._meta_of(data, "k")
        return unpack(data["k_code"], self.key_bits, self.head_dim) * scale + zero

    def decode_values(self, data: dict[str, Tensor]) -> Tensor:
        """fp32 values, ``[..., W, d]``."""
        scale, zero = (m.unsqueeze(-1) for m in self._meta_of(data, "v"))
        codes = unpack(data["v_code"], self.value_bits, self.head_dim).unflatten(-1, (-1, self.group))
        return (codes * scale + zero).flatten(-2)
