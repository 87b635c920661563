"""Caches to compare speed with: the library's own full caches, the fastest full cache that we know for one query token, and the
library's quantized caches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, QuantizedCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from baselines.fullkv import FullKV
from qevict.accounting import measure
from qevict.hf.attention import NAME
from qevict.hf.cache import HandleLayer, TierCache

FULL = ("dynamic_sdpa", "dynamic_eager", "dynamic_flash", "packed", "fullkv")
# Two bits, the library's groups of 64 and 128 newest tokens in full; hqq needs its axis 1. fp8 takes no options.
QUANTIZED = {
    "hf_quanto": partial(QuantizedCache, "quanto", nbits=2),
    "hf_hqq": partial(QuantizedCache, "hqq", nbits=2, axis_key=1, axis_value=1),
    "hf_fp8": partial(QuantizedCache, "fp8"),
}
NAMES = (*FULL, *QUANTIZED)
IMPLEMENTATIONS = {"dynamic_sdpa": "sdpa", "dynamic_eager": "eager", "dynamic_flash": "flash_attention_2"} | dict.fromkeys(
    QUANTIZED, "sdpa"
)


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

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.k, self.v = (x.repeat_interleave(repeats, 0) for x in (self.k, self.v))


def make(name: str, model, room: int, dtype: torch.dtype) -> Cache:
    """A cache by name; ``room`` tokens, ``dtype`` is the storage type of ``fullkv``.

    Raises:
        ValueError, ImportError: what a quantized cache needs is not installed, or does not fit the model.
    """
    if name == "fullkv":
        return TierCache(model, FullKV(), 1.0, dtype)
    if name == "packed":
        return Cache(layers=[PackedLayer(room) for _ in range(model.config.get_text_config().num_hidden_layers)])
    if name in QUANTIZED:
        return QUANTIZED[name](config=model.config)
    return DynamicCache(config=model.config)


def unavailable(name: str, model) -> str | None:
    """Why a cache cannot be measured here; None: it can."""
    if name == "dynamic_flash":
        if model.device.type != "cuda":
            return "flash_attention_2 needs a CUDA device"
        if find_spec("flash_attn") is None:
            return "flash-attn is not installed"
        if model.dtype == torch.float32:
            return "flash_attention_2 needs model.dtype=bfloat16 or float16"
    if name in QUANTIZED:
        try:
            make(name, model, 0, model.dtype)
        except (ImportError, ValueError) as error:  # not installed; a backend that this release of transformers does not know
            return " ".join(str(error).split())
    return None


def implementation(name: str) -> str:
    """Attention implementation that the model runs a cache with."""
    return IMPLEMENTATIONS.get(name, NAME)


def attention_function(name: str, module) -> Callable:
    """What the model calls for attention under an implementation; ``eager`` is in the module's own source file."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]


def held(cache: Cache) -> int:
    """Bytes of the tensors that a cache keeps, each storage once, at its full size."""
    if isinstance(cache, TierCache):
        return measure(cache)["total"]
    found, stack = {}, [value for layer in cache.layers for value in vars(layer).values()]
    while stack:
        item = stack.pop()
        if isinstance(item, list | tuple | dict):  # fp8 keeps values and scale together, hqq a dictionary
            stack += item.values() if isinstance(item, dict) else item
        elif hasattr(item, "__tensor_flatten__"):  # quanto's tensors are made of others
            stack += [getattr(item, name) for name in item.__tensor_flatten__()[0]]
        elif isinstance(item, Tensor):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
