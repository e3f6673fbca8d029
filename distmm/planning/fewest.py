"""How few workers can hold a product."""

from __future__ import annotations

from collections.abc import Callable

# More workers than one Dask scheduler serves.
MOST_WORKERS = 4096

# The result exceeds the fewest workers by at most this share of itself. It is not exact, because each number that turns
# out too low costs a search without a result, which takes seconds for the largest products.
TOLERANCE = 1 / 8


def few_workers(fits: Callable[[int], bool], first: int, least: int = 1) -> int | None:
    """Return a number of workers that is enough, at most an eighth above the fewest.

    It is None if `MOST_WORKERS` are too few. From `first` the numbers are halved or doubled until one is enough and
    another is not, and bisected then. More workers usually hold what fewer hold. There are exceptions (a prime number
    of workers has no square grid), so a smaller number may also be enough.

    Parameters
    ----------
    fits : callable
        Whether so many workers can hold the product.
    first : int
        Number that is tried first.
    least : int
        Fewer workers are never enough.
    """
    if least > MOST_WORKERS:
        return None
    low, high = least - 1, min(max(first, least), MOST_WORKERS)
    if fits(high):
        while high > least and fits(half := max(least, high // 2)):
            high = half
        low = max(low, high // 2 if high > least else low)
    else:
        while True:
            if high == MOST_WORKERS:
                return None
            low, high = high, min(2 * high, MOST_WORKERS)
            if fits(high):
                break
    while high - low > max(1, high * TOLERANCE):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
