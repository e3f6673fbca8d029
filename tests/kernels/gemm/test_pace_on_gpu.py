"""The common pace of thread blocks changes no bits, and nothing waits for blocks that cannot run, on a real GPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.launch import hopper_launch
from distmm_kernels.select import select
from distmm_kernels.tiles.hopper_tiles import UNPACED
from tests.kernels.reference.matrices import on_gpu

pytestmark = pytest.mark.gpu

N, K = 4096, 64 * UNPACED // 2  # several waves of tiles: blocks wait for each other from the third on
BUSY = r"""
extern "C" __global__ void busy(long long clocks) {
    extern __shared__ int memory[];
    long long start = clock64();
    while (clock64() - start < clocks) memory[threadIdx.x] = 1;
}
"""


@pytest.fixture
def product(hopper):
    """Prepared operands, and their product in peace."""
    kernel, rng = select(Problem(1, 1, 1, np.dtype("float16")), hopper, name="hopper"), np.random.default_rng(0)
    a, b = (on_gpu(rng.standard_normal(shape).astype("f2")) for shape in ((N, K), (K, N)))
    left, right = kernel.prepare_a(a), kernel.prepare_b(b)
    d = kernel.multiply(left, right, None)
    np.testing.assert_allclose(d[::512].get(), (a[::512].astype("f8") @ b.astype("f8")).get(), atol=0.05)
    return lambda: kernel.multiply(left, right, None, wait=False), d


def counters():
    """What the counters of all streams hold, if it is not 0."""
    return [number for numbers in hopper_launch._pace_counters.values() for number in numbers.get().tolist() if number]


def test_products_side_by_side_on_streams_and_in_threads(product):
    import cupy

    multiply, want = product
    made = []

    def several(stream):
        with stream:
            made.extend(multiply() for _ in range(5))
            stream.synchronize()

    streams = [*(cupy.cuda.Stream(non_blocking=True) for _ in range(3)), cupy.cuda.Stream.ptds, cupy.cuda.Stream.ptds]
    threads = [threading.Thread(target=several, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 25
    assert all(bool((d == want).all()) for d in made)
    assert not counters(), "as the next launch expects"


def test_a_product_next_to_a_kernel_that_keeps_half_of_the_multiprocessors(product, hopper):
    import cupy

    multiply, want = product
    busy = cupy.RawKernel(BUSY, "busy")
    busy.max_dynamic_shared_size_bytes = room = 160_000  # a block of the product does not fit beside it
    with cupy.cuda.Stream(non_blocking=True):
        busy((hopper.multiprocessors // 2,), (32,), (50_000_000,), shared_mem=room)
        with cupy.cuda.Stream(non_blocking=True) as other:
            made = [multiply() for _ in range(3)]
            other.synchronize()
    assert all(bool((d == want).all()) for d in made)
    cupy.cuda.Device().synchronize()
    assert not counters()
