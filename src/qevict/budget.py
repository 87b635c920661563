"""From a budget to integer bytes, and from bytes to slots.

Every persistent byte of the cache is counted: keys, values, codes, scales, zeros, unit ids, scores, write positions,
rotary frequencies and spare capacity. Temporary workspace is not (it is measured and reported apart).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import gcd
from typing import TypeVar

import torch

from qevict.fields import check
from qevict.store.codec import WindowCodec

T = TypeVar("T")
BASES = ("current", "prompt", "total")
DECODE = ("capped", "grow")
ID_BYTES = 4  # int32 unit id (gives the positions)
SCORE_BYTES = 4  # float32 accumulated score
LINK_BYTES = 4  # int32 slot of a full window's code in the write-once ledger
WRITE_BYTES = 8  # int64 index of the unit that new tokens go to, per layer, row and KV head
WEIGHT_BYTES = 2  # float16 weight of a unit's values
SHARE_BYTES = 4  # int32 number of slots of a KV head, where heads differ
ROW_BYTES = 32  # int64 first column, position shift, padding and evicted count of a sequence


class BudgetError(ValueError):
    """The budget cannot be met. The message names the smallest workable one, ``least`` is it: as a share for a budget that is one,
    else in bytes."""

    def __init__(self, message: str, least: float = 0):
        super().__init__(message)
        self.least = least


def all_of(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Results of all calls.

    Raises:
        BudgetError: of those that the calls raise the one that asks for most, so that what it names is enough for all.
    """
    results, errors = [], []
    for call in calls:
        try:
            results.append(call())
        except BudgetError as error:
            errors.append(error)
    if errors:
        raise max(errors, key=lambda error: error.least)
    return results


@dataclass(frozen=True)
class Geometry:
    """Sizes of the model's attention and the type that full-precision keys and values are stored in."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: keys and values of all KV heads."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    def full_bytes(self, tokens: int) -> int:
        """``M_full``: bytes of an uncompressed cache of ``tokens`` tokens, one sequence."""
        return self.layers * self.token_bytes * tokens

    @property
    def rope_bytes(self) -> int:
        return 4 * (self.head_dim // 2)


@dataclass(frozen=True)
class Budget:
    """What a run may keep, per sequence: exactly one of a fraction of FullKV, bytes, or tokens' worth of bytes.

    Args:
        fraction: share of ``M_full(S)``, in (0, 1]; 1 keeps everything.
        nbytes: absolute bytes.
        tokens: as many bytes as FullKV needs for that many tokens.
        basis: the ``S`` of a fraction: ``current`` (prompt + generated so far), ``prompt``, or ``total`` (prompt + max_new_tokens).
        max_new_tokens: needed by ``basis='total'``.
        decode: ``capped`` holds the budget at every step, by selecting again among what is stored; ``grow`` holds it at the end
            of the prompt only: nothing is selected again and generated tokens stay (the authors' one-shot behaviour), so the
            ratio rises above the budget.
    """

    fraction: float | None = None
    nbytes: int | None = None
    tokens: int | None = None
    basis: str = "current"
    max_new_tokens: int | None = None
    decode: str = "capped"

    def __post_init__(self):
        given = {"budget": self.fraction, "budget_bytes": self.nbytes, "budget_tokens": self.tokens}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise BudgetError("give exactly one of budget (a share of FullKV's bytes), budget_bytes and budget_tokens")
        ((name, value),) = given.items()
        try:
            check(name, value, float if name == "budget" else int)
        except ValueError as error:
            raise BudgetError(f"{error}, for example budget=0.05 or budget_bytes=4000000") from None
        if name == "budget" and not 0 < value <= 1:
            raise BudgetError(f"budget={value:g} is outside (0, 1]; 1 keeps everything, 0.05 keeps 5 % of FullKV's bytes")
        if value <= 0:
            raise BudgetError(f"{name}={value} is not positive: give at least 1")
        if self.basis not in BASES:
            raise BudgetError(f"budget basis {self.basis!r}: choose one of {', '.join(BASES)}")
        if self.decode not in DECODE:
            raise BudgetError(f"decode={self.decode!r}: choose one of {', '.join(DECODE)}")
        if self.basis == "total" and not self.max_new_tokens:
            raise BudgetError("budget basis 'total' needs max_new_tokens > 0")

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{self.fraction:g}"
        return f"{self.nbytes}B" if self.nbytes is not None else f"{self.tokens}tok"

    @property
    def once(self) -> bool:
        """Only one selection, at the end of the prompt."""
        return self.decode == "grow"

    @property
    def unlimited(self) -> bool:
        return self.fraction == 1

    def basis_tokens(self, prompt: int, seen: int) -> int:
        return {"current": seen, "prompt": prompt, "total": prompt + (self.max_new_tokens or 0)}[self.basis]

    def resolve(self, geometry: Geometry, prompt: int, seen: int) -> int:
        """Integer bytes that one sequence may hold when ``seen`` of its tokens (``prompt`` of them prompt) have passed."""
        if self.nbytes is not None:
            return self.nbytes
        if self.tokens is not None:
            return geometry.full_bytes(self.tokens)
        return int(self.fraction * geometry.full_bytes(self.basis_tokens(prompt, seen)))


@dataclass(frozen=True)
class Layout:
    """Slots of one sequence in every layer. One unit is ``window`` consecutive tokens.

    ``full`` and ``codes`` are K_f and K_q of the paper; ``protected`` units hold the local region and the tokens that
    arrive until the next routing event, ``interval`` tokens later (0: there is no event). ``local`` tokens are never candidates.
    ``reckoned`` is how many tokens all this was worked out for.
    """

    window: int
    interval: int | None
    sink: int
    local: int
    protected: int
    full: int
    codes: int
    budget_bytes: int | None
    persistent_bytes: int | None
    reckoned: int | None = None

    @property
    def dense(self) -> int:
        """Slots of the full-precision pool."""
        return self.protected + self.full


@dataclass(frozen=True)
class Costs:
    """Bytes per layer and sequence of each thing a layout can hold, from the codec's own formula."""

    fixed: int
    full_unit: int
    code_unit: int

    @classmethod
    def of(
        cls,
        g: Geometry,
        *,
        window: int,
        groups: int,
        sink: int,
        codec: WindowCodec | None,
        channels: int,
        weighted: bool,
        linked: bool,
        ragged: bool,
    ):
        record = ID_BYTES + SCORE_BYTES * channels
        return cls(
            fixed=sink * g.token_bytes + g.kv_heads * (WRITE_BYTES + (SHARE_BYTES if ragged else 0)),
            full_unit=window * g.token_bytes + groups * (record + WEIGHT_BYTES * weighted + LINK_BYTES * linked),
            code_unit=g.kv_heads * codec.unit_bytes() + groups * record if codec else 0,
        )

    def total(self, g: Geometry, dense: int, codes: int) -> int:
        """Closed form of all persistent bytes of one sequence."""
        return g.layers * (self.fixed + dense * self.full_unit + codes * self.code_unit) + ROW_BYTES + g.rope_bytes


def protected_units(window: int, interval: int, local: int) -> int:
    """Units needed for ``local`` tokens, a unit in progress, and ``interval`` new tokens between two routing events (0: there
    are none)."""
    return -(-(local + window - gcd(window, interval) + interval) // window)


def smallest(g: Geometry, budget: Budget, nbytes: int, tokens: int) -> tuple[str, float]:
    """What to ask for to hold ``nbytes`` where FullKV holds ``tokens``: the share in words, and :attr:`BudgetError.least`."""
    share = -(-nbytes * 10000 // g.full_bytes(tokens)) / 10000
    return f"budget>={share:g}" if share < 1 else "budget=1", nbytes if budget.fraction is None else share


def require(g: Geometry, costs: Costs, budget: Budget, dense: int, what: str, prompt: int, seen: int) -> int:
    """Bytes per layer left for history after ``dense`` protected units, or a BudgetError naming the smallest budget."""
    allowed = budget.resolve(g, prompt, seen)
    least = costs.total(g, dense, 0)
    if allowed < least:
        tokens = budget.basis_tokens(prompt, seen)
        fix, asked = smallest(g, budget, least, tokens)
        raise BudgetError(
            f"a budget of {allowed} bytes at {tokens} tokens cannot hold {what}: "
            f"smallest workable: {least} bytes ({fix}, or budget_bytes={least})",
            asked,
        )
    return (allowed - ROW_BYTES - g.rope_bytes) // g.layers - costs.fixed - dense * costs.full_unit
