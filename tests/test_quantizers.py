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

from baselines.adakv import AdaKV
from baselines.criticalkv import CriticalKV
from baselines.kivi import KIVI, GroupCodec
from baselines.kvquant import KVQuantSelf
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from baselines.zipcache import ZipCache
from conftest import build, call, forced_logits, full_logits, gap, holdings, left_padded, rotate, softmax, tiny, tokens
from qevict import Budget, BudgetError, QEvict, TierCache
from qevict.accounting import measure
from qevict.budget import Geometry, protected_units
from qevict.hf.attention import tiered_attention
from qevict.store.codec import unpack
from qevict.store.history import HistoryLayer
from qevict.store.twoclass import TwoClassLayer

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
    "200": [200, *[1] * 200], "399": [399, 1], "400": [400], "turns": [100, 1, 150, 1, 1, 31, 116],
    "turn-after-turn": [5, 190, 205],
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
@pytest.mark.parametrize(
    ("bits", "ratios"), [(2, [1.68, 3.46, 3.55, 4.20, 4.995, 5.29]), (4, [1.52, 2.51, 2.55, 2.81, 3.09, 3.19])]
)
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
        with pytest.raises(ValueError, match=r"bits=3 needs a head dimension that is a multiple of 8, got 12"):
            TierCache(narrow, policy)
    TierCache(narrow, KIVI(bits=4, group=4, residual=8))
    for residual in (40, 16, 0):
        with pytest.raises(ValueError, match=rf"method.residual={residual} must be a positive multiple of method.group=32"):
            KIVI(residual=residual)
    with pytest.raises(ValueError, match=r"bits=5: choose one of"):
        KIVI(bits=5)
    with pytest.raises(ValueError, match=r"32 KV heads of 1024 channels"):
        KVQuantSelf().codec(Geometry(1, 32, 32, 1024, F16))


@pytest.mark.parametrize("evict", [AdaKV(), QEvict(), StreamingLLM()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("method", [KIVI, KVQuantSelf, ZipCache])
def test_evictors_that_do_not_fit_are_refused(method, evict):
    with pytest.raises(ValueError, match=rf"method.evict={type(evict).__name__}\(.*: give _target_ .*SnapKV"):
        method(evict=evict)


# -- what all quantizers promise: batches --------------------------------------------------------------------------------


@methods
@pytest.mark.parametrize("lengths", [[60, 9, 33], [45, 45]], ids=str)
def test_a_batch_gives_what_each_sequence_alone_gives(policy, lengths):
    ids, mask = left_padded(lengths)
    forced = tokens(len(lengths), 45, seed=1)
    got = forced_logits(tiny(), TierCache(tiny(), policy), ids, mask, forced)
    full = full_logits("llama", ids, mask, forced)
    assert gap(got[:, 0], full[:, 0]) < 1e-4, "the prompt itself is attended in full"
    assert all(gap(got[r], full[r]) > 1e-2 for r in range(len(lengths))), "coded tokens should change the logits"
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = forced_logits(tiny(), TierCache(tiny(), policy), ids[one, -length:], None, forced[one])
        assert gap(got[one], alone) < 1e-3, f"row {row}"


@methods
def test_a_sequence_changes_nothing_of_another(policy):
    mine, other = text(100), text(100, seed=1)
    pair = [torch.cat((a, 10 * b), 1) for a, b in zip(mine, other, strict=True)]
    alone, together = (TierCache(tiny(), policy) for _ in range(2))
    for cache, data in ((alone, mine), (together, pair)):
        drive(cache, data, [50, *[1] * 40, 10])
    for a, b in zip(layers_of(alone), layers_of(together), strict=True):
        for x, y in zip(a.read(0, 100), b.read(0, 100), strict=True):
            assert torch.equal(x[0], y[0])


@pytest.mark.parametrize(("name", "values_too"), [("kivi", True), ("zipcache", False)])
def test_heads_change_nothing_of_each_other(name, values_too):
    """ZipCache pools the heads of a value row, as the paper does; its keys, and all of KIVI, are of one head."""
    data = text(100)
    changed = [x.clone() for x in data]
    for x in changed[1:]:
        x[:, :, 1] = x[:, :, 1].flip(-2) * 10
    caches = [TierCache(tiny(), METHODS[name]) for _ in range(2)]
    for cache, x in zip(caches, (data, changed), strict=True):
        drive(cache, x, [50, *[1] * 50])
    for a, b in zip(*(layers_of(c) for c in caches), strict=True):
        (k, v), (k2, v2) = a.read(0, 100), b.read(0, 100)
        assert torch.equal(k[:, 0], k2[:, 0]) and not torch.equal(k[:, 1], k2[:, 1])
        assert torch.equal(v[:, 0], v2[:, 0]) == values_too


@methods
@pytest.mark.parametrize("evict", [None, SnapKV(observe=8, interval=8)], ids=["all", "snapkv"])
def test_rows_can_be_reordered_and_repeated(policy, evict):
    policy = policy if evict is None else type(policy)(**{**vars(policy), "evict": evict})
    budget = 1.0 if evict is None else Budget(0.8)
    lengths, rows = [60, 40, 60], [2, 0, 0, 1]
    ids, mask = left_padded(lengths)
    forced = tokens(3, 60, seed=1)
    want = forced_logits(tiny(), TierCache(tiny(), policy, budget), ids, mask, forced)[rows]
    cache = TierCache(tiny(), policy, budget)
    forced_logits(tiny(), cache, ids, mask, forced[:, :25])
    before = measure(cache)
    cache.reorder_cache(torch.tensor([1, 2, 0]))
    assert measure(cache) == before
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_select_indices(torch.tensor(rows))
    assert cache.store.batch == 4
    mask = torch.cat((mask, torch.ones(3, 25, dtype=torch.long)), -1)[rows]
    positions = (mask.cumsum(-1) - 1)[:, -1:]
    for step in range(25, 60):
        mask, positions = torch.cat((mask, mask[:, -1:]), -1), positions + 1
        got = call(tiny(), cache, forced[rows, step, None], mask, positions).logits[:, -1]
        assert gap(got, want[:, step + 1]) < 1e-3, f"step {step}"


@methods
def test_repeated_rows_go_on_alike(policy):
    data, twice = text(100, batch=2), [x.repeat_interleave(2, 1) for x in text(100, batch=2)]
    cache = TierCache(tiny(), policy)
    drive(cache, data, [60])
    cache.batch_repeat_interleave(2)
    out = drive(cache, twice, [1] * 40)
    assert torch.equal(out[:, 0::2], out[:, 1::2])


@methods
@pytest.mark.parametrize("evict", [None, SnapKV(observe=8, interval=8)], ids=["all", "snapkv"])
def test_a_copy_goes_its_own_way(policy, evict):
    policy = policy if evict is None else type(policy)(**{**vars(policy), "evict": evict})
    data, other = text(140), text(140, seed=1)
    cache = TierCache(tiny(), policy, 1.0 if evict is None else 0.5)
    drive(cache, data, [70, *[1] * 5])
    twin, before = copy.deepcopy(cache), measure(cache)
    assert measure(twin) == before
    drive(twin, other, [1] * 60)
    assert measure(cache) == before
    again = copy.deepcopy(cache)
    assert torch.equal(drive(cache, data, [1] * 60), drive(again, data, [1] * 60))
    assert not torch.equal(layers_of(cache)[0].read(0, 80)[0], layers_of(twin)[0].read(0, 80)[0])


@methods
def test_long_histories_are_read_in_blocks(policy):
    """Any range of tokens decodes as in the whole, and attention over several blocks is one softmax."""
    if isinstance(policy, KIVI):
        policy = KIVI(group=16, residual=48)  # 48 divides no block of 512 tokens
    data, n = text(600), 570
    cache = TierCache(tiny(), policy)
    drive(cache, data, [n - 30, *[1] * 30])
    layers = layers_of(cache)
    before = [layer.read(0, n) for layer in layers]
    for layer, whole in zip(layers, before, strict=True):
        for lo, hi in ((5, 37), (0, 1), (1, 3), (33, 34), (500, 520), (512, 570), (530, 533), (569, 570)):
            for got, want in zip(layer.read(lo, hi), whole, strict=True):
                np.testing.assert_allclose(got.numpy(), want[:, :, lo:hi].numpy(), atol=1e-5, err_msg=f"{lo}:{hi}")
    out = drive(cache, data, [1])
    for i, layer in enumerate(layers):
        k, v = (torch.cat((x[0], new[i, 0, :, n, None]), 1) for x, new in zip(before[i], data[1:], strict=True))
        if policy.codes_first:
            k, v = (x[0] for x in layer.read(0, n + 1))
        want, _ = attention(data[0][i, 0, :, n].numpy(), k.numpy(), v.numpy())
        np.testing.assert_allclose(out[i, 0, :, 0].numpy(), want, rtol=0, atol=2e-5)


# -- what all quantizers promise: bytes ----------------------------------------------------------------------------------


@methods
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_measured_bytes_are_the_formula_at_every_step(policy, batch, dtype):
    cache = TierCache(tiny(), policy, dtype=dtype)

    def check(n, _):
        g, m = cache.geometry, measure(cache)
        assert m["total"] == batch * policy.total(g, 45, n) - (batch - 1) * g.rope_bytes
        assert m["other"] == m["ledger"] == m["scores"] == 0

    drive(cache, text(260, batch=batch), [45, *[1] * 70, 33, *[1] * 90, 2, 20], each=check)


FLOORS = [("kivi", 57), ("kivi", 100), ("zipcache", 57), ("zipcache", 101), ("kvquant_self", 57), ("kvquant_self", 100)]


@pytest.mark.parametrize(("name", "length"), FLOORS)
def test_a_budget_below_the_floor_is_refused_and_the_named_floor_works(name, length):
    policy, data = METHODS[name], text(length + 200)
    cache = TierCache(tiny(), policy, 0.05)
    with pytest.raises(
        BudgetError, match=r"keeps every token: .*floor here is budget>=0\.\d+ .*compose it with an evictor"
    ) as error:
        drive(cache, data, [length])
    assert cache.store is None and cache.get_seq_length() == 0
    floor = float(re.search(r"budget>=([\d.]+)", str(error.value))[1])
    with pytest.raises(BudgetError):
        drive(TierCache(tiny(), policy, floor - 2e-4), data, [length, *[1] * 200])
    cache = TierCache(tiny(), policy, floor)

    def check(n, _):
        assert measure(cache)["total"] <= floor * cache.geometry.full_bytes(n)

    drive(cache, data, [length, *[1] * 200], each=check)
    assert cache.store.seen == length + 200


@methods
def test_absolute_bytes_run_out_before_a_token_is_stored(policy):
    data, length = text(200), 60
    g = TierCache(tiny(), policy).geometry
    sizes = {n: policy.total(g, length, n) for n in range(length, 200)}
    nbytes = max(sizes[n] for n in range(length, length + 45))
    end = min(n for n in sizes if sizes[n] > nbytes)
    with pytest.raises(BudgetError, match=r"its floor here is budget"):
        drive(TierCache(tiny(), policy, Budget(nbytes=sizes[length] - 1)), data, [length])
    cache, free = TierCache(tiny(), policy, Budget(nbytes=nbytes)), TierCache(tiny(), policy)
    calls = [length, *[1] * (end - 1 - length)]

    def check(*_):
        assert measure(cache)["total"] <= nbytes

    drive(cache, data, calls, each=check)
    before = measure(cache)
    for n in (1, 2):  # neither a token nor a turn
        with pytest.raises(BudgetError, match=rf"at {end - 1 + n} tokens it holds \d+ bytes, the budget is {nbytes}"):
            drive(cache, data, [n])
        assert cache.get_seq_length() == cache.store.seen == end - 1
        assert measure(cache) == before
    drive(free, data, calls)
    cache.store.budget = Budget(1.0)  # the cache is as it was: given room it goes on
    assert torch.equal(drive(cache, data, [1] * 5), drive(free, data, [1] * 5))


@methods
def test_grow_lets_bytes_rise(policy):
    cache = TierCache(tiny(), policy)
    nbytes, data = policy.total(cache.geometry, 60, 60), text(160)
    cache = TierCache(tiny(), policy, Budget(nbytes=nbytes, decode="grow"))
    drive(cache, data, [60])
    assert measure(cache)["total"] == nbytes
    drive(cache, data, [*[1] * 80, 20])
    assert measure(cache)["total"] == policy.total(cache.geometry, 60, 160) > nbytes
    with pytest.raises(BudgetError):
        drive(TierCache(tiny(), policy, Budget(nbytes=nbytes - 1, decode="grow")), data, [60])


# -- with an evictor -----------------------------------------------------------------------------------------------------

EVICTORS = {"snapkv": SnapKV(observe=8, interval=8), "criticalkv": CriticalKV(observe=8, interval=8)}
evictors = pytest.mark.parametrize("evict", EVICTORS.values(), ids=EVICTORS)


def composed(name: str, evict, **changes):
    return type(METHODS[name])(**{**vars(METHODS[name]), **changes, "evict": evict})


class Tracker:
    """Which tokens each layer and head of a cache holds, from the indices that its selections took: ``ids[layer] [B, H, n]``."""

    def __init__(self, monkeypatch):
        self.taken: dict[int, torch.Tensor] = {}
        for kind in (HistoryLayer, TwoClassLayer):
            original = kind.regroup

            def spy(layer, index, score, original=original):
                self.taken[id(layer)] = index
                return original(layer, index, score)

            monkeypatch.setattr(kind, "regroup", spy)
        self.ids: list[torch.Tensor] = []
        self.selections = 0

    def update(self, cache: TierCache, seen: int, new: int) -> None:
        layers = layers_of(cache)
        fresh = torch.arange(seen - new, seen)
        if not self.ids:
            self.ids = [torch.zeros(len(x.first), cache.geometry.kv_heads, 0, dtype=torch.int64) for x in layers]
        self.selections += bool(self.taken)
        for i, layer in enumerate(layers):
            self.ids[i] = torch.cat((self.ids[i], fresh.expand(*self.ids[i].shape[:2], -1)), -1)
            if id(layer) in self.taken:
                self.ids[i] = self.ids[i].gather(-1, self.taken[id(layer)])
        self.taken.clear()


@evictors
@pytest.mark.parametrize(
    ("name", "changes", "share"),
    [
        ("kivi", {"bits": 4}, 0.2),
        ("kivi", {"bits": 4, "residual": 8}, 0.2),
        ("kvquant_self", {"bits": 4}, 0.2),
        ("zipcache", {"high_bits": 8, "low_bits": 4}, 0.15),
    ],
    ids=["kivi", "kivi-8", "kvquant_self", "zipcache"],
)
def test_an_evictor_keeps_bytes_window_and_positions(name, changes, share, evict, monkeypatch):
    policy, budget = composed(name, evict, **changes), Budget(share)
    data, calls = text(400), [200, *[1] * 60, 50, *[1] * 60, 5, *[1] * 25]
    cache, tracker = TierCache(tiny(), policy, budget), Tracker(monkeypatch)
    k, v = data[1], data[2]
    last = [0]

    def check(n, _):
        g, m = cache.geometry, measure(cache)
        tracker.update(cache, n, n - last[0])
        last[0] = n
        assert m["total"] <= budget.resolve(g, 200, n) and m["other"] == 0
        (group,) = cache.store.groups
        layer = group.layers[0]
        assert m["total"] == policy.total(g, layer.base, layer.n)
        for i, held in enumerate(group.layers):
            ids = tracker.ids[i]
            assert held.n == ids.shape[-1] < n
            assert (ids.diff(dim=-1) > 0).all() and (ids[..., : policy.sink] == torch.arange(policy.sink)).all()
            assert (ids[..., -8:] == torch.arange(n - 8, n)).all(), "the observation window was not kept"
            if policy.plain_keys:
                assert torch.equal(held.position.long(), ids)
            for got, x in zip(held.read(0, held.n), (k[i], v[i]), strict=True):
                want = x.gather(2, ids.unsqueeze(-1).expand(*ids.shape, x.shape[-1]))
                assert ((got - want) ** 2).sum() < 0.1 * (want**2).sum(), "these are not the tokens that were kept"

    drive(cache, data, calls, each=check)
    assert tracker.selections > 15


@pytest.mark.parametrize("name", METHODS)
def test_an_evictors_step_attends_to_what_is_stored_at_its_position(name, monkeypatch):
    """Keys coded before RoPE are turned by the position of the token that they belong to, in every head."""
    policy = composed(name, EVICTORS["snapkv"])
    data, at = text(160), 100
    cache, tracker = TierCache(tiny(), policy, 0.4), Tracker(monkeypatch)
    drive(cache, data, [at], each=lambda n, _: tracker.update(cache, n, n))
    inv_freq = cache.rope.inv_freq.double().numpy()
    for t in range(at, at + 40):
        held = layers_of(cache)
        state = [[x[0].numpy() for x in layer.read(0, layer.n)] for layer in held]
        out = drive(cache, data, [1])
        for i, (q, k, v) in enumerate(zip(*(x[:, 0, :, t].numpy() for x in data), strict=True)):
            keys, values = (np.concatenate((x, new[:, None]), 1) for x, new in zip(state[i], (k, v), strict=True))
            if policy.codes_first:
                side, ids = held[i].keys, np.concatenate((tracker.ids[i][0], np.full((2, 1), t)), 1)
                if tracker.taken:  # selected anew after the step: what was attended to is gone
                    continue
                flat = side.codec.decode({n: x.read() for n, x in side.coded.items()})[0].numpy()
                turned = rotate(flat, ids[:, policy.sink :], inv_freq)
                keys = np.concatenate((keys[:, : policy.sink], turned), 1)
                values = held[i].read(0, held[i].n)[1][0].numpy()
            want, _ = attention(q, keys, values)
            np.testing.assert_allclose(out[i, 0, :, 0].numpy(), want, rtol=0, atol=3e-5, err_msg=f"token {t}, layer {i}")
        tracker.update(cache, t + 1, 1)
    assert tracker.selections >= 4


@evictors
@pytest.mark.parametrize("name", METHODS)
def test_the_prompts_kept_set_is_the_evictors_own(name, evict, monkeypatch):
    policy = composed(name, evict, **({"first": 0} if name == "kvquant_self" else {}))
    data = text(200)
    cache, tracker = TierCache(tiny(), policy, 0.15), Tracker(monkeypatch)
    drive(cache, data, [200], each=lambda n, _: tracker.update(cache, n, n))
    count = cache.store.layouts[0].full
    slots = count - evict.observe + protected_units(1, evict.interval, evict.observe)
    own = TierCache(tiny(), evict, Budget(nbytes=evict.costs(cache.geometry, 0).total(cache.geometry, slots, 0)))
    drive(own, data, [200])
    assert own.store.layouts[0].full == count - evict.observe
    held = holdings(own.store)
    for (layer, row, head), units in held.items():
        assert set(tracker.ids[layer][row, head].tolist()) == set(units)
    assert len({frozenset(u) for u in held.values()}) == 4, "heads choose for themselves"


@pytest.mark.parametrize("name", METHODS)
def test_an_evictor_needs_room_for_its_window(name):
    policy, data = composed(name, EVICTORS["snapkv"]), text(200)
    with pytest.raises(BudgetError, match=r"smallest workable: \d+ bytes \(budget>=0\.\d+, or budget_bytes=\d+\)") as error:
        drive(TierCache(tiny(), policy, 0.005), data, [150])
    nbytes = int(re.search(r"budget_bytes=(\d+)", str(error.value))[1])
    cache = TierCache(tiny(), policy, Budget(nbytes=nbytes))

    def check(*_):
        assert measure(cache)["total"] <= nbytes

    drive(cache, data, [150, *[1] * 50], each=check)
    with pytest.raises(BudgetError):
        drive(TierCache(tiny(), policy, Budget(nbytes=nbytes - 1)), data, [150])


def squared_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want) ** 2).sum())


@pytest.mark.parametrize(
    ("name", "share", "at", "may"),
    [("kivi", 0.2, 250, (4, 1.001)), ("kvquant_self", 0.2, 250, (1, 1)), ("zipcache", 0.13, 600, (1.3, 1.1))],
    ids=METHODS,
)
def test_selections_do_not_wear_out_what_stays(name, share, at, may, monkeypatch):
    """Errors of a prompt's coded keys and values that stay, after 15 selections against after the first. KVQuant's are the same to
    the bit; of the others only keys, which share a scale with tokens that come and go, are rounded again."""
    policy, data = composed(name, SnapKV(observe=8, interval=8)), text(at + 120)
    cache, tracker = TierCache(tiny(), policy, Budget(share)), Tracker(monkeypatch)
    drive(cache, data, [at], each=lambda n, _: tracker.update(cache, n, n))
    first = [(tracker.ids[i], policy.coded(x.base, x.n), x.read(0, x.n)) for i, x in enumerate(layers_of(cache))]
    drive(cache, data, [1] * 120, each=lambda n, _: tracker.update(cache, n, 1))
    assert tracker.selections == 16
    for i, ((ids, coded, then), layer) in enumerate(zip(first, layers_of(cache), strict=True)):
        now, later = layer.read(0, layer.n), tracker.ids[i]
        assert later.shape[-1] < at + 120 - policy.sink
        for side, (x, limit) in enumerate(zip(data[1:], may, strict=True)):
            end = policy.sink + coded[side]
            b, h, new, old = (later.unsqueeze(-1) == ids[..., None, policy.sink : end]).nonzero(as_tuple=True)
            before, after = then[side][b, h, policy.sink + old], now[side][b, h, new]
            want = x[i][b, h, ids[b, h, policy.sink + old]]
            assert len(b) > 20
            assert squared_error(after, want) <= limit * squared_error(before, want), f"layer {i}, {'kv'[side]}"
            if name == "kvquant_self":
                assert torch.equal(before, after)


@pytest.mark.parametrize("name", METHODS)
def test_an_evictor_that_keeps_everything_keeps_it_as_well(name):
    """KIVI stores the same; the others have a row per head then, and lose no more by it."""
    data, calls = text(120), [60, *[1] * 40, 20]
    caches = [TierCache(tiny(), composed(name, e)) for e in (EVICTORS["snapkv"], None)]
    outs = [drive(cache, data, calls) for cache in caches]
    if name == "kivi":
        assert torch.equal(*outs)
    for with_it, without, k, v in zip(*map(layers_of, caches), data[1], data[2], strict=True):
        assert with_it.n == without.n == 120
        for got, plain, want in zip(with_it.read(0, 120), without.read(0, 120), (k, v), strict=True):
            assert squared_error(got, want) <= 1.02 * squared_error(plain, want)
