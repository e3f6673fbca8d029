"""A question to all workers of a cluster, some of which may die while they are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Client

__all__ = ["everywhere"]


def everywhere(client: Client, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return what `function` answers on every worker, by address; those that die meanwhile are left out.

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
