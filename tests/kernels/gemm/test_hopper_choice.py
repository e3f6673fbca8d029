"""Which variant of the Hopper kernel a product takes, on the host: launches are replaced."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.gemm import hopper
from distmm_kernels.gemm.hopper import HopperKernel
from distmm_kernels.gemm.hopper_rounded import HopperBf16Kernel, HopperTf32Kernel
from distmm_kernels.last_step import Last
from distmm_kernels.launch import hopper_launch
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.hopper_tiles import MOST_PANELS, STRETCH

NOWHERE = Device("cuda", "none", 0, 0, (9, 0), 1)  # whose multiprocessor always has a tile: k is not sliced
KERNELS = pytest.mark.parametrize(
    ("kernel", "dtype"), [(HopperKernel, "float16"), (HopperTf32Kernel, "float32"), (HopperBf16Kernel, "float32")]
)


@pytest.fixture
def tiles(monkeypatch):
    """The tiles that are launched, in order."""
    launched = []
    monkeypatch.setattr(hopper_launch, "hopper_gemm", lambda tile, device: lambda *operands: launched.append(tile))
    monkeypatch.setattr("distmm_kernels.layout.stack.address", lambda array: 4096)
    monkeypatch.setattr(Stack, "loadable", lambda self: True)
    return launched


def multiplied(kernel, m, k, n, adds=False):
    a, b = kernel._format(np.zeros((m, k), kernel.dtype), "A"), kernel._format(np.zeros((k, n), kernel.dtype), "B")
    c = np.zeros((m, n), kernel.accumulator) if adds else None
    kernel._accumulate(a, b, c, np.zeros((m, n), kernel.accumulator))


@KERNELS
@pytest.mark.parametrize("adds", [False, True])
def test_deep_float_products_take_sums_out_and_others_keep_their_wide_tiles(tiles, kernel, dtype, adds):
    made = kernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    for k, deep in ((64, False), (STRETCH, False), (STRETCH + 1, True), (3 * STRETCH, True)):
        multiplied(made, 128, k, 256, adds)
        tile = tiles.pop()
        assert (tile.promotes, tile.adds) == (deep, adds)
        assert tile.columns <= (192 if deep else 256)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_sums_of_integers_are_exact_and_stay(tiles, dtype):
    multiplied(HopperKernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE), 128, 2 * STRETCH, 256)
    tile = tiles.pop()
    assert (tile.operand, tile.output, tile.promotes) == (dtype, "int32", False)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_bools_are_counted_in_32_bits_and_counts_added_in_64_part_by_part(monkeypatch, dtype, batch):
    kernel, rng = HopperKernel(Problem(1, 1, 1, np.dtype("bool")), NOWHERE), np.random.default_rng(0)
    parts = []

    def counted(a, b, c, d):
        assert (c, d.dtype) == (None, np.int32)
        (left,), (right,) = a.made, b.made
        assert a.shape == left.shape
        parts.append(d.shape[-2])
        d[...] = np.matmul(left.view("u1"), right.swapaxes(-1, -2).view("u1"), dtype="i4")

    kernel._module = np
    monkeypatch.setattr(kernel, "_add", counted)
    monkeypatch.setattr("distmm_kernels.layout.stack.address", lambda array: 4096)
    monkeypatch.setattr(Stack, "loadable", lambda self: self.contiguous(-1))
    monkeypatch.setattr(hopper, "in_vectors", lambda rows, device: np.ascontiguousarray(rows))
    a, b = rng.random((*batch, 300, 50)) < 0.1, rng.random((50, 70)) < 0.1
    counts = np.matmul(a, b, dtype="i8")
    c = 2**32 - counts
    c[..., 5, 7] = -counts[..., 5, 7]
    a_, b_ = kernel._format(a, "A"), kernel._format(b, "B")
    row = 12 * 72 * (3 if batch else 1)
    for workspace, want in ((1, [1] * 300), (row * 256, [256, 44]), (hopper.WORKSPACE, [300])):
        monkeypatch.setattr(hopper, "WORKSPACE", workspace)
        for added in (None, c):
            if dtype == "bool" and added is None:
                continue  # one pass: below
            d = np.full(counts.shape, 7, dtype)
            parts.clear()
            kernel._accumulate(a_, b_, added, d)
            np.testing.assert_array_equal(d, (counts if added is None else counts + added).astype(dtype))
            assert parts == want


@pytest.mark.parametrize("columns", [64, 128, 192, 256, 4096])
def test_a_product_of_bools_alone_stores_bytes_and_makes_no_counts(tiles, columns):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype("bool")), NOWHERE)
    a, b = (
        kernel._format(np.zeros((128, 2 * STRETCH), "?"), "A"),
        kernel._format(np.zeros((2 * STRETCH, columns), "?"), "B"),
    )
    kernel._accumulate(a, b, None, np.zeros((128, columns), "?"))
    (tile,) = tiles
    assert (tile.operand, tile.output, tile.adds) == ("uint8", "bool", False)
    assert tile.columns == (128 if columns <= 128 else 256), "whole boxes of 128 bytes"


@pytest.mark.parametrize(("dtype", "to"), [("int8", "int8"), ("uint8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("adds", [False, True])
def test_integers_of_8_bits_are_stored_as_such_in_tiles_of_whole_boxes(tiles, dtype, to, adds):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    a, b = kernel._format(np.zeros((128, 64), dtype), "A"), kernel._format(np.zeros((64, 192), dtype), "B")
    kernel._accumulate(a, b, np.zeros((128, 192), "i4") if adds else None, np.zeros((128, 192), to))
    (tile,) = tiles
    assert (tile.operand, tile.output, tile.columns, tile.adds) == (dtype, "uint8", 256, adds)


def panels(kernel, *ks, rows=128, columns=256):
    a, b = ([np.zeros(shape(k), kernel.dtype) for k in ks] for shape in (lambda k: (rows, k), lambda k: (k, columns)))
    return [(kernel._format(x, "A"), kernel._format(y, "B")) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize(
    ("ks", "joined"),
    [
        ((64,), [64]),
        ((64, 64, 64, 8), [200]),
        ((64, 8, 64), [72, 64]),
        ((8, 64, 64), [8, 128]),
        ((16,) * (2 * MOST_PANELS + 1), [16 * MOST_PANELS, 16 * MOST_PANELS, 16]),
        ((STRETCH, STRETCH), [2 * STRETCH]),
        ((STRETCH + 1, STRETCH + 1, STRETCH), [3 * STRETCH + 2]),
        ((64, 0, 64), [64, 0, 64]),
    ],
)
def test_panels_of_one_size_and_one_smaller_after_them_are_joined(tiles, ks, joined):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype("float16")), NOWHERE)
    made = kernel.joined(panels(kernel, *ks))
    assert [(a.shape, b.shape) for a, b in made] == [((128, k), (k, 256)) for k in joined]
    kept = [stack for a, _ in made for stack in getattr(a, "stacks", ())]
    assert [stack.columns for stack in kept] == list(ks), "none is lost, in their order"


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_deep_panels_are_joined_unless_they_are_multiplied_in_slices(tiles, dtype):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype(dtype)), Device("cuda", "none", 0, 0, (9, 0), 4))

    def joined(n):
        return [a.shape[-1] for a, _ in kernel.joined(panels(kernel, 2 * STRETCH, 2 * STRETCH, columns=n))]

    assert joined(4 * 256) == [4 * STRETCH]
    assert joined(64) == [2 * STRETCH] * 2


def test_panels_that_lie_differently_or_are_batches_are_not_joined(monkeypatch):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype("float16")), NOWHERE)
    monkeypatch.setattr("distmm_kernels.layout.stack.address", lambda array: 4096)
    one, other = np.zeros((64, 64), "f2"), np.zeros((64, 64), "f2", order="F")
    ((a, b),) = panels(kernel, 64, rows=64, columns=64)
    turned = kernel._format(other, "A")
    assert turned.major != a.major
    assert len(kernel.joined([(a, b), (a, b)])) == 1
    assert len(kernel.joined([(a, b), (turned, b)])) == 2
    batch = kernel._format(np.stack([one, one]), "A")
    assert len(kernel.joined([(batch, b), (batch, b)])) == 2


@pytest.mark.parametrize(("dtype", "promotes", "widest"), [("float16", True, 192), ("int8", False, 256)])
@pytest.mark.parametrize("adds", [False, True])
def test_joined_panels_are_one_launch_that_takes_sums_of_floats_out(tiles, dtype, promotes, widest, adds):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    ((a, b),) = kernel.joined(panels(kernel, 4096, 4096, 4096, 100))
    kernel._accumulate(
        a, b, np.zeros((128, 256), kernel.accumulator) if adds else None, np.zeros((128, 256), kernel.accumulator)
    )
    (tile,) = tiles
    assert (tile.panels, tile.promotes, tile.adds, tile.sliced) == (True, promotes, adds, False)
    assert tile.columns <= widest


@pytest.mark.parametrize("c0", [None, "float32", "float16"])
@pytest.mark.parametrize("k", [64, STRETCH + 1])
@pytest.mark.parametrize("joined", [False, True])
def test_the_finish_is_part_of_the_launch(tiles, monkeypatch, c0, k, joined):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype("float16")), NOWHERE)
    monkeypatch.setattr(kernel, "_empty", np.zeros)
    made = kernel.joined(panels(kernel, *(64, 64) if joined else (k,)))
    added = None if c0 is None else np.zeros((128, 256), c0)
    d = kernel._finished(*made[0], None, Last(0.5, 2.0, added, np.dtype("float16")), symmetric=False)
    assert d.dtype == "float16"
    (tile,) = tiles
    assert (tile.output, tile.finishes, tile.c0, tile.panels) == ("float16", True, c0, joined)


@pytest.mark.parametrize(
    ("dtype", "to", "c0"), [("int8", "int32", None), ("float16", "float64", None), ("float16", "float16", "float64")]
)
def test_what_no_launch_finishes_is_left_to_passes(tiles, dtype, to, c0):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    ((a, b),) = panels(kernel, 64)
    added = None if c0 is None else np.zeros((128, 256), c0)
    assert kernel._finished(a, b, None, Last(2, 1, added, np.dtype(to)), symmetric=False) is None
    assert not tiles


def test_what_a_kernel_stores_at_the_last_step():
    stored = {
        name: [
            to
            for to in ("float16", "float32", "int8", "uint8", "bool", "int32", "int64")
            if kernel._stores(np.dtype(to))
        ]
        for name in ("float16", "int8", "uint8", "bool")
        for kernel in (HopperKernel(Problem(1, 1, 1, np.dtype(name)), NOWHERE),)
    }
    assert stored == {
        "float16": ["float16", "float32"],
        "int8": ["int8", "uint8", "int32"],
        "uint8": ["int8", "uint8", "int32"],
        "bool": ["bool", "int64"],
    }


def test_integers_of_other_types_wrap_around_on_their_way_to_uint8_and_bools_are_made_of_bools_only(monkeypatch):
    kernel = HopperKernel(Problem(1, 1, 1, np.dtype("uint8")), NOWHERE)
    assert (kernel._converted(np.array([[-1, 300]], "i2")) == [[255, 44]]).all()
    for dtype in ("i1", "i8", "u2", "?"):
        monkeypatch.setattr(kernel, "_format", lambda block, operand: block)
        monkeypatch.setattr(kernel, "_to_device", lambda block: block)
        monkeypatch.setattr(kernel, "_on_device", contextlib.nullcontext)
        assert kernel.prepare_a(np.ones((2, 2), dtype), wait=False).dtype == dtype
    for operand, made in (
        (np.ones((2, 2)), kernel),
        (np.ones((2, 2), "i4"), HopperKernel(Problem(1, 1, 1, np.dtype("bool")), NOWHERE)),
    ):
        with pytest.raises(TypeError, match=r"convert it with \.astype"):
            made.prepare_a(operand)


def test_cuts_of_k_where_sums_are_taken_out_leave_the_bits_and_plans_know():
    granules = {c.name: c.granule for c in CANDIDATES}
    for kernel in (HopperKernel, HopperTf32Kernel, HopperBf16Kernel):
        assert kernel.granule == granules[kernel.name] == STRETCH
