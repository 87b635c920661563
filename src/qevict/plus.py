"""QEvict, with its bytes spent better: docs/qevict_plus.md says what each setting bought."""

from __future__ import annotations

from dataclasses import dataclass

from qevict.rankers import Ranked


@dataclass(frozen=True)
class QEvictPlus(Ranked):
    """The pieces of QEvict in another composition; nothing here is of its own.

    Storage: longer windows of 4-bit keys and values with 8-bit metadata; history is coded from the first (``q=1``), so nothing is
    promoted and no copy is kept. Allocation: every KV head chooses its windows, and all heads of all layers share the slots by
    where the best windows are. Score: the prompt by the p-norm of its last 128 queries, the last of them above all, which together
    count as 16 generated tokens, and the windows after one that they look at are kept for what is read on from there; attention
    fades while decoding.
    """

    window: int = 16
    q: float = 1.0
    key_bits: int = 4
    value_bits: int = 4
    meta: str = "uint8"
    granularity: str = "kv_head"
    last_queries: int = 128
    shares: str | None = "layers"
    ranker: str = "decayed"
    half_life: float = 32.0
    prompt_norm: float = 8.0
    query_half_life: float | None = 8.0
    prompt_weight: float | None = 16.0
    follow: float = 0.5
