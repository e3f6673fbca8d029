"""Every CUDA kernel on a real GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm_kernels import device
from distmm_kernels.config import SUPPORTED, Problem
from distmm_kernels.launch import launches as launch
from distmm_kernels.select import CANDIDATES, select
from tests.kernels.reference import products as reference
from tests.kernels.reference.matrices import RAGGED_SHAPES, STRIDES, error_bound, matrix, on_gpu
from tests.kernels.reference.products import first_difference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

TILED = ("dmma", "complex_chain", "register_tiled")
LEGAL = [
    (candidate.name, dtype)
    for candidate, dtype in itertools.product(CANDIDATES, SUPPORTED)
    if candidate.name in (*TILED, "tiled", "cublas") and dtype.name in candidate.dtypes
]
legal = pytest.mark.parametrize(("name", "dtype"), LEGAL)


@pytest.fixture
def kernel_for(gpu):
    return lambda name, dtype: select(Problem(1, 1, 1, np.dtype(dtype)), gpu, name=name)


def multiply(kernel, a, b, c=None):
    """Multiply where freed memory holds NaN, so that an element left unwritten shows."""
    import cupy

    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    size = max(1, int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])))) * a.shape[-2] * b.shape[-1]
    poison = cupy.full(size, np.nan if kernel.dtype.kind in "fc" else -77, kernel.dtype)
    del poison
    return kernel.multiply(a, b, c)


def check(d, a, b, dtype, c=None):
    expected = reference.multiply(a, b) if c is None else reference.multiply(a, b) + c
    assert d.dtype == dtype
    difference = first_difference(d.get(), expected.astype(dtype) if dtype.kind == "i" else expected,
                                  atol=error_bound(a, b, dtype, c))  # fmt: skip
    assert difference is None, str(difference)


@legal
@pytest.mark.parametrize("shape", RAGGED_SHAPES)
def test_every_ragged_shape_is_right(kernel_for, name, dtype, shape):
    m, k, n = shape
    a, b, c = (matrix(s, dtype, seed) for seed, s in enumerate(((m, k), (k, n), (m, n))))
    kernel = kernel_for(name, dtype)
    check(multiply(kernel, a, b), a, b, dtype)
    check(multiply(kernel, a, b, on_gpu(c, "C")), a, b, dtype, c)


@legal
@pytest.mark.parametrize("order", STRIDES)
def test_every_stride_is_right_from_host_and_from_gpu_memory(kernel_for, name, dtype, order):
    kernel = kernel_for(name, dtype)
    a, b, c = (matrix(s, dtype, seed, order=order) for seed, s in enumerate(((33, 70), (70, 45), (33, 45))))
    check(multiply(kernel, a, b), a, b, dtype)
    d = multiply(kernel, on_gpu(a, order), on_gpu(b, order), on_gpu(c, order))
    check(d, a, b, dtype, c)
    assert d.flags.c_contiguous


@pytest.mark.parametrize("order", STRIDES)
def test_operands_of_the_right_type_on_the_gpu_are_not_copied(kernel_for, order):
    kernel = kernel_for("tiled", "float32")
    block = on_gpu(matrix((20, 30), "float32", 0), order)
    assert kernel.prepare_a(block) is block
    assert kernel.prepare_b(block) is block


@pytest.mark.parametrize("order", STRIDES)
def test_register_tiles_copy_only_operands_without_aligned_rows_along_m_or_n(kernel_for, order):
    kernel = kernel_for("register_tiled", "float32")
    a, b = on_gpu(matrix((20, 30), "float32", 0).T, order).T, on_gpu(matrix((30, 20), "float32", 1), order)
    left, right = kernel.prepare_a(a), kernel.prepare_b(b)
    same = [prepared.data.ptr == block.data.ptr for prepared, block in ((left, a), (right, b))]
    assert same == [order in ("C", "broadcast")] * 2
    for prepared, block in ((left, a), (right, b)):
        np.testing.assert_array_equal(prepared.get(), block.get())
    again = kernel.prepare_a(left)
    assert again.data.ptr == left.data.ptr, "what is prepared needs no second copy"


# every other line of a matrix is NaN, and so is what lies between the end of a line and the next
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("shape", [(261, 77, 390), (129, 33, 1), (3, 1, 200)])
def test_dmma_multiplies_both_orders_where_they_lie_and_reads_nothing_beside_them(kernel_for, orders, shape):
    import cupy

    def amid_nan(values, order):
        lines = values if order == "C" else values.T
        whole = cupy.full((2 * len(lines), lines.shape[1] + 2 + lines.shape[1] % 2), cupy.nan)
        placed = whole[::2, : lines.shape[1]]
        placed[...] = cupy.asarray(lines)
        return placed if order == "C" else placed.T

    m, k, n = shape
    kernel = kernel_for("dmma", "float64")
    a, b = amid_nan(matrix((m, k), "float64", 0), orders[0]), amid_nan(matrix((k, n), "float64", 1), orders[1])
    assert kernel.prepare_a(a).data.ptr == a.data.ptr
    assert kernel.prepare_b(b).data.ptr == b.data.ptr
    expected = kernel_for("tiled", "float64").multiply(a, b, None).get()
    np.testing.assert_array_equal(multiply(kernel, a, b).get(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["C", "F"])
def test_dmma_reads_offsets_beyond_two_to_the_31(kernel_for, gpu, order):
    import cupy

    m, k = 2**24 + 3, 130
    if gpu.memory < 30 * m * k:
        pytest.skip(f"needs {30 * m * k / 2**30:.0f} GiB of GPU memory, {gpu.memory / 2**30:.0f} are there")
    a = cupy.empty((m, k), order=order)
    a[...] = (cupy.arange(m) % 1000)[:, None]
    d = kernel_for("dmma", "float64").multiply(a, cupy.ones((k, 3)), None)
    assert bool((d == k * a[:, :3]).all())


@legal
def test_operands_and_c_are_never_written(kernel_for, name, dtype):
    kernel = kernel_for(name, dtype)
    host = [matrix((65, 65), dtype, seed) for seed in range(3)]
    a, b, c = (on_gpu(values, "C") for values in host)
    first = kernel.multiply(a, b, c)
    second = kernel.multiply(a, b, c)
    for values, operand in zip(host, (a, b, c), strict=True):
        np.testing.assert_array_equal(operand.get(), values)
    np.testing.assert_array_equal(first.get(), second.get())
    assert first.data.ptr not in {x.data.ptr for x in (a, b, c, second)}


# sizes around the register tiles of each type, the large and the small ones, and operands that are copied or not
@pytest.mark.parametrize(("name", "dtype"), [each for each in LEGAL if each[0] in TILED])
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("shape", [(128, 64, 128), (127, 63, 129), (260, 36, 132), (2100, 20, 136), (2050, 77, 2051)])
def test_register_tiles_give_the_bits_of_tiled(kernel_for, name, dtype, orders, shape):
    m, k, n = shape
    a = on_gpu(matrix((m, k), dtype, 0), orders[0])
    b = on_gpu(matrix((k, n), dtype, 1), orders[1])
    c = on_gpu(matrix((m, n), dtype, 2), "every other")
    expected = kernel_for("tiled", dtype).multiply(a, b, c).get()
    np.testing.assert_array_equal(multiply(kernel_for(name, dtype), a, b, c).get(), expected)


CUTS = {**dict.fromkeys(TILED, (32, 45)), "tiled": (7, 32, 96)}


@pytest.mark.parametrize(
    ("name", "cut", "dtype"), [(name, cut, dtype) for name, dtype in LEGAL for cut in CUTS.get(name, ())]
)
def test_bits_do_not_depend_on_how_k_is_cut(kernel_for, name, dtype, cut):
    kernel = kernel_for(name, dtype)
    a, b = on_gpu(matrix((70, 333), dtype, 0), "C"), on_gpu(matrix((333, 61), dtype, 1), "C")
    chain = None
    for first in range(0, 333, cut):
        chain = kernel.multiply(a[:, first : first + cut], b[first : first + cut], chain)
    np.testing.assert_array_equal(chain.get(), kernel.multiply(a, b, None).get())


@pytest.mark.parametrize("dtype", SUPPORTED)
def test_our_kernels_give_the_same_bits(kernel_for, dtype):
    a, b, c = (on_gpu(matrix(s, dtype, seed), "C") for seed, s in enumerate(((70, 333), (333, 61), (70, 61))))
    names = [name for name, own in LEGAL if own == dtype and name != "cublas"]
    first, *others = (kernel_for(name, dtype).multiply(a, b, c).get() for name in names)
    for other in others:
        np.testing.assert_array_equal(other, first)


@legal
@pytest.mark.parametrize(("left", "right"), [((3,), (3,)), ((2, 1), (3,)), ((), (4,)), ((2, 3), ()), ((0,), ())])
def test_batches_broadcast(kernel_for, name, dtype, left, right):
    a, b = matrix((*left, 5, 40), dtype, 0), matrix((*right, 40, 7), dtype, 1)
    d = multiply(kernel_for(name, dtype), a, b)
    assert d.shape == (a @ b).shape
    check(d, a, b, dtype)


@pytest.mark.parametrize("name", ["register_tiled", "tiled"])
def test_batches_beyond_the_limit_of_the_grid(kernel_for, name):
    a, b = matrix((launch.MAX_GRID_Y + 3, 2, 3), "int32", 0), matrix((3, 2), "int32", 1)
    np.testing.assert_array_equal(multiply(kernel_for(name, "int32"), a, b).get(), a @ b)


@pytest.mark.parametrize("name", ["register_tiled", "tiled"])
def test_tall_products_beyond_the_limit_of_the_grid(kernel_for, name):
    a, b = matrix((32 * launch.MAX_GRID_Y + 33, 2), "int32", 0), matrix((2, 1), "int32", 1)
    np.testing.assert_array_equal(multiply(kernel_for(name, "int32"), a, b).get(), a @ b)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["register_tiled", "tiled"])
def test_more_than_two_to_the_31_elements(kernel_for, gpu, name):
    import cupy

    n = 2**31 + 33
    if gpu.memory < 10 * n:
        pytest.skip(f"needs {10 * n / 2**30:.0f} GiB of GPU memory, {gpu.memory / 2**30:.0f} are there")
    a = cupy.array([[3, -1]], cupy.int32)
    b = cupy.empty((2, n), cupy.int8)
    b[0] = cupy.arange(n, dtype=cupy.int64).astype(cupy.int8)
    b[1] = 1
    kernel = kernel_for(name, "int32")
    # stride 0 along k keeps B's int32 copy to one row: every step reads the same 2^31 elements
    row = kernel.prepare_b(b[:1])
    d = kernel.multiply(a, cupy.broadcast_to(row, (2, n)), None)
    assert bool((d[0] == 2 * row[0]).all())


@legal
def test_work_on_another_stream_is_ordered_and_complete(kernel_for, name, dtype):
    import cupy

    kernel = kernel_for(name, dtype)
    a, b = matrix((300, 200), dtype, 0), matrix((200, 150), dtype, 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        left, right = on_gpu(a, "C"), kernel.prepare_b(b)
        for _ in range(20):  # work queued ahead that the product depends on
            left = left + 0
        d = kernel.multiply(kernel.prepare_a(left), right, None)
    assert stream.done
    check(d, a, b, dtype)


@pytest.mark.parametrize("name", ["dmma", "register_tiled"])
def test_a_chain_that_nobody_waits_for_has_the_bits_of_one_product(kernel_for, name):
    import cupy

    kernel = kernel_for(name, "float64")
    a, b = matrix((300, 900), "float64", 0), matrix((900, 250), "float64", 1)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        held, chain = [], None
        for first in range(0, 900, 100):
            left = kernel.prepare_a(on_gpu(a[:, first : first + 100], "C"), wait=False)
            right = kernel.prepare_b(on_gpu(b[first : first + 100], "F"), wait=False)
            chain = kernel.multiply(left, right, chain, wait=False)
            held += [left, right, chain]  # until it is done
        stream.synchronize()
    whole = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)
    np.testing.assert_array_equal(chain.get(), whole.get())


def test_big_endian_and_other_types_are_converted(kernel_for):
    a, b = matrix((9, 40), "float32", 0), matrix((40, 7), "float32", 1)
    kernel = kernel_for("tiled", "float64")
    d = kernel.multiply(kernel.prepare_a(a.astype(">f4")), kernel.prepare_b(on_gpu(b, "C")), None)
    check(d, a.astype(float), b.astype(float), np.dtype("float64"))


def test_finish_stays_on_the_gpu(kernel_for):
    import cupy

    kernel = kernel_for("tiled", "float32")
    d = cupy.arange(6, dtype=cupy.float32).reshape(2, 3)
    assert kernel.finish(d, 1, 0, None, "float32") is d
    out = kernel.finish(d, -2, 0.5, np.full((2, 3), 4, np.float32), "float16")
    assert isinstance(out, cupy.ndarray)
    np.testing.assert_array_equal(out.get(), np.arange(6, dtype=np.float16).reshape(2, 3) * -2 + 2)
    poisoned = kernel.finish(d, 3, 0, cupy.full((2, 3), cupy.nan), "float64")
    np.testing.assert_array_equal(poisoned.get(), np.arange(6.0).reshape(2, 3) * 3)
    counts = kernel_for("tiled", "int64").finish(cupy.array([[0, 5]]), 1, 0, None, bool)
    np.testing.assert_array_equal(counts.get(), [[False, True]])


@pytest.mark.multigpu
@pytest.mark.parametrize("name", ["tiled", "cublas"])
def test_the_second_gpu_of_a_process_serves_as_well_as_the_first(name):
    import cupy

    second = device.gpus()[1]
    kernel = select(Problem(1, 1, 1, np.dtype("float32")), second, name=name)
    a, b = matrix((70, 90), "float32", 0), matrix((90, 50), "float32", 1)
    d = kernel.multiply(kernel.prepare_a(cupy.asarray(a)), kernel.prepare_b(b), None)  # A comes from the first
    assert d.device.id == 1
    assert cupy.cuda.runtime.getDevice() == 0
    with cupy.cuda.Device(1):
        check(d, a, b, np.dtype("float32"))
