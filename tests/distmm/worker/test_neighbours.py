"""Blocks in GPU memory go to other workers of the host by CUDA IPC, by whatever protocol the cluster sends others."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import ml_dtypes  # noqa: F401  tells NumPy the names of its types
import numpy as np
import pytest
from distributed import Client, get_worker

import distmm
from distmm.clusters import view
from distmm.transfer import gpu_allocations, tickets
from distmm.worker import neighbours

pytestmark = pytest.mark.multigpu

N = 1100


@pytest.fixture(scope="module", params=["tcp", "ucx"])
def gpus(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Two workers on two GPUs: of a cluster without options, and of one with UCX and a pool."""
    cuda, pool = pytest.importorskip("dask_cuda"), {}
    if request.param == "ucx":
        pytest.importorskip("distributed_ucxx")
        pool = {"protocol": "ucx", "rmm_pool_size": "4GB"}
    with cuda.LocalCUDACluster(n_workers=2, dashboard_address=":0", **pool) as cluster, Client(cluster) as client:
        view.ask(client)
        yield client


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    """Small whole numbers, whose products float32 holds exactly."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype("f4")


def made(form: str, dtype: str) -> Any:
    import cupy

    block = cupy.asarray(whole(3, N, N)).astype(np.dtype(dtype))
    return {
        "stack": block,
        "matrix": block[1].copy(),
        "turned": block[1].copy().T,
        "vector": block[0].ravel(),
        "small": block[0, :9].copy(),
        "gaps": block[2, ::2, ::2],
        "backwards": block[1, ::-1],
        "repeated": cupy.broadcast_to(block[1, :1], (N, N)),
    }[form]


def maps(block: Any) -> tuple[np.ndarray, int]:
    """Return a block and the number of allocations of other processes, as large as it, that this one has mapped.

    The first block makes the workers map small secrets of each other, too.
    """
    get_worker()
    return block.get(), sum(each.nbytes >= block.nbytes for each in gpu_allocations._maps)


def all_maps(blocks: list[Any]) -> list[np.ndarray]:
    return [maps(block)[0] for block in blocks]


PARTS = {
    "stack": np.s_[:], "matrix": np.s_[1], "turned": np.s_[1], "vector": np.s_[0], "small": np.s_[0, :9],
    "gaps": np.s_[2, ::2, ::2], "backwards": np.s_[1, ::-1], "repeated": np.s_[1, [0] * N],
}  # fmt: skip


@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_goes_by_a_ticket(gpus: Client, form: str, dtype: str) -> None:
    giver, taker = gpus.scheduler_info()["workers"]
    gpus.run(gpu_allocations.drop_idle, -1.0)
    block = gpus.submit(made, form, dtype, workers=[giver], pure=False)
    found, mapped = gpus.submit(maps, block, workers=[taker], pure=False).result()
    wanted = whole(3, N, N)[PARTS[form]]
    expected = {"turned": wanted.T, "vector": wanted.ravel()}.get(form, wanted)
    np.testing.assert_array_equal(found.astype("f4"), expected)
    assert (found.dtype, mapped) == (np.dtype(dtype), form not in ("small", "gaps", "backwards", "repeated"))


def test_blocks_that_are_asked_for_together_arrive_together(gpus: Client) -> None:
    giver, taker = gpus.scheduler_info()["workers"]
    blocks = [gpus.submit(made, form, "float32", workers=[giver], pure=False) for form in PARTS]
    found = gpus.submit(all_maps, blocks, workers=[taker], pure=False).result()
    for form, block in zip(PARTS, found, strict=True):
        wanted = whole(3, N, N)[PARTS[form]]
        np.testing.assert_array_equal(block, {"turned": wanted.T, "vector": wanted.ravel()}.get(form, wanted))


def test_the_client_gets_the_elements(gpus: Client) -> None:
    np.testing.assert_array_equal(gpus.submit(made, "matrix", "float32").result().get(), whole(3, N, N)[1])


def ticket(freed: bool) -> bytes:
    import cupy

    block = cupy.ones((N, N), "f4")
    given = tickets.tickets_for({"block": block})
    assert given is not None
    if not freed:
        _kept.append(block)
    return pickle.dumps(list(given.named.values()))


_kept: list[Any] = []


def take(given: bytes) -> Any:
    try:
        return float(neighbours.received(pickle.loads(given))[0].sum())
    except OSError as error:
        return f"OSError: {error}"
    except EOFError as error:
        return f"EOFError: {error}"


def test_a_block_that_is_freed_meanwhile_is_asked_for_again(gpus: Client) -> None:
    giver, taker = gpus.scheduler_info()["workers"]
    for freed in (False, True):
        given = gpus.submit(ticket, freed, workers=[giver], pure=False).result()
        found = gpus.submit(take, given, workers=[taker], pure=False).result()
        assert "was freed while it was copied" in found if freed else found == N * N


def test_products_of_blocks_that_move_are_right(gpus: Client) -> None:
    import cupy
    import dask.array as da

    def elements(i: Any, j: Any) -> Any:
        return ((7 * i + 3 * j) % 9 - 4).astype("f4")

    shape = 4 * N, 4 * N
    A = da.fromfunction(elements, shape=shape, chunks=2 * N, dtype="f4").map_blocks(cupy.asarray).persist()
    a = np.fromfunction(elements, shape)
    np.testing.assert_array_equal(distmm.matmul(A, A.T).compute().get(), a @ a.T)
