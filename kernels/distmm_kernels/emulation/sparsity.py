"""Whether a fixed number of digits holds the product of two granules, each of which holds alone.

A row of A (a column of B) is rounded to a fixed number of digits below its largest number, or below its norm. With
that, a number of a row is *near* it, *far* from it, or even *small*:

- A number that is not small keeps enough digits of its own. What its products lose is little beside them.
- A small number keeps few digits, or none. What its products lose is little beside a product of two near numbers.

So nothing is lost where no row has a small number, however sparse the rows are. Where one has, each sum must have
products of two near numbers. Of ``length`` steps, ``length - far_a - far_b`` have them at least. If these are
1/16 of all steps, the error of each element of C keeps the bound of multiply-adds, ``(k + 2) u |A| |B|`` (grade A of
`distmm_kernels.reference.grades`). Otherwise the sum may be of small numbers alone: ``A @ np.eye(k)`` is.

The worst case decides how large near numbers are. Of ``length`` steps, let 1/16 be near in both rows, and all others
small in one of them, and as large as they can be in the other:

- float16 halves (`formats`): rows are scaled to ``2^15``, a small number loses ``2^-25``, and products of near numbers
  are ``2^(2 t)``. With ``u = 2^-24``, ``length^2 / 16 * 2^(2 t - 24) >= length * 15 / 16 * 2^-10`` holds for t = 5 from
  a length of 256 on.
- Residues (`residues`): rows are scaled to a norm of ``2^62.2`` at most, and a small number loses 1/2. With
  ``u = 2^-53``, ``length^2 / 16 * 2^(2 t - 53) >= 2^61.2 * sqrt(2 * length * 15 / 16)`` holds for
  ``t = smallest + 5`` from a length of 512 to 16384.

N(0, 1) has at most 1 number in 15 that is far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["FAR", "FAR_BITS", "SIXTEENTHS", "Counts", "counts", "holds"]

FAR_BITS = 16  # of a row's word: the count of far numbers lies in the lower bits, that of small ones above them
FAR = (1 << FAR_BITS) - 1
# A row of more than 7/16 far numbers is sparse: two operands without such rows have 2/16 of near products.
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
