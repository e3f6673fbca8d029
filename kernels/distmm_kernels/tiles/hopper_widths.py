"""The choice of the width of tiles of the Hopper kernel: by the time of the multiprocessor with the most work."""

from __future__ import annotations

import functools

from distmm_kernels.tiles.hopper_places import rows_in_pairs
from distmm_kernels.tiles.hopper_tiles import ROWS

# Relative rates of tiles by width, for one product and for three. Measured with all multiprocessors busy (H200, n =
# 8192 and 4096).
RATES = {1: {256: 1.0, 192: 0.99, 128: 0.96, 64: 0.6}, 3: {192: 1.0, 128: 0.93, 64: 0.6}}

# The same for one product of which a triangle is computed: bfloat16, n = 4096, and ten products of residues, of
# which those with 128 columns take 1.13 times as long (H200, 2026-11-27).
RATES_OF_TRIANGLES = {**RATES, 1: {256: 1.0, 192: 0.95, 128: 0.92, 64: 0.6}}


@functools.lru_cache(maxsize=1024)
def best_columns(
    m: int, n: int, batch: int, products: int, multiprocessors: int, widest: int = 256, symmetric: int = 0
) -> int:
    """Return the fastest width of tiles for products ``(batch, m, n)``, at most ``widest``.

    A wide tile loads less data for each multiplication. Narrow tiles balance the load better in a small product, or in
    the last wave of tiles.
    """
    widths = (columns for columns in RATES[products] if columns <= widest)
    return min(widths, key=lambda columns: cost(m, n, batch, products, multiprocessors, columns, symmetric))


def cost(m: int, n: int, batch: int, products: int, multiprocessors: int, columns: int, symmetric: int = 0) -> float:
    """Return the time of products ``(batch, m, n)`` with tiles of a width.

    The unit is the time for one column of a tile of the fastest width. ``symmetric`` is `HopperTile.symmetric`.
    """
    high, wide = -(-m // ROWS), -(-n // columns)
    if symmetric:
        high, wide = rows_in_pairs(high, columns // symmetric, n // symmetric - m)
    tiles = high * wide * batch
    rates = RATES_OF_TRIANGLES if symmetric else RATES
    return -(-tiles // multiprocessors) * columns / rates[products][columns]
