"""The errors that distmm raises on purpose. Their messages name the values and the remedy."""


class DistmmError(Exception):
    """Base of all errors that distmm raises on purpose; the command line prints them without a traceback."""


class InputError(DistmmError, ValueError):
    """An argument, file or cluster that cannot be used as given (exit code 2)."""


class DoesNotFitError(InputError, MemoryError):
    """A plan that needs more memory than the cluster has (exit code 2)."""


class DeviceMemoryError(MemoryError, DistmmError):  # with the bases in another order, pickle cannot restore it
    """A task could not get memory on a GPU, or on a CPU worker of a job (exit code 1)."""


class WrongResultError(DistmmError, ArithmeticError):
    """A product that failed its check (exit code 1)."""


class UndecidedError(DistmmError, ArithmeticError):
    """A product for which the check cannot tell whether it is right (exit code 4)."""


class Stopped(DistmmError):  # noqa: N818  an early end, not an error
    """A job that stopped early and can be resumed (exit code 75, EX_TEMPFAIL of sysexits.h)."""
