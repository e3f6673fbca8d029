"""The verdict of a check on C: right, wrong, or "cannot tell"."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from distmm.errors import UndecidedError, WrongResultError

Outcome = Literal["right", "wrong", "cannot tell"]


def of_tolerance(residual: float) -> str:
    """Describe an error, which is given as a ratio to the largest error that rounding may cause in a right product."""
    return f"{residual:.2g} of the tolerance for rounding (up to 1 is right)"


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check. As a bool it is True only if C is right.

    Attributes
    ----------
    outcome : {"right", "wrong", "cannot tell"}
        "cannot tell": float64 cannot decide (C has inf or NaN, and the order of a sum decides whether it overflows), or
        A or B has changed since the product.
    residual : float
        Largest ratio of an error to its tolerance, over rows (Freivalds) or elements (full). At most 1 if C is right.
    message : str
        One sentence. For a wrong C it names the first bad block, or the first bad position and both values.
    seed : int or None
        Seed of the random vectors or rows, to repeat the check. None if nothing in it is random.
    """

    outcome: Outcome
    residual: float
    message: str
    seed: int | None = None

    @property
    def ok(self) -> bool:
        """Whether C is right."""
        return self.outcome == "right"

    def __bool__(self) -> bool:
        return self.ok

    def seeded(self, seed: int) -> Verdict:
        """Return the verdict with the seed that repeats its check."""
        return replace(self, message=f"{self.message} (seed {seed})", seed=seed)

    def raise_if_wrong(self) -> None:
        """Raise an error with the message unless C is right.

        Raises
        ------
        WrongResultError
            If C is wrong.
        UndecidedError
            If the check cannot tell.
        """
        if self.outcome == "wrong":
            raise WrongResultError(self.message)
        if not self.ok:
            raise UndecidedError(self.message)
