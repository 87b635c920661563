"""FullKV: every token is kept at full precision. The reference that the others are measured against."""

from __future__ import annotations

from dataclasses import dataclass

from qevict.policy import Policy


@dataclass(frozen=True)
class FullKV(Policy):
    """Keeps everything, in blocks of 8 tokens. Needs budget=1."""
