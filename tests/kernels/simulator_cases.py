"""Cases for Numba's CUDA simulator; `test_simulator` runs this file in a process of its own.

The kernels run through their own launcher; only memory and the stream are NumPy's. Thread blocks are 3 x 3 here: the
simulator makes a Python thread of every CUDA thread, and 32 x 32 of them cost seconds. Each case at 3 has its edges
where the real tile has them at 32.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import config, cuda
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.np.numpy_support import as_dtype

from distmm_kernels import block_kernel, driver, launch, real_view, reference, vectors
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.gemm.dmma import DmmaKernel
from distmm_kernels.gemm.naive import NaiveKernel
from distmm_kernels.gemm.register_tiled import RegisterTiledKernel
from distmm_kernels.gemm.tiled import TiledKernel
from distmm_kernels.kernel import product_shape
from distmm_kernels.mma_tiles import MmaTiling
from distmm_kernels.reference import first_difference
from distmm_kernels.testing import STRIDES, error_bound, matrix
from distmm_kernels.tiling import Tiling

TILE = 3
SHAPES = [
    (1, 1, 1),
    (TILE - 1, TILE, TILE + 1),
    (TILE, TILE, TILE),
    (TILE + 1, 2 * TILE + 1, TILE - 1),
    (1, 3 * TILE - 1, 2),
    (2 * TILE + 1, 1, 1),
]
GPU = Device("cuda", "simulator", 0, 0, (9, 0), 1)


class SmallNaive(NaiveKernel):
    tile = TILE


class SmallTiled(TiledKernel):
    tile = TILE


class SmallRegisterTiled(RegisterTiledKernel):
    """One warp, and vectors of two elements: of 16 bytes only for some types, which the simulator does not mind."""

    tiling = Tiling(rows=8, columns=16, depth=8, stages=3, thread_rows=2, thread_columns=2, vector=2)

    def _tiling(self, a, b, d):
        return self.tiling


class SmallDmma(DmmaKernel):
    """Two warps below each other, each with 16 x 16 of C."""

    tiling = MmaTiling(rows=32, columns=16, depth=8, stages=3, thread_rows=2, thread_columns=4, vector=2)
    instruction_rows = 8

    def _tiling(self, a, b, d):
        chosen = super()._tiling(a, b, d)
        return dataclasses.replace(self.tiling, along_k=chosen.along_k, instruction_rows=self.instruction_rows)


class SmallTallDmma(SmallDmma):
    instruction_rows = 16


both = pytest.mark.parametrize("kernel", [SmallNaive, SmallTiled])
every = pytest.mark.parametrize("kernel", [SmallNaive, SmallTiled, SmallRegisterTiled])


@pytest.fixture(autouse=True)
def numpy_memory(monkeypatch):
    """Let the launcher see NumPy arrays, of any strides, where it sees CuPy's on a GPU."""
    monkeypatch.setattr(block_kernel, "view", FakeCUDAArray)
    monkeypatch.setattr(block_kernel, "current_stream", lambda: 0)
    monkeypatch.setattr(launch, "address", lambda array: array.ctypes.data)
    monkeypatch.setattr(launch, "Launch", SimulatedLaunch)
    monkeypatch.setattr(driver, "loaded", RealigningKernel)


@pytest.fixture(autouse=True)
def threads_in_turn(monkeypatch):
    """Let one thread of a block run at a time, from barrier to barrier, in an order that turns round at each.

    Numba's own manager lets all run at once and polls them: that takes twice as long, a missing barrier shows by chance
    alone, and threads that are interrupted at the wrong moment get shared arrays of their own.
    """
    monkeypatch.setattr(simulator.BlockManager, "run", run_block)


@pytest.fixture(autouse=True)
def lines_without_their_text(monkeypatch):
    """Let shared arrays be found by file and line of the caller, without reading the source of the whole stack."""

    def extract_stack(frame):
        return [(frame.f_back.f_code.co_filename, frame.f_back.f_lineno), None]

    monkeypatch.setattr(kernelapi, "traceback", SimpleNamespace(extract_stack=extract_stack))


class Turns(simulator.BlockThread):
    """A CUDA thread that waits for its turn at its start and at each barrier."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mine, self.others, self.over = threading.Lock(), threading.Lock(), False
        self.mine.acquire()
        self.others.acquire()

    def run(self):
        self.mine.acquire()
        super().run()  # keeps an exception
        self.over = True
        self.others.release()

    def syncthreads(self):
        self.others.release()
        self.mine.acquire()

    def take(self):
        self.mine.release()
        self.others.acquire()


def run_block(manager, block, *args):
    """Do what `BlockManager.run` does."""
    shape = manager._block_dim
    threads = [Turns(lambda: manager._f(*args), manager, block, place, False) for place in np.ndindex(*shape)]
    for thread in threads:
        thread.start()
    while threads:
        for thread in threads:
            thread.take()
            if thread.exception is not None:
                error, trace = thread.exception
                raise error.with_traceback(trace)
        assert len({thread.over for thread in threads}) == 1, "some threads have ended, others wait at a barrier"
        threads = [thread for thread in reversed(threads) if not thread.over]


class SimulatedLaunch:
    """Does what `launch.Launch` does, from the source of the kernel in place of its machine code."""

    def __init__(self, recipe, device, blocks, stacks):
        self.source = recipe.source()
        self.dtype = as_dtype(self.source.signature.args[0].dtype)
        self.blocks, self.stacks = blocks, stacks

    def __call__(self, *addresses):
        arrays = [self.array(*each) for each in zip(self.stacks, addresses, strict=True)]
        cuda.jit(self.source.function)[self.blocks, self.source.threads](*map(FakeCUDAArray, arrays))

    def array(self, stack, address):
        if stack is None:
            assert address == 0
            return np.empty((0, 0, 0), self.dtype)
        ends = [(size - 1) * stride for size, stride in zip(stack.shape, stack.strides, strict=True)]
        below = -sum(end for end in ends if end < 0)
        held = (ctypes.c_char * (sum(map(abs, ends)) + stack.itemsize)).from_address(address - below)
        return np.ndarray(stack.shape, self.dtype, held, below, stack.strides)


class Bounded(np.ndarray):
    """Memory of a kernel: an index outside fails, a negative one too, which NumPy would count from the end."""

    def __getitem__(self, index):
        assert 0 <= index < self.size
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        assert 0 <= index < self.size
        super().__setitem__(index, value)


class RealigningKernel:
    """What `driver.loaded` gives for the kernel of `device_code.realign`.

    Attributes
    ----------
    read
        First and last address of each array that the last launch could read from.
    """

    read: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, recipe, device):
        self.source = recipe.source()

    def launch(self, grid, maps, values):
        def memory(_owner, _parent, count, itemsize, address, *_):
            held = (ctypes.c_char * (count * itemsize)).from_address(address)
            return FakeCUDAArray(np.ndarray(count, f"u{itemsize}", held).view(Bounded))

        read = values[:7], values[7:14]
        type(self).read[:] = [(each[4], each[4] + each[2] * each[3]) for each in read if each[2]]
        arguments = *(memory(*each) for each in read), *values[14:19], memory(*values[19:26]), *values[26:]
        cuda.jit(self.source.function)[grid, self.source.threads](*arguments)


def multiply(kernel, a, b, c=None):
    """Run the launcher into a d that holds poison, with a guard band around it."""
    shape = product_shape(a.shape, b.shape)
    whole = np.full((*shape[:-2], shape[-2] + 2, shape[-1] + 2), 99, a.dtype)
    d = whole[..., 1:-1, 1:-1]
    d[...] = np.nan if a.dtype.kind in "fc" else -77
    before = [operand.copy() for operand in (a, b, c) if operand is not None]
    kernel(Problem(1, 1, 1, a.dtype), GPU)._accumulate(a, b, c, d)
    for operand, copy in zip((a, b, c), before, strict=False):
        np.testing.assert_array_equal(operand, copy)
    result = d.copy()
    d[...] = 99
    assert (whole == 99).all(), "wrote outside C"
    return result


def test_this_is_the_simulator():
    assert config.ENABLE_CUDASIM


# all of these are within one tile of the register-tiled kernel, which has shapes of its own below: one is one element,
# one has vectors in rows of C of 16 bytes, one has none
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [(kernel, shape) for kernel in (SmallNaive, SmallTiled) for shape in SHAPES]
    + [(SmallRegisterTiled, shape) for shape in (SHAPES[0], SHAPES[1], SHAPES[3])],
)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "complex64", "complex128"])
def test_every_ragged_shape_is_right(kernel, shape, dtype):
    m, k, n = shape
    a, b, c = (matrix(s, dtype, seed, "integers") for seed, s in enumerate(((m, k), (k, n), (m, n))))
    d = multiply(kernel, a, b, c)
    assert d.dtype == dtype
    assert first_difference(d, (a @ b + c).astype(dtype)) is None
    assert first_difference(multiply(kernel, a, b), a @ b) is None


@every
def test_an_error_of_rounding_is_all_that_real_numbers_show(kernel):
    a, b = matrix((TILE + 1, 3 * TILE + 1), "float32", 0), matrix((3 * TILE + 1, TILE), "float32", 1)
    d = multiply(kernel, a, b)
    assert first_difference(d, reference.multiply(a, b), atol=error_bound(a, b, "float32")) is None


@pytest.mark.parametrize("cut", [TILE, 2 * TILE])
def test_the_bits_of_tiled_do_not_depend_on_how_k_is_cut(cut):
    k = 3 * TILE + 1
    a, b = matrix((TILE + 1, k), "float32", 0), matrix((k, TILE + 1), "float32", 1)
    chain = None
    for first in range(0, k, cut):
        chain = multiply(SmallTiled, a[:, first : first + cut], b[first : first + cut], chain)
    np.testing.assert_array_equal(chain, multiply(SmallTiled, a, b))


def test_naive_and_tiled_give_the_same_bits():
    a, b, c = (matrix((2 * TILE + 1, 2 * TILE + 1), "float32", seed) for seed in range(3))
    np.testing.assert_array_equal(multiply(SmallNaive, a, b, c), multiply(SmallTiled, a, b, c))


@every
def test_batches_broadcast(kernel):
    a, b = matrix((2, 1, 3, 5), "int64", 0, "integers"), matrix((3, 5, 2), "int64", 1, "integers")
    np.testing.assert_array_equal(multiply(kernel, a, b), a @ b)


# (m, k, n) around the tile of 8 x 16 and its 8 steps, of which 3 stages are under way
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("shape", [(8, 8, 16), (7, 9, 17), (9, 16, 18), (8, 33, 16)])
def test_register_tiles_are_right_in_every_order(orders, shape):
    m, k, n = shape
    a, b = matrix((2, m, k), "int64", 0, "integers", orders[0]), matrix((2, k, n), "int64", 1, "integers", orders[1])
    c = matrix((2, m, n), "int64", 2, "integers")
    np.testing.assert_array_equal(multiply(SmallRegisterTiled, a, b, c), a @ b + c)


# (m, k, n) around the tile of 32 x 16 and its 8 steps
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [(SmallDmma, (31, 9, 17)), (SmallDmma, (1, 1, 1)), (SmallTallDmma, (32, 8, 16)), (SmallTallDmma, (2, 33, 6))],
)
def test_tiles_of_a_warps_instructions_are_right_in_every_order(kernel, orders, shape):
    m, k, n = shape
    a = amid_nan(matrix((m, k), "float64", 0, "integers"), orders[0])
    b = amid_nan(matrix((k, n), "float64", 1, "integers"), orders[1])
    c = matrix((m, n), "float64", 2, "integers")
    np.testing.assert_array_equal(multiply(kernel, a, b, c), a @ b + c)


def amid_nan(values, order):
    """The same matrix in memory where each of its lines begins at a multiple of 16 bytes and ends before NaN."""
    lines = values if order == "C" else values.T
    rows, pitch = len(lines), lines.shape[1] + 2 + lines.shape[1] % 2
    memory = np.full(rows * pitch + 1, np.nan)
    first = memory.ctypes.data // 8 % 2
    placed = memory[first:][: rows * pitch].reshape(rows, pitch)[:, : lines.shape[1]]
    placed[...] = lines
    return placed if order == "C" else placed.T


def test_register_tiles_are_numbered_in_groups_that_cover_c_once():
    rows, columns = SmallRegisterTiled.tiling.rows, SmallRegisterTiled.tiling.columns
    a, b = matrix((17 * rows + 1, 1), "int64", 0, "integers"), matrix((1, columns + 1), "int64", 1, "integers")
    np.testing.assert_array_equal(multiply(SmallRegisterTiled, a, b), a @ b)


@pytest.mark.parametrize("cut", [8, 5])
def test_the_bits_of_register_tiles_do_not_depend_on_how_k_is_cut(cut):
    a, b = matrix((9, 19), "float64", 0), matrix((19, 5), "float64", 1)
    chain = None
    for first in range(0, 19, cut):
        chain = multiply(SmallRegisterTiled, a[:, first : first + cut], b[first : first + cut], chain)
    np.testing.assert_array_equal(chain, multiply(SmallRegisterTiled, a, b))


def test_a_batch_beyond_the_grids_limit_is_cut_into_launches(monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_Y", 2)
    a, b = matrix((5, 2, 3), "int64", 0, "integers"), matrix((3, 2), "int64", 1, "integers")
    d = np.zeros((5, 2, 2), "int64")
    assert [stack[3].shape[0] for stack in launch.matrices(a, b, d, d)] == [2, 2, 1]
    np.testing.assert_array_equal(multiply(SmallNaive, a, b), a @ b)


def test_the_real_tile_on_one_ragged_block():
    a, b = matrix((3, 33), "float32", 0, "integers"), matrix((33, 2), "float32", 1, "integers")
    np.testing.assert_array_equal(multiply(TiledKernel, a, b), a @ b)


@every
@pytest.mark.parametrize("order", STRIDES)
def test_every_stride_is_read_in_place(kernel, order):
    shapes = (TILE + 1, TILE + 3), (TILE + 3, TILE - 1), (TILE + 1, TILE - 1)
    a, b, c = (matrix(s, "int64", seed, "integers", order) for seed, s in enumerate(shapes))
    np.testing.assert_array_equal(multiply(kernel, a, b, c), a @ b + c)


# threads outside C may multiply the zero frame by infinity; what they get is not written
@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")
@every
def test_nan_and_infinity_stay_in_their_rows_and_columns(kernel):
    a, b = np.ones((TILE + 1, TILE + 1)), np.ones((TILE + 1, TILE + 1))
    a[0, 0], b[TILE, 1] = np.nan, np.inf
    expected = np.full_like(a, TILE + 1)
    expected[:, 1] = np.inf
    expected[0] = np.nan
    np.testing.assert_array_equal(multiply(kernel, a, b), expected)


# rows shorter than a word, of 1, 2 and more than 4 chunks of 128 words; from any byte of a word on, to any; in reverse
@settings(max_examples=20)
@given(
    dtype=st.sampled_from(["int8", "float16", "complex128"]),
    row=st.sampled_from([1, 2, 3, 4, 7, 511, 512, 513, 1030, 2051]),
    batch=st.sampled_from([(), (1,), (2,)]),
    others=st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 3)),
    reverse=st.tuples(st.booleans(), st.booleans()),
)
def test_rows_that_begin_anywhere_are_copied_to_vectors_and_no_byte_beside_them_is_used(
    dtype, row, batch, others, reverse
):
    dtype, (count, before, gap) = np.dtype(dtype), others
    columns, before = -(-row // dtype.itemsize), before * dtype.itemsize
    shape = *batch, count, columns + gap
    memory = np.full(before + math.prod(shape) * dtype.itemsize, 0xA5, np.uint8)
    rows = np.ndarray(shape, dtype, memory, before)[..., :columns]
    rows[...] = matrix(rows.shape, "int32", 0, "integers")
    rows = rows[..., :: -1 if reverse[0] else 1, :]
    rows = rows[::-1] if batch and reverse[1] else rows
    copied = vectors.in_vectors(rows, GPU)
    assert vectors.has_vectors(copied, -1)
    np.testing.assert_array_equal(copied, rows)
    vector = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    filled = np.lib.stride_tricks.as_strided(copied, (*rows.shape[:-1], vector))
    assert not filled[..., columns:].any()
    first, end = np.lib.array_utils.byte_bounds(rows)
    assert all(first <= low and high <= end for low, high in RealigningKernel.read)


# by words where columns are whole ones from the first byte on; else, and larger elements, one by one
@settings(max_examples=6)
@example("int8", 132, 129, (2,), (0, 4), False)
@example("float16", 66, 65, (), (4, 0), True)
@given(
    dtype=st.sampled_from(["int8", "float16", "float32"]),
    m=st.sampled_from([2, 3, 4, 64, 132]),
    n=st.sampled_from([1, 5, 129]),
    batch=st.sampled_from([(), (2,)]),
    others=st.tuples(st.sampled_from([0, 4, 5]), st.sampled_from([0, 0, 4, 5])),
    reverse=st.booleans(),
)
def test_matrices_in_fortran_order_are_copied_to_vectors(dtype, m, n, batch, others, reverse):
    dtype, (before, gap) = np.dtype(dtype), others
    shape = *batch, n, m + gap
    memory = np.full(before * dtype.itemsize + math.prod(shape) * dtype.itemsize, 0xA5, np.uint8)
    columns = np.ndarray(shape, dtype, memory, before * dtype.itemsize)[..., :m]
    columns[...] = matrix(columns.shape, "int32", 0, "integers")
    columns = columns[..., :: -1 if reverse else 1, :]
    copied = vectors.in_vectors(columns.swapaxes(-1, -2), GPU)
    assert vectors.has_vectors(copied, -1)
    np.testing.assert_array_equal(copied, columns.swapaxes(-1, -2))
    vector = -(-n * dtype.itemsize // 16) * 16 // dtype.itemsize
    filled = np.lib.stride_tricks.as_strided(copied, (*copied.shape[:-1], vector))
    assert not filled[..., n:].any()


@settings(max_examples=6)
@example("complex64", 5, 3, (), "F")
@example("complex128", 9, 130, (2,), "C")
@given(
    dtype=st.sampled_from(["complex64", "complex128"]),
    k=st.sampled_from([1, 3, 4, 5, 9]),
    n=st.sampled_from([1, 2, 127, 129]),
    batch=st.sampled_from([(), (2,)]),
    order=st.sampled_from(["C", "F", "offset", "reversed", "broadcast"]),
)
def test_complex_matrices_become_real_ones(dtype, k, n, batch, order):
    b = matrix((*batch, k, n), dtype, 0, "normal", "C" if order == "reversed" else order)
    b = b[..., ::-1, :] if order == "reversed" else b
    made = real_view.doubled(b, GPU)
    np.testing.assert_array_equal(made, real_view.doubled_twin(b))
    lines = made if made.strides[-1] == made.itemsize else made.swapaxes(-1, -2)
    assert vectors.has_vectors(lines, -1) or lines.shape[-1] * lines.itemsize < 16
    vector = -(-lines.shape[-1] * lines.itemsize // 16) * 16 // lines.itemsize
    filled = np.lib.stride_tricks.as_strided(lines, (*lines.shape[:-1], vector))
    assert not filled[..., lines.shape[-1] :].any()
