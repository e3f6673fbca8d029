"""What guarded kernels make, and keep, of operands, on the host: what runs on a GPU is replaced."""

from __future__ import annotations

import contextlib
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.gemm import emulated, guarded, real_view
from distmm_kernels.gemm.emulated import TF32_BYTES, Fp16x3Kernel
from distmm_kernels.gemm.guarded import WORKSPACE, GuardedOperand, Way, by_parts
from distmm_kernels.gemm.hopper import HopperKernel
from distmm_kernels.gemm.hopper_rounded import HopperBf16Kernel, HopperTf32Kernel
from distmm_kernels.gemm.residues import ResidueKernel
from distmm_kernels.layout import vectors
from distmm_kernels.layout.stack import distinct
from distmm_kernels.tiles.hopper_tiles import ROWS
from tests.kernels.on_numpy import NOWHERE
from tests.kernels.reference.exact import doubled_twin

SIZES = st.integers(1, 6)


@given(SIZES, SIZES, SIZES, st.sampled_from([((), ()), ((2,), (2,)), ((2,), ()), ((1, 3), (2, 1))]), st.booleans())
def test_products_of_parts_are_the_product(m, k, n, batches, adds):
    rng = np.random.default_rng(0)
    left, right = (rng.integers(-9, 10, (*batch, 60 * rows, k)) for batch, rows in zip(batches, (m, n), strict=True))
    d = np.full((*np.broadcast_shapes(*batches), 60 * m, 60 * n), -1)
    c = rng.integers(-9, 10, d.shape) if adds else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarded, "WORKSPACE", 1 << 11)
        for x, y, added, to in by_parts(left, right, c, d, 8):
            assert (to == -1).all(), "each element once"
            to[...] = x @ y.swapaxes(-1, -2) + (0 if added is None else added)
    np.testing.assert_array_equal(d, left @ right.swapaxes(-1, -2) + (0 if c is None else c))


@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(256, GRANULE), st.sampled_from([4, 8, TF32_BYTES]))
def test_copies_of_parts_take_no_more_than_plans_count(m, n, k, each):
    def operand(rows):
        return np.broadcast_to(np.int8(0), (rows, k))

    parts = list(by_parts(operand(m), operand(n), None, np.broadcast_to(np.int8(0), (m, n)), each))
    assert sum(to.size for *_, to in parts) == m * n
    most = max(x.size + y.size for x, y, *_ in parts) * each
    assert most <= 1.02 * WORKSPACE, "rows of copies are completed to whole lines of the cache"
    for axis in (0, 1):
        edges = sorted({to.shape[axis] for *_, to in parts})
        assert edges[-1] - edges[0] < ROWS * len(parts), "equal but for whole tiles"


def drawn(shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_halves_that_a_guard_asks_for_are_not_kept(monkeypatch):
    alive, most, multiplied = weakref.WeakSet(), [], []

    class Parts:
        def piece(self, index):
            return index

    def split(stack):
        parts = Parts()
        alive.add(parts)
        most.append(len(alive))
        return parts, SimpleNamespace(raised=False)

    monkeypatch.setattr(emulated, "splitter", lambda form, device: split)
    kernel = Fp16x3Kernel(Problem(1, 1, 1, np.dtype("float32")), NOWHERE)
    monkeypatch.setattr(kernel, "_tensor_cores", lambda left, *_: multiplied.append(left.piece))
    found = SimpleNamespace(guards=(Guard.RANGE,) * 3)
    a, b = (
        GuardedOperand(shape=shape, format="", matrices=drawn((rows, 3 * GRANULE)), found=found, made=Parts())
        for rows, shape in ((3, (3, 3 * GRANULE)), (2, (3 * GRANULE, 2)))
    )
    for _ in range(2):
        ways = tuple(kernel._way(a, b, index) for index in range(3))
        assert ways == (Way.TF32X3,) * 3
        kernel._chain(ways, a, b, None, np.zeros((3, 2), np.float32))
    assert len(multiplied) == 6
    assert max(most) == 2, "those of one granule at a time"
    assert not alive


BATCHES = pytest.mark.parametrize("operand", ["A", "B"])


def repeated(operand, dtype="float32"):
    """Matrices that a broadcast repeats 1000 times along one axis of the batch, and the other two of them."""
    block = np.broadcast_to(drawn((2, 1, 6, 5)).astype(dtype), (2, 1000, 6, 5))
    return block if operand == "A" else block.swapaxes(-1, -2)


@BATCHES
@pytest.mark.parametrize(("kernel", "dtype"), [(Fp16x3Kernel, "float32"), (ResidueKernel, "float64")])
def test_matrices_that_a_broadcast_repeats_are_split_once(monkeypatch, kernel, dtype, operand):
    given = []

    def split(stack):
        given.append(stack)
        return SimpleNamespace(), None

    made = kernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    monkeypatch.setattr(made, "_split", split, raising=False)
    block = repeated(operand, dtype)
    prepared = made._format(block, operand)
    assert prepared.shape == block.shape
    (stack,) = given
    assert stack.shape[:-1] == (2, 6)


@BATCHES
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(HopperKernel, "float16"), (HopperBf16Kernel, "float32"), (HopperTf32Kernel, "float32")]
)
def test_matrices_that_a_broadcast_repeats_are_copied_once(monkeypatch, kernel, dtype, operand):
    copied = []
    monkeypatch.setattr("distmm_kernels.gemm.hopper.in_vectors", lambda array, device: copied.append(array) or array)
    stack = SimpleNamespace(loadable=lambda: False, contiguous=lambda axis: True)
    monkeypatch.setattr("distmm_kernels.gemm.hopper.Stack.of", lambda array: stack)
    block = repeated(operand, dtype)
    prepared = kernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)._format(block, operand)
    assert prepared.shape == block.shape
    assert copied[0].shape[:2] == (2, 1)


def test_rows_of_repeated_matrices_are_aligned_once_and_repeated_again(monkeypatch):
    sources = []
    monkeypatch.setattr("distmm_kernels.layout.stack.address", lambda array: array.ctypes.data)
    monkeypatch.setattr(vectors, "_realign", lambda source, *_: sources.append(source))
    block = np.broadcast_to(np.zeros((2, 1, 6, 5), np.float32), (2, 1000, 6, 5))
    made = vectors.in_vectors(block, NOWHERE)
    assert [source.shape for source in sources] == [(1, 6, 5)] * 2
    assert (made.shape, made.strides[1]) == (block.shape, 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=3))
def test_what_is_made_of_distinct_matrices_broadcasts_to_all_of_them(axes):
    shape = tuple(size for size, _ in axes)
    held = drawn((*(1 if repeats else size for size, repeats in axes), 3, 2))
    array = np.broadcast_to(held, (*shape, 3, 2))
    kept = distinct(array)
    assert kept.shape == held.shape
    np.testing.assert_array_equal(np.broadcast_to(kept, array.shape), array)


def test_nobody_waits_for_the_guards_of_halves_that_a_guard_asks_for(monkeypatch):
    events = []

    class Unread:
        """Guards, of which the last reference waits until the device has written them."""

        raised = False

        def __del__(self):
            events.append("waits")

    parts = SimpleNamespace(piece=lambda index: index)
    monkeypatch.setattr(emulated, "splitter", lambda form, device: lambda stack: (parts, Unread()))
    monkeypatch.setattr(guarded, "WORKSPACE", 1)
    kernel = Fp16x3Kernel(Problem(1, 1, 1, np.dtype("float32")), NOWHERE)
    monkeypatch.setattr(kernel, "_tensor_cores", lambda *_: events.append("multiplies"))
    a, b = (
        GuardedOperand(shape=shape, format="", matrices=drawn((300, 64)), found=None, made=None, by_tf32={0: True})
        for shape in ((300, 64), (64, 300))
    )
    kernel._chain((Way.TF32X3,), a, b, None, np.zeros((300, 300), np.float32))
    assert events == 9 * ["multiplies"]
    kernel._chain((Way.TF32X3,), a, b, None, np.zeros((300, 300), np.float32))
    assert events == 18 * ["multiplies"] + 18 * ["waits"]


class Chosen(guarded.GuardedKernel):
    """Records the algorithms that it takes: chains of multiply-adds if a guard is raised."""

    name, shortest, reads = "chosen", 1, ("",)
    _module = SimpleNamespace(cuda=SimpleNamespace(Stream=lambda non_blocking: contextlib.nullcontext()))

    def __init__(self):
        self._raised, self._unequal, self._sample, self.patience, self.computed = False, False, None, 0, []

    def _expected(self, k):
        return (guarded.Way.FP16X3,)

    def _holds(self, a, b, index):
        return not (a.found.raised or b.found.raised)

    def _chain(self, ways, a, b, c, d, symmetric):
        self.computed.append(ways[0].name)

    def _format(self, block, operand):
        made = guards(block.shape, raised=not block.all()).found
        return GuardedOperand(shape=block.shape, format="", made=None, matrices=block, found=made)

    def _on_device(self):
        return contextlib.nullcontext()


def guards(shape, raised):
    found = SimpleNamespace(here=False, raised=raised, guards=(Guard.RANGE if raised else Guard(0),))
    return SimpleNamespace(shape=shape, found=found)


def test_late_guards_that_were_raised_make_the_next_product_wait_for_its_own():
    kernel, sparse, full = Chosen(), guards((8, 8), raised=True), guards((8, 8), raised=False)
    for a, expected in (
        (full, ["FP16X3"]),
        (sparse, ["FP16X3", "IEEE"]),  # begun before its guards arrive, and thrown away
        (sparse, ["IEEE"]),
        (full, ["FP16X3"]),  # once, after its guards
        (full, ["FP16X3"]),
    ):
        kernel.computed.clear()
        kernel._accumulate(a, full, None, None)
        assert kernel.computed == expected
    assert not kernel._raised


def test_a_product_of_milliseconds_waits_for_its_guards():
    kernel, shape = Chosen(), (8192, 8192)
    kernel._accumulate(guards(shape, raised=True), guards(shape, raised=False), None, None)
    assert kernel.computed == ["IEEE"]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("steps", [2**20, 2**33])
def test_the_library_multiplies_after_a_product_with_raised_guards_until_a_sample_has_none(monkeypatch, dtype, steps):
    kernel = real = Chosen()
    if dtype == "complex64":
        monkeypatch.setattr(real_view, "Fp16x3Kernel", lambda problem, device: real)
        monkeypatch.setattr(real_view, "doubled", lambda block, *_: doubled_twin(block))
        kernel = real_view.ComplexFp16x3Kernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    one = np.ones((), dtype) * (1 if dtype == "float32" else 1 + 1j)
    full, sparse = one * np.ones((300, 8)), one * np.tile([1.0, 0.0], (300, 4))
    real._accumulate(guards((8, 8), raised=False), guards((8, 8), raised=False), None, None)
    assert kernel.guarded
    assert not kernel.declines(steps)
    real._accumulate(guards((8, 8), raised=True), guards((8, 8), raised=False), None, None)
    for a, b, declined in ((sparse, full, True), (full, sparse, True), (full, full, False)):
        assert kernel.declines(steps)
        kernel.look(a.astype(dtype), b.astype(dtype).T)
        assert kernel.declines(steps), "the device has not looked yet"
        assert [operand.shape[-2:] for operand in real._sample] == (
            [(75, 8), (8, 75)] if dtype == "float32" else [(75, 16), (16, 150)]
        )
        for operand in real._sample:
            operand.found.here = True
        assert kernel.declines(steps) is declined
        assert (kernel.patience > 0) is declined


def test_the_library_does_not_multiply_where_the_second_algorithm_is_faster(monkeypatch):
    kernel = Chosen()
    monkeypatch.setattr(real_view, "Fp16x3Kernel", lambda problem, device: kernel)
    of_complex = real_view.ComplexFp16x3Kernel(Problem(1, 1, 1, np.dtype("complex64")), NOWHERE)
    kernel.library_below = 2**34
    kernel._accumulate(guards((8, 8), raised=True), guards((8, 8), raised=False), None, None)
    assert kernel.declines(2**34 - 1)
    assert not kernel.declines(2**34)
    assert of_complex.declines(2**32 - 1), "each step is four of real numbers"
    assert not of_complex.declines(2**32)


def test_a_long_product_is_looked_at_each_time():
    kernel, full, sparse = Chosen(), np.ones((300, 8)), np.tile([1.0, 0.0], (300, 4))
    kernel._accumulate(guards((8, 8), raised=True), guards((8, 8), raised=False), None, None)
    for steps, patience in ((2**20, 1), (2**20, 3), (guarded.LONG, 0), (2**20, 1)):
        kernel.look(sparse, full.T)
        for operand in kernel._sample:
            operand.found.here = True
        assert kernel.declines(steps)
        assert kernel.patience == patience


def test_the_longer_guards_stay_raised_the_more_products_pass_before_the_next_sample():
    kernel, full, sparse = Chosen(), np.ones((300, 8)), np.tile([1.0, 0.0], (300, 4))
    kernel._accumulate(guards((8, 8), raised=True), guards((8, 8), raised=False), None, None)
    found = []
    for a in (*[sparse] * 6, full):
        kernel.look(a, full.T)
        for operand in kernel._sample:
            operand.found.here = True
        kernel.declines(2**20)
        found.append(kernel.patience)
    assert found == [1, 3, 7, 15, 15, 15, 0]


def test_a_sample_keeps_no_block_alive():
    kernel, a = Chosen(), np.ones((300, 8))
    alive = weakref.ref(a)
    kernel.look(a, a.T)
    del a
    assert alive() is None
