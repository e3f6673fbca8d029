"""How cuBLAS is told to read an operand: on NumPy arrays, without the library."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.arrays.products import chosen
from distmm_kernels.config import Problem
from distmm_kernels.gemm.cublas import AS_IT_IS, COUNTS_BELOW, CublasInt8Kernel, CublasKernel, _layout
from distmm_kernels.launch.launches import MAX_GRID_Y
from tests.kernels.reference.matrices import STRIDES, strided
from tests.kernels.selection import H200

sizes = st.integers(1, 9)
steps = st.sampled_from([1, 2, 3])


def read(x, turn, pitch):
    """What the library reads from an address: columns first, and transposed unless it is told otherwise."""
    rows, columns = x.shape
    step = x.itemsize
    strides = (pitch * step, step) if turn == AS_IT_IS else (step, pitch * step)
    return np.lib.stride_tricks.as_strided(x, (rows, columns), strides)


@given(rows=sizes, columns=sizes, first=steps, every=st.tuples(steps, steps), turned=st.booleans())
def test_what_the_library_reads_is_the_operand(rows, columns, first, every, turned):
    whole = np.arange(3000, dtype=np.float32).reshape(50, 60)
    x = whole[first :: every[0], first :: every[1]]
    x = (x.T if turned else x)[:rows, :columns]
    found = _layout(x)
    if found is None:  # neither axis is contiguous
        assert every[1] > 1
        assert rows > 1
        assert columns > 1
        return
    np.testing.assert_array_equal(read(x, *found), x)
    turn, pitch = found
    assert pitch >= (columns if turn == AS_IT_IS else rows), "the library refuses a pitch below the length of a line"


@pytest.mark.parametrize("order", STRIDES)
def test_only_operands_with_a_contiguous_axis_are_read_as_they_lie(order):
    x = strided(np.ones((2, 20, 30), np.float64), order)
    assert (_layout(x) is not None) == (order in ("C", "F", "offset"))
    if order in ("C", "F"):
        assert _layout(np.broadcast_to(x[:1], (7, 20, 30))) == _layout(x)


def test_what_the_library_cannot_count_is_copied():
    one = np.ones(1, np.int8)
    long = np.lib.stride_tricks.as_strided(one, (2, 8), (COUNTS_BELOW, 1))
    assert _layout(long) is None
    assert _layout(np.lib.stride_tricks.as_strided(one, (2, 8), (COUNTS_BELOW - 1, 1))) == (AS_IT_IS, COUNTS_BELOW - 1)
    fields = np.zeros((4, 4), [("x", np.float32), ("y", np.int8)])["x"]
    assert _layout(fields) is None, "rows of 20 bytes, elements 5 bytes apart"


@pytest.mark.parametrize(
    ("sizes", "batch", "short"),
    [
        ((2048, 2048, 2048), (), True),
        ((65536, 1024, 1024), (), False),
        ((1024, 1024, 1024), (64,), False),
        ((1000, 1024, 1024), (), False),
    ],
)
def test_the_library_reads_an_int8_b_in_c_order_where_it_can_and_a_copy_would_take_longer(sizes, batch, short):
    kernel = chosen(*sizes, batch, np.dtype("int8"), H200, "highest", False, False)
    assert (kernel.name == "cublas_int8") == short


@pytest.mark.parametrize("n", [256, 1024, 2048])
def test_an_int8_result_is_made_by_a_kernel_that_stores_it(n):
    how = np.dtype("int8"), H200, "highest", False, False, False, False
    names = {out: chosen(n, n, n, (), *how, np.dtype(out)).name for out in ("int8", "int32")}
    assert names["int32"] == "cublas_int8" != names["int8"]


def test_the_library_multiplies_while_kernels_are_built_that_would_not_save_as_much_time():
    for n, library in ((8192, True), (131072, False)):
        how = np.dtype("float32"), H200, "highest"
        assert (chosen(n, n, n, (), *how, False, False, building=True).name == "cublas") == library
        assert chosen(n, n, n, (), *how, False, False).name != "cublas"
        assert chosen(n, n, n, (), *how, True, False, building=True).granule is not None


def test_a_batch_that_takes_several_calls_of_the_library_is_not_learnt_as_one():
    count = MAX_GRID_Y + 1
    a, b, d = (np.empty((count, 2, 2), np.float32) for _ in range(3))
    kernel = CublasKernel(Problem(2, 2, 2, np.dtype("float32"), (count,)), H200)
    assert kernel.direct(a, b, d) is None


class Lying(SimpleNamespace):
    """A matrix in C order that lies somewhere in memory."""

    def __init__(self, rows, columns, dtype, pitch):
        strides = pitch * np.dtype(dtype).itemsize, np.dtype(dtype).itemsize
        super().__init__(shape=(rows, columns), strides=strides, dtype=np.dtype(dtype), itemsize=strides[1], ndim=2)
        self.data = SimpleNamespace(ptr=4096)

    def swapaxes(self, *_):
        turned = Lying(*self.shape, self.dtype, 1)
        turned.shape, turned.strides = self.shape[::-1], self.strides[::-1]
        return turned


@pytest.mark.parametrize("m", [33, 2**24])
def test_a_call_with_an_int8_b_in_c_order_is_not_learnt_where_b_has_to_be_copied(m):
    """The library refuses 33 rows, and takes its slow path for many."""
    kernel = CublasInt8Kernel(Problem(m, 64, 64, np.dtype("int8")), H200)
    a, b, d = Lying(m, 64, "i1", 64), Lying(64, 64, "i1", 128), Lying(m, 64, "i4", 64)
    assert kernel._readable(b, "B") is b
    assert kernel.direct(a, b, d) is None
