"""Uncompressed caches to compare speed with: the library's own, and the fastest full cache that we know for one query token."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from baselines.fullkv import FullKV
from qevict.hf.attention import NAME
from qevict.hf.cache import HandleLayer, TierCache

NAMES = ("dynamic_sdpa", "dynamic_eager", "dynamic_flash", "packed", "fullkv")
IMPLEMENTATIONS = {"dynamic_eager": "eager", "dynamic_flash": "flash_attention_2"}


class PackedLayer(HandleLayer):
    """Keys and values in tensors that never move; a single query token's head group is packed into the query axis, so keys are
    read once per KV head."""

    def __init__(self, room: int):
        self.room = room
        self.k = self.v = None

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        batch, heads, n, dim = key_states.shape
        if self.k is None:
            self.k, self.v = (key_states.new_empty(batch, heads, self.room, dim) for _ in range(2))
        self.k[:, :, self.seen : self.seen + n] = key_states
        self.v[:, :, self.seen : self.seen + n] = value_states
        self.seen += n
        return self, self

    def attend(self, module, query, mask, scaling, position_ids, **kwargs) -> Tensor:
        k, v = self.k[:, :, : self.seen], self.v[:, :, : self.seen]
        if query.shape[2] > 1:
            return sdpa_attention_forward(module, query, k, v, mask, scaling=scaling, **kwargs)[0]
        packed = query.squeeze(2).unflatten(1, (k.shape[1], -1))  # [B, H, group, d]
        out = torch.nn.functional.scaled_dot_product_attention(packed, k, v, scale=scaling)
        return out.flatten(1, 2).unsqueeze(1)


def make(name: str, model, room: int, dtype: torch.dtype) -> Cache:
    """A full cache by name; ``room`` tokens, ``dtype`` is the storage type of ``fullkv``."""
    if name == "fullkv":
        return TierCache(model, FullKV(), 1.0, dtype)
    if name == "packed":
        return Cache(layers=[PackedLayer(room) for _ in range(model.config.get_text_config().num_hidden_layers)])
    return DynamicCache(config=model.config)


def implementation(name: str) -> str:
    """Attention implementation that the model runs a cache with."""
    return IMPLEMENTATIONS.get(name, NAME)
