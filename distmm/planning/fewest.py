"""How few workers can hold a product."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

# More workers than one Dask scheduler serves.
MOST_WORKERS = 4096

# The result exceeds the fewest workers by at most this share of itself. It is not exact, because each number that turns
# out too low costs a search without a result, which takes seconds for the largest products.
TOLERANCE = 1 / 8


def few_workers(fits: Callable[[int], bool], least: int = 1) -> int | None:
    """Return a number of workers that is enough, at most an eighth above the fewest.

    It is None if `MOST_WORKERS` are too few. More workers usually hold what fewer hold. There are exceptions (a prime
    number of workers has no square grid), so a smaller number may also be enough.

    Parameters
    ----------
    fits : callable
        Whether so many workers can hold the product.
    least : int
        Fewer workers are never enough.
    """
    tried = [least]
    while tried[-1] < MOST_WORKERS:
        tried.append(min(max(tried[-1] + 1, int(tried[-1] * (1 + TOLERANCE))), MOST_WORKERS))
    found = bisect_left(tried, True, key=fits) if least <= MOST_WORKERS else len(tried)
    return tried[found] if found < len(tried) else None
