"""Every kernel at the limits of a process: more than 2^31 elements, the second GPU, streams that are destroyed."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.select import CANDIDATES, select, why_not
from tests.kernels.reference.matrices import matrix, on_gpu

pytestmark = pytest.mark.gpu

LONG = 2**31
EIGHT_BITS = {dtype.name for dtype in FLOAT8}  # CuPy draws none


def _dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


KERNELS = pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (each.name, _dtype(dtype))
        for each in CANDIDATES
        if each.device_kind == "cuda"
        for dtype in sorted(each.dtypes - EIGHT_BITS)[:: 3 if len(each.dtypes) > 6 else 1]
    ],
    ids=str,
)


def kernel_on(gpu, name, dtype, m=1, k=1, n=1):
    problem = Problem(m, k, n, dtype)
    candidate = next(each for each in CANDIDATES if each.name == name)
    if reason := why_not(candidate, problem, gpu):
        pytest.skip(reason)
    return select(problem, gpu, name=name), candidate


def room_for(gpu, needed):
    if gpu.memory < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory, {gpu.memory / 2**30:.0f} are there")


@pytest.fixture(autouse=True)
def freed():
    yield
    import cupy

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.slow
@KERNELS
def test_a_result_of_more_than_2_to_31_elements(gpu, name, dtype):
    import cupy

    m, k, n = 65_540, 64, 32_800
    assert m * n > LONG
    kernel, candidate = kernel_on(gpu, name, dtype, m, k, n)
    itemsize = kernel.accumulator.itemsize
    room_for(gpu, m * n * itemsize + candidate.workspace_of(dtype.name) + (4 << 30))
    low = 0 if dtype.kind in "bu" else -1
    a, b = (cupy.random.randint(low, 2, shape).astype(dtype) for shape in ((m, k), (k, n)))
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    left, right = (x.astype(np.float32).astype(wide) if dtype.itemsize < 4 else x.astype(wide) for x in (a, b))
    for rows in (slice(0, 256), slice(m // 2, m // 2 + 256), slice(m - 256, m)):
        assert bool((d[rows].astype(wide) == left[rows] @ right).all())
    sums = cupy.concatenate([d[i : i + 4096].sum(axis=1, dtype=wide) for i in range(0, m, 4096)])
    assert bool((sums == left @ right.sum(axis=1)).all())


@pytest.mark.slow
@KERNELS
def test_an_operand_of_more_than_2_to_31_elements(gpu, name, dtype):
    import cupy

    m, k, n = (1 << 20) + 40, 2052, 16
    assert m * k > LONG
    kernel, candidate = kernel_on(gpu, name, dtype, m, k, n)
    bytes_of_a = m * k * max(dtype.itemsize, kernel.dtype.itemsize)
    room_for(gpu, 1.1 * bytes_of_a * (1 + candidate.prepared) + candidate.workspace_of(dtype.name) + (4 << 30))
    low = 0 if dtype.kind in "bu" else -1
    row = cupy.random.randint(low, 2, k).astype(dtype)
    sign = cupy.where(cupy.arange(m) % 3 == 0, 0, 1).astype(dtype)
    a = cupy.empty((m, k), dtype)
    for first in range(0, m, 65536):
        a[first : first + 65536] = sign[first : first + 65536, None] * row
    b = cupy.random.randint(low, 2, (k, n)).astype(dtype)
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    wide = np.complex128 if dtype.kind == "c" else np.float64
    values = [x.astype(np.float32).astype(wide) if dtype.itemsize < 4 else x.astype(wide) for x in (sign, row, b)]
    assert bool((d.astype(wide) == values[0][:, None] * (values[1] @ values[2])).all())


@KERNELS
def test_work_on_a_stream_that_is_destroyed_is_done(gpu, name, dtype):
    """Its handle is soon that of another stream, whose launches must not disturb those that still run."""
    import cupy

    kernel, _ = kernel_on(gpu, name, dtype)
    a, b = (on_gpu(matrix(shape, dtype, seed)) for seed, shape in enumerate(((700, 1100), (1100, 600))))
    left, right = kernel.prepare_a(a), kernel.prepare_b(b)
    want = kernel.multiply(left, right, None)
    made = []
    for _ in range(6):
        with cupy.cuda.Stream(non_blocking=True):
            made += [kernel.multiply(left, right, None, wait=False) for _ in range(3)]
        gc.collect()
    cupy.cuda.Device().synchronize()
    assert all(bool((d == want).all()) for d in made)


@pytest.mark.multigpu
@KERNELS
def test_the_second_gpu_gives_what_the_first_gives(name, dtype):
    import cupy

    first, second = device.gpus()[:2]
    a, b = (matrix(shape, dtype, seed) for seed, shape in enumerate(((300, 1100), (1100, 250))))
    results = []
    for gpu in (first, second):
        kernel, _ = kernel_on(gpu, name, dtype)
        d = kernel.multiply(kernel.prepare_a(cupy.asarray(a)), kernel.prepare_b(b), None)  # A is on the first GPU
        assert d.device.id == gpu.index
        results.append(d.get())
    np.testing.assert_array_equal(*results)
    assert cupy.cuda.runtime.getDevice() == 0
