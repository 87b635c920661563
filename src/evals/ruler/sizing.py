"""How many units of haystack fit."""

from __future__ import annotations

from collections.abc import Callable


def largest(tokens: Callable[[int], int], smallest: int, limit: int, guess: int) -> int:
    """Largest size with ``tokens(size) <= limit``, for which ``tokens(smallest) <= limit`` is known.

    A binary search that divides its bracket where a straight line through the known counts meets the limit: about four
    counts from a good guess, where halving takes one for every bit of the size.
    """
    origin = good = (smallest, tokens(smallest))
    bad = None
    size = max(guess, smallest + 1)
    while bad is None or bad[0] - good[0] > 1:
        point = (size, tokens(size))
        if point[1] <= limit:
            good = point
        else:
            bad = point
        (x0, t0), (x1, t1) = good, bad or origin
        size = x0 + (limit - t0) * (x1 - x0) // (t1 - t0 or 1)  # the same count may do for several sizes
        size = max(size, x0 + 1) if bad is None else min(max(size, x0 + 1), x1 - 1)
    return good[0]
