"""Products that nobody waits for, on several streams and from several threads, by each kernel of tensor cores.

That is how tasks multiply: ``wait=False`` on a stream of their own. What work is queued ahead on a stream makes sure
that a kernel, a copy or a guard which were on another one would read operands too early.
"""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.select import CANDIDATES, select, why_not
from tests.kernels.reference.matrices import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KERNELS = [
    ("hopper", "float16"),
    ("hopper", BFLOAT16),
    ("hopper", "int8"),
    ("hopper", "uint8"),
    ("hopper", "bool"),
    ("hopper_tf32", "float32"),
    ("hopper_bf16", "float32"),
    ("fp16x3", "float32"),
    ("tf32x3", "float32"),
    ("mma_sync_fp16x3", "float32"),
    ("mma_sync_residues", "float64"),
    ("mma_sync", BFLOAT16),
    ("mma_sync", "int8"),
    ("mma_sync_tf32", "float32"),
    ("mma_sync_bf16", "float32"),
    ("dmma", "float64"),
    ("residues", "float64"),
    ("integer_residues", "int32"),
    ("integer_residues", "int64"),
    ("complex_fp16x3", "complex64"),
    ("complex_residues", "complex128"),
    ("register_tiled", "float32"),
    *(("cublas", dtype) for dtype in ("float16", BFLOAT16, "float32", "float64", "complex64")),
    ("cublas_tf32", "float32"),
    ("cublas_int8", "int8"),
]
# Exponents of numbers in the second granule that raise a guard; 0 raises none. The second way of fp16x3 holds those.
GUARDED = {
    "fp16x3": 30,
    "tf32x3": 60,
    "mma_sync_fp16x3": 30,
    "mma_sync_residues": 30,
    "residues": 30,
    "complex_fp16x3": 30,
    "complex_residues": 30,
}
CASES = pytest.mark.parametrize(
    ("name", "dtype", "guarded"),
    [
        (name, np.dtype(dtype), exponent)
        for name, dtype in KERNELS
        for exponent in (0, *(GUARDED[each] for each in GUARDED if each == name))
    ],
)


@pytest.fixture
def kernel_for(gpu):
    def make(name, dtype):
        candidate = next(each for each in CANDIDATES if each.name == name)
        if reason := why_not(candidate, Problem(1, 1, 1, dtype), gpu):
            pytest.skip(reason)
        return select(Problem(1, 1, 1, dtype), gpu, name=name)

    return make


def drawn(dtype, guarded, seed, m=200, k=GRANULE + 1100, n=170):
    """Operands on the GPU, A in C order and B in Fortran order."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-9, 10, shape) + (0j if dtype.kind == "c" else 0) for shape in ((m, k), (k, n)))
    a, b = a.astype(dtype), b.astype(dtype)
    if guarded:
        a[7, GRANULE + 5 :: 2] *= 2.0**-guarded
        a[7, GRANULE + 4] = 2.0**guarded
    return on_gpu(a), on_gpu(b, "F")


def waited_for(kernel, a, b):
    """The chain of two products, one after the other on one stream."""
    import cupy

    d = None
    for some in (slice(GRANULE), slice(GRANULE, None)):
        d = kernel.multiply(kernel.prepare_a(a[:, some]), kernel.prepare_b(b[some]), d)
    cupy.cuda.Device().synchronize()
    return d


class Queue:
    """Chains on one stream; what they need stays alive until `results` has waited for all of it."""

    def __init__(self, kernel):
        import cupy

        self.kernel, self.stream = kernel, cupy.cuda.Stream(non_blocking=True)
        self.work, self.held, self.chains = cupy.zeros(1 << 24), [], []

    def multiply(self, a, b):
        """Enqueue copies of the operands behind other work, and the two products of a chain on the copies."""
        import cupy

        kernel, d = self.kernel, None
        with self.stream:
            late_a, late_b = cupy.zeros_like(a), cupy.zeros_like(b)  # an operand that is read too early shows
            for _ in range(20):
                self.work += 1
            late_a[...], late_b[...] = a, b
            for some in (slice(GRANULE), slice(GRANULE, None)):
                left = kernel.prepare_a(late_a[:, some], wait=False)
                right = kernel.prepare_b(late_b[some], wait=False)
                d = kernel.multiply(left, right, d, wait=False)
                self.held += [late_a, late_b, left, right, d]
        self.chains.append(d)

    def results(self):
        self.stream.synchronize()
        return self.chains


@CASES
def test_chains_that_nobody_waits_for_have_the_bits_of_those_that_are(kernel_for, name, dtype, guarded):
    kernel = kernel_for(name, dtype)
    operands = [drawn(dtype, guarded, seed) for seed in (1, 2)]
    expected = [waited_for(kernel, *pair) for pair in operands]
    queue = Queue(kernel)
    for pair in operands * 3:
        queue.multiply(*pair)
    for got, want in zip(queue.results(), expected * 3, strict=True):
        assert bool((got == want).all())


@CASES
def test_two_streams_do_not_see_each_others_work(kernel_for, name, dtype, guarded):
    kernel = kernel_for(name, dtype)
    operands = [drawn(dtype, guarded * (seed == 1), seed) for seed in (1, 2)]
    expected = [waited_for(kernel, *pair) for pair in operands]
    queues = [Queue(kernel) for _ in operands]
    for _ in range(4):
        for queue, pair in zip(queues, operands, strict=True):
            queue.multiply(*pair)
    for queue, want in zip(queues, expected, strict=True):
        for got in queue.results():
            assert bool((got == want).all())


@CASES
def test_prepared_operands_serve_another_stream_that_waits_for_them(kernel_for, name, dtype, guarded):
    import cupy

    kernel = kernel_for(name, dtype)
    a, b = drawn(dtype, guarded, 3)
    want = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    work = cupy.zeros(1 << 24)
    cupy.cuda.Device().synchronize()
    with first:
        late = cupy.zeros_like(a)
        for _ in range(20):
            work += 1
        late[...] = a
        left, right = kernel.prepare_a(late, wait=False), kernel.prepare_b(b, wait=False)
        ready = first.record()
    second.wait_event(ready)
    with second:
        results = [kernel.multiply(left, right, None, wait=False) for _ in range(3)]
    second.synchronize()
    for got in results:
        assert bool((got == want).all())


@CASES
def test_threads_share_a_kernel_and_prepared_operands(kernel_for, name, dtype, guarded):
    import cupy

    kernel, device = kernel_for(name, dtype), cupy.cuda.Device().id
    operands = [drawn(dtype, guarded * (seed == 0), seed, m=200 - 30 * seed) for seed in range(3)]
    expected = [waited_for(kernel, *pair) for pair in operands]
    whole = [kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None) for a, b in operands]
    shared = kernel.prepare_a(operands[0][0]), kernel.prepare_b(operands[0][1])
    cupy.cuda.Device().synchronize()
    together, wrong = threading.Barrier(4), []

    def work(number):
        try:
            with cupy.cuda.Device(device):
                queue = Queue(kernel)
                together.wait()
                order = [(number + i) % 3 for i in range(6)]
                for i in order:
                    queue.multiply(*operands[i])
                with queue.stream:
                    both = [kernel.multiply(*shared, None, wait=False) for _ in range(3)]
                for i, got in zip(order, queue.results(), strict=True):
                    if not bool((got == expected[i]).all()):
                        wrong.append((number, i))
                if not all(bool((got == whole[0]).all()) for got in both):
                    wrong.append((number, "shared"))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
