"""Questions to all workers of a cluster, also while some of them die; and whether a worker owns a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Client, Worker

__all__ = ["everywhere", "owns_gpu"]


def everywhere(client: Client, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Call a function on every worker, and leave out workers that die meanwhile.

    Parameters
    ----------
    client : distributed.Client
    function : callable
    *args
        Its arguments.

    Returns
    -------
    dict
        What it returns, by address of the worker.

    Raises
    ------
    Exception
        What the function raises on a worker, other than the loss of the connection.
    """
    answers = client.run(function, *args, on_error="return")
    for answer in answers.values():
        if isinstance(answer, BaseException) and not isinstance(answer, OSError):
            raise answer
    return {address: answer for address, answer in answers.items() if not isinstance(answer, BaseException)}


def owns_gpu(worker: Worker) -> bool:
    """Whether dask-cuda has started this worker, and so has given it a GPU of its own."""
    return any(type(plugin).__module__.startswith("dask_cuda") for plugin in worker.plugins.values())
