"""Whether the product of two granules is accurate if their numbers keep a fixed number of digits.

Each row of A (column of B) is rounded to a fixed number of digits below its largest number, or below its norm. A number
is *near* this largest number, or *far* from it, as zeros are. A far number may be so far that it is *small*:

- A number that is not small keeps enough digits. The rounding errors of its products are small compared with these
  products.
- A small number that is not zero keeps few digits, or none. The rounding errors of its products are small compared with
  a product of two near numbers.

So the product is accurate if no row has a small number, even if the rows are sparse. If a row has a small number, each
sum needs products of two near numbers. Of ``length`` steps, at least ``length - far_a - far_b`` have such a product. If
1/16 of all steps have one, the error of each element of C keeps the bound of multiply-adds, ``(k + 2) u |A| |B|``
(grade A: `tests/kernels/reference/grades.py`). If no step has one, all products of a sum may have small factors, as in
``A @ np.eye(k)``.

A number is near if it is at least ``2^t``. The worst case gives ``t``: at 1/16 of the steps both numbers are near; at
all others one is small, and the other is as large as possible:

- float16 halves (`formats`): rows are scaled to ``2^15``, a small number loses ``2^-25``, and products of near numbers
  are ``2^(2 t)`` at least. With ``u = 2^-24``, ``length^2 / 16 * 2^(2 t - 24) >= length * 15 / 16 * 2^-10`` holds for
  t = 5 from a length of 256 on.
- Residues (`residues`): rows are scaled to a norm of ``2^58.4`` at most, and a small number loses 1/2. With
  ``u = 2^-53``, ``length^2 / 16 * 2^(2 t - 53) >= 2^57.4 * sqrt(2 * length * 15 / 16)`` gives ``2^t`` for each length
  (`distmm_kernels.emulation.residues.nearest`), from ``2^50`` for 1024 steps to ``2^47`` for 16384.

At most 1 in 7 numbers of N(0, 1) is far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

FAR_BITS = 16  # a row's word: its lower 16 bits count far numbers, its upper 16 bits small numbers
FAR = (1 << FAR_BITS) - 1
# A row is sparse if more than 7/16 of its numbers are far. If neither a row nor a column is sparse, both have near
# numbers at 2/16 of the steps at least.
SIXTEENTHS = 7


class Counts(NamedTuple):
    """Counts of small and far numbers in a granule of an operand.

    Attributes
    ----------
    small
        The largest count of small numbers of any row.
    far
        The largest count of far numbers, zeros included, of any row that is not all zeros.
    length
        Steps of k in the granule.
    """

    small: int
    far: int
    length: int


def holds(one: Counts, other: Counts) -> bool:
    """Whether the product of two granules of the same length keeps the bound of multiply-adds."""
    return not (one.small or other.small) or 16 * (one.far + other.far) <= 15 * one.length


def counts(words: Any, lengths: tuple[int, ...]) -> Iterator[Counts]:
    """Yield the counts of each granule.

    Parameters
    ----------
    words
        ``(matrices, granules, rows)``, uint32, of NumPy or CuPy: how many small and far numbers each row has. They are
        copied to host memory: on a new machine CuPy would compile each operation, which takes 2 s.
    lengths
        Steps of k in each granule.
    """
    on_host = words.get() if hasattr(words, "get") else words
    for index, length in enumerate(lengths):
        own = on_host[:, index]
        far = own & FAR
        yield Counts(int((own >> FAR_BITS).max()), int((far * (far != length)).max()), length)
