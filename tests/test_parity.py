"""The sets of prompt tokens that methods keep, against kvpress (recorded by scripts/make_goldens.py) and against the code of
DefensiveKV's authors (recorded numbers, revision in the file), in fp32."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from baselines.adakv import AdaKV
from baselines.criticalkv import AdaCriticalKV, CriticalKV
from baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from conftest import call
from qevict import TierCache
from qevict.budget import Layout
from qevict.hf.loading import load_model

FOLDER = Path(__file__).parent / "golden"
GOLDEN = load_file(FOLDER / "kvpress.safetensors")
AUTHORS = load_file(FOLDER / "defensivekv.safetensors")
METHODS = {
    "snapkv": SnapKV, "adakv": AdaKV, "criticalkv": CriticalKV, "ada_criticalkv": AdaCriticalKV,
    "defensivekv": DefensiveKV, "layer_defensivekv": LayerDefensiveKV,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return load_model("smollm2-135m", device="cpu", dtype="float32")[0]


def kept(model, policy, tokens: int) -> np.ndarray:
    """``[layers, kv_heads, tokens]`` bool after the prefill."""
    cache = TierCache(model, policy, 0.5)
    with torch.inference_mode():
        call(model, cache, torch.from_numpy(GOLDEN["ids"]).long()[None])
    arena = cache.store
    unit = arena.full.grid("unit")[:, 0].numpy()
    out = np.zeros((unit.shape[0], cache.geometry.kv_heads, tokens), dtype=bool)
    out[..., : arena.sink.shape[-2]] = True
    layer, group, slot = (unit >= 0).nonzero()
    heads = [group] if unit.shape[1] == out.shape[1] else [np.full_like(group, h) for h in range(out.shape[1])]
    for head in heads:
        out[layer, head, unit[layer, group, slot]] = True
    return out


def exactly(cls, keep: int):
    """The method with room for ``keep`` prompt tokens per head (on average), whatever the budget."""

    @dataclass(frozen=True)
    class Exact(cls):
        def layout(self, g, budget, prompt, seen):
            local = 0 if cls is LayerDefensiveKV else getattr(self, "observe", keep - getattr(self, "sink", 0))
            full = keep - local - getattr(self, "sink", 0)
            return Layout(1, 1, getattr(self, "sink", 0), local, local + 1, full, 0, None, None)

    return Exact


@pytest.mark.parametrize("key", [k for k in GOLDEN if k != "ids"])
def test_kept_tokens_are_those_of_kvpress(model, key):
    name, _, *rest = key.split("/")
    tokens = len(GOLDEN["ids"])
    want = np.unpackbits(GOLDEN[key], axis=-1)[..., :tokens].astype(bool)
    keep = int(want.sum()) // (want.shape[0] * want.shape[1])  # kvpress truncates tokens * (1 - ratio) in floating point
    assert keep * want.shape[0] * want.shape[1] == want.sum()
    if name == "streaming_llm":
        policy = exactly(StreamingLLM, keep)()
    else:
        policy = exactly(METHODS[name], keep)(observe=int(rest[0]), kernel=int(rest[1]))
    got = kept(model, policy, tokens)
    same = (got == want).all(-1)
    assert same.all(), f"{int(same.sum())} of {same.size} heads equal; sizes {got.sum(-1)[~same]} and {want.sum(-1)[~same]}"


@pytest.mark.parametrize("key", list(AUTHORS))
def test_kept_tokens_are_those_of_the_authors(model, key):
    name, keep, window, kernel = key.split("/")
    tokens = len(GOLDEN["ids"])
    want = np.unpackbits(AUTHORS[key], axis=-1)[..., :tokens].astype(bool)
    assert want.sum() == int(keep) * want.shape[0] * want.shape[1]
    got = kept(model, exactly(METHODS[name], int(keep))(observe=int(window), kernel=int(kernel)), tokens)
    same = (got == want).all(-1)
    if key == "layer_defensivekv/45/32/5":  # the cut falls among equal scores of layer 0: which of them is left to the sort
        assert got[0].sum() == want[0].sum() == 47
        same = same[1:]
    assert same.all(), f"{int(same.sum())} of {same.size} heads equal; sizes {got.sum(-1)} and {want.sum(-1)}"
