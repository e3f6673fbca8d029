"""How few workers can hold a product."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable

# More workers than one Dask scheduler serves.
MOST_SERVED = 4096

# The number found exceeds the fewest workers by at most this share. It is not exact, because each number that turns out
# too low costs a search without a result, which takes seconds for the largest products.
TOLERANCE = 1 / 8


def few_workers(fits: Callable[[int], bool], most: int = MOST_SERVED) -> int | None:
    """Return a number of workers that is enough, at most an eighth above the fewest. None if `most` are too few.

    Tried are `most`, and numbers with a nearly square grid: they usually, but not always, hold what fewer workers hold.

    Parameters
    ----------
    fits : callable
        Whether so many workers can hold the product.
    most : int
        More workers are not tried.
    """
    tried: list[int] = []
    for workers in range(1, most + 1):
        if workers == most or _is_nearly_square(workers):
            if len(tried) > 1 and workers <= tried[-2] * (1 + TOLERANCE):
                tried.pop()
            tried.append(workers)
    found = bisect_left(tried, True, key=fits)
    return tried[found] if found < len(tried) else None


def _is_nearly_square(workers: int) -> bool:
    """Whether a grid of so many workers has few more than twice as many columns as rows."""
    rows = next(each for each in range(math.isqrt(workers), 0, -1) if workers % each == 0)
    return workers // rows <= 2 * rows + 5
