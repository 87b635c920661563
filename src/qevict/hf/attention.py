"""The attention function that transformers calls, and its mask. Importing this module registers both under ``NAME``."""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "tiered"  # names that contain "sdpa" or "flash" enter special dispatch in transformers


def tiered_attention(module, query, key, value, attention_mask, scaling=None, position_ids=None, **kwargs):
    """Attention over a tiered layer; with a plain cache, or none, ordinary ``sdpa``.

    query ``[B, H_q, n, d]``; ``key`` is the layer handle that :class:`qevict.hf.cache.TierLayer` returned from ``update``.
    """
    if isinstance(key, torch.Tensor):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return key.attend(module, query, attention_mask, scaling, position_ids, **kwargs), None


AttentionInterface.register(NAME, tiered_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without a mask function of its own a name loses its padding masks
