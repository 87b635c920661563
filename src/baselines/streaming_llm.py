"""StreamingLLM: attention sinks and a rolling window of the newest tokens (arXiv 2309.17453).

The set is {0 .. sink-1} and the newest tokens, the same in every head and layer, rolled at every generated token, so the
bytes stay at the budget. The prompt is prefilled in one shot, which lets evicted tokens influence the keys and values of
kept ones: stronger than streaming the prompt token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

from qevict.budget import Budget, Geometry, Layout, require
from qevict.policy import Policy


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Sinks and a rolling window.

    Args:
        sink: first tokens, always kept (the authors' default is 4).
        positions: ``slot`` numbers tokens by their place in the cache, as the authors do; ``original`` keeps true positions.
    """

    sink: int = 4
    positions: str = "slot"

    window = 1

    def __post_init__(self):
        super().__post_init__()
        if self.positions not in ("slot", "original"):
            raise ValueError(f"method.positions={self.positions!r}: choose slot or original")
        if self.sink < 0:
            raise ValueError(f"method.sink={self.sink} is below 0: set method.sink to 0 or more")

    @property
    def slot_positions(self) -> bool:
        return self.positions == "slot"

    def layout(self, g: Geometry, budget: Budget, prompt: int, seen: int) -> Layout:
        if budget.unlimited:
            return self.keep_everything(prompt)
        costs, new = self.costs(g, self.sink, budget.once), int(not budget.once)
        left = require(g, costs, budget, 2, f"{self.sink} sink tokens and 2 recent tokens", prompt, seen)
        recent = 2 + left // costs.full_unit
        return Layout(
            1, new, self.sink, recent - new, recent, 0, 0, budget.resolve(g, prompt, seen), costs.total(g, recent, 0)
        )  # fmt: skip
