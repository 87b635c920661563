"""Packing and the window codec against independent numpy code, golden values and the byte table."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qevict import QEvict, TierCache
from qevict.store.codec import META_DTYPES, WindowCodec, pack, packed_bytes, unpack

BITS = (2, 3, 4, 8)
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}

# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("channels", [16, 64, 80, 96, 128, 256])
def test_pack_round_trip(bits, channels):
    codes = torch.randint(0, 2**bits, (3, 5, channels), generator=torch.Generator().manual_seed(channels))
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, channels * bits // 8) == (3, 5, packed_bytes(channels, bits))
    assert torch.equal(unpack(packed, bits, channels).long(), codes)


def planar(codes: np.ndarray, bits: int) -> np.ndarray:
    """The documented layout, one channel at a time."""
    channels, rows, shift = codes.shape[-1], [], 0
    for plane in PLANES[bits]:
        width = channels * plane // 8
        row = np.zeros(width, np.uint8)
        for channel in range(channels):
            part = (int(codes[channel]) >> shift) & (2**plane - 1)
            row[channel % width] |= part << (channel // width * plane)
        rows.append(row)
        shift += plane
    return np.concatenate(rows)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("channels", [16, 80, 128])
def test_pack_follows_the_documented_layout(bits, channels):
    codes = np.random.default_rng(bits).integers(0, 2**bits, channels)
    assert np.array_equal(pack(torch.from_numpy(codes), bits).numpy(), planar(codes, bits))


def test_pack_golden_bytes():
    """d = 16, 2 bits: byte j holds channels j, j + 4, j + 8, j + 12, lowest bits first."""
    codes = torch.tensor([0, 0, 2, 3] * 4)
    assert pack(codes, 2).tolist() == [0x00, 0x00, 0xAA, 0xFF]
    assert pack(torch.arange(16), 4).tolist() == [j | (j + 8) << 4 for j in range(8)]
    assert pack(torch.tensor([7, 0, 0, 4, 0, 0, 0, 3]), 3).tolist() == [0b11, 0b11 << 6, 0b1001]


# -- the codec against numpy -------------------------------------------------------------------------------------------


def rounded(x: np.ndarray, meta: str) -> np.ndarray:
    """fp32 -> the metadata's type -> fp32."""
    x = x.astype(np.float32)
    if meta == "float32":
        return x
    if meta == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)  # bfloat16 is the upper half of fp32, half to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def eight_bit_meta(scale: np.ndarray, zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zeros of a window as 8-bit codes with fp16 super-scales, decoded again."""

    def half(x):
        return np.float32(np.float16(np.float32(x)))

    def code(x, step, origin):
        return np.clip(np.rint((x - origin) / step), 0, 255).astype(np.float32) if step > 0 else np.zeros_like(x)

    top, origin = half(scale.max() / np.float32(255)), half(zero.min())
    step = half(max(zero.max() - origin, np.float32(0)) / np.float32(255))
    return code(scale, top, np.float32(0)) * top, code(zero, step, origin) * step + origin


def quantize(x: np.ndarray, bits: int, meta: str, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and decoded values of ``x`` with one scale and zero per line along ``axis``."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale, zero = (high - low) / np.float32(2**bits - 1), low
    if meta == "uint8":
        scale, zero = eight_bit_meta(scale, zero)
    else:
        scale, zero = rounded(scale, meta), rounded(zero, meta)
    codes = np.zeros_like(x)
    live = np.broadcast_to(scale > 0, x.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes[live] = np.clip(np.rint((x - zero) / scale), 0, 2**bits - 1)[live]
    return codes.astype(np.int64), codes * scale + zero


def reference(k, v, key_bits, value_bits, meta, group):
    """(key codes, keys, value codes, values) of one window ``[W, d]``."""
    keys = quantize(k, key_bits, meta, 0)
    values = quantize(v.reshape(len(v), -1, group), value_bits, meta, 2)
    return *keys, *(x.reshape(v.shape) for x in values)


def windows(count: int, window: int, dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random windows with offsets, large and small channels, and some constant lines."""
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((count, window, dim)).astype(np.float32) for _ in range(2))
    k = k * np.exp(rng.standard_normal(dim)).astype(np.float32) + rng.standard_normal(dim).astype(np.float32) * 3
    k[0, :, 3], v[0, -1] = 0.7, -1.3
    return k, v


def encoded(codec: WindowCodec, k: np.ndarray, v: np.ndarray) -> dict[str, torch.Tensor]:
    return codec.encode(torch.from_numpy(k), torch.from_numpy(v))


@pytest.mark.parametrize("meta", META_DTYPES)
@pytest.mark.parametrize("key_bits", BITS)
@pytest.mark.parametrize(
    ("value_bits", "window", "dim", "group"), [(2, 8, 64, None), (3, 4, 80, 16), (4, 16, 16, 8), (8, 1, 96, 32)]
)
def test_codec_equals_numpy_bit_for_bit(meta, key_bits, value_bits, window, dim, group):
    codec = WindowCodec(window, dim, key_bits, value_bits, meta, group)
    k, v = windows(5, window, dim, seed=key_bits)
    data = encoded(codec, k, v)
    assert {n: (tuple(t.shape[1:]), t.dtype) for n, t in data.items()} == codec.spec()
    k_codes, v_codes = unpack(data["k_code"], key_bits, dim), unpack(data["v_code"], value_bits, dim)
    keys, values = codec.decode_keys(data), codec.decode_values(data)
    for i in range(len(k)):
        expected = reference(k[i], v[i], key_bits, value_bits, meta, group or dim)
        for name, got, want in zip(
            ("key codes", "keys", "value codes", "values"), (k_codes[i], keys[i], v_codes[i], values[i]), expected, strict=True
        ):
            assert np.array_equal(got.numpy(), want), f"{name} of window {i} differ"


def test_codes_round_half_to_even():
    """min 0, max 3, 2 bits: the scale is 1, so 0.5 and 2.5 are ties."""
    line = np.array([0, 0.5, 1.5, 2.5, 3, 3, 0, 0], np.float32)
    x = np.repeat(line[:, None], 16, 1)[None]
    data = encoded(WindowCodec(8, 16), x, x.copy())
    assert unpack(data["k_code"], 2, 16)[0, :, 0].tolist() == [0, 0, 2, 2, 3, 3, 0, 0]


def test_metadata_is_rounded_before_the_codes():
    """fp32 metadata would give the middle token code 2; the scale rounded to bfloat16 is larger and gives 1."""
    x = np.zeros((1, 3, 16), np.float32)
    top = np.float32(3 * 1.0045)  # scale 1.0045, in bfloat16 1.0078125
    x[:, 1], x[:, 2] = 1.5 * np.float32(1.006), top
    fine, coarse = (encoded(WindowCodec(3, 16, meta=m), x, x.copy()) for m in ("float32", "bfloat16"))
    assert unpack(fine["k_code"], 2, 16)[0, 1].unique().tolist() == [2]
    assert unpack(coarse["k_code"], 2, 16)[0, 1].unique().tolist() == [1]


# -- golden values -----------------------------------------------------------------------------------------------------


def test_golden_small_groups():
    line = np.array([0, 0.5, 1.5, 3] * 4, np.float32)
    x = np.repeat(line[:, None], 16, 1)[None]  # along the tokens for keys, along the channels for values
    codec = WindowCodec(16, 16, meta="float32")
    data = encoded(codec, x, x.transpose(0, 2, 1).copy())
    assert data["k_scale"].unique().tolist() == [1.0]
    assert data["k_zero"].unique().tolist() == [0.0]
    assert unpack(data["k_code"], 2, 16)[0, :, 5].tolist() == [0, 0, 2, 3] * 4
    assert unpack(data["v_code"], 2, 16)[0, 5].tolist() == [0, 0, 2, 3] * 4


def test_golden_four_bits():
    line = np.arange(32, dtype=np.float32) / 10
    x = np.repeat(line[:, None], 32, 1)[None]
    data = encoded(WindowCodec(32, 32, 4, 4, "float32"), x, x.transpose(0, 2, 1).copy())
    assert data["k_scale"].unique().item() == pytest.approx(0.2066667, abs=1e-7)
    assert unpack(data["k_code"], 4, 32)[0, :, 0].tolist() == [i // 2 for i in range(32)]
    assert unpack(data["v_code"], 4, 32)[0, 0].tolist() == [i // 2 for i in range(32)]


@pytest.mark.parametrize(
    ("bits", "key_sum", "key_error", "value_sum", "value_error"),
    [(2, 6080, 0.149881, 6115, 0.146475), (4, 30315, 0.006000, 30647, 0.005945)],
)
def test_golden_gaussian(bits, key_sum, key_error, value_sum, value_error):
    """64 tokens of 64 channels in groups of 32; the figures come from the code of KIVI's authors."""
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32).reshape(2, 32, 64)
    codec = WindowCodec(32, 64, bits, bits, "float32", 32)
    data = encoded(codec, x, x.copy())

    def error(y: torch.Tensor) -> float:
        return float(((y.numpy() - x) ** 2).sum() / (x**2).sum())

    codes = unpack(data["k_code"], bits, 64)
    if bits == 2:
        assert codes[0, 0, :8].tolist() == [2, 1, 2, 1, 1, 2, 2, 2]
    assert int(codes.long().sum()) == key_sum
    assert int(unpack(data["v_code"], bits, 64).long().sum()) == value_sum
    assert error(codec.decode_keys(data)) == pytest.approx(key_error, abs=1e-6)
    assert error(codec.decode_values(data)) == pytest.approx(value_error, abs=1e-6)


# -- properties --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meta", META_DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_constant_groups_are_exact(meta, bits):
    k, v = torch.full((2, 8, 64), 0.375), torch.full((2, 8, 64), -2.5)
    codec = WindowCodec(8, 64, bits, bits, meta)
    data = codec.encode(k, v)
    assert not data["k_code"].any()
    assert torch.equal(codec.decode_keys(data), k)
    assert torch.equal(codec.decode_values(data), v)


@pytest.mark.parametrize("meta", ["float16", "bfloat16", "float32"])
def test_a_constant_channel_among_others_is_exact(meta):
    k, v = (torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    k[..., 9] = 1.75
    codec = WindowCodec(8, 64, meta=meta)
    assert torch.equal(codec.decode_keys(codec.encode(k, v))[..., 9], k[..., 9])


@pytest.mark.parametrize("meta", META_DTYPES)
def test_large_values_stay_finite(meta):
    """Ranges that overflow the metadata's type are clamped, never infinite."""
    k = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1)) * 1e4
    codec = WindowCodec(8, 64, meta=meta)
    data = codec.encode(k, k * 30)
    assert codec.decode_keys(data).isfinite().all()
    assert codec.decode_values(data).isfinite().all()


@pytest.mark.parametrize(("window", "dim"), [(4, 64), (8, 64), (32, 128)])
def test_reencoding_a_decoded_window_keeps_the_codes(window, dim):
    k, v = (torch.randn(500, window, dim, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    codec = WindowCodec(window, dim, meta="float32")
    first = codec.encode(k, v)
    again = codec.encode(codec.decode_keys(first), codec.decode_values(first))
    assert torch.equal(again["k_code"], first["k_code"])
    assert torch.equal(again["v_code"], first["v_code"])


@pytest.mark.parametrize(
    ("dim", "bits", "window", "half", "byte"),
    [
        (64, 2, 4, 400, 276), (64, 2, 8, 544, 412), (64, 2, 16, 832, 684), (64, 2, 32, 1408, 1228),
        (64, 4, 4, 528, 404), (64, 4, 8, 800, 668), (64, 4, 16, 1344, 1196), (64, 4, 32, 2432, 2252),
        (128, 2, 4, 784, 532), (128, 2, 8, 1056, 796), (128, 2, 16, 1600, 1324), (128, 2, 32, 2688, 2380),
        (128, 4, 4, 1040, 788), (128, 4, 8, 1568, 1308), (128, 4, 16, 2624, 2348), (128, 4, 32, 4736, 4428),
    ],
)  # fmt: skip
def test_unit_bytes_of_the_table(dim, bits, window, half, byte):
    assert WindowCodec(window, dim, bits, bits).unit_bytes() == half
    assert WindowCodec(window, dim, bits, bits, "bfloat16").unit_bytes() == half
    assert WindowCodec(window, dim, bits, bits, "uint8").unit_bytes() == byte


@pytest.mark.parametrize("meta", META_DTYPES)
@pytest.mark.parametrize(
    ("key_bits", "value_bits", "window", "dim", "group"), [(2, 3, 8, 80, 16), (8, 2, 16, 128, 64), (3, 4, 5, 96, 96)]
)
def test_unit_bytes_equal_the_closed_form_and_the_tensors(meta, key_bits, value_bits, window, dim, group):
    codec = WindowCodec(window, dim, key_bits, value_bits, meta, group)
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "uint8": 1}[meta]
    extra = 12 if meta == "uint8" else 0
    form = window * dim * (key_bits + value_bits) / 8 + 2 * dim * size + 2 * window * (dim // group) * size + extra
    data = encoded(codec, *windows(1, window, dim, 0))
    assert codec.unit_bytes() == form == sum(t.numel() * t.element_size() for t in data.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_bits": 5}, "key_bits=5: choose one of 2, 3, 4, 8"),
        ({"value_bits": 1}, "value_bits=1: choose one of 2, 3, 4, 8"),
        ({"head_dim": 66}, "multiple of 4, got 66"),
        ({"head_dim": 20, "value_bits": 3}, "value_bits=3 needs a head dimension that is a multiple of 8, got 20"),
        ({"meta": "int4"}, "meta=int4: choose one of .*bfloat16.*float16.*float32.*uint8"),
        ({"value_group": 48}, "value_group=48 does not divide the head dimension 64"),
        ({"value_group": 128}, "value_group=128 does not divide the head dimension 64"),
        ({"value_group": -8}, "value_group=-8"),
        ({"value_group": 0}, "value_group=0"),
    ],
)
def test_bad_codecs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        WindowCodec(**{"window": 8, "head_dim": 64, **changes})


def test_pack_refuses_odd_lengths():
    with pytest.raises(ValueError, match="multiple of 4, got 18"):
        pack(torch.zeros(18, dtype=torch.long), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"key_bits": 5}, "key_bits=5"), ({"meta": "int4"}, "meta=int4"), ({"value_group": 7}, "value_group=7")],
)
def test_a_cache_refuses_a_bad_codec_at_once(llama, changes, message):
    with pytest.raises(ValueError, match=message):
        TierCache(llama, QEvict(**changes), 0.5)
