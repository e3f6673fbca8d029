"""A block that changes between two workers is found by its checksum, and sent again, on real connections."""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed import Client, Worker
from distributed.protocol.serialize import dask_deserialize

from distmm.all_workers import workers_of
from distmm.clusters import view

SHAPE = 300, 400


def block() -> np.ndarray:
    return np.arange(SHAPE[0] * SHAPE[1], dtype="f8").reshape(SHAPE)


def as_received(x: np.ndarray) -> np.ndarray:
    """The block that a worker holds."""
    return x


def change_next(dask_worker: Worker) -> None:
    """Change a bit of the next block that arrives at this worker; count those that arrive."""
    receive = dask_deserialize.dispatch(np.ndarray)
    dask_worker.arrived = []

    def changed(header: dict[str, Any], frames: list[Any]) -> Any:
        if header.get("shape", SHAPE) != SHAPE:
            return receive(header, frames)
        dask_worker.arrived.append(header)
        if len(dask_worker.arrived) > 1:
            dask_deserialize.register(np.ndarray, receive)
            return receive(header, frames)
        frames = [bytearray(frame) for frame in frames]
        frames[0][1000] ^= 1
        return receive(header, frames)

    dask_deserialize.register(np.ndarray, changed)


def arrived(dask_worker: Worker) -> int:
    return len(dask_worker.arrived)


def sent(client: Client) -> tuple[np.ndarray, int]:
    """Send a block from the first worker to the second one, which it reaches changed. Return it, and how often."""
    view.ask(client)
    first, second, *_ = workers_of(client)
    made = client.submit(block, workers=[first], pure=False)
    client.submit(as_received, made, workers=[first], pure=False).result()  # it is there
    client.run(change_next, workers=[second])
    found = client.submit(as_received, made, workers=[second], pure=False).result(60)
    return found, client.run(arrived, workers=[second])[second]


def test_a_block_that_arrives_changed_over_tcp_is_sent_again(client: Client) -> None:
    found, times = sent(client)
    np.testing.assert_array_equal(found, block())
    assert times == 2
