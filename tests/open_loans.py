"""The arrays of this process that it may still send to a cluster, or that tasks may still read."""

from __future__ import annotations

import asyncio

from distributed import Client

from distmm.transfer import loans


def open_loans() -> set[str]:
    """Names of loans, and of arrays that are kept until a scheduler has said that no task reads them."""
    loops = {client.loop.asyncio_loop for client in list(Client._instances)}
    tasks = [task.get_coro() for loop in loops for task in asyncio.all_tasks(loop)]
    asking = [each.cr_frame for each in tasks if each.__name__ == loans._ask.__name__]
    return {*loans._loans, *(frame.f_locals["name"] for frame in asking if frame is not None)}
