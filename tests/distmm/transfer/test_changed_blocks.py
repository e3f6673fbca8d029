"""A block that changes between two workers is found by its checksum, and sent again, on real connections."""

from __future__ import annotations

from typing import Any, Literal

import dask
import numpy as np
import pytest
from distributed import Client, Worker

from distmm import clusters
from distmm.all_workers import workers_of
from distmm.clusters import view

SHAPE = 300, 400


def block(kind: Literal["numpy", "cupy"]) -> Any:
    xp: Any = __import__(kind)
    return xp.arange(SHAPE[0] * SHAPE[1], dtype="f8").reshape(SHAPE)


def as_received(x: Any) -> np.ndarray:
    """The block that a worker holds, in host memory."""
    return np.asarray(x.get() if hasattr(x, "get") else x)


def change_next(kind: Literal["numpy", "cupy"], dask_worker: Worker) -> None:
    """Change a bit of the next block that arrives at this worker; count those that arrive."""
    from distributed.protocol.cuda import cuda_deserialize
    from distributed.protocol.serialize import dask_deserialize

    dispatch = dask_deserialize if kind == "numpy" else cuda_deserialize
    array = __import__(kind).ndarray
    receive = dispatch.dispatch(array)
    dask_worker.arrived = []

    def changed(header: dict[str, Any], frames: list[Any]) -> Any:
        if header.get("shape", SHAPE) != SHAPE:
            return receive(header, frames)
        dask_worker.arrived.append(header)
        if len(dask_worker.arrived) > 1:
            dispatch.register(array, receive)
            return receive(header, frames)
        if kind == "numpy":
            frames = [bytearray(frame) for frame in frames]
        else:
            frames = [__import__(kind).asarray(frame).copy() for frame in frames]
        frames[0][1000] ^= 1
        return receive(header, frames)

    dispatch.register(array, changed)


def arrived(dask_worker: Worker) -> int:
    return len(dask_worker.arrived)


def sent(client: Client, kind: Literal["numpy", "cupy"]) -> tuple[np.ndarray, int]:
    """Send a block from the first worker to the second one, which it reaches changed. Return it, and how often."""
    view.ask(client)
    first, second, *_ = workers_of(client)
    made = client.submit(block, kind, workers=[first], pure=False)
    client.submit(as_received, made, workers=[first], pure=False).result()  # it is there
    client.run(change_next, kind, workers=[second])
    found = client.submit(as_received, made, workers=[second], pure=False).result(60)
    return found, client.run(arrived, workers=[second])[second]


def test_a_block_that_arrives_changed_over_tcp_is_sent_again(client: Client) -> None:
    found, times = sent(client, "numpy")
    np.testing.assert_array_equal(found, block("numpy"))
    assert times == 2


@pytest.mark.multigpu
def test_a_block_that_arrives_changed_over_ucx_is_sent_again() -> None:
    with (
        dask.config.set({"distmm.gpu-checksums": True}),
        clusters.local("gpu", workers=2, dashboard=None, quiet=True) as client,
    ):
        found, times = sent(client, "cupy")
    np.testing.assert_array_equal(found, block("numpy"))
    assert times == 2
