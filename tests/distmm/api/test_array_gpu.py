"""`distmm.matmul` on real GPUs: kinds of blocks, kernels, clusters of one and of two GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, wait
from experiment import products

import distmm
from distmm import clusters
from tests.bench.experiment.moved_bytes import moved_bytes


@pytest.fixture(scope="module")
def gpus() -> Iterator[Client]:
    """All GPUs of this machine, one worker each."""
    pytest.importorskip("dask_cuda")
    with clusters.local(device="gpu", dashboard=":0") as client:
        yield client


def random(shape: tuple[int, ...], seed: int, dtype: str = "f4") -> np.ndarray:
    rng = np.random.default_rng(seed)
    real = rng.standard_normal(shape)
    return (real + 1j * rng.standard_normal(shape) if dtype.startswith("c") else real).astype(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "tiled", "register_tiled", "cublas"])
def test_cupy_blocks_stay_cupy_blocks(kernel: str | None) -> None:
    import cupy

    a, b = random((300, 170), 1), random((170, 210), 2)
    A, B = (da.from_array(cupy.asarray(x), chunks=64, asarray=False) for x in (a, b))
    C = distmm.matmul(A, B, kernel=kernel)
    assert isinstance(C._meta, cupy.ndarray)
    block = C.compute(scheduler="synchronous")
    assert isinstance(block, cupy.ndarray)
    np.testing.assert_allclose(block.get(), a @ b, rtol=1e-3, atol=1e-3)
    assert isinstance((C + 1).sum().compute(scheduler="threads"), cupy.ndarray)
    assert distmm.verify(A, B, C, check="full").ok


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f2", "f8", "i4", "u8", "i1", "?", "c8", "c16"])
def test_gpu_result_types_follow_numpy(dtype: str) -> None:
    a, b = (random(s, i, "f8") * 30 for i, s in enumerate([(65, 70), (70, 33)]))
    if dtype.startswith("c"):
        a, b = a + 1j * a, b - 1j * b
    a, b = (x.astype("i8").astype(dtype) if np.dtype(dtype).kind in "iu?" else x.astype(dtype) for x in (a, b))
    C = distmm.matmul(a, b, device="gpu", blocks=(32, 32, 32))
    assert C.dtype == (a @ b).dtype
    value = C.compute(scheduler="synchronous")
    assert isinstance(value, np.ndarray)
    if C.dtype.kind in "iu?":
        np.testing.assert_array_equal(value, a @ b)
    else:
        np.testing.assert_allclose(value, a @ b, rtol=1e-2 if dtype == "f2" else 1e-4, atol=1)


@pytest.mark.gpu
def test_compute_of_numpy_arrays_has_gpu_workers_fill_an_array_of_this_process(gpus: Client) -> None:
    a, b = (np.random.default_rng(seed).integers(-9, 9, (1200, 1200)).astype("f4") for seed in range(2))
    with gpus.as_current():
        C = distmm.matmul(a, b, blocks=(400, 600, 400))
        for product in (C, C.persist()):
            value = product.compute()
            assert (type(value), value.flags.owndata, value.flags.writeable) == (np.ndarray, True, True)
            np.testing.assert_array_equal(value, a @ b)


@pytest.mark.gpu
def test_numpy_and_cupy_are_not_mixed() -> None:
    import cupy

    with pytest.raises(distmm.InputError, match="cupy blocks and B numpy blocks"):
        distmm.matmul(cupy.ones((4, 4)), np.ones((4, 4)))
    with pytest.raises(distmm.InputError, match="device is 'cpu'"):
        distmm.matmul(cupy.ones((4, 4)), cupy.ones((4, 4)), device="cpu")


@pytest.mark.gpu
def test_bits_do_not_depend_on_how_k_is_cut_into_blocks() -> None:
    a, b = random((100, 1000), 1), random((1000, 80), 2)
    whole = distmm.matmul(a, b, device="gpu", kernel="tiled", blocks=(100, 1000, 80)).compute(scheduler="synchronous")
    for k in (32, 96, 320):
        cut = distmm.matmul(a, b, device="gpu", kernel="tiled", blocks=(32, k, 48)).compute(scheduler="synchronous")
        np.testing.assert_array_equal(cut, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "cublas"])
def test_a_gpu_cluster_multiplies_numpy_and_cupy(gpus: Client, kernel: str | None) -> None:
    import cupy

    a, b = random((700, 500), 1), random((500, 600), 2)
    C = distmm.matmul(a, b, client=gpus, kernel=kernel, blocks=(256, 128, 256))
    assert distmm.plan(a, b, client=gpus).cluster.device == "cuda"
    np.testing.assert_allclose(gpus.compute(C, sync=True), a @ b, rtol=1e-3, atol=1e-3)
    with gpus.as_current():
        rs = da.random.default_rng(cupy.random.default_rng(0))
        A, B = (rs.standard_normal((1024, 1024), chunks=256, dtype="f4").persist() for _ in range(2))
        D = distmm.matmul(A, B, client=gpus, kernel=kernel).persist()
        wait(D)
        assert isinstance(D._meta, cupy.ndarray)
        verdict = distmm.verify(A, B, D)
        assert verdict.ok, verdict.message
        assert not distmm.verify(A, B, D + (da.arange(1024, chunks=256) == 700).map_blocks(cupy.asarray) * 10).ok


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "granule", "bound"), [("f8", 8192, 1e-12), ("c8", 4096, 1e-5), ("c16", 8192, 1e-12)])
def test_products_on_hopper_gpus_are_right_and_have_the_same_bits_for_all_cuts_at_granules(
    gpus: Client, dtype: str, granule: int, bound: float
) -> None:
    def product(*blocks: int, **how: Any) -> np.ndarray:
        return gpus.compute(distmm.matmul(a, b, client=gpus, blocks=blocks, **how), sync=True)

    def assert_right(value: np.ndarray) -> None:
        exact = a.astype(np.result_type(dtype, "f8")) @ b.astype(np.result_type(dtype, "f8"))
        assert (abs(value - exact) <= bound * (abs(a) @ abs(b))).all()

    n, k = 600, 2 * granule + 700
    a, b = random((n, k), 1, dtype), random((k, n), 2, dtype)
    if distmm.plan(a, b, client=gpus).cluster.granule != granule:
        pytest.skip("tensor cores multiply float64 and complex numbers on compute capability 9.0 alone")
    whole = product(n, k, n)
    assert_right(whole)
    for blocks in ((n, granule, n), (256, 2 * granule, 200), (128, granule, 599)):
        np.testing.assert_array_equal(product(*blocks), whole)
    np.testing.assert_array_equal(product(256, 5000, 200, precision="ieee"), product(n, 1024, n, kernel="tiled"))

    a = a.copy()
    a[7, granule + 5] = 2.0**70  # this granule goes another way, in all rows of the block
    whole = product(n, k, n)
    assert_right(whole)
    for blocks in ((n, granule, n), (n, 2 * granule, 200), (n, granule, 599)):
        np.testing.assert_array_equal(product(*blocks), whole)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_complex_products_take_no_more_memory_of_a_gpu_than_planned(gpus: Client, dtype: str) -> None:
    import cupy

    gpus.run(products.count_allocations)
    with gpus.as_current():
        rs = da.random.default_rng(cupy.random.default_rng(0))
        A, B = (
            (rs.standard_normal(shape, chunks=chunks) + 1j * rs.standard_normal(shape, chunks=chunks)).astype(dtype)
            for shape, chunks in (((4096, 16384), (2048, 8192)), ((16384, 4096), (8192, 2048)))
        )
        A, B = A.persist(), B.persist()
        wait([A, B])
        plan = distmm.plan(A, B, client=gpus)
        gpus.run(products.start_counting)
        C = distmm.matmul(A, B, plan=plan, client=gpus).persist()
        wait(C)
        peak = max(gpus.run(products.peak_bytes).values())
        verdict = distmm.verify(A, B, C)
    assert verdict.ok, verdict.message
    assert 16 * 2**20 * C.dtype.itemsize <= peak <= plan.peak.worker


@pytest.mark.multigpu
def test_two_gpus_move_exactly_the_bound(gpus: Client) -> None:
    import cupy

    with gpus.as_current():
        A, B = (
            da.random.default_rng(seed).standard_normal((2048, 2048), chunks=512, dtype="f4").map_blocks(cupy.asarray)
            for seed in (1, 2)
        )
        p = distmm.plan(A, B, client=gpus)
        assert p.schedule.chunks is None  # blocks are chunks: these are few
        before = moved_bytes(gpus)
        C = distmm.matmul(A, B, plan=p, client=gpus).persist()
        wait(C)
        assert moved_bytes(gpus) - before == p.bytes_moved == p.cost.bytes_bound > 0
        assert distmm.verify(A, B, C).ok


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_gpus_multiply_from_host_memory_to_host_memory(gpus: Client, pinned: bool) -> None:
    a, b = random((1500, 1000), 1), random((1000, 1200), 2)
    out = distmm.empty((1500, 1200), "f4", client=gpus) if pinned else np.empty((1500, 1200), "f4")
    if pinned:
        a, b = (np.copyto(x := distmm.empty(y.shape, "f4", client=gpus), y) or x for y in (a, b))
    assert distmm.matmul(a, b, out=out, client=gpus, device="gpu", blocks=(512, 512, 512)) is out
    np.testing.assert_allclose(out, a @ b, rtol=1e-3, atol=1e-3)
