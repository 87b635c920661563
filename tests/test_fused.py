"""The fused CPU kernel against the reference: outputs, what units collect, what is stored; building it, and doing without it."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from baselines.adakv import AdaKV
from baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from baselines.fullkv import FullKV
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from conftest import Stream, build, tiny
from qevict import Budget, QEvict, TierCache
from qevict.engine import cpu
from qevict.store.codec import PLANES

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C++ compiler: the kernel cannot be built")

METHODS = {
    "full": (FullKV(), 1.0),
    "qevict": (QEvict(), 0.4),
    "heads": (QEvict(granularity="kv_head", window=4, key_bits=3, value_bits=4, meta="uint8"), 0.4),
    "wide": (QEvict(key_bits=8, value_bits=2, value_group=8, meta="bfloat16", promotion="off"), 0.5),
    "long windows": (QEvict(window=24, interval=5, key_bits=4, value_bits=3, meta="float32"), 0.6),
    "snapkv": (SnapKV(observe=8), 0.3),
    "ragged": (AdaKV(observe=8), 0.3),
    "peaks": (DefensiveKV(observe=8), 0.3),
    "layers": (LayerDefensiveKV(observe=8), 0.3),
    "grow": (LayerDefensiveKV(observe=8), Budget(0.2, decode="grow")),
    "streaming": (StreamingLLM(), 0.2),
}


def drive(model, policy, budget, dtype, backend, lengths=(200, 150, 177), width=200):
    """Outputs of every call and the records at the end, for a prompt, 30 tokens, a turn of 9 and 12 more tokens."""
    cache = TierCache(model, policy, budget, dtype, backend)
    stream = Stream(model, cache, list(lengths))
    out = [stream.feed(n) for n in (width, *[1] * 30, 9, *[1] * 12)]
    records = [{n: t.clone() for n, t in pool.record.items()} for pool in cache.store.pools]
    return out, records, [p.payload for p in cache.store.pools]


def compare(model, policy, budget, dtype=torch.float16, near=1e-5, **shape):
    want, got = (drive(model, policy, budget, dtype, backend, **shape) for backend in ("reference", "cpu"))
    assert max(float(np.abs(a - b).max()) for a, b in zip(want[0], got[0], strict=True)) < near
    for a, b in zip(want[1], got[1], strict=True):
        for name in a:
            if name in ("unit", "link"):
                assert torch.equal(a[name], b[name]), f"other {name}s"
            else:
                assert float((a[name].float() - b[name].float()).abs().max()) < near, name
    for a, b in zip(want[2], got[2], strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a), "other content"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", METHODS)
def test_equals_the_reference(name, dtype):
    compare(tiny(), *METHODS[name], dtype)


@pytest.mark.parametrize("family", ["llama3-rope", "yarn", "mistral", "qwen2", "qwen3"])
def test_families(family):
    compare(tiny(family), *METHODS["qevict"])


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["qevict", "ragged"])
def test_query_groups(name, group):
    model = build("llama", num_attention_heads=2 * group, num_key_value_heads=2, hidden_size=32 * group, head_dim=16)
    compare(model, *METHODS[name])


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_head_dimensions_and_bits(dim, bits):
    model = build("llama", num_attention_heads=2, num_key_value_heads=1, hidden_size=64, head_dim=dim, num_hidden_layers=1)
    policy = QEvict(key_bits=bits, value_bits=bits)
    if dim * min(PLANES[bits]) % 8:
        pytest.skip(f"{bits}-bit codes do not fill bytes at {dim}")
    compare(model, policy, 0.6, near=3e-5, lengths=(120, 90), width=120)


def test_prompts_shorter_than_the_sinks():
    for lengths, width in (([1], 1), ([3, 1], 3), ([6, 2], 6)):
        compare(tiny(), QEvict(), Budget(nbytes=60_000), lengths=lengths, width=width)
        compare(tiny(), StreamingLLM(), Budget(nbytes=20_000), lengths=lengths, width=width)


def test_positions_far_out_and_shifted():
    """Rotary tables are split at 256 positions; a shifted batch begins at other positions."""
    compare(tiny("llama"), QEvict(), 0.2, lengths=(900, 517), width=900)


def test_a_build_without_vector_instructions_agrees(monkeypatch):
    flags = tuple(f for f in cpu.FLAGS if not f.startswith(("-march", "-mprefer")))
    plain = cpu.load(cpu.build(flags))
    monkeypatch.setattr(cpu, "library", lambda: plain)
    for name in ("qevict", "heads", "ragged", "wide"):
        compare(tiny(), *METHODS[name])
    compare(tiny(), *METHODS["qevict"], torch.bfloat16)


def test_half_precision_extremes_are_stored_as_torch_does(monkeypatch):
    """Also without the processor's own conversion."""
    portable = cpu.load(cpu.build(tuple(f for f in cpu.FLAGS if not f.startswith(("-march", "-mprefer")))))
    values = torch.tensor(
        [0.0, 1e-8, 6e-8, 5.9e-5, 6.1e-5, 1.0009765, 1.00146, 65504.0, -65504.0, -2e-7, 3.3333, 1234.5, -0.1, 7.7, 0.3, 2.0]
    )
    for lib in (cpu.library(), portable):
        monkeypatch.setattr(cpu, "library", lambda lib=lib: lib)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            cache = TierCache(tiny(), FullKV(), 1.0, dtype, "cpu")
            Stream(tiny(), cache, [4]).feed(4)
            cache.store.begin(1)
            k = values.expand(1, 2, 1, 16)
            cache.store.decode(0, torch.zeros(1, 4, 1, 16), k, k, 1.0)
            slot, inside = int(cache.store.write[0, 0, 0]), (cache.store.seen - 1 - cache.store.origin) % 8
            assert torch.equal(cache.store.full.payload["k"][slot, inside], values.to(dtype))


def test_model_types():
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny("llama", dtype)
        ids = torch.arange(1, 41)[None]
        out = model.generate(
            ids, max_new_tokens=12, do_sample=False, past_key_values=TierCache(model, QEvict(), 0.9, backend="cpu")
        )
        assert out.shape == (1, 52)


def test_no_compiler_falls_back_with_one_notice(tmp_path):
    code = (
        "import warnings, torch; warnings.simplefilter('always')\n"
        "from conftest import tiny, Stream\nfrom qevict import QEvict, TierCache\n"
        "for _ in range(2):\n"
        "    cache = TierCache(tiny(), QEvict(), 0.9); Stream(tiny(), cache, [60]).feed(60); print(cache.store.fused)\n"
        "try:\n    TierCache(tiny(), QEvict(), 0.9, backend='cpu').load\n"
        "    c = TierCache(tiny(), QEvict(), 0.9, backend='cpu'); Stream(tiny(), c, [60]).feed(60)\n"
        "except RuntimeError as error: print(error)\n"
    )
    env = os.environ | {"CXX": "/no/such/compiler", "QEVICT_CACHE": str(tmp_path), "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[:2] == ["None", "None"]
    assert done.stderr.count("the fused CPU kernel is not used") == 1
    assert "no C++ compiler '/no/such/compiler': install one, or name it in CXX" in done.stdout


def test_two_processes_build_at_once(tmp_path):
    code = "from qevict.engine import cpu; print(cpu.build())"
    env = os.environ | {"QEVICT_CACHE": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    paths = {p.communicate()[0].strip() for p in both}
    assert all(p.returncode == 0 for p in both) and len(paths) == 1
    cpu.load(next(iter(map(type(tmp_path), paths))))
    assert [f.suffix for f in (tmp_path / "kernels").iterdir()] == [".so"]


def test_bad_backends_are_refused():
    with pytest.raises(ValueError, match="backend='gpu': choose one of auto, reference, cpu"):
        TierCache(tiny(), QEvict(), 0.5, backend="gpu")
    model = build("llama", num_attention_heads=2, num_key_value_heads=1, hidden_size=64, head_dim=48, num_hidden_layers=1)
    with pytest.raises(ValueError, match="head dimension 48"):
        Stream(model, TierCache(model, QEvict(), 0.9, backend="cpu"), [60]).feed(60)
    cache = TierCache(model, QEvict(), 0.9)
    Stream(model, cache, [60]).feed(60)
    assert cache.store.fused is None
