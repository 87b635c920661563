"""KVQuant (non-uniform codes, outliers, calibration) and ZipCache (two classes of tokens) against worked examples and numpy code
written from their descriptions. What they share with KIVI is in test_quantizers.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from baselines import zipcache
from baselines.kvquant import KVQuant, KVQuantSelf
from baselines.zipcache import ZipCache, probes
from conftest import build, forced_logits, gap, left_padded, rotate, tiny, tokens
from qevict import TierCache
from qevict.accounting import measure
from qevict.artifact import ArtifactError, artifact_path, load_artifact, model_digest, save_artifact
from qevict.budget import Geometry
from qevict.policy import PromptView
from qevict.store.codec import unpack
from qevict.store.nuq import NuqCodec, kmeans_1d, nearest, outlier_slots, percentile, q_norm
from qevict.store.twoclass import TwoClassLayer, channel_scale
from test_quantizers import affine, attention, drive, layers_of, text

F16 = torch.float16
NAMES = {"k_middle", "k_half", "k_book", "v_book", "k_norm", "v_norm"}


def static(book, middle, half, slots: int, heads: int = 1, bits: int = 2, norm=None) -> NuqCodec:
    """Codec of keys; ``middle`` and ``half`` are per channel."""
    middle, half = (torch.as_tensor(x, dtype=torch.float32).view(1, 1, -1) for x in (middle, half))
    book = torch.as_tensor(book, dtype=torch.float32)[None]
    return NuqCodec(heads, middle.shape[-1] // heads, bits, slots, book, norm, middle, half, True)


def dynamic(book, heads: int, dim: int, slots: int, bits: int = 2) -> NuqCodec:
    """Codec of values."""
    return NuqCodec(heads, dim, bits, slots, torch.as_tensor(book, dtype=torch.float32)[None], None, None, None, True)


def codes_of(codec: NuqCodec, data) -> np.ndarray:
    """``[H, t, d]``."""
    return unpack(data["code"], codec.bits, codec.dim)[0].numpy()


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


# -- KVQuant: codes ------------------------------------------------------------------------------------------------------


def test_kvquant_worked_example():
    """A channel -3, -1, 0, 0.5, 1, 10 with thresholds -3 and 1, the others constant."""
    x = torch.zeros(1, 1, 6, 4)
    x[0, 0, :, 0] = torch.tensor([-3, -1, 0, 0.5, 1, 10])
    codec = static([-0.8, -0.2, 0.3, 0.9], [-1, 0, 0, 0], [2, 1, 1, 1], 2)
    data = codec.encode(x)
    assert codes_of(codec, data)[0, :, 0].tolist() == [0, 1, 2, 3, 3, 3]
    assert codec.decode(data)[0, 0, :, 0].tolist() == pytest.approx([-2.6, -1.4, -0.4, 0.8, 0.8, 10], abs=1e-6)
    assert data["where"][0, 0].tolist() == [[-1, -1]] * 5 + [[0, -1]]
    dense = codec.decode({**data, "where": torch.full_like(data["where"], -1)})
    assert dense[0, 0, 5, 0] == pytest.approx(0.8, abs=1e-6)  # the residual that the authors store is 9.2


def test_kvquant_half_way_values_and_ends():
    book = torch.tensor([[-0.5, 0.0, 0.5, 1.0]])
    y = torch.tensor([[-9, -0.5, -0.25, -0.249, 0.25, 0.251, 0.75, 0.76, 9]])
    assert nearest(y, book)[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kvquant_uniform_centroids_are_the_integer_quantizer(bits):
    x, levels = normal(bits, 1, 2, 50, 16) * 3 + 1, 2**bits - 1
    codec = dynamic(np.linspace(-1, 1, 2**bits), 2, 16, 0, bits)
    data = codec.encode(x)
    rows = x[0].transpose(0, 1).flatten(1).numpy()
    low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    middle, half = (m.astype(np.float16).astype(np.float32) for m in ((high + low) / 2, (high - low) / 2))
    assert np.array_equal(data["middle"][0, 0].float().numpy(), middle) and np.array_equal(data["half"][0, 0].float().numpy(), half)
    scale, zero = 2 * half / levels, middle - half
    place = (rows - zero) / scale
    clear = np.abs(place - np.floor(place) - 0.5) > 1e-3
    want = np.clip(np.rint(place), 0, levels)
    got = codes_of(codec, data).swapaxes(0, 1).reshape(50, -1)
    assert clear.mean() > 0.9 and np.array_equal(got[clear], want[clear])
    np.testing.assert_allclose(codec.decode(data)[0].transpose(0, 1).flatten(1).numpy(), got * scale + zero, atol=1e-5)


def test_kvquant_slots_of_a_row():
    assert [outlier_slots(h, 0.01) for h in (4096, 192, 5120)] == [42, 2, 52]
    assert outlier_slots(4096, 0) == 0


@pytest.mark.parametrize(("share", "slots"), [(0.01, 2), (0.2, 8)])
def test_kvquant_takes_the_extremes_of_every_value_row(share, slots):
    x = normal(5, 2, 2, 40, 16) * 4
    codec = dynamic([-0.75, -0.25, 0.25, 0.75], 2, 16, outlier_slots(32, share))
    data = codec.encode(x)
    back = codec.decode(data).transpose(1, 2).flatten(2).numpy()
    for b, row in enumerate(x.transpose(1, 2).flatten(2).numpy()):
        for t, values in enumerate(row):
            order, where = np.argsort(values), data["where"][b, 0, t].numpy()
            inner = order[slots // 2 : -slots // 2]
            assert len(where) == slots and set(where) == set(order) - set(inner)
            assert np.array_equal(data["outlier"][b, 0, t].numpy(), values[where].astype(np.float16))
            assert np.array_equal(back[b, t, where], values[where].astype(np.float16).astype(np.float32))
            # the others fill the range between the next values on each side
            high, low = values[inner[-1]], values[inner[0]]
            middle, half = (np.float32(np.float16(m)) for m in ((high + low) / 2, (high - low) / 2))
            table = np.array([-0.75, -0.25, 0.25, 0.75], np.float32) * half + middle
            want = np.abs(values[inner, None] - table).min(-1)
            np.testing.assert_allclose(np.abs(back[b, t, inner] - values[inner]), want, atol=1e-5)


def test_kvquant_keys_have_outliers_only_beyond_their_thresholds():
    x = torch.zeros(1, 2, 4, 4)
    x[0, 0, 0] = torch.tensor([0.5, -1.0, 1.0, 0])  # the thresholds themselves are no outliers
    x[0, 1, 1] = torch.tensor([3.0, -7.0, 1.5, 2.0])  # more high ones than the one slot: the largest is kept, others are clamped
    x[0, 0, 2, 3], x[0, 1, 2, 0] = -1.5, -1.25
    codec = static([-0.9, -0.3, 0.3, 0.9], np.zeros(8), np.ones(8), 2, heads=2)
    data = codec.encode(x)
    assert data["where"][0, 0].tolist() == [[-1, -1], [4, 5], [-1, 3], [-1, -1]]
    back = codec.decode(data)[0]
    assert back[1, 1].tolist() == pytest.approx([3, -7, 0.9, 0.9]) and back[0, 2, 3] == -1.5
    assert back[1, 2, 0] == pytest.approx(-0.9)


def test_kvquant_heads_of_keys_are_apart_without_outliers():
    x = normal(6, 1, 2, 20, 16)
    other = x.clone()
    other[:, 1] *= 50
    codec = static([-0.8, -0.2, 0.3, 0.9], np.linspace(-1, 1, 32), np.linspace(1, 3, 32), 0, heads=2)
    a, b = codec.encode(x)["code"], codec.encode(other)["code"]
    assert torch.equal(a[:, 0], b[:, 0]) and not torch.equal(a[:, 1], b[:, 1])


def test_kvquant_key_outliers_of_a_long_prompt():
    """One per cent by the thresholds; the two slots of a narrow row hold nearly all of them."""
    g, k, v = Geometry(1, 2, 2, 16, torch.float32), normal(7, 2, 2049, 16) * 2 + 1, normal(8, 2, 2049, 16)
    policy = KVQuantSelf()
    tables = policy.calibrate(g, k, v)
    keys, _ = policy.codecs(g, k[None], v[None], tables)
    where = keys.encode(k[None, :, 1:])["where"][0, 0].numpy()
    rows = k[:, 1:].transpose(0, 1).flatten(1).numpy()
    high, low = (np.percentile(rows, q, axis=0) for q in (99.5, 0.5))
    middle, half = (m.astype(np.float16).astype(np.float32) for m in ((high + low) / 2, (high - low) / 2))
    y = (rows - middle) / half
    want = np.stack((np.where(y.max(-1) > 1, y.argmax(-1), -1), np.where(y.min(-1) < -1, y.argmin(-1), -1)), -1)
    assert np.array_equal(where, want)
    assert 0.009 < (np.abs(y) > 1).mean() < 0.012 and 0.008 < (where >= 0).sum() / rows.size < 0.011


# -- KVQuant: what it is calibrated to -----------------------------------------------------------------------------------


def test_kmeans_worked_example():
    x = torch.tensor([1, -1, 0.9, -0.9, 0.2, -0.2, 0.1, -0.1])
    assert kmeans_1d(x, 4).tolist() == pytest.approx([-0.95, -0.15, 0.15, 0.95])
    values = torch.tensor([-1, -0.9, -0.2, -0.1, 0.1, 0.2, 0.9, 1])
    heavy = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 9])
    assert kmeans_1d(values, 4, heavy).tolist() == pytest.approx([-0.95, -0.15, 0.15, 0.99])
    # weights move a centroid to the weighted mean of its values
    pair, weight = torch.tensor([-1, -0.9, 0.9, 1]), torch.tensor([1.0, 1, 3, 9])
    assert kmeans_1d(pair, 2, weight).tolist() == pytest.approx([-0.95, 0.975])


def best_distortion(x: np.ndarray, w: np.ndarray, count: int) -> float:
    """Of all ways to cut the sorted values into ``count`` runs (dynamic programming)."""
    order = np.argsort(x)
    x, w = x[order], w[order]
    m0, m1, m2 = (np.concatenate(([0.0], np.cumsum(t))) for t in (w, w * x, w * x * x))
    lo, hi = np.triu_indices(len(x) + 1, 1)
    cost = np.full((len(x) + 1, len(x) + 1), np.inf)
    cost[lo, hi] = (m2[hi] - m2[lo]) - (m1[hi] - m1[lo]) ** 2 / (m0[hi] - m0[lo])
    best = cost[0]
    for _ in range(count - 1):
        best = (best[:, None] + cost).min(0)
    return best[-1]


@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
@pytest.mark.parametrize(
    ("kind", "count", "slack"),
    [(k, c, 1.02) for k in ("standard_normal", "random", "laplace") for c in (4, 8, 16)],
)  # fmt: skip
def test_kmeans_is_nearly_the_best(kind, count, slack, weighted):
    rng = np.random.default_rng(count)
    x = getattr(rng, kind)(size=800)
    high, low = np.percentile(x, 99.5), np.percentile(x, 0.5)
    x = (x - (high + low) / 2) / ((high - low) / 2)
    x = x[np.abs(x) <= 1]  # as keys and values are, once outliers are out
    w = rng.random(len(x)) + 0.5 if weighted else np.ones(len(x))
    book = kmeans_1d(torch.from_numpy(x), count, torch.from_numpy(w) if weighted else None).double().numpy()
    assert (np.diff(book) > 0).all()
    assert (w * ((x[:, None] - book) ** 2).min(-1)).sum() <= slack * best_distortion(x, w, count)


@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize("q", [0, 0.005, 0.37, 0.995, 1])
def test_percentile_equals_numpy(n, q):
    x = normal(n, n, 5)
    np.testing.assert_allclose(percentile(x, q).numpy(), np.percentile(x.numpy(), 100 * q, axis=0), atol=1e-6)


def test_kvquant_thresholds_of_short_and_long_prompts():
    g, v = Geometry(1, 2, 2, 16, torch.float32), normal(9, 2, 400, 16)
    k = normal(10, 2, 400, 16) * 3 + 2
    k[:, 0] = 100  # the first token is kept in full, it does not count
    for n, q in ((256, 0), (257, 0.5), (400, 0.5)):
        tables = KVQuantSelf().calibrate(g, k[:, :n], v[:, :n])
        rows = k[:, 1:n].transpose(0, 1).flatten(1).numpy()
        high, low = np.percentile(rows, 100 - q, axis=0), np.percentile(rows, q, axis=0)
        np.testing.assert_allclose(tables["k_middle"].flatten().numpy(), (high + low) / 2, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(tables["k_half"].flatten().numpy(), (high - low) / 2, rtol=1e-3)
        assert all(t.dtype == F16 for t in tables.values()) and tables.keys() == NAMES
    plain = KVQuantSelf(outliers=0).calibrate(g, k, v)
    np.testing.assert_allclose((plain["k_middle"] + plain["k_half"]).flatten().numpy(), k[:, 1:].amax(1).flatten(), rtol=1e-3)
    assert KVQuantSelf(bits=3).calibrate(g, k, v).keys() == NAMES - {"k_norm", "v_norm"}
    assert KVQuantSelf(bits=4, q_norm=True).calibrate(g, k, v).keys() == NAMES


@pytest.mark.parametrize("bits", [2, 4])
def test_q_norm_restores_mean_and_deviation(bits):
    y = normal(11, 5000).clamp(-1, 1) * 0.8 + 0.1
    book = torch.linspace(-0.6, 0.9, 2**bits)
    scale, offset = q_norm(y, book)
    coded = book[nearest(y[None], book[None])[0]]
    assert abs(coded.mean() - y.mean()) > 1e-3 or abs(coded.std() - y.std()) > 1e-3
    back = coded * scale + offset
    assert float(back.mean()) == pytest.approx(float(y.mean()), abs=1e-5)
    assert float(back.std()) == pytest.approx(float(y.std()), abs=1e-5)
    # through the codec: keys with thresholds -1 and 1
    x = y[:4000].view(1, 1, -1, 16)
    norm = torch.stack((scale, offset))[None]
    codec = static(book, np.zeros(16), np.ones(16), 0, bits=bits, norm=norm)
    np.testing.assert_allclose(codec.decode(codec.encode(x)).flatten().numpy(), back[:4000].numpy(), atol=1e-6)


@pytest.mark.parametrize("policy", [KVQuantSelf(), KVQuantSelf(outliers=0, q_norm=False), KVQuantSelf(bits=4, first=0)])
def test_kvquant_short_and_constant_prompts_stay_finite(policy):
    data = text(40)
    for n in (1, 2, 3, 9):
        assert torch.isfinite(drive(TierCache(tiny(), policy), data, [n, *[1] * (38 - n), 2])).all()
    flat = [x.clone() for x in data]
    flat[1][..., :20, :], flat[2][..., :20, :] = 0.5, -0.75
    flat[1][..., 3], flat[2][..., 5] = 0, 0
    cache = TierCache(tiny(), policy)
    assert torch.isfinite(drive(cache, flat, [20, *[1] * 20])).all()
    _, v = layers_of(cache)[0].read(0, 20)
    assert (v[..., 6:] == -0.75).all() or policy.outliers == 0


# -- KVQuant: the store --------------------------------------------------------------------------------------------------


def test_kvquant_codes_keys_before_rope():
    """Decoding then turning equals the stored key as attention sees it; without turning it is the key before RoPE."""
    policy, data = KVQuantSelf(bits=4, q_norm=False), text(60)
    cache = TierCache(tiny(), policy)
    inv_freq = cache.rope.inv_freq.double().numpy()
    before = [x.clone() for x in data[1]]
    data[1] = torch.from_numpy(rotate(data[1].numpy(), np.broadcast_to(np.arange(60), (2, 1, 2, 60)), inv_freq).astype(np.float32))
    drive(cache, data, [40, *[1] * 15, 5])
    for layer, plain, turned in zip(layers_of(cache), before, data[1], strict=True):
        side = layer.keys
        assert side.count == layer.values.count == 59 and side.sink.count == 1
        flat = side.codec.decode({n: x.read() for n, x in side.coded.items()})
        seen = layer.read(0, 60)[0].numpy()
        want = rotate(flat.numpy(), np.broadcast_to(np.arange(1, 60), (1, 2, 59)), inv_freq)
        np.testing.assert_allclose(seen[:, :, 1:], want, atol=1e-5)
        assert np.array_equal(seen[:, :, 0], turned[:, :, 0].numpy())
        # every value is at its nearest centroid, or an outlier in full
        codec, rows = side.codec, plain[0, :, 1:].transpose(0, 1).flatten(1).numpy()
        table = codec.book.float().numpy()[0][:, None, None] * codec.half.float().numpy()[0] + codec.middle.float().numpy()[0]
        error = np.abs(flat[0].transpose(0, 1).flatten(1).numpy() - rows)
        best = np.abs(table - rows).min(0)
        where = side.coded["where"].read()[0, 0].numpy()
        for t, c in zip(*np.nonzero(where >= 0), strict=True):
            best[t, where[t, c]] = np.abs(np.float32(np.float16(rows[t, where[t, c]])) - rows[t, where[t, c]])
        np.testing.assert_allclose(error, best, atol=2e-3)
        assert (where >= 0).sum() > 0 and error.max() > 0.01


def test_kvquant_codes_a_token_before_it_is_attended_to():
    policy, data = KVQuantSelf(), text(60)
    cache = TierCache(tiny(), policy)

    def check(n, y):
        for i, layer in enumerate(layers_of(cache)):
            keys, values = (x[0].numpy() for x in layer.read(0, n))
            want, _ = attention(data[0][i, 0, :, n - 1].numpy(), keys, values)
            if n > 40:
                np.testing.assert_allclose(y[i, 0, :, -1].numpy(), want, atol=2e-5)

    drive(cache, data, [40, *[1] * 20], each=check)


def kvquant_bytes(n: int, h: int, b: int, m: int, k: int, own: bool, normed: bool) -> int:
    """Section 2.3 of the fact sheet: one layer of one sequence, fp16."""
    return k * 4 * h + (n - k) * (h * b // 4 + 4 + 2 * m * 4) + own * (4 * h + 2 ** (b + 2) + 8 * normed)


@pytest.mark.parametrize(
    "policy",
    [KVQuantSelf(), KVQuantSelf(bits=3), KVQuantSelf(bits=4, outliers=0.2, first=4, q_norm=True), KVQuantSelf(outliers=0)],
    ids=["nuq2", "nuq3", "nuq4-many", "nuq2-none"],
)  # fmt: skip
def test_kvquant_bytes_follow_the_formula(policy):
    cache, m = TierCache(tiny(), policy, dtype="float16"), outlier_slots(32, policy.outliers)

    def check(n, _):
        got, g = measure(cache), cache.geometry
        used = got["total"] - got["spare"] - got["ids"] - g.rope_bytes
        assert used == 2 * kvquant_bytes(n, 32, policy.bits, m, policy.first, True, policy.normed)
        assert got["tables"] == g.rope_bytes + 2 * policy.table_bytes(g)
        assert got["ids"] == 8 and got["other"] == 0

    drive(cache, text(90), [40, *[1] * 30, 15, *[1] * 5], each=check)


@pytest.mark.parametrize(
    ("d", "heads", "ratios"),
    [(64, 3, (7.68, 6.62, 5.19, 4.68, 3.92, 3.62)), (64, 8, (7.88, 6.65, 5.28, 4.70, 3.97, 3.63)),
     (128, 8, (7.94, 6.69, 5.31, 4.72, 3.98, 3.64)), (128, 32, (7.98, 6.86, 5.33, 4.80, 4.00, 3.69))],
)  # fmt: skip
def test_kvquant_ratio_table(d, heads, ratios):
    g, n = Geometry(1, heads, heads, d, F16), 1 << 20
    settings = [(bits, share) for bits in (2, 3, 4) for share in (0, 0.01)]
    for (bits, share), ratio in zip(settings, ratios, strict=True):
        policy = KVQuantSelf(bits=bits, outliers=share)
        assert g.full_bytes(n) / policy.layer_bytes(g, n, n) == pytest.approx(ratio, abs=0.0051)


# -- KVQuant: an artifact of other text ----------------------------------------------------------------------------------


def calibrated(policy: KVQuant, data, n: int) -> dict[str, torch.Tensor]:
    """What a prompt of ``n`` tokens gives, under the names of an artifact."""
    cache = TierCache(tiny(), KVQuantSelf())
    place, g = torch.arange(n)[None], cache.geometry
    own = KVQuantSelf(bits=policy.bits, outliers=policy.outliers, first=policy.first, q_norm=policy.q_norm)
    out = {}
    for i, (k, v) in enumerate(zip(data[1], data[2], strict=True)):
        tables = own.calibrate(g, cache.rope.turn(k[0, :, :n], place, -1), v[0, :, :n])
        out |= {f"{i}.{name}": t for name, t in tables.items()}
    return out


@pytest.fixture
def artifact(tmp_path, monkeypatch):
    """An artifact for the tiny model in a cache of its own: its policy and path."""
    monkeypatch.setenv("QEVICT_CACHE", str(tmp_path))
    policy = KVQuant()
    path = artifact_path("kvquant", model_digest(tiny()), policy.setting())
    save_artifact(path, calibrated(policy, text(360), 300), {"model_digest": model_digest(tiny()), **policy.setting()})
    return policy, path


def test_artifact_round_trip(artifact):
    policy, path = artifact
    want = calibrated(policy, text(360), 300)
    shapes = {name: tuple(t.shape) for name, t in load_file(path).items()}
    got = load_artifact("kvquant", "auto", tiny(), policy.setting(), shapes, "x.py")
    assert got.keys() == want.keys() and all(torch.equal(got[n], want[n]) and got[n].dtype == F16 for n in want)
    assert load_artifact("kvquant", str(path), tiny(), policy.setting(), shapes, "x.py").keys() == want.keys()
    tables = policy.tables(tiny())
    assert len(tables) == 2 and all(t.keys() == NAMES for t in tables)
    assert {f.name for f in path.parent.iterdir()} == {path.name, path.with_suffix(".json").name}


def test_artifact_that_is_missing_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("QEVICT_CACHE", str(tmp_path))
    words = (
        r"no calibration at .*kvquant.*: make it with `python scripts/calibrate_kvquant.py --bits 4 --outliers 0.01 --first 1 "
        r"--q-norm False --length 512`"
    )
    with pytest.raises(ArtifactError, match=words):
        TierCache(tiny(), KVQuant(bits=4, length=512))
    with pytest.raises(ArtifactError, match=r"no calibration at .*nowhere"):
        TierCache(tiny(), KVQuant(calibration=str(tmp_path / "nowhere.safetensors")))


@pytest.mark.parametrize("damage", ["missing", "shape", "nan"])
def test_an_incomplete_artifact_is_refused(artifact, damage):
    policy, path = artifact
    tensors = load_file(path)
    if damage == "missing":
        del tensors["1.k_book"]
    elif damage == "shape":
        tensors["1.k_book"] = tensors["1.k_book"][:, :-1].contiguous()
    else:
        tensors["1.k_book"][0, 0] = float("nan")
    save_artifact(path, tensors, {"model_digest": model_digest(tiny()), **policy.setting()})
    with pytest.raises(ArtifactError, match=r"1.k_book is missing, not of shape \(1, 4\), or not finite: make it again"):
        TierCache(tiny(), policy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"bits": 4, "q_norm": True}, "bits=2, this run has bits=4"), ({"length": 512}, "length=2048, this run has length=512"),
     ({"outliers": 0.02}, "outliers=0.01, this run has outliers=0.02"), ({"first": 0}, "first=1, this run has first=0"),
     ({"q_norm": False}, "q_norm=True, this run has q_norm=False")],
)  # fmt: skip
def test_artifact_of_another_setting_is_refused(artifact, changes, words):
    policy, path = artifact
    with pytest.raises(ArtifactError, match=rf"calibration .* was made for {words}: make one with scripts/calibrate_kvquant.py"):
        TierCache(tiny(), replace(policy, calibration=str(path), **changes))


def test_artifact_of_another_model_is_refused(artifact):
    policy, path = artifact
    other = build("llama", seed=1)
    digest, mine = model_digest(other), model_digest(tiny())
    assert digest != mine == model_digest(build("llama"))
    with pytest.raises(ArtifactError, match=f"was made for model_digest={mine}, this run has model_digest={digest}"):
        TierCache(other, replace(policy, calibration=str(path)))
    with pytest.raises(ArtifactError, match="no calibration at"):
        TierCache(other, policy)


@pytest.mark.parametrize("harm", ["truncated", "empty", "text", "no-json", "bad-json"])
def test_damaged_artifact_is_refused(artifact, harm):
    policy, path = artifact
    about, data = path.with_suffix(".json"), path.read_bytes()
    if "json" in harm:
        about.unlink() if harm == "no-json" else about.write_text("{")
    else:
        path.write_bytes({"truncated": data[:-100], "empty": b"", "text": b"not safetensors at all"}[harm])
    with pytest.raises(ArtifactError, match=r"calibration .* cannot be read \(.*\): make it again with scripts/calibrate"):
        TierCache(tiny(), policy)


def test_kvquant_with_an_artifact_of_the_prompt_is_kvquant_self(artifact):
    policy, _ = artifact
    data, calls = text(360), [300, *[1] * 40, 20]
    assert torch.equal(drive(TierCache(tiny(), policy), data, calls), drive(TierCache(tiny(), KVQuantSelf()), data, calls))
    other = text(360, seed=1)
    assert gap(drive(TierCache(tiny(), policy), other, calls), drive(TierCache(tiny(), KVQuantSelf()), other, calls)) > 1e-3


def test_artifact_is_shared_and_counted_once(artifact):
    policy, _ = artifact
    cache = TierCache(tiny(), policy, dtype="float16")
    g = cache.geometry
    tables = g.rope_bytes + 2 * policy.table_bytes(g)
    assert measure(cache)["tables"] == tables

    def check(n, _):
        m = measure(cache)
        assert m["tables"] == tables and m["other"] == 0
        # three sequences, one set of tables
        assert m["total"] == 3 * policy.total(g, 50, n) - 2 * (g.rope_bytes + 2 * policy.table_bytes(g))
        used = m["total"] - m["spare"] - m["ids"] - tables
        assert used == 3 * 2 * kvquant_bytes(n, 32, 2, 2, 1, False, True)

    drive(cache, text(70, batch=3), [50, *[1] * 20], each=check)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert measure(cache)["tables"] == tables
    for layer, shared in zip(layers_of(cache), cache.tables, strict=True):
        assert layer.codecs[0].book.data_ptr() == shared["k_book"].data_ptr()


def test_artifact_in_a_padded_batch_equals_each_alone(artifact):
    policy, _ = artifact
    lengths = [60, 9, 33]
    ids, mask = left_padded(lengths)
    forced = tokens(3, 20, seed=1)
    got = forced_logits(tiny(), TierCache(tiny(), policy), ids, mask, forced)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = forced_logits(tiny(), TierCache(tiny(), policy), ids[one, -length:], None, forced[one])
        assert gap(got[one], alone) < 1e-3


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
    return PromptView(zero.repeat(1, 2, 1, 1), zero, zero, torch.ones(1, length, dtype=torch.bool), 0.25)


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
    """Two rounds against numpy: what is stored, who has which class, and what a query gets; up to what lies on
    the border between two codes or two fp16 scales, where the processor decides."""
    policy, data, length = ZipCache(interval=10), text(75), 50
    cache = TierCache(tiny(), policy)
    out, state = [], []
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

    def check(n, y):
        if n < length:
            return
        for i, layer in enumerate(layers_of(cache)):
            keys, values, high = state[i][n - length]
            assert layer.count == high.shape[1] == n - (n - length) % 10
            assert np.array_equal(layer.salient()[0].numpy(), high)
            for got, want in zip(layer.read(0, n), (keys, values), strict=True):
                assert (np.abs(got[0].numpy() - want) > 1e-2).mean() < 2e-3
            if n > length:
                np.testing.assert_allclose(y[i, 0, :, 0].numpy(), out[i][:, n - length - 1], rtol=0, atol=5e-2)

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
    ("d", "heads", "ratios"),
    [(64, 3, (4.85, 4.63, 5.52, 6.40)), (64, 8, (4.93, 4.70, 5.62, 6.53)), (128, 8, (4.96, 4.73, 5.66, 6.59))],
)  # fmt: skip
def test_zipcache_ratio_table(d, heads, ratios):
    g = Geometry(1, heads, heads, d, F16)
    cells = [(0.6, 0), (0.6, 50), (0.4, 0), (0.2, 0)]
    for (salient, buffered), ratio in zip(cells, ratios, strict=True):
        nbytes = ZipCache(salient=salient).layer_bytes(g, 4096 - buffered, 4096) - g.full_bytes(-buffered % 8)
        assert g.full_bytes(4096) / nbytes == pytest.approx(ratio, abs=0.011)
