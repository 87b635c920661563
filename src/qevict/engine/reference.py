"""Reference attention: block streaming with an online softmax, for any store, codec and device.

It is the oracle that faster backends are tested against. Arithmetic is fp32 whatever the storage type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_BLOCK = 32  # prompt queries per block when their attention is summed: larger ones leave the processor's caches


@dataclass
class Block:
    """Some stored tokens: k, v ``[B, H, t, d]``; ``visible`` broadcasts to ``[B, H, n, t]`` (None: all); ``window`` tokens
    make one unit of mass; ``turned_query`` replaces the queries for this block only (StreamingLLM's slot positions)."""

    k: Tensor
    v: Tensor
    visible: Tensor | None
    window: int
    turned_query: Tensor | None = None


def attend(
    q: Tensor, blocks: Iterable[Block], scaling: float, mass_queries: int | None = 0, peak: bool = False
) -> tuple[Tensor, list[Tensor] | None]:
    """Softmax attention of ``q [B, H_q, n, d]`` over all blocks together.

    Args:
        mass_queries: attention mass is summed over the last so many queries (0: none wanted, ``None``: all).
        peak: also want the highest attention of any of those queries and of any head of the group.

    Returns:
        output ``[B, H_q, n, d]`` in q's dtype, and per block the mass ``[B, H, units]`` (mean over each KV head's
        query group, summed over the queries), or None. With ``peak``: ``[2, B, H, units]``, mass and peak.
    """
    batch, heads, n, dim = q.shape
    counted = n if mass_queries is None else min(mass_queries, n)
    top = total = out = grouped = None
    pieces = []
    for block in blocks:
        kv_heads = block.k.shape[1]
        grouped = (q if block.turned_query is None else block.turned_query).float()
        grouped = grouped.view(batch, kv_heads, heads // kv_heads, n, dim)
        # a group's queries are rows of one product: broadcasting would copy keys and values for each of them
        logits = (grouped.flatten(2, 3) @ block.k.float().transpose(-1, -2)).unflatten(2, grouped.shape[2:4]) * scaling
        if block.visible is not None:
            logits = logits.masked_fill(~block.visible.unsqueeze(2), float("-inf"))
        new_top = logits.amax(-1, keepdim=True)
        new_top = new_top if top is None else torch.maximum(top, new_top)
        # a query that has seen nothing yet keeps -inf; 0 instead avoids -inf - -inf
        shift = new_top.masked_fill(new_top == float("-inf"), 0)
        weights = (logits - shift).exp_()
        value = (weights.flatten(2, 3) @ block.v.float()).unflatten(2, grouped.shape[2:4])
        if top is None:
            total, out = weights.sum(-1, keepdim=True), value
        else:
            fade = (top - shift).exp_()
            total = total * fade + weights.sum(-1, keepdim=True)
            out = out * fade + value
        top = new_top
        if counted:
            units = weights[..., n - counted :, :].unflatten(-1, (-1, block.window)).sum(-1)
            pieces.append((units, shift[..., n - counted :, :]))
    out = (out / total).to(q.dtype).view(batch, heads, n, dim)
    if not counted:
        return out, None
    last, norm = top[..., n - counted :, :], total[..., n - counted :, :]
    shares = (units * ((shift - last).exp_() / norm) for units, shift in pieces)
    if peak:
        return out, [torch.stack((p.sum(-2).mean(2), p.amax((2, 3)))) for p in shares]
    return out, [p.sum(-2).mean(2) for p in shares]


def causal_attention(q: Tensor, k: Tensor, real: Tensor, scaling: float, rows: Tensor) -> Tensor:
    """Attention that the prompt's queries at columns ``rows`` (ascending) pay to every token up to the last of them.

    q ``[B, H_q, T, d]``, k ``[B, H, T, d]``, ``real [B, T]`` False on (left) padding.

    Returns:
        ``[B, H, group, rows, T]`` fp32; zero for a query that is padding.
    """
    length = q.shape[-2]
    part = q[:, :, rows].float().unflatten(1, (k.shape[1], -1))
    visible = (torch.arange(length, device=k.device) <= rows[:, None]) & real[:, None, :]
    logits = (part.flatten(2, 3) * scaling @ k.float().transpose(-1, -2)).unflatten(2, part.shape[2:4])
    return logits.masked_fill_(~visible[:, None, None], float("-inf")).softmax(-1).nan_to_num_()


def causal_attention_mass(q: Tensor, k: Tensor, real: Tensor, scaling: float, last: int | None) -> Tensor:
    """Attention mass that the last ``last`` real queries (``None``: all) of a prompt put on every token, as
    :func:`causal_attention`. Queries are taken in blocks, so no ``T x T`` matrix is ever made.

    Returns:
        ``[B, H, T]`` fp32, summed over the queries, mean over each KV head's query group.
    """
    mass = torch.zeros(k.shape[:-1], device=k.device)
    for rows in _query_blocks(q, last):
        mass += causal_attention(q, k, real, scaling, rows).sum(-2).mean(2)
    return mass


def causal_attention_norm(
    q: Tensor, k: Tensor, real: Tensor, scaling: float, last: int | None, p: float, half_life: float | None
) -> Tensor:
    """p-norm mean of the attention that a prompt's last ``last`` real queries (``None``: all) and a group's heads pay to every
    token, ``(sum w a ** p / sum w) ** (1 / p)``; a query's ``w`` halves every ``half_life`` tokens from the prompt's end back
    (``None``: all are 1).

    Returns:
        ``[B, H, T]`` fp32. What is below 2 ** (-212 / p) (1e-8 for p = 8) counts as that.
    """
    length = q.shape[-2]
    total, weights = torch.zeros(k.shape[:-1], device=k.device), torch.zeros(len(q), 1, 1, device=k.device)
    up, low = 2.0 ** (112 / p), 2.0 ** (-100 / p)  # powers of small numbers have no place in fp32, or are very slow there
    for rows in _query_blocks(q, last):
        weight = torch.ones(len(rows), device=k.device) if half_life is None else 0.5 ** ((length - 1 - rows) / half_life)
        attention = causal_attention(q, k, real, scaling, rows).mul_(up * weight[:, None] ** (1 / p))
        total += raised(attention.clamp_min_(low), p).sum(-2).mean(2)
        weights += (weight * real[:, rows]).sum(-1)[:, None, None]
    return (total / weights).pow_(1 / p).div_(up)


def raised(x: Tensor, p: float) -> Tensor:
    """``x ** p`` in place; by squares where that goes, which is much faster."""
    while p > 1 and p % 2 == 0:
        x, p = x.square_(), p / 2
    return x if p == 1 else x.pow_(p)


def _query_blocks(q: Tensor, last: int | None) -> Iterator[Tensor]:
    """Columns of the last ``last`` queries (``None``: all), some at a time."""
    length = q.shape[-2]
    for lo in range(0 if last is None else max(0, length - last), length, QUERY_BLOCK):
        yield torch.arange(lo, min(lo + QUERY_BLOCK, length), device=q.device)


def projected_norm(v: Tensor, module: torch.nn.Module) -> Tensor:
    """How much a token's value can move the layer's output: L1 norm of the value times the output projection of each query
    head, mean over a KV head's query group.

    v ``[B, H, t, d]``; ``module.o_proj`` maps ``[H_q * d]`` to the hidden size.

    Returns:
        ``[B, H, t]`` fp32.
    """
    heads, dim = v.shape[1], v.shape[-1]
    weight = module.o_proj.weight.float().unflatten(1, (heads, -1, dim))  # [hidden, H, group, d]
    v = v.float()
    norms = [torch.einsum("bhtd,chd->bhtc", v, weight[:, :, j]).abs().sum(-1) for j in range(weight.shape[2])]
    return torch.stack(norms).mean(0)
