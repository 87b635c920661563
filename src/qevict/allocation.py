"""How heads share slots: by where the best entries are."""

from __future__ import annotations

from torch import Tensor

from qevict.policy import rank_of


def best_per_head(priority: Tensor, candidate: Tensor, total: Tensor) -> Tensor:
    """How many of a layer's best ``total [..., 1, 1]`` entries each head has, ``[..., H, 1]``; ``priority [..., H, U]`` is -inf
    where ``candidate`` is False."""
    best = rank_of(priority.flatten(-2)).view_as(priority) < total  # in the order of the whole layer
    return (best & candidate).sum(-1, keepdim=True).float()


def exact_sum(share: Tensor, total: Tensor) -> Tensor:
    """Integers ``[..., H, 1]`` near ``share`` that sum to ``total [..., 1, 1]``: what is missing is spread evenly, then by
    largest remainder, lower heads first."""
    share = share + (total - share.sum(-2, keepdim=True)).clamp_min(0) / share.shape[-2]
    whole = share.floor()
    left = total - whole.sum(-2, keepdim=True)
    rank = (share - whole).argsort(dim=-2, descending=True, stable=True).argsort(-2)
    return (whole + (rank < left)).long()


def among_heads(priority: Tensor, candidate: Tensor, even: Tensor) -> Tensor:
    """Slots of the heads of each layer, ``[..., H, 1]``, that sum to ``H * even [..., 1, 1]``."""
    total = priority.shape[-2] * even
    return exact_sum(best_per_head(priority.masked_fill(~candidate, float("-inf")), candidate, total), total)


def among_layers(priority: Tensor, candidate: Tensor, even: Tensor) -> Tensor:
    """Slots of all heads of all layers, ``[L, B, H, 1]``, that sum to ``L * H * even [L, B, 1, 1]`` per sequence."""

    def together(x: Tensor) -> Tensor:  # [L, B, H, U] -> [B, L * H, U]: all heads as those of one layer
        return x.transpose(0, 1).flatten(1, 2)

    layers, batch, heads, _ = priority.shape
    slots = among_heads(together(priority), together(candidate), even[0].view(-1, 1, 1))
    return slots.view(batch, layers, heads, 1).transpose(0, 1)
