"""Tiny seeded models and the drivers that the tests share. Everything runs offline on one CPU core."""

from __future__ import annotations

import inspect
from functools import cache as once
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from baselines.adakv import AdaKV
from baselines.defensivekv import DefensiveKV, LayerDefensiveKV
from baselines.fullkv import FullKV
from baselines.snapkv import SnapKV
from baselines.streaming_llm import StreamingLLM
from qevict import Budget, QEvict, TierCache
from qevict.artifact import model_digest, save_artifact
from qevict.budget import Geometry
from qevict.hf.attention import tiered_attention
from qevict.policy import CODED, FULL, Candidates
from qevict.store.pool import FIRST_LEDGER

torch.set_num_threads(1)

VOCAB = 101
# Weights are drawn wide: with the library's 0.02 attention is flat and a test could not tell one cache from another.
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BASE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "llama3-rope": (LlamaConfig, {"rope_parameters": LLAMA3 | BASE}),
    "yarn": (LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0} | BASE, "max_position_embeddings": 256}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
}
FAMILIES = tuple(CONFIGS)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> torch.nn.Module:
    """A fresh random model; the same arguments give the same weights."""
    cls, extra = CONFIGS[name]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(cls(**{**SMALL, **extra, **changes}), attn_implementation="sdpa")
    return model.to(dtype).eval()


@once
def tiny(name: str = "llama", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Shared model that caches are attached to."""
    return build(name, dtype)


@once
def plain(name: str = "llama", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The same weights, never touched by a tiered cache: the reference."""
    return build(name, dtype)


@pytest.fixture
def llama() -> torch.nn.Module:
    return tiny("llama")


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids without the padding token."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of these lengths as one left-padded batch: ids and mask."""
    width = max(lengths)
    ids = tokens(len(lengths), width, seed=seed)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def call(model, cache, ids, mask=None, positions=None):
    """One forward call. The keyword for the cache differs between releases of transformers."""
    known = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache})


def forced_logits(model, cache, ids, mask, forced):
    """Logits ``[B, n + 1, vocab]`` after the prompt and after each of the ``n`` forced tokens ``[B, n]``, one call a token."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    out = [call(model, cache, ids, mask, positions).logits[:, -1]]
    for token in forced.unbind(-1):
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), -1)
        positions = positions[:, -1:] + 1
        out.append(call(model, cache, token[:, None], mask, positions).logits[:, -1])
    return torch.stack(out, 1).float()


def full_logits(name, ids, mask, forced):
    """The same from an untouched model with the library's own cache."""
    return forced_logits(plain(name), DynamicCache(), ids, mask, forced)


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max())


def calibrate(policy, g: Geometry, model, path: Path) -> str:
    """An artifact for a method that is calibrated on other text, from the keys before RoPE and the values of random text."""
    seen, hooks = {}, []
    for i, layer in enumerate(model.get_decoder().layers):
        for side in ("k_proj", "v_proj"):
            keep = lambda _, __, out, at=(i, side): seen.__setitem__(at, out)  # noqa: E731
            hooks.append(getattr(layer.self_attn, side).register_forward_hook(keep))
    call(model, DynamicCache(), tokens(1, 300, seed=9))
    for hook in hooks:
        hook.remove()
    flat = {}
    for i in range(g.layers):
        k, v = (seen[i, s][0].float().unflatten(-1, (g.kv_heads, g.head_dim)).transpose(0, 1) for s in ("k_proj", "v_proj"))
        flat |= {f"{i}.{n}": t for n, t in policy.calibrate(g, k, v).items()}
    save_artifact(path, flat, {"model_digest": model_digest(model), **policy.setting()})
    return str(path)


# -- what a store holds -------------------------------------------------------------------------------------------------


def holdings(arena) -> dict[tuple[int, int, int], dict[int, dict]]:
    """What the store holds, read slot by slot: (layer, row, group) -> unit -> tier, slot and score.

    Checks on the way that no unit is held twice and that ledger and links point at each other.
    """
    full, linked = arena.full.grid("unit").tolist(), arena.policy.linked
    link = arena.full.grid("link").tolist() if linked else None
    coded = arena.coded.grid("unit").tolist() if arena.coded is not None else None
    score = [p.grid("score").tolist() if p is not None and "score" in p.record else None for p in (arena.full, arena.coded)]
    out = {}
    for i in range(arena.geometry.layers):
        for b in range(arena.batch):
            for g in range(arena.full.groups):
                units, codes = {}, {}
                for s, u in enumerate(coded[i][b][g] if coded else ()):
                    codes[s] = u
                    if u >= 0:
                        assert u not in units
                        units[u] = {"tier": CODED, "code": s, "score": score[1][i][b][g][s]}
                for s, u in enumerate(full[i][b][g]):
                    if u < 0:
                        continue
                    assert u not in units, f"unit {u} is held twice"
                    at = link[i][b][g][s] if linked else -1
                    units[u] = {"tier": FULL, "slot": s, "code": at if at >= 0 else None}
                    units[u]["score"] = score[0][i][b][g][s] if score[0] else 0.0
                owners = {x["code"]: u for u, x in units.items() if x["tier"] == FULL and x["code"] is not None}
                ledger = {s: FIRST_LEDGER - u for s, u in codes.items() if u <= FIRST_LEDGER}
                assert ledger == owners, f"ledger {ledger} and links {owners} disagree"
                out[i, b, g] = units
    return out


def candidates(score, candidate=None, unit=None, even=1, peak=None, weight=None) -> Candidates:
    """What a policy is asked to rank: ``score [..., G, U]``, all of them candidates in the order of their ids unless said."""
    unit = torch.arange(score.shape[-1]).expand(score.shape) if unit is None else unit
    even = torch.as_tensor(even).view((1,) * score.ndim)
    return Candidates(unit, unit >= 0 if candidate is None else candidate, score, peak, weight, even, even, torch.zeros_like(even))


# -- a fused kernel against the reference ------------------------------------------------------------------------------

METHODS = {
    "full": (FullKV(), 1.0),
    "qevict": (QEvict(), 0.4),
    "heads": (QEvict(granularity="kv_head", window=4, key_bits=3, value_bits=4, meta="uint8"), 0.4),
    "wide": (QEvict(key_bits=8, value_bits=2, value_group=8, meta="bfloat16", promotion="off"), 0.5),
    "long windows": (QEvict(window=24, interval=5, key_bits=4, value_bits=3, meta="float32"), 0.6),
    "shared": (QEvict(q=1, granularity="kv_head", shares="layers", window=4, value_bits=3, meta="uint8"), 0.25),
    "snapkv": (SnapKV(observe=8), 0.3),
    "ragged": (AdaKV(observe=8), 0.3),
    "peaks": (DefensiveKV(observe=8), 0.3),
    "layers": (LayerDefensiveKV(observe=8), 0.3),
    "grow": (LayerDefensiveKV(observe=8), Budget(0.2, decode="grow")),
    "streaming": (StreamingLLM(), 0.2),
}
CALLS = (*[1] * 30, 9, *[1] * 12)  # tokens of each call after the prompt


def drive(model, policy, budget, dtype, backend, lengths=(200, 150, 177), calls=CALLS, given=torch.float32, switch=None):
    """Outputs of every call; what the pools hold at the end, records and payload.

    Args:
        dtype: storage type; ``given`` is that of queries, keys and values.
        switch: called with the store before the last call.
    """
    cache = TierCache(model, policy, budget, dtype, backend)
    stream = Stream(model, cache, list(lengths), dtype=given)
    out = [stream.feed(n) for n in (max(lengths), *calls[:-1])]
    if switch is not None:
        switch(cache.store)
    out.append(stream.feed(calls[-1]))
    records = [{n: t.clone() for n, t in pool.record.items()} for pool in cache.store.pools]
    return out, records, [p.payload for p in cache.store.pools]


def same(want, got, near: float) -> None:
    """Two results of :func:`drive`: the same content, and outputs and scores that differ by less than ``near``."""
    assert max(gap(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(want[0], got[0], strict=True)) < near
    for a, b in zip(want[1], got[1], strict=True):
        for name in a:
            if name in ("unit", "link"):
                assert torch.equal(a[name], b[name]), f"other {name}s"
            else:
                assert torch.allclose(a[name].float(), b[name].float(), atol=near, rtol=0), name
    for a, b in zip(want[2], got[2], strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a), "other content"


# -- independent arithmetic --------------------------------------------------------------------------------------------


def rotate(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, sign: int = 1) -> np.ndarray:
    """Rotary embedding of ``x [..., tokens, d]`` at ``positions [..., tokens]`` in fp64, pair by pair."""
    angle = sign * positions[..., None].astype(np.float64) * inv_freq.astype(np.float64)
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate((turned.real, turned.imag), -1)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# -- the engine without a model around it ------------------------------------------------------------------------------


class Stream:
    """Feeds synthetic queries, keys and values to a cache the way the attention of a model does.

    The text has topics: keys of a token lean towards its topic, queries towards a topic that changes every few tokens.
    So windows gain and lose attention all the time, and every transition between the tiers occurs.
    """

    def __init__(self, model, cache: TierCache, lengths: list[int], seed: int = 0, strength: float = 2.5, dtype=torch.float32):
        self.model, self.cache, self.lengths, self.strength, self.dtype = model, cache, lengths, strength, dtype
        g = cache.geometry
        self.layers, self.batch, self.heads, self.dim = g.layers, len(lengths), g.kv_heads, g.head_dim
        self.query_heads = g.query_heads
        self.width = max(lengths)
        self.pad = self.width - np.array(lengths)
        self.inv_freq = model.get_decoder().rotary_emb.inv_freq.double().numpy()
        self.rng = np.random.default_rng(seed)
        self.topics = self.rng.standard_normal((6, self.dim))
        self.topics /= np.linalg.norm(self.topics, axis=-1, keepdims=True)
        self.seen = 0
        # everything that ever passed, after RoPE: [layers, B, H, tokens, d]
        self.k = np.zeros((self.layers, self.batch, self.heads, 0, self.dim), np.float32)
        self.v = self.k.copy()

    def _draw(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        column = np.arange(self.seen, self.seen + n)
        near = self.topics[(column // 8) % len(self.topics)]
        asked = self.topics[(self.rng.integers(0, 1000) + column // 5) % len(self.topics)]
        draw = self.rng.standard_normal
        k = draw((self.layers, self.batch, self.heads, n, self.dim)) * 0.7 + near * self.strength
        q = draw((self.layers, self.batch, self.query_heads, n, self.dim)) * 0.7 + asked * self.strength
        v = draw(k.shape)
        where = self.positions(column)[None, :, None]
        turned = [rotate(x, np.broadcast_to(where, x.shape[:-1]), self.inv_freq) for x in (q, k)]
        return tuple(x.astype(np.float32) for x in (*turned, v))

    def positions(self, column: np.ndarray) -> np.ndarray:
        """``[B, n]`` position of every column in each sequence."""
        return column[None] - self.pad[:, None]

    def feed(self, n: int, each=None) -> np.ndarray:
        """One forward call of ``n`` tokens. Returns the attention output ``[layers, B, H_q, n, d]``.

        ``each(layer, q, k, v)`` runs before every layer's attention.
        """
        q, k, v = self._draw(n)
        self.k, self.v = np.concatenate((self.k, k), 3), np.concatenate((self.v, v), 3)
        column = np.arange(self.seen, self.seen + n)
        every = np.arange(self.seen + n)
        mask = (every <= column[:, None]) & (every >= self.pad[:, None, None])
        device = self.model.device
        mask = torch.from_numpy(mask[:, None]).to(device) if n > 1 or self.pad.any() else None
        positions = torch.from_numpy(self.positions(column)).clamp_min(0).to(device)
        out = []
        for i in range(self.layers):
            if each is not None:
                each(i, q[i], k[i], v[i])
            module = self.model.get_decoder().layers[i].self_attn
            query, key, value = (torch.from_numpy(x[i]).to(device, self.dtype) for x in (q, k, v))
            handle, _ = self.cache.update(key, value, i)
            with torch.no_grad():
                y, _ = tiered_attention(module, query, handle, handle, mask, scaling=module.scaling, position_ids=positions)
            out.append(y.transpose(1, 2).float().cpu().numpy())
        self.seen += n
        self.q = q
        return np.stack(out)
