"""The contract of a quantizer: a method that keeps every token, most of them at low bits.

Its bytes are a fixed point: at a budget below its floor it is refused, or it holds only the tokens that an evictor keeps
(``evict``), as many as the budget pays for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from qevict.budget import Budget, BudgetError, Geometry, Layout, smallest
from qevict.hf.rope import Rope
from qevict.policy import EVERYTHING, Policy, PromptView
from qevict.store.history import HistoryLayer
from qevict.store.stream import GROWTH, Field, TokenCodec

Tables = dict[str, Tensor]  # what was calibrated on other text, for one layer
FIRST_BYTES = 8  # int64 position of a sequence's first token


@dataclass(frozen=True)
class Quantizer(Policy):
    """Base of the quantizers.

    Args:
        evict: a method that chooses which tokens to hold (token-level, every KV head for itself, equally many per head).

    Class attributes that a method sets:

    Attributes:
        sink: first tokens, kept in full.
        plain_keys: keys are coded before RoPE.
        codes_first: a new token is coded before it is attended to; else after.
        keeps_codes: (with ``codes_first``) every token and KV head has its codes and metadata for itself, so that what an evictor
            keeps, keeps its codes; else it is coded anew.
        period: tokens after which the ratio to FullKV has been at its highest.
    """

    evict: Policy | None = None

    window = 1
    per_head = True
    sink = 0
    plain_keys = False
    codes_first = False
    keeps_codes = False
    kernels = ()
    period = 1

    def __post_init__(self):
        super().__post_init__()
        e = self.evict
        fits = isinstance(e, Policy) and e.window == 1 and e.per_head and e.channels == ("score",) and not e.shares
        if e is not None and not (fits and hasattr(e, "observe") and hasattr(e, "interval")):
            raise ValueError(
                f"method.evict={e!r}: give _target_ and fields of a method that keeps equally many tokens in every KV head by "
                "attention, such as baselines.snapkv.SnapKV or baselines.criticalkv.CriticalKV"
            )

    @property
    def fixed(self) -> bool:
        return self.evict is None

    # -- what a method says ---------------------------------------------------------------------------------------------

    def specs(self, g: Geometry) -> tuple[dict[str, Field], dict[str, Field]]:
        """Tensors of coded keys and of coded values.

        Raises:
            ValueError: the head dimension does not fit.
        """
        raise NotImplementedError

    def codecs(self, g: Geometry, k: Tensor, v: Tensor, tables: Tables | None) -> tuple[TokenCodec, TokenCodec]:
        """Codecs of keys and values of one layer; k (before RoPE if ``plain_keys``) and v ``[b, H, T, d]`` are its prompt."""
        raise NotImplementedError

    def coded(self, base: int, n: int) -> tuple[int, int]:
        """Of ``n`` tokens, ``base`` of which arrived with the last prompt or selection: how many keys and values are coded."""
        raise NotImplementedError

    def wants_attention(self, base: int, n: int) -> bool:
        """Whether the attention of the token that makes it ``n`` is needed to code others."""
        return False

    def new_layer(self, g: Geometry, rope: Rope, view: PromptView, first: Tensor, tables: Tables | None) -> HistoryLayer:
        return HistoryLayer(self, g, rope, view, first, tables)

    def table_bytes(self, g: Geometry) -> int:
        """Bytes of what a sequence (or the model) was calibrated to, per layer."""
        return 0

    def tables(self, model: torch.nn.Module) -> list[Tables] | None:
        """What was calibrated on other text for this model, per layer.

        Raises:
            ValueError: it is missing, or belongs to another model or setting.
        """
        return None

    def calibration_id(self, model: torch.nn.Module) -> str | None:
        tables = self.tables(model)
        if tables is None:
            return None
        sha = hashlib.sha256()
        for name, tensor in ((n, t) for layer in tables for n, t in sorted(layer.items())):
            sha.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()[:16]

    # -- bytes ----------------------------------------------------------------------------------------------------------

    def codec(self, g: Geometry) -> None:
        self.specs(g)

    def layer_bytes(self, g: Geometry, base: int, n: int) -> int:
        """Closed form of one layer of one sequence that holds ``n`` tokens."""
        full = Field(g.kv_heads, (g.head_dim,), g.dtype)
        sinks = min(self.sink, n)
        out = 2 * full.nbytes(sinks, step=1)
        for spec, coded in zip(self.specs(g), self.coded(base, n), strict=True):
            out += full.nbytes(n - sinks - coded) + sum(f.nbytes(coded) for f in spec.values())
        return out

    def total(self, g: Geometry, base: int, n: int, once: bool = False) -> int:
        """Closed form of all persistent bytes of one sequence."""
        layer = self.layer_bytes(g, base, n) + self.table_bytes(g)
        if self.evict is not None:
            layer += 4 * g.kv_heads * n * self.plain_keys  # int32 positions
            layer += 0 if once else Field(g.kv_heads, (), torch.float32).nbytes(n)
        return g.layers * layer + FIRST_BYTES + g.rope_bytes

    def layout(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        if budget.unlimited:
            return Layout(1, None, self.sink, EVERYTHING, 0, EVERYTHING, 0, None, None)
        allowed = budget.resolve(g, prompt, seen)
        if self.evict is None:
            self.check(g, budget, prompt, seen)
            return Layout(1, 0, self.sink, EVERYTHING, 0, EVERYTHING, 0, allowed, self.total(g, prompt, seen))
        return self._share(g, budget, prompt, seen)

    def check(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> None:
        """Refuse a budget below the method's bytes at ``seen`` tokens or, if it is a share of what is seen, ever after.

        Raises:
            BudgetError: naming the floor.
        """
        allowed, held = budget.resolve(g, prompt, seen), self.total(g, prompt, seen)
        ahead = 0
        if budget.fraction is not None and budget.basis == "current" and not budget.once:
            cycle = lcm(self.period, GROWTH)  # tensors grow in steps
            ratios = [self.total(g, prompt, n) / g.full_bytes(n) for n in range(seen, seen + cycle + 1)]
            ahead = ratios.index(max(ratios))
            held, allowed = self.total(g, prompt, seen + ahead), budget.resolve(g, prompt, seen + ahead)
        if held > allowed:
            fix, asked = smallest(g, budget, held, budget.basis_tokens(prompt, seen + ahead))
            raise BudgetError(
                f"{type(self).__name__} keeps every token: at {seen + ahead} tokens it holds {held} bytes, the budget is "
                f"{allowed}; its floor here is {fix} or {held} bytes (budget=1 runs it as it is), or compose it with an evictor "
                "(method.evict, as in method=kivi_snapkv, zipcache_snapkv and kvquant_self_snapkv)",
                asked,
            )

    def _share(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        """How many tokens the evictor may keep, so that the budget holds at every step up to the next selection."""
        once, least = budget.once, self.sink + self.evict.observe + 1
        allowed, interval = budget.resolve(g, prompt, seen), 0 if once else self.evict.interval
        # room for new tokens lies idle until they come: not more than a quarter of the budget
        while interval > 1 and (
            self._spare(g, budget, prompt, seen, least, interval) < 0
            or self.total(g, least, least + interval, once) - self.total(g, least, least, once) > allowed // 4
        ):
            interval //= 2
        if self._spare(g, budget, prompt, seen, least, interval) < 0:
            need = max(self.total(g, least, least + j, once) for j in range(interval + 1))
            fix, asked = smallest(g, budget, need, budget.basis_tokens(prompt, seen))
            raise BudgetError(
                f"a budget of {allowed} bytes at {budget.basis_tokens(prompt, seen)} tokens cannot hold the {least} tokens that "
                f"{type(self).__name__} with {type(self.evict).__name__} needs: smallest workable: {need} bytes "
                f"({fix}, or budget_bytes={need})",
                asked,
            )
        # the least that a token costs bounds the count from above
        cost = max(1, (self.total(g, 4096, 4096, once) - self.total(g, 2048, 2048, once)) // 2048)
        count = self.fit(g, budget, prompt, seen, interval, max(least, min(seen, allowed // cost)))
        return Layout(1, interval, self.sink, self.evict.observe, 0, count, 0, allowed, self.total(g, count, count, once))

    def _spare(self, g: Geometry, budget: Budget, prompt: int, seen: int, count: int, interval: int) -> int:
        """Bytes left at the tightest step up to the next selection, if ``count`` tokens are held now."""
        steps = range(interval + 1)
        return min(budget.resolve(g, prompt, seen + j) - self.total(g, count, count + j, budget.once) for j in steps)

    def fit(self, g: Geometry, budget: Budget, prompt: int, seen: int, interval: int, most: int) -> int:
        """The largest number of tokens, up to ``most``, that keeps the budget. Blocks make bytes a saw-tooth, so fewer tokens
        may cost more: the count is walked down.

        Raises:
            BudgetError: there is none.
        """
        for count in range(most, min(most, self.sink + self.evict.observe + 1) - 1, -1):
            if self._spare(g, budget, prompt, seen, count, interval) >= 0:
                return count
        raise BudgetError(f"a budget of {budget.resolve(g, prompt, seen)} bytes at {seen} tokens cannot hold what {self} needs")
