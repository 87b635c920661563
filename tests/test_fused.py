"""The fused CPU kernel against the reference: outputs, what units collect, what is stored; building it, and doing without it."""

import os
import subprocess
import sys

import pytest
import torch

from baselines.fullkv import FullKV
from baselines.streaming_llm import StreamingLLM
from conftest import METHODS, Stream, build, drive, same, tiny
from qevict import Budget, QEvict, TierCache
from qevict.engine import cpu
from qevict.store.codec import PLANES

pytestmark = pytest.mark.skipif(not cpu.available(16), reason="no C++ compiler: the kernel cannot be built")


def compare(model, policy, budget, dtype=torch.float16, near=1e-5, **shape):
    same(*(drive(model, policy, budget, dtype, backend, **shape) for backend in ("reference", "cpu")), near)


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
    model = build("llama", num_attention_heads=2 * group, num_key_value_heads=2, hidden_size=32 * group, head_dim=64)
    compare(model, *METHODS[name])


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_head_dimensions_and_bits(dim, bits):
    model = build("llama", num_attention_heads=2, num_key_value_heads=1, hidden_size=64, head_dim=dim, num_hidden_layers=1)
    policy = QEvict(key_bits=bits, value_bits=bits)
    if dim * min(PLANES[bits]) % 8:
        pytest.skip(f"{bits}-bit codes do not fill bytes at {dim}")
    compare(model, policy, 0.6, near=3e-5, lengths=(120, 90))


def test_prompts_shorter_than_the_sinks():
    for lengths in ([1], [3, 1], [6, 2]):
        compare(tiny(), QEvict(), Budget(nbytes=60_000), lengths=lengths)
        compare(tiny(), StreamingLLM(), Budget(nbytes=20_000), lengths=lengths)


def test_positions_far_out_and_shifted():
    """Rotary tables are split at 256 positions; a shifted batch begins at other positions."""
    compare(tiny("llama"), QEvict(), 0.2, lengths=(900, 517))


def test_a_window_longer_than_a_row_of_the_rotary_table():
    compare(tiny("llama"), QEvict(window=272, sink=0), 0.9, lengths=(1500, 1400))


def test_a_build_without_vector_instructions_agrees(monkeypatch):
    flags = tuple(f for f in cpu.FLAGS if not f.startswith(("-march", "-mprefer")))
    plain = cpu.load(cpu.build(16, flags))
    monkeypatch.setattr(cpu, "library", lambda dim: plain)
    for name in ("qevict", "heads", "ragged", "wide"):
        compare(tiny(), *METHODS[name])
    compare(tiny(), *METHODS["qevict"], torch.bfloat16)


def test_half_precision_extremes_are_stored_as_torch_does(monkeypatch):
    """Also without the processor's own conversion."""
    portable = cpu.load(cpu.build(16, tuple(f for f in cpu.FLAGS if not f.startswith(("-march", "-mprefer")))))
    values = torch.tensor(
        [0.0, 1e-8, 6e-8, 5.9e-5, 6.1e-5, 1.0009765, 1.00146, 65504.0, -65504.0, -2e-7, 3.3333, 1234.5, -0.1, 7.7, 0.3, 2.0]
    )
    for lib in (cpu.library(16), portable):
        monkeypatch.setattr(cpu, "library", lambda dim, lib=lib: lib)
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
    code = "from qevict.engine import cpu; print(cpu.build(64))"
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
