"""All workers of a cluster: their list, calls on all of them while some may die, and whether a worker owns a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client, Worker


def workers_of(client: Client, seconds: float | None = None) -> dict[str, dict[str, Any]]:
    """Return what the scheduler knows of each worker, by address. TimeoutError if it has not answered after `seconds`.

    Do not use `Client.scheduler_info` for this. It stores the scheduler's answer in the client, and returns what is
    stored. Every two seconds the client stores an answer without workers there, perhaps just before the return.
    """
    return client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=seconds)["workers"]


def everywhere(
    client: Client, function: Callable[..., Any], *args: Any, seconds: float | None = None
) -> dict[str, Any]:
    """Call a function on every worker, and ignore workers that die during the call.

    Parameters
    ----------
    client : distributed.Client
    function : callable
    *args
        Arguments of the function.
    seconds : float, optional
        Longest time until all have answered.

    Returns
    -------
    dict
        Results, by address of the worker.

    Raises
    ------
    Exception
        The error of the function on a worker, if it is no OSError: Dask reports a lost worker as one.
    TimeoutError
        If a worker has not answered after `seconds`.
    """
    answers = client.run(function, *args, on_error="return", callback_timeout=seconds)
    for answer in answers.values():
        if isinstance(answer, BaseException) and not isinstance(answer, OSError):
            raise answer
    return {address: answer for address, answer in answers.items() if not isinstance(answer, BaseException)}


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, for `everywhere`, beside a worker's event loop."""
    return await asyncio.to_thread(function, *args)


def owns_gpu(worker: Worker) -> bool:
    """Whether dask-cuda started this worker and assigned it a GPU."""
    return any(type(plugin).__module__.startswith("dask_cuda") for plugin in worker.plugins.values())
