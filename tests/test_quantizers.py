"""KIVI and ZipCache against worked examples, golden values and numpy code written from their descriptions; and what all
quantizers promise: measured bytes, budgets, evictors, batches. KVQuant's own arithmetic is in test_nuq.py."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from baselines import zipcache
from baselines.adakv import AdaKV
from baselines.criticalkv import CriticalKV
from baselines.kivi import KIVI, GroupCodec
from baselines.kvquant import KVQuantSelf
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from baselines.zipcache import ZipCache, probes
from conftest import build, forced_logits, full_logits, gap, holdings, left_padded, rotate, softmax, tiny, tokens
from qevict import Budget, BudgetError, QEvict, TierCache
from qevict.accounting import measure
from qevict.budget import Geometry, protected_units
from qevict.hf.attention import tiered_attention
from qevict.policy import PromptView
from qevict.store.codec import unpack
from qevict.store.twoclass import TwoClassLayer, channel_scale

GOLDEN = load_file(Path(__file__).parent / "golden/quanto.safetensors")
F16 = torch.float16
SMALL_KIVI = KIVI(group=8, residual=32)
METHODS = {"kivi": SMALL_KIVI, "kvquant_self": KVQuantSelf(), "zipcache": ZipCache(interval=20)}
methods = pytest.mark.parametrize("policy", METHODS.values(), ids=METHODS)


def text(n: int, name: str = "llama", batch: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """Queries, keys, values ``[layers, B, heads, n, d]`` for a tiny model; some channels are wide, keys are off centre."""
    rng, config = np.random.default_rng(seed), tiny(name).config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wide = np.exp(rng.standard_normal(dim) * 0.5)
    heads = (config.num_attention_heads, *[config.num_key_value_heads] * 2)
    q, k, v = (rng.standard_normal((config.num_hidden_layers, batch, h, n, dim)) * wide for h in heads)
    return [torch.from_numpy(x.astype(np.float32)) for x in (q, k + rng.standard_normal(dim), v)]


def drive(cache: TierCache, data: list[torch.Tensor], calls, name: str = "llama", each=None) -> torch.Tensor:
    """Feed the next tokens of ``data`` in calls of so many each; attention output ``[layers, B, H_q, n, d]``."""
    modules, out = [layer.self_attn for layer in tiny(name).get_decoder().layers], []
    for n in calls:
        at = cache.layers[0].seen
        part = [x[..., at : at + n, :] for x in data]
        assert part[0].shape[-2] == n
        row = []
        for i, module in enumerate(modules):
            handle, _ = cache.update(part[1][i], part[2][i], i)
            with torch.no_grad():
                y, _ = tiered_attention(module, part[0][i], handle, handle, None, scaling=module.scaling)
            row.append(y.transpose(1, 2))
        out.append(torch.stack(row))
        if each is not None:
            each(at + n, out[-1])
    return torch.cat(out, -2)


def layers_of(cache: TierCache) -> list:
    (group,) = cache.store.groups
    return group.layers


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One query per head ``[H_q, d]`` over ``[H, n, d]``: output, and each KV head's mean attention ``[H, n]``."""
    group = len(q) // len(k)
    weights = np.stack([softmax(k[h // group].astype(np.float64) @ q[h] / np.sqrt(q.shape[-1])) for h in range(len(q))])
    out = np.stack([w @ v[h // group] for h, w in enumerate(weights)])
    return out, weights.reshape(len(k), group, -1).mean(1)


def affine(x: np.ndarray, axis: int, bits: int, meta=np.float16) -> tuple[np.ndarray, ...]:
    """Codes, scale, zero and decoded values of fp32 ``x`` with one scale and zero per line along ``axis``."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale, zero = (m.astype(meta).astype(np.float32) for m in ((high - low) / np.float32(2**bits - 1), low))
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(scale > 0, np.clip(np.rint((x - zero) / scale), 0, 2**bits - 1), 0).astype(np.float32)
    return codes, scale, zero, codes * scale + zero


# -- KIVI: the codec -----------------------------------------------------------------------------------------------------


def both(tokens_: int, dim: int, group: int, bits: int, meta: str = "float32") -> dict[str, GroupCodec]:
    return {"k": GroupCodec(1, dim, bits, group, 1, meta), "v": GroupCodec(1, dim, bits, 1, group, meta)}


def coded(codec: GroupCodec, x: np.ndarray) -> tuple[np.ndarray, dict[str, torch.Tensor], np.ndarray]:
    """Codes, stored tensors and decoded values of ``x [tokens, channels]``."""
    data = codec.encode(torch.from_numpy(x.astype(np.float32))[None, None])
    return unpack(data["code"], codec.bits, codec.dim)[0, 0].numpy(), data, codec.decode(data)[0, 0].numpy()


def words(codes: np.ndarray, bits: int) -> list[int]:
    """32-bit words of codes, the first in the lowest bits."""
    grid = codes.astype(np.uint64).reshape(-1, 32 // bits)
    return [int(sum(int(c) << (i * bits) for i, c in enumerate(row))) for row in grid]


@pytest.mark.parametrize(
    ("line", "bits", "scale", "codes", "packed"),
    [
        (np.tile([0, 0.5, 1.5, 3], 4), 2, 1.0, [0, 0, 2, 3] * 4, [0xE0E0E0E0]),
        (np.arange(32) / 10, 4, 0.2066667, None, [0x33221100, 0x77665544, 0xBBAA9988, 0xFFEEDDCC]),
    ],
    ids=["half-to-even", "ramp"],
)
def test_kivi_worked_examples(line, bits, scale, codes, packed):
    size = len(line)
    for kind, codec in both(size, 16 if bits == 2 else 32, size, bits).items():
        x = np.tile(line[:, None], (1, codec.dim)) if kind == "k" else np.tile(line, (4, 1))
        got, data, _ = coded(codec, x)
        one = got[:, 0] if kind == "k" else got[0]
        assert codes is None or one.tolist() == codes
        assert words(one, bits) == packed
        assert data["scale"].flatten().numpy() == pytest.approx(scale, abs=1e-6) and not data["zero"].any()


@pytest.mark.parametrize(
    ("kind", "bits", "total", "error", "first"),
    [
        ("k", 2, 6080, 0.149881, [2, 1, 2, 1, 1, 2, 2, 2]), ("v", 2, 6115, 0.146475, None), ("k", 4, 30315, 0.006000, None),
        ("v", 4, 30647, 0.005945, None),
    ],
)  # fmt: skip
def test_kivi_code_sums_of_a_normal_matrix(kind, bits, total, error, first):
    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    codes, _, back = coded(both(64, 64, 32, bits)[kind], x)
    assert codes.sum() == total
    assert first is None or codes[0, :8].tolist() == first
    assert ((back - x) ** 2).sum() / (x**2).sum() == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("shape", [(64, 64), (128, 80)], ids=str)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("kind", ["k", "v"])
def test_kivi_codes_equal_quanto_bit_for_bit(kind, bits, shape):
    seed, group = {64: (0, 32), 80: (1, 16)}[shape[1]]
    x = np.random.default_rng(seed).standard_normal(shape)
    x = (x if seed == 0 else x * 3 + 1).astype(np.float32)
    codes, data, _ = coded(both(*shape, group, bits)[kind], x)
    want = {n: GOLDEN[f"{kind}/{bits}/{shape[0]}x{shape[1]}/{n}"] for n in ("codes", "scales", "shifts")}
    assert np.array_equal(codes, want["codes"])
    assert np.array_equal(data["scale"][0, 0].numpy(), want["scales"])
    assert np.array_equal(data["zero"][0, 0].numpy(), -want["shifts"])


def test_kivi_metadata_is_rounded_before_the_codes():
    x = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float32) * 5
    for kind, codec in both(64, 32, 16, 4, "float16").items():
        lines = x.reshape(4, 16, 32) if kind == "k" else x.reshape(64, 2, 16)
        codes, _, _, want = affine(lines, 1 if kind == "k" else 2, 4)
        got, data, back = coded(codec, x)
        assert data["scale"].dtype == data["zero"].dtype == F16
        assert np.array_equal(got, codes.reshape(x.shape))
        np.testing.assert_allclose(back, want.reshape(x.shape), rtol=0, atol=1e-6)


def test_kivi_constant_groups_decode_to_their_value():
    for kind, codec in both(32, 32, 32, 2, "float16").items():
        x = np.random.default_rng(3).standard_normal((32, 32)).astype(np.float32)
        lines = x.T if kind == "k" else x  # a channel of the keys, a token of the values
        lines[3], lines[5], lines[9] = 0.75, -1.25, 0
        codes, data, back = coded(codec, x)
        codes, back = (codes.T, back.T) if kind == "k" else (codes, back)
        assert not codes[[3, 5, 9]].any() and codes[4].any()
        assert np.array_equal(back[[3, 5, 9]], lines[[3, 5, 9]])
        assert (data["scale"] == 0).sum() == 3


@pytest.mark.parametrize("meta", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_kivi_extremes_stay_finite(bits, meta):
    x = np.zeros((16, 16), np.float32)
    x[0], x[1], x[2], x[3, 0], x[4, :2] = 65504, -65504, 1e-7 * np.arange(16), 1e6, (-1e6, 1e-30)
    for codec in both(16, 16, 16, bits, meta).values():
        _, data, back = coded(codec, x)
        assert all(torch.isfinite(t.float()).all() for t in data.values()) and np.isfinite(back).all()


# -- KIVI: the flow ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "keys", "values"),
    [(100, (0, 100), (0, 100)), (128, (128, 0), (0, 128)), (129, (128, 1), (1, 128)), (300, (256, 44), (172, 128)),
     (384, (384, 0), (256, 128))],
)  # fmt: skip
def test_kivi_residual_table(n, keys, values):
    cache = TierCache(tiny("qwen3"), KIVI())
    drive(cache, text(n, "qwen3"), [n - 7, *[1] * 7], "qwen3")
    for layer in layers_of(cache):
        assert (layer.keys.count, layer.keys.tail.count) == keys
        assert (layer.values.count, layer.values.tail.count) == values


def kivi_reference(k: np.ndarray, v: np.ndarray, n: int, policy: KIVI) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values ``[H, m, d]`` as a query sees them once ``n`` of the ``m`` tokens are in the history, the rest in full."""
    size, k, v = policy.group, k.copy(), v.copy()
    for lo in range(0, policy.residual * (n // policy.residual), size):
        k[:, lo : lo + size] = affine(k[:, lo : lo + size], 1, policy.bits)[3]
    aged, dim = max(0, n - policy.residual), k.shape[-1]
    for lo in range(0, dim if aged else 0, size):
        v[:, :aged, lo : lo + size] = affine(v[:, :aged, lo : lo + size], 2, policy.bits)[3]
    return k, v


SPLITS = {
    "one-by-one": [1] * 400, "prompt-31": [31, *[1] * 369], "32": [32, *[1] * 368], "33": [33, *[1] * 367],
    "200": [200, *[1] * 200], "399": [399, 1], "400": [400], "turns": [100, 1, 150, 1, 1, 31, 116], "turn-after-turn": [5, 190, 205],
}  # fmt: skip


@pytest.fixture(scope="module")
def kivi_whole():
    cache = TierCache(tiny(), KIVI(group=16, residual=32))
    drive(cache, text(400), [400])
    return layers_of(cache)


@pytest.mark.parametrize("calls", SPLITS.values(), ids=SPLITS)
def test_kivi_stores_the_same_for_every_split(calls, kivi_whole):
    policy, data = KIVI(group=16, residual=32), text(400)
    cache = TierCache(tiny(), policy)

    def closed_form(n, _):
        for layer in layers_of(cache):
            assert layer.n == n
            assert (layer.keys.count, layer.keys.tail.count) == (32 * (n // 32), n % 32)
            assert (layer.values.count, layer.values.tail.count) == (max(0, n - 32), min(n, 32))

    drive(cache, data, calls, each=closed_form)
    for i, (layer, whole) in enumerate(zip(layers_of(cache), kivi_whole, strict=True)):
        for side, other in ((layer.keys, whole.keys), (layer.values, whole.values)):
            assert side.coded.keys() == other.coded.keys() == {"code", "scale", "zero"}
            for name in side.coded:
                assert torch.equal(side.coded[name].read(), other.coded[name].read()), name
            assert torch.equal(side.tail.read(), other.tail.read())
        want = kivi_reference(data[1][i, 0].numpy(), data[2][i, 0].numpy(), 400, policy)
        for got, x in zip(layer.read(0, 400), want, strict=True):
            np.testing.assert_allclose(got[0].numpy(), x, rtol=0, atol=1e-5)


def test_kivi_attention_sees_new_tokens_in_full():
    """Against numpy: a step attends to the history as it was before the step, and to its own tokens in full."""
    policy, data = KIVI(group=8, residual=16), text(150)
    cache, calls = TierCache(tiny(), policy), [20, *[1] * 60, 30, *[1] * 20, 20]
    got, at = drive(cache, data, calls).numpy(), 0
    for n in calls:
        for i, (q, k, v) in enumerate(zip(*(x[:, 0].numpy() for x in data), strict=True)):
            keys, values = kivi_reference(k[:, : at + n], v[:, : at + n], at, policy)
            for t in range(at, at + n):
                want, _ = attention(q[:, t], keys[:, : t + 1], values[:, : t + 1])
                np.testing.assert_allclose(got[i, 0, :, t], want, rtol=0, atol=2e-5, err_msg=f"token {t}")
        at += n
    exact = TierCache(tiny(), KIVI(group=8, residual=1024))
    assert gap(torch.from_numpy(got), drive(exact, data, calls)) > 0.1, "coded tokens should differ from the originals"


# -- KIVI: bytes ---------------------------------------------------------------------------------------------------------


def kivi_bytes(n: int, heads: int, d: int, b: int, g: int, r: int) -> int:
    """Section 1.3 of the fact sheet: one layer of one sequence, fp16."""
    kq, vq = r * (n // r), max(0, n - r)
    return heads * (kq * d * b // 8 + kq // g * d * 4 + (n - kq) * 2 * d + vq * (d * b // 8 + d // g * 4) + (n - vq) * 2 * d)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("bits", "ratios"), [(2, [1.68, 3.46, 3.55, 4.20, 4.99, 5.29]), (4, [1.52, 2.51, 2.55, 2.81, 3.09, 3.19])])
def test_kivi_ratio_table(bits, ratios, d):
    g = Geometry(1, 8, 8, d, F16)
    for n, ratio in zip((128, 512, 1000, 1024, 4096, 32768), ratios, strict=True):  # multiples of 8: no spare slots
        nbytes = KIVI(bits=bits).layer_bytes(g, n, n)
        assert nbytes == kivi_bytes(n, 8, d, bits, 32, 128)
        assert g.full_bytes(n) / nbytes == pytest.approx(ratio, abs=0.0051)


def test_kivi_used_bytes_follow_the_formula():
    for bits in (2, 4):
        cache = TierCache(tiny("qwen3"), KIVI(bits=bits), dtype="float16")

        def check(n, _, cache=cache, bits=bits):
            m = measure(cache)
            assert m["total"] - m["spare"] - m["ids"] - m["tables"] == 2 * kivi_bytes(n, 2, 32, bits, 32, 128)

        drive(cache, text(300, "qwen3"), [100, *[1] * 90, 60, *[1] * 50], "qwen3", each=check)


# -- what does not fit is refused ----------------------------------------------------------------------------------------


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"method\.group=32 does not divide the head dimension 16: set method\.group to a divisor"):
        TierCache(tiny(), KIVI())
    narrow = build("llama", head_dim=12)
    for policy in (KIVI(bits=3, group=4, residual=8), KVQuantSelf(bits=3), ZipCache(low_bits=3)):
        with pytest.raises(ValueError, match=r"3-bit codes need a head dimension that is a multiple of 8, got 12"):
            TierCache(narrow, policy)
    TierCache(narrow, KIVI(bits=4, group=4, residual=8))
    for residual in (40, 16, 0):
        with pytest.raises(ValueError, match=rf"residual={residual} must be a positive multiple of group=32"):
            KIVI(residual=residual)
    with pytest.raises(ValueError, match=r"bits=5: choose one of"):
        KIVI(bits=5)
    with pytest.raises(ValueError, match=r"32 KV heads of 1024 channels"):
        KVQuantSelf().codec(Geometry(1, 32, 32, 1024, F16))


@pytest.mark.parametrize("evict", [AdaKV(), QEvict(), StreamingLLM()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("method", [KIVI, KVQuantSelf, ZipCache])
def test_evictors_that_do_not_fit_are_refused(method, evict):
    with pytest.raises(ValueError, match=rf"evict={type(evict).__name__}: choose a method .*SnapKV"):
        method(evict=evict)


# -- ZipCache ------------------------------------------------------------------------------------------------------------


def zip_reference(k, v, high, high_bits=4, low_bits=2, meta=np.float16) -> tuple[np.ndarray, np.ndarray]:
    """Decoded keys and values ``[H, n, d]`` whose salient tokens are ``high [H, n]``, as the paper codes them."""
    k_out, v_out = np.zeros_like(k), np.zeros_like(v)
    channel = np.sqrt(np.abs(v).max(1, keepdims=True)).astype(meta).astype(np.float32)
    channel[channel == 0] = 1
    for mask, bits in ((high, high_bits), (~high, low_bits)):
        ids = [np.flatnonzero(m) for m in mask]
        if not len(ids[0]):
            continue
        for h, i in enumerate(ids):
            k_out[h, i] = affine(k[h, i], 0, bits, meta)[3]
        rows = np.concatenate([(v / channel)[h, i] for h, i in enumerate(ids)], -1)  # r-th such token of every head
        back = np.split(affine(rows, 1, bits, meta)[3], len(ids), -1)
        for h, i in enumerate(ids):
            v_out[h, i] = back[h] * channel[h]
    return k_out, v_out


def saliency_reference(q, k, rows) -> np.ndarray:
    """``[H, n]``: attention from the probe rows over how many of them see a token."""
    n, total = k.shape[1], 0
    for t in rows:
        total = total + np.pad(attention(q[:, t], k[:, : t + 1], k[:, : t + 1])[1], ((0, 0), (0, n - t - 1)))
    return total / (np.asarray(rows)[:, None] >= np.arange(n)).sum(0)


def test_zipcache_values_of_one_class():
    """The fact sheet's numbers are of fp32 metadata; with fp16 (as stored) some codes move by one, the error hardly."""
    v = np.random.default_rng(1).standard_normal((1, 3, 32, 64)).astype(np.float32)
    none = np.zeros((3, 32), bool)
    channel = np.sqrt(np.abs(v[0]).max(1, keepdims=True))
    np.testing.assert_allclose(channel_scale(torch.from_numpy(v))[0].numpy(), channel, rtol=5e-4)
    codes = affine((v[0] / channel).transpose(1, 0, 2).reshape(32, -1), 1, 2, np.float32)[0]
    exact = zip_reference(v[0], v[0], none, meta=np.float32)[1]
    assert codes.sum() == 9070
    assert ((exact - v[0]) ** 2).sum() / (v**2).sum() == pytest.approx(0.237373, abs=1e-6)
    g = Geometry(1, 3, 3, 64, torch.float32)
    x = torch.from_numpy(v)
    view = PromptView(x, x, x, torch.ones(1, 32, dtype=torch.bool), 0.125)
    layer = TwoClassLayer(ZipCache(salient=0), g, None, view, torch.zeros(1, dtype=torch.int64))
    layer.fill(x, x)
    _, back = layer.read(0, 32)
    stored = unpack(layer.coded["low_v_code"], 2, 64)[0].transpose(0, 1).flatten(1).numpy()
    assert abs(int(stored.sum()) - 9070) <= 5 and (stored != codes).sum() <= 10
    np.testing.assert_allclose(back[0].numpy(), zip_reference(v[0], v[0], none)[1], rtol=0, atol=1e-5)
    assert ((back.numpy() - v) ** 2).sum() / (v**2).sum() == pytest.approx(0.237373, abs=2e-4)


def uniform(length: int) -> PromptView:
    zero = torch.zeros(1, 2, length, 16)
    return PromptView(zero[:, :, :, :].repeat(1, 2, 1, 1), zero, zero, torch.ones(1, length, dtype=torch.bool), 0.25)


def test_zipcache_saliency_of_uniform_attention(monkeypatch):
    got = ZipCache(probes=1.0).saliency(uniform(4))[0]
    # four query heads on two KV heads: sums over a group are twice what one head gives
    np.testing.assert_allclose(got.numpy() / 2, np.tile([0.5208333, 0.3611111, 0.2916667, 0.25], (2, 1)), atol=1e-6)
    monkeypatch.setattr(zipcache, "probes", lambda length, share: torch.tensor([1, 3]))
    for normalizer, want in (("probes", [0.375, 0.375, 0.25, 0.25]), ("causal", [0.1875, 0.25, 0.125, 0.25])):
        got = ZipCache(normalizer=normalizer).saliency(uniform(4))[0]
        np.testing.assert_allclose(got.numpy() / 2, [want, want], atol=1e-6)


def test_zipcache_probe_counts():
    for length, recent, older in ((1024, 52, 51), (19, 1, 0), (1, 1, 0)):
        rows = probes(length, 0.1).tolist()
        assert rows == sorted(set(rows)) and len(rows) == recent + older
        assert rows[older:] == list(range(length - recent, length))
        assert probes(length, 0.1).tolist() == rows
    assert probes(100, 1.0).tolist() == list(range(100))


def test_zipcache_classes_and_ties():
    data = text(101)
    cache = TierCache(tiny(), ZipCache())
    drive(cache, data, [101])
    rows = probes(101, 0.1).tolist()
    for i, layer in enumerate(layers_of(cache)):
        high = layer.salient()[0].numpy()
        assert ((~high).sum(-1) == 40).all()  # floor(0.4 * 101) of every head
        want = saliency_reference(data[0][i, 0].numpy(), data[1][i, 0].numpy(), rows)
        for h in range(2):
            assert set(np.flatnonzero(~high[h])) == set(np.argsort(want[h])[:40])
    flat = [torch.zeros_like(data[0]), torch.zeros_like(data[1]), data[2]]
    policy = ZipCache(probes=1.0)
    assert (policy.few(100, 100), policy.few(100, 200), policy.few(19, 19), policy.few(1, 1)) == (40, 80, 7, 0)
    cache = TierCache(tiny(), policy)
    drive(cache, flat, [101])
    # uniform attention: saliency falls with the position, so the last are the low ones
    assert (~layers_of(cache)[0].salient()[0, 0]).nonzero().flatten().tolist() == list(range(61, 101))
    cache = TierCache(tiny(), ZipCache(interval=10))
    drive(cache, flat, [1, *[1] * 10])
    # ten tokens with equal attention: of equals the older have low bits
    assert layers_of(cache)[0].salient()[0].tolist() == [[True] + [False] * 4 + [True] * 6] * 2


def test_zipcache_codes_everything_anew_every_interval():
    """Two rounds against numpy: what is stored, who has which class, and what a query gets."""
    policy, data, length = ZipCache(interval=10), text(75), 50
    cache = TierCache(tiny(), policy)
    out, state, tails = [], [], []
    for q, k, v in zip(*(x[:, 0].numpy() for x in data), strict=True):
        first = saliency_reference(q[:, :length], k[:, :length], probes(length, 0.1).tolist())
        high = np.ones((2, length), bool)
        np.put_along_axis(high, np.argsort(first, -1)[:, :20], False, -1)
        keys, values = zip_reference(k[:, :length], v[:, :length], high)
        got, seen = [], [(keys, values, high)]
        for t in range(length, 75):
            keys, values = (np.concatenate((x, new[:, t : t + 1]), 1) for x, new in ((keys, k), (values, v)))
            y, row = attention(q[:, t], keys, values)
            got.append(y)
            if (t + 1 - length) % 10 == 0:
                new = np.ones((2, 10), bool)
                np.put_along_axis(new, np.argsort(row[:, -10:], -1)[:, :4], False, -1)
                high = np.concatenate((high, new), 1)
                keys, values = zip_reference(keys, values, high)
            seen.append((keys, values, high))
        out.append(np.stack(got, 1))
        state.append(seen)
        tails.append(keys)

    def check(n, y):
        if n < length:
            return
        for i, layer in enumerate(layers_of(cache)):
            keys, values, high = state[i][n - length]
            assert layer.count == high.shape[1] == n - (n - length) % 10
            assert np.array_equal(layer.salient()[0].numpy(), high)
            for got, want in zip(layer.read(0, n), (keys, values), strict=True):
                np.testing.assert_allclose(got[0].numpy(), want, rtol=0, atol=1e-4)
            if n > length:
                np.testing.assert_allclose(y[i, 0, :, 0].numpy(), out[i][:, n - length - 1], rtol=0, atol=1e-4)

    drive(cache, data, [length, *[1] * 25], each=check)
    whole = TierCache(tiny(), policy)
    drive(whole, data, [length, 25])  # one turn: coded once, by its last query
    for layer in layers_of(whole):
        assert layer.count == 70 and ((~layer.salient()[0]).sum(-1) == 28).all()


def test_zipcache_survives_dead_channels():
    data = text(60)
    data[2][..., 3], data[2][:, :, 1] = 0, 0
    data[1][..., 5] = 0.5
    cache = TierCache(tiny(), ZipCache(interval=5), dtype="float16")
    assert torch.isfinite(drive(cache, data, [40, *[1] * 20])).all()
    k, v = layers_of(cache)[0].read(0, 60)
    assert (k[..., 5] == 0.5).all() and torch.isfinite(v).all()


def test_zipcache_bytes_follow_the_formula():
    policy = ZipCache(interval=20)
    cache = TierCache(tiny(), policy, dtype="float16")

    def check(n, _):
        count, heads, row = n - (n - 50) % 20, 2, 32
        low = int(0.4 * 50 + 1e-9) + (count - 50) // 20 * 8
        m = measure(cache)
        assert m["codes"] == 2 * 2 * row * (4 * (count - low) + 2 * low) / 8
        assert m["quant_meta"] == 2 * (8 * row + 4 * count + 2 * row)
        assert m["ids"] == 2 * heads * -(-count // 8) + 8
        assert m["full"] == 2 * (n - count) * 4 * row
        assert m["spare"] == 2 * (-(n - count) % 8) * 4 * row and m["scores"] == m["other"] == 0

    drive(cache, text(110), [50, *[1] * 60], each=check)


@pytest.mark.parametrize(
    ("d", "heads", "ratios"), [(64, 3, (4.85, 4.63, 5.52, 6.40)), (64, 8, (4.93, 4.70, 5.62, 6.53)), (128, 8, (4.96, 4.73, 5.66, 6.59))]
)  # fmt: skip
def test_zipcache_ratio_table(d, heads, ratios):
    g = Geometry(1, heads, heads, d, F16)
    cells = [(0.6, 0), (0.6, 50), (0.4, 0), (0.2, 0)]
    for (salient, buffered), ratio in zip(cells, ratios, strict=True):
        nbytes = ZipCache(salient=salient).layer_bytes(g, 4096 - buffered, 4096) - g.full_bytes(-buffered % 8)
        assert g.full_bytes(4096) / nbytes == pytest.approx(ratio, abs=0.011)
