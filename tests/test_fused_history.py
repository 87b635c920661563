"""The fused CPU kernel on whole-history stores against the reference: outputs, collected attention, what is stored."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from baselines.criticalkv import CriticalKV
from baselines.kivi import KIVI
from baselines.kvquant import KVQuantSelf
from baselines.snapkv import SnapKV
from baselines.zipcache import ZipCache
from conftest import Stream, build, tiny
from qevict import TierCache
from qevict.engine import cpu
from qevict.quantizer import Quantizer

pytestmark = pytest.mark.skipif(not cpu.available(16), reason="no C++ compiler: the kernel cannot be built")

F16 = torch.float16
SNAP, CRITICAL = SnapKV(observe=8, interval=16), CriticalKV(observe=8, interval=16)
METHODS = {
    "kivi": (KIVI(group=8, residual=16), 1.0),
    "kivi, single channels": (KIVI(bits=4, group=1, residual=16), 1.0),
    "kivi, snapkv": (KIVI(group=8, residual=16, evict=SNAP), 0.6),
    "kivi, criticalkv": (KIVI(bits=3, group=8, residual=16, meta="float32", evict=CRITICAL), 0.6),
    "zipcache": (ZipCache(interval=10), 1.0),
    "zipcache, 8 and 3 bits": (ZipCache(interval=10, high_bits=8, low_bits=3), 1.0),
    "zipcache, one class": (ZipCache(interval=10, salient=0), 1.0),
    "zipcache, snapkv": (ZipCache(interval=10, evict=SNAP), 0.6),
}
CALLS = (*[1] * 34, 9, *[1] * 12)  # tokens of each call after the prompt


def content(layer) -> dict[str, torch.Tensor]:
    if isinstance(layer.policy, ZipCache):
        return layer.coded | {"bitmap": layer.bitmap} | {f"tail{i}": t.read() for i, t in enumerate(layer.tails)}
    parts = {"keys": layer.keys, "values": layer.values}
    return {f"{side} {n}": x.read() for side, s in parts.items() for n, x in (*s.coded.items(), ("sink", s.sink), ("tail", s.tail))}


def compare(model, policy, budget=1.0, dtype=F16, lengths=(90, 71, 90), calls=CALLS, near=1e-5, given=torch.float32):
    """The same tokens through both backends, then a query over what the kernel's cache holds."""
    caches = [TierCache(model, policy, budget, dtype, backend) for backend in ("reference", "cpu")]
    streams = [Stream(model, cache, list(lengths), dtype=given) for cache in caches]
    for n in (max(lengths), *calls):
        want, got = (stream.feed(n) for stream in streams)
        assert np.abs(want - got).max() < near
    q = torch.from_numpy(streams[1].q).to(given)
    for slow, fast in zip(*(cache.store.groups for cache in caches), strict=True):
        for i, layers in enumerate(zip(slow.layers, fast.layers, strict=True)):
            assert [layer.fused for layer in layers] == [False, True]
            stored = [content(layer) for layer in layers]
            assert all(torch.equal(stored[0][name], stored[1][name]) for name in stored[0])
            layer = layers[1]
            if layer.score is not None:
                assert torch.allclose(layers[0].score.read(), layer.score.read(), atol=near, rtol=0)
            out, mass = layer.attend(q[i, fast.rows], 0.25, True)
            layer.fused = False
            for got, want in zip((out, mass), layer.attend(q[i, fast.rows], 0.25, True), strict=True):
                assert got.shape == want.shape and got.dtype == want.dtype
                assert (got - want).abs().max() < near
            assert torch.allclose(mass.sum(-1), torch.ones(()), atol=near)
    return caches[1]


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_reference(name, dtype):
    compare(tiny(), *METHODS[name], dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["kivi", "zipcache"])
def test_query_groups(name, group):
    model = build("llama", num_attention_heads=2 * group, num_key_value_heads=2, hidden_size=32 * group, head_dim=16)
    compare(model, *METHODS[name])


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_head_dimensions_bits_and_groups(dim, bits):
    model = build("llama", num_attention_heads=3, num_key_value_heads=1, hidden_size=48, head_dim=dim, num_hidden_layers=1)
    meta = {2: "float16", 3: "bfloat16", 4: "float32", 8: "float16"}[bits]
    for group in (8, 16, 32, dim):
        if dim % group == 0:
            policy = KIVI(bits=bits, group=group, residual=group, meta=meta)
            compare(model, policy, lengths=(150, 133), calls=[1] * 20, near=3e-5)
    compare(model, ZipCache(interval=10, high_bits=bits), lengths=(60, 41), calls=[1] * 20, near=3e-5)


@pytest.mark.parametrize("lengths", [[1], [3, 1], [40, 7]], ids=str)
@pytest.mark.parametrize("name", ["kivi", "zipcache"])
def test_nothing_or_little_is_coded_yet(name, lengths):
    compare(tiny(), METHODS[name][0], lengths=lengths, calls=[1] * 6)


def test_long_generation_over_several_codings():
    cache = compare(tiny(), KIVI(group=8, residual=32), lengths=(700, 650), calls=[1] * 100)
    assert [group.layers[0].keys.count for group in cache.store.groups] == [32 * (n // 32) for n in (750, 800)]


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16], ids=["fp16", "bf16"])
def test_model_types(dtype):
    compare(tiny("llama", dtype), *METHODS["kivi"], dtype, given=dtype, near=0.02)


def test_rows_of_a_batch_are_chosen():
    cache = TierCache(tiny(), METHODS["zipcache"][0], 1.0, backend="cpu")
    stream = Stream(tiny(), cache, [40, 40])
    stream.feed(40)
    cache.batch_select_indices(torch.tensor([1, 1, 0]))
    (group,) = cache.store.groups
    q = torch.randn(3, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    for layer in group.layers:
        got = layer.attend(q, 0.25, True)
        layer.fused = False
        for a, b in zip(got, layer.attend(q, 0.25, True), strict=True):
            assert torch.allclose(a, b, atol=1e-5, rtol=0)


def test_a_build_without_vector_instructions_agrees(monkeypatch):
    flags = tuple(f for f in cpu.FLAGS if not f.startswith(("-march", "-mprefer")))
    plain = cpu.load(cpu.build(16, flags))
    monkeypatch.setattr(cpu, "library", lambda dim: plain)
    for name, method in METHODS.items():
        compare(tiny(), *method, torch.bfloat16 if name == "kivi" else F16)


def test_who_decodes():
    def used(policy: Quantizer, backend: str, model: torch.nn.Module) -> str:
        cache = TierCache(model, policy, backend=backend)
        Stream(model, cache, [30]).feed(30)
        (group,) = cache.store.groups
        assert {layer.fused for layer in group.layers} == {cache.decoder(model.device) == "cpu"}
        return cache.decoder(model.device)

    kivi, odd = KIVI(group=8, residual=16), build("llama", hidden_size=64, head_dim=24, num_hidden_layers=1)
    for policy in (kivi, ZipCache()):
        assert [used(policy, b, tiny()) for b in ("auto", "cpu", "reference")] == ["cpu", "cpu", "reference"]
        assert used(policy, "auto", odd) == "reference"
        with pytest.raises(ValueError, match="head dimension 24"):
            used(policy, "cpu", odd)
        with pytest.raises(ValueError, match=f"backend=triton: {type(policy).__name__} is decoded by the reference"):
            TierCache(tiny(), policy, backend="triton")
    for policy in (KVQuantSelf(), KVQuantSelf(evict=SNAP)):
        assert used(policy, "auto", tiny()) == "reference"
        with pytest.raises(ValueError, match="backend=cpu: KVQuantSelf is decoded by the reference; use backend=auto or reference"):
            TierCache(tiny(), policy, backend="cpu")


def test_no_compiler_falls_back_with_one_notice(tmp_path):
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "from conftest import tiny, Stream\nfrom baselines.kivi import KIVI\nfrom qevict import TierCache\n"
        "for backend in ('auto', 'auto', 'cpu'):\n"
        "    cache = TierCache(tiny(), KIVI(group=8, residual=16), 1.0, backend=backend)\n"
        "    try:\n        Stream(tiny(), cache, [60]).feed(60); print(cache.store.fused)\n"
        "    except RuntimeError as error: print(error)\n"
    )
    env = os.environ | {"CXX": "/no/such/compiler", "QEVICT_CACHE": str(tmp_path), "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[:2] == ["False", "False"]
    assert done.stderr.count("the fused CPU kernel is not used") == 1
    assert "no C++ compiler '/no/such/compiler': install one, or name it in CXX" in done.stdout
