"""Every error that distmm raises on purpose: the values in question, then the remedy."""

from __future__ import annotations

__all__ = [
    "DeviceMemoryError",
    "DistmmError",
    "DoesNotFitError",
    "InputError",
    "Stopped",
    "UndecidedError",
    "WrongResultError",
]


class DistmmError(Exception):
    """Base of all errors that distmm raises on purpose; the command line prints them without a traceback."""


class InputError(DistmmError, ValueError):
    """An argument, file or cluster that cannot be used as given (exit code 2)."""


class DoesNotFitError(InputError, MemoryError):
    """A plan that needs more memory than the cluster has (exit code 2)."""


class DeviceMemoryError(MemoryError, DistmmError):  # in this order, or it cannot be restored where Dask sends it
    """A GPU, or a CPU worker of a job, whose memory was full when a task needed some (exit code 1)."""


class WrongResultError(DistmmError, ArithmeticError):
    """A product that failed its check (exit code 1)."""


class UndecidedError(DistmmError, ArithmeticError):
    """A product of which a check cannot tell whether it is right (exit code 4)."""


class Stopped(DistmmError):  # noqa: N818  it is not an error, but an end before the end
    """A job that stopped before its end, and can be gone on with (exit code 75, EX_TEMPFAIL of sysexits.h)."""
