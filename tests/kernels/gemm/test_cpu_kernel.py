from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm_kernels import device
from distmm_kernels.config import SUPPORTED, Problem, compute_dtype
from distmm_kernels.device_code import cpu_integers
from distmm_kernels.select import select
from tests.kernels.reference import products as reference
from tests.kernels.reference.matrices import RAGGED_SHAPES, STRIDES, error_bound, matrix
from tests.kernels.reference.products import first_difference
from tests.tables import number_of

INTEGERS = [dtype for dtype in SUPPORTED if dtype.kind == "i"]


def multiply(a, b, c=None, dtype=None):
    kernel = select(Problem(1, 1, 1, np.dtype(dtype or a.dtype)), device.cpu())
    return kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), c)


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("shape", RAGGED_SHAPES)
def test_every_ragged_shape_is_right(shape, dtype):
    m, k, n = shape
    a, b, c = (matrix(s, dtype, seed) for seed, s in enumerate(((m, k), (k, n), (m, n))))
    with np.errstate(over="ignore"):
        expected = reference.multiply(a, b) + c
    d = multiply(a, b, c)
    assert d.dtype == dtype
    assert first_difference(d, expected, atol=error_bound(a, b, dtype, c)) is None
    assert first_difference(multiply(a, b), reference.multiply(a, b), atol=error_bound(a, b, dtype)) is None


sizes = st.integers(0, 40)


@settings(max_examples=number_of(80))
@given(
    shape=st.tuples(sizes, sizes, sizes),
    dtype=st.sampled_from(["float32", "float64", "int32", "int64", "complex64", "complex128"]),
    orders=st.tuples(st.sampled_from(STRIDES), st.sampled_from(STRIDES)),
    batch=st.sampled_from([((), ()), ((2,), (2,)), ((3,), ()), ((), (2, 3)), ((2, 1), (3,)), ((0,), (1,))]),
    seed=st.integers(0, 1000),
)
def test_any_shape_stride_type_and_batch_agrees_with_the_reference(shape, dtype, orders, batch, seed):
    m, k, n = shape
    a = matrix((*batch[0], m, k), dtype, seed, order=orders[0])
    b = matrix((*batch[1], k, n), dtype, seed + 1, order=orders[1])
    expected = reference.multiply(a, b)
    d = multiply(a, b)
    assert d.shape == expected.shape
    assert d.flags.c_contiguous
    assert first_difference(d, expected, atol=error_bound(a, b, dtype)) is None


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "shape",
    [
        (cpu_integers.TILE_M, cpu_integers.TILE_K, cpu_integers.TILE_N),
        (cpu_integers.TILE_M + 1, cpu_integers.TILE_K + 1, cpu_integers.TILE_N + 1),
        (2 * cpu_integers.TILE_M - 1, 2 * cpu_integers.TILE_K + 3, cpu_integers.TILE_N - 1),
        (1, 3 * cpu_integers.TILE_K + 2, 2 * cpu_integers.TILE_N + 1),
    ],
)
def test_integer_tiles_wrap_around_at_every_edge(shape, dtype):
    m, k, n = shape
    a, b = matrix((m, k), dtype, 0), matrix((k, n), dtype, 1)
    np.testing.assert_array_equal(multiply(a, b), a @ b)


# Where a number stops fitting in its low half, and where sums and halves wrap around.
EXTREMES = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, -(2**32), 2**62, 2**63 - 1, -(2**63)]
shapes = st.tuples(st.integers(1, 9), st.integers(1, 2 * cpu_integers.TILE_K + 9), st.integers(1, 9))


@settings(max_examples=number_of(60))
@given(shape=shapes, bits_a=st.integers(1, 63), bits_b=st.integers(1, 63), seed=st.integers(0, 1000))
def test_int64_is_exact_at_every_magnitude(shape, bits_a, bits_b, seed):
    m, k, n = shape
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-(2**bits_a), 2**bits_a, (m, k)), rng.integers(-(2**bits_b), 2**bits_b, (k, n))
    np.testing.assert_array_equal(multiply(a, b), a @ b)


@settings(max_examples=number_of(60))
@given(shape=shapes, dtype=st.sampled_from(INTEGERS), seed=st.integers(0, 1000))
def test_extreme_integers_wrap_around(shape, dtype, seed):
    m, k, n = shape
    rng = np.random.default_rng(seed)
    extremes = np.array(EXTREMES).astype(dtype)
    a, b, c = (rng.choice(extremes, s) for s in ((m, k), (k, n), (m, n)))
    np.testing.assert_array_equal(multiply(a, b, c), a @ b + c)


@pytest.mark.parametrize("a_is_wide", [False, True])
@pytest.mark.parametrize("b_is_wide", [False, True])
@pytest.mark.parametrize("where", [0, cpu_integers.TILE_K, -1])
def test_one_wide_number_among_narrow_ones_is_not_lost(a_is_wide, b_is_wide, where):
    k = 3 * cpu_integers.TILE_K - 1
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**31), 2**31, (5, k)), rng.integers(-(2**31), 2**31, (k, 6))
    if a_is_wide:
        a[2, where] = 3 * 2**40 + 5
    if b_is_wide:
        b[where, 3] = -7 * 2**50 - 9
    np.testing.assert_array_equal(multiply(a, b), a @ b)


def test_what_a_full_tile_leaves_in_the_buffers_does_not_reach_a_ragged_one():
    k = 2 * cpu_integers.TILE_K - 3
    a, b = (matrix(shape, "int64", seed) for seed, shape in enumerate(((5, k), (k, 6))))
    np.testing.assert_array_equal(multiply(a, b), a @ b)


def test_mixed_tiles_of_narrow_and_wide_integers_are_right():
    tiles = cpu_integers.TILE_M, cpu_integers.TILE_K, cpu_integers.TILE_N
    m, k, n = (2 * tile + 3 for tile in tiles)
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**31), 2**31, (m, k)), rng.integers(-(2**31), 2**31, (k, n))
    a[: tiles[0], tiles[1] : 2 * tiles[1]] <<= 31
    b[tiles[1] :, : tiles[2]] <<= 31
    np.testing.assert_array_equal(multiply(a, b), a @ b)


@pytest.mark.parametrize("narrow", ["int8", "uint8", "int16", "uint16", "uint32", "uint64"])
def test_narrow_and_unsigned_integers_end_with_numpys_bits(narrow):
    a, b = matrix((20, 70), narrow, 0), matrix((70, 30), narrow, 1)
    kernel = select(Problem(20, 70, 30, compute_dtype(narrow)), device.cpu())
    d = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    out = kernel.finish(d, 1, 0, None, narrow)
    assert out.dtype == narrow
    np.testing.assert_array_equal(out, a @ b)


def test_read_only_unaligned_and_big_endian_operands_are_right():
    a, b = matrix((9, 33), "int32", 0), matrix((33, 7), "int32", 1)
    frozen = a.copy()
    frozen.flags.writeable = False
    unaligned = np.frombuffer(b"\0" + b.tobytes(), np.int8)[1:].view(np.int32).reshape(b.shape)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(multiply(frozen, unaligned), a @ b)
    np.testing.assert_array_equal(multiply(a.astype(">i4"), b, dtype="int32"), a @ b)
    np.testing.assert_array_equal(
        multiply(a.astype(float), unaligned.astype(">f8"), dtype="float64"), (a.astype(float) @ b)
    )


@pytest.mark.bits
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_do_not_depend_on_the_alignment_of_operands(dtype):
    a, b = matrix((32, 24), dtype, 0), matrix((40, 24), dtype, 1)
    unaligned = np.frombuffer(b"\0" + b.tobytes(), np.int8)[1:].view(dtype).reshape(b.shape)
    assert not unaligned.flags.aligned
    np.testing.assert_array_equal(multiply(a, unaligned.T), multiply(a, b.T))


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("order", STRIDES)
def test_operands_and_c_are_never_written(order, dtype):
    a, b, c = (matrix((17, 17), dtype, seed, order=order) for seed in range(3))
    before = a.tobytes(), b.tobytes(), c.tobytes()
    d = multiply(a, b, c)
    assert (a.tobytes(), b.tobytes(), c.tobytes()) == before
    assert not any(np.shares_memory(d, operand) for operand in (a, b, c))
    np.testing.assert_array_equal(multiply(a, b, c), d)


def test_operands_that_blas_reads_are_not_copied():
    kernel = select(Problem(8, 8, 8, np.dtype("float32")), device.cpu())
    whole = matrix((20, 30), "float32", 0)
    for block in (whole, whole.T, whole[3:9, 2:15], whole[3:9, 2:15].T, np.broadcast_to(whole, (4, 20, 30))):
        assert kernel.prepare_a(block) is block
    for block in (whole[::-1], whole[:, ::2], np.broadcast_to(whole[:1], (5, 30))):
        assert kernel.prepare_a(block).flags.c_contiguous
    integers = select(Problem(8, 8, 8, np.dtype("int64")), device.cpu())
    block = matrix((20, 30), "int64", 0)[::-1, ::3]
    assert integers.prepare_b(block) is block


@pytest.mark.parametrize("dtype", INTEGERS)
def test_many_threads_may_multiply_at_once(dtype):
    a, b = matrix((150, 70), dtype, 0), matrix((70, 530), dtype, 1)
    expected = a @ b
    with ThreadPoolExecutor(8) as callers:
        for d in callers.map(lambda _: multiply(a, b), range(24)):
            np.testing.assert_array_equal(d, expected)


def test_where_numba_may_keep_no_code_it_compiles_for_the_process(monkeypatch):
    def njit(signatures, *, nogil, cache=False):
        if cache:
            raise RuntimeError("cannot cache function '_add_tile': no locator available for file")
        return lambda function: (function, nogil)

    monkeypatch.setattr(cpu_integers, "njit", njit)
    assert cpu_integers._compiled.__wrapped__(np.dtype("int32")) == (cpu_integers._add_tile, True)


@pytest.mark.parametrize(("setting", "threads"), [("1", None), ("3", 3)])
def test_omp_num_threads_bounds_the_pool(monkeypatch, setting, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    cpu_integers._pool.cache_clear()
    try:
        pool = cpu_integers._pool()
        assert (pool and pool._max_workers) == threads
        a, b = matrix((150, 20), "int64", 0), matrix((20, 530), "int64", 1)
        np.testing.assert_array_equal(multiply(a, b), a @ b)
        if pool is not None:
            pool.shutdown()
    finally:
        cpu_integers._pool.cache_clear()


def _multiply_in_child(queue, a, b):
    queue.put(multiply(a, b))


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_makes_its_own_pool():
    a, b = matrix((150, 20), "int64", 0), matrix((20, 530), "int64", 1)
    expected = multiply(a, b)  # starts the parent's threads, which the child does not have
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_multiply_in_child, args=(queue, a, b))
    child.start()
    try:
        np.testing.assert_array_equal(queue.get(timeout=60), expected)
    finally:
        child.kill()
        child.join()
