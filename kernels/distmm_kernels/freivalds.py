r"""The random vectors of Freivalds' test, for `distmm_kernels.verify`, and for the jobs and checks of distmm.

*Floating-point numbers.* The vectors are +-U(1, 2), divided by their root mean square. They are never near zero, so
each single error is detected. They are continuous, so errors in one row cancel with probability zero. With +-1, two
errors cancel with probability one half: 16 such vectors are equal for 64 pairs of 3000 columns, and for some pair of
more than 65,536, which could be swapped unseen.

*Integers.* Errors may be multiples of a power of two. The elements of the first vector are odd, so each single error is
detected. The others are uniform modulo 2**w. A wrong element of A or B makes a whole row or column wrong. If all of
these errors are multiples of 2**(w - t) in integers of w bits, one vector misses them with probability 2**-t, which is
one half for the highest bit. The first vector always misses some of them, such as two equal errors in the highest bit.
The 15 others all miss with a probability of at most 2**-15.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

VECTORS, VECTORS_OF_INTEGERS = 2, 16
RMS = math.sqrt(7 / 3)  # root mean square of +-U(1, 2)


def vectors(seed: int, column: int, width: int, exact: bool, number: int = VECTORS) -> np.ndarray[Any, Any]:
    """Return the random vectors ``(width, number)`` of one block column of C. Every worker and run gets the same."""
    rng = np.random.default_rng([seed, column])
    if not exact:
        return np.asarray(rng.uniform(1, 2, (width, number)) * rng.choice([-1.0, 1.0], (width, number)) / RMS)
    x = rng.integers(0, 2**64, (width, VECTORS_OF_INTEGERS), dtype=np.uint64)
    x[:, 0] |= np.uint64(1)
    return x
