"""Whether a fixed number of digits is enough for the product of two granules, if it is enough to hold each of them.

Each row of A (column of B) is rounded to a fixed number of digits below its largest number, or below its norm. So a
number is *near* the largest one, *far* from it (zeros are, too), or so far that it is *small*:

- A number that is not small keeps enough digits. The rounding errors of its products are little beside these products.
- A small number keeps few digits, or none. The rounding errors of its products are little beside a product of two near
  numbers.

So the product is accurate if no row has a small number, even if the rows are sparse. If a row has one, each sum needs
products of two near numbers. Of ``length`` steps, at least ``length - far_a - far_b`` have such a product. If 1/16 of
all steps have one, the error of each element of C keeps the bound of multiply-adds, ``(k + 2) u |A| |B|`` (grade A of
`distmm_kernels.reference.grades`). If no step has one, all products of a sum may have small factors, as in
``A @ np.eye(k)``.

The worst case decides from which size ``2^t`` on a number is near. At 1/16 of the steps both numbers are near. At all
others one is small, and the other one as large as it can be:

- float16 halves (`formats`): rows are scaled to ``2^15``, a small number loses ``2^-25``, and products of near numbers
  are ``2^(2 t)`` at least. With ``u = 2^-24``, ``length^2 / 16 * 2^(2 t - 24) >= length * 15 / 16 * 2^-10`` holds for
  t = 5 from a length of 256 on.
- Residues (`residues`): rows are scaled to a norm of ``2^62.2`` at most, and a small number loses 1/2. With
  ``u = 2^-53``, ``length^2 / 16 * 2^(2 t - 53) >= 2^61.2 * sqrt(2 * length * 15 / 16)`` holds for
  ``t = smallest + 5`` from a length of 512 to 16384.

Of numbers that are N(0, 1), at most 1 in 15 is far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["FAR", "FAR_BITS", "SIXTEENTHS", "Counts", "counts", "holds"]

FAR_BITS = 16  # of a row's word: the count of far numbers lies in the lower bits, that of small ones above them
FAR = (1 << FAR_BITS) - 1
# A row is sparse if more than 7/16 of its numbers are far. Two rows that are not have near numbers at 2/16 of the same
# steps.
SIXTEENTHS = 7


class Counts(NamedTuple):
    """What a granule of an operand has.

    Attributes
    ----------
    small, far
        The most small numbers that one of its rows has; the most far ones, zeros among them, of a row that is not zero.
    length
        Of its rows.
    """

    small: int
    far: int
    length: int


def holds(one: Counts, other: Counts) -> bool:
    """Whether the product of two granules of the same length keeps the bound of multiply-adds."""
    return not (one.small or other.small) or 16 * (one.far + other.far) <= 15 * one.length


def counts(words: Any, lengths: tuple[int, ...]) -> Iterator[Counts]:
    """Count in each granule.

    Parameters
    ----------
    words
        ``(matrices, granules, rows)``, uint32, NumPy's or CuPy's: how many small and far numbers each row has.
    lengths
        Of the granules.
    """
    for index, length in enumerate(lengths):
        own = words[:, index]
        far = own & FAR
        yield Counts(int((own >> FAR_BITS).max()), int((far * (far != length)).max()), length)
