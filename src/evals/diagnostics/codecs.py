"""Where the error of low-bit keys and values sits: by layer and head, keys and values apart, on the model's own attention.

No cache takes part. A text is prefilled; in every layer all but the first and the newest tokens are coded and decoded, keys alone,
values alone or both, and the attention outputs of the newest queries are compared with the exact ones. Errors do not add up over
layers here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import ClassVar

import torch
from torch import Tensor
from transformers import Cache

from evals.benchmark import Item, Session
from evals.decode import cache_keyword
from evals.fidelity import Fidelity
from evals.full_caches import PackedLayer
from evals.metrics import estimates, summarize
from qevict.engine.reference import causal_attention
from qevict.hf.attention import NAME
from qevict.hf.cache import geometry_of
from qevict.hf.rope import Rope
from qevict.store.codec import WindowCodec

SINK = 5  # first tokens that stay exact
PAPER = "K2 V2"  # the paper's setting
# Bits of keys and of values (0: left exact), window, type of scales and zeros.
VARIANTS = {
    **{f"K{b}": (b, 0, 8, "float16") for b in (2, 3, 4)},
    **{f"V{b}": (0, b, 8, "float16") for b in (2, 3, 4)},
    **{f"K2 Omega {w}": (2, 0, w, "float16") for w in (4, 16, 32)},
    **{f"K2 Omega {w} uint8": (2, 0, w, "uint8") for w in (4, 8, 16, 32)},
    **{f"V{b} uint8": (0, b, 8, "uint8") for b in (2, 3)},
    PAPER: (2, 2, 8, "float16"),
    "K2 V2 uint8": (2, 2, 8, "uint8"),
    "K2 V2 Omega 16 uint8": (2, 2, 16, "uint8"),
    "K2 V3 Omega 16 uint8": (2, 3, 16, "uint8"),
    "K3 V3 Omega 16 uint8": (3, 3, 16, "uint8"),
    "K4 V2": (4, 2, 8, "float16"),
    "K2 V4": (2, 4, 8, "float16"),
    "K4 V4": (4, 4, 8, "float16"),
}


def bits_per_element(name: str, dim: int) -> float:
    """Bits of a variant's codes and metadata per element of the sides that it codes."""
    keys, values, window, meta = VARIANTS[name]
    codec = WindowCodec(window, dim, keys or 2, values or 2, meta)
    sides = [side for side, bits in (("k", keys), ("v", values)) if bits]
    nbytes = sum(torch.Size(s).numel() * t.itemsize for n, (s, t) in codec.spec().items() if n[0] in sides)
    return 8 * (nbytes + (6 * len(sides) if meta == "uint8" else 0)) / (window * dim * len(sides))


def coded(k: Tensor, v: Tensor, codec: WindowCodec, rope: Rope, end: int) -> tuple[Tensor, Tensor]:
    """Keys (after RoPE) and values ``[B, H, T, d]`` with whole windows up to token ``end`` coded and decoded, fp32; the first
    ``SINK`` stay."""
    start = end - (end - SINK) // codec.window * codec.window
    position = torch.arange(start, end, device=k.device)
    plain, values = rope.turn(k[:, :, start:end], position, -1), v[:, :, start:end].float()
    data = codec.encode(*(x.unflatten(2, (-1, codec.window)).flatten(0, 2) for x in (plain, values)))
    k, v = k.float().clone(), v.float().clone()
    k[:, :, start:end] = rope.turn(codec.decode_keys(data).view_as(plain), position)
    v[:, :, start:end] = codec.decode_values(data).view_as(values)
    return k, v


def errors(q: Tensor, k: Tensor, v: Tensor, scaling: float, rope: Rope, queries: int) -> dict[str, Tensor]:
    """``[B, H]`` relative L2 error of a KV head's query group, over the last ``queries`` queries, for each variant."""
    length = k.shape[2]
    rows = torch.arange(length - queries, length, device=k.device)
    real = torch.ones(k.shape[0], length, dtype=torch.bool, device=k.device)

    def output(weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v.float().unsqueeze(2)  # [B, H, group, queries, d]

    weights = causal_attention(q, k, real, scaling, rows)
    exact, out = output(weights, v), {}
    for name, (keys, values, window, meta) in VARIANTS.items():
        codec = WindowCodec(window, k.shape[-1], keys or 2, values or 2, meta)
        coded_k, coded_v = coded(k, v, codec, rope, length - queries)
        theirs = causal_attention(q, coded_k, real, scaling, rows) if keys else weights
        said = output(theirs, coded_v if values else v)
        out[name] = (said - exact).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    return out


class _Layer(PackedLayer):
    """Tells ``note`` the queries, keys and values of the prompt."""

    def __init__(self, room: int, note):
        super().__init__(room)
        self.note = note

    def attend(self, module, query, mask, scaling, position_ids, **kwargs) -> Tensor:
        self.note(query, self.k, self.v, scaling)
        return super().attend(module, query, mask, scaling, position_ids, **kwargs)


@dataclass(frozen=True)
class CodecErrors(Fidelity):
    """Errors of codes on prompts of ``context`` tokens, for the newest ``queries`` queries. The method has no part in it."""

    queries: int = 32

    name: ClassVar[str] = "codecs"

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.queries <= self.context - SINK - 32:
            raise ValueError(
                f"task.queries={self.queries} is outside [1, task.context - {SINK + 32}]: lower it or raise task.context"
            )

    @torch.inference_mode()
    def _batch(self, session: Session, items: Sequence[Item]) -> Iterator[dict]:
        model = session.model
        config = model.config.get_text_config()
        if config._attn_implementation != NAME:
            model.set_attn_implementation(NAME)
        rope, said = Rope(model.get_decoder().rotary_emb), []
        cache = Cache(
            layers=[
                _Layer(self.context, lambda q, k, v, s: said.append(errors(q, k, v, s, rope, self.queries)))
                for _ in range(config.num_hidden_layers)
            ]
        )
        dim = geometry_of(config, model.dtype).head_dim
        bits = {name: round(bits_per_element(name, dim), 3) for name in VARIANTS}
        ids = torch.tensor([item.payload[1][: self.context] for item in items], device=model.device)
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
        for i, item in enumerate(items):
            by_head = {n: [[round(x, 5) for x in layer[n][i].tolist()] for layer in said] for n in VARIANTS}
            means = {n: mean(map(mean, x)) for n, x in by_head.items()}
            yield {
                "id": item.id, "task": item.payload[0], "prompt_sha": item.sha, "prompt_tokens": self.context, "error": None,
                "status": "ok", "score": 1 - means[PAPER], "errors": means, "bits": bits,
                "errors_by_head": by_head,  # [layers][KV heads]
            }  # fmt: skip

    def summary(self, rows: Sequence[dict]) -> dict:
        """Means over layers, heads and texts, 95 % intervals over texts. ``score``: 1 minus the error of the paper's setting."""
        return summarize(rows) | estimates(rows, VARIANTS, lambda row, name: row["errors"][name])

    def card(self) -> dict:
        return super().card() | {"reference": "exact attention of each layer", "queries": self.queries, "sink": SINK}
