"""Rotary position embedding as the model applies it, in fp32, both ways."""

from __future__ import annotations

import torch
from torch import Tensor

FIXED_TYPES = ("default", "linear", "llama3", "yarn")


class Rope:
    """The model's own rotary frequencies. Stored keys carry the model's attention scaling (YaRN); turning leaves it in.

    Args:
        rotary: the ``rotary_emb`` module of the decoder.

    Raises:
        ValueError: the frequencies depend on the sequence length (``dynamic``, ``longrope``): keys stored earlier could
            not be turned consistently.
    """

    def __init__(self, rotary: torch.nn.Module):
        kind = getattr(rotary, "rope_type", "default")
        if kind not in FIXED_TYPES:
            raise ValueError(f"rope_type {kind!r} changes with the sequence length; supported: {', '.join(FIXED_TYPES)}")
        self.inv_freq = rotary.inv_freq.detach().float().clone()

    def turn(self, x: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """Rotate ``x [..., tokens, head_dim]`` by ``sign * positions [..., tokens]`` (broadcast), computed in fp32."""
        angle = positions.unsqueeze(-1).float() * self.inv_freq.to(x.device)
        cos, sin = angle.cos(), angle.sin() * sign
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
