"""The Triton kernel against the reference: on a GPU if there is one, else under Triton's interpreter. That it compiles for GPUs is
tested everywhere."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baselines.streaming_llm import StreamingLLM
from conftest import METHODS, build, drive, forced_logits, gap, left_padded, same, tokens
from qevict import Budget, QEvict, TierCache

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
triton = pytest.importorskip("triton", reason="triton is not installed")


def interpret() -> None:
    """What TRITON_INTERPRET=1 does when triton is first imported, which transformers has done by now."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    triton.knobs.runtime.interpret = True
    for module in (tl, tl.core, tl.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, triton.JITFunction):
                setattr(module, name, InterpretedFunction(function.fn))


if not ON_GPU:
    interpret()
kernel = importlib.import_module("qevict.engine.triton_kernel")

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
LENGTHS = (900, 517) if ON_GPU else (90, 61)


def model_of(name="llama", **changes):
    return build(name, **SMALL | changes).to(DEVICE)


def compare(model, policy, budget, dtype=torch.float16, near=1e-4, programs=None, reorder=None, lengths=LENGTHS, steps=19, **given):
    """The kernel decodes the last of ``steps`` tokens, from where the reference got to: on a CPU a step takes long."""

    def switch(store):
        if reorder is not None:
            store.select_rows(torch.tensor(reorder))
        store.fused = kernel.Decoder(store)
        store.fused.programs = programs or store.fused.programs

    def stay(store):
        if reorder is not None:
            store.select_rows(torch.tensor(reorder))

    shape = {"lengths": lengths, "calls": [1] * steps, **given}
    want, got = (drive(model, policy, budget, dtype, "reference", switch=s, **shape) for s in (stay, switch))
    same(want, got, near)


@pytest.mark.parametrize("name", METHODS)
def test_equals_the_reference(name):
    compare(model_of(), *METHODS[name], lengths=(200, 131) if name == "long windows" else LENGTHS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["qevict", "ragged"])
def test_storage_types(name, dtype):
    compare(model_of(), *METHODS[name], dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ["qevict", "streaming"])
def test_half_models(name, dtype):
    """On a GPU products of half types are made in tf32; outputs are rounded to the type."""
    near = {torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    compare(model_of(head_dim=64), *METHODS[name], dtype, near, given=dtype)


@pytest.mark.parametrize(("name", "group"), [*(("qevict", n) for n in (1, 3, 4, 7, 8, 20)), ("ragged", 3), ("ragged", 7)])
def test_query_groups(name, group):
    heads = 2 if name == "ragged" else 1
    model = model_of(num_attention_heads=heads * group, num_key_value_heads=heads, hidden_size=16 * heads * group)
    compare(model, *METHODS[name], lengths=LENGTHS[:1])


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_head_dimensions_and_bits(dim, bits):
    model = model_of(num_attention_heads=2, num_key_value_heads=1, head_dim=dim)
    compare(model, QEvict(key_bits=bits, value_bits=bits), 0.6, lengths=(60,), steps=11)


@pytest.mark.parametrize("meta", ["float16", "bfloat16", "float32", "uint8"])
@pytest.mark.parametrize("value_group", [8, 80])
def test_metadata(meta, value_group):
    model = model_of(num_attention_heads=2, num_key_value_heads=1, head_dim=80)
    compare(model, QEvict(meta=meta, value_group=value_group), 0.8, lengths=(60,), steps=11)


@pytest.mark.parametrize(("window", "programs"), [(1, 1), (5, 1000), (24, 3), (40, 1000), (300, 1)])
def test_windows_and_splits(window, programs, monkeypatch):
    """Units of one, some and many tokens, of a part of a tile and of several; tiles all in one program, or one in each."""
    monkeypatch.setattr(kernel, "MERGED", 2)
    length = 3 * window + 37
    budget = 0.85 if window > 24 else 0.7
    compare(model_of(), QEvict(window=window, interval=4), budget, programs=programs, lengths=(length,), steps=6)


def test_positions_far_out_and_sequences_that_change_places():
    """Rotary tables are split at 256 positions. The batch is another one when the kernel takes over."""
    compare(model_of(), QEvict(), 0.1, lengths=(700, 317), steps=9, reorder=[1, 0])


def test_prompts_shorter_than_the_sinks():
    for lengths in ([1], [6, 2]):
        compare(model_of(), QEvict(), Budget(nbytes=60_000), lengths=lengths, steps=2)
        compare(model_of(), StreamingLLM(), Budget(nbytes=20_000), lengths=lengths, steps=2)


def test_a_model_generates_as_with_the_reference():
    """With a routing event in every text; workspace is gone after each step."""
    ids, mask = left_padded([60, 41])
    forced = tokens(2, 2, seed=3).to(DEVICE)
    logits, texts = [], []
    for backend in ("reference", "triton"):
        model = model_of("qwen2", num_hidden_layers=2)
        cache = TierCache(model, QEvict(interval=2), 0.7, "float16", backend)
        logits.append(forced_logits(model, cache, ids.to(DEVICE), mask.to(DEVICE), forced))
        assert backend == "reference" or cache.store.fused.step is None
        cache = TierCache(model, QEvict(interval=2), 0.7, "float16", backend)
        texts.append(model.generate(ids[:1].to(DEVICE), max_new_tokens=3, do_sample=False, past_key_values=cache))
    assert gap(*logits) < 1e-4
    assert torch.equal(*texts)


def test_where_it_works_and_where_not(monkeypatch):
    model = model_of()
    cache = TierCache(model, QEvict(), 0.9, backend="triton")
    assert cache.decoder(torch.device("cuda")) == "triton"
    assert TierCache(model, QEvict(), 0.9).decoder(torch.device("cuda")) == "triton"
    monkeypatch.setattr(kernel, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"backend=triton: it runs on CUDA, or with TRITON_INTERPRET=1 .* not on cpu; use"):
        cache.decoder(torch.device("cpu"))
    wide = model_of(head_dim=320)
    assert TierCache(wide, QEvict(), 0.9).decoder(torch.device("cuda")) == "reference"
    with pytest.raises(ValueError, match="backend=triton: head dimension 320 on cuda is not supported"):
        TierCache(wide, QEvict(), 0.9, backend="triton").decoder(torch.device("cuda"))
    monkeypatch.setattr("qevict.hf.cache.find_spec", lambda name: None)
    assert TierCache(model, QEvict(), 0.9).decoder(torch.device("cuda")) == "reference"
    with pytest.raises(ValueError, match="backend=triton: triton is not installed; use backend=auto or reference"):
        cache.decoder(torch.device("cuda"))


@pytest.mark.parametrize("names", ["qevict peaks", pytest.param("full heads wide long-windows streaming", marks=pytest.mark.slow)])
def test_compiles_for_a_gpu(names, tmp_path):
    """Also without one: each kernel becomes machine code, with products on tensor cores and with no more shared memory than the
    smaller GPUs have (99 KiB); layers, steps and pools share what was compiled."""
    script = Path(__file__).with_name("compile_triton.py")
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script, *names.split()], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {}
    for method, kernel_name, digest, shared, products, code in map(str.split, done.stdout.splitlines()):
        assert int(shared) <= 99 * 1024 and int(code) > 0
        assert int(products) > 0 or kernel_name != "_attend"
        kernels.setdefault((method, kernel_name), set()).add(digest)
    assert {k for k, _ in kernels} == set(names.split()) and {k for _, k in kernels} == {"_append", "_attend", "_merge", "_collect"}
    assert all(len(digests) == 1 for digests in kernels.values()), "compiled more than once for one cache"
