"""KV-cache compression for long-context decoding, at measured persistent bytes."""

from qevict.budget import Budget, BudgetError
from qevict.hf.cache import TierCache
from qevict.method import QEvict
from qevict.plus import QEvictPlus
from qevict.policy import Policy

__all__ = ["Budget", "BudgetError", "Policy", "QEvict", "QEvictPlus", "TierCache"]
