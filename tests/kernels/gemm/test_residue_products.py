"""What products of residues launch, and where, on the host: both kernels are replaced by NumPy at their addresses."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.emulation import moduli
from distmm_kernels.emulation.formats import Guard
from distmm_kernels.emulation.integers import SYSTEMS
from distmm_kernels.emulation.moduli import OFFSET, epilogue_multiplier
from distmm_kernels.emulation.residues import COLUMNS, FORMS, THREADS
from distmm_kernels.gemm import guarded, residue_products
from distmm_kernels.gemm.residue_products import ResidueProducts
from distmm_kernels.gemm.residues import ComplexResidueKernel
from distmm_kernels.launch import hopper_launch
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.layout.stack import Stack
from distmm_kernels.symmetric import mirror
from distmm_kernels.tiles.hopper_places import rows_in_pairs
from distmm_kernels.tiles.hopper_tiles import ROWS
from tests.kernels.on_numpy import NOWHERE, OnNumPy
from tests.kernels.reference import complex_twin, integer_twin

MODULI = SYSTEMS[32].moduli


def seen(address, shape, strides, dtype):
    """The array that lies there."""
    size = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + np.dtype(dtype).itemsize
    memory = np.frombuffer((ctypes.c_char * size).from_address(address), np.uint8)
    return np.lib.stride_tricks.as_strided(memory[: np.dtype(dtype).itemsize].view(dtype), shape, strides)


@pytest.fixture
def launched(monkeypatch):
    """Recipes and tiles as they are launched; memory is the host's."""
    launches, kept = [], []

    def alloc(nbytes):
        kept.append(np.full(nbytes, 99, np.int8))
        return SimpleNamespace(ptr=kept[-1].ctypes.data)

    def asarray(table):
        kept.append(table)
        return SimpleNamespace(data=SimpleNamespace(ptr=table.ctypes.data))

    def hopper_gemm(tile, device):
        return gemm((tile.operand, tile.output, tile.b_major), tile)

    def gemm(what, tile=None):
        def multiply(a, b, c, to, scales, above=0):
            launches.append((*what, to.shape[1:]))
            assert c is None
            assert scales[1:] == (8, 0, 0)
            table = seen(scales.rows, (to.matrices, 2), (8, 4), np.uint32)
            assert table[:, 1].tolist() == [epilogue_multiplier(modulus) for modulus in table[:, 0].tolist()]
            x, y = (seen(each.address, each.shape, each.strides, np.int8).astype("f8") for (each,) in (a, b))
            of_each = table[:, :1, None].astype(np.int64)
            residues = ((x @ y.swapaxes(-1, -2)).astype(np.int64) + OFFSET) % of_each - OFFSET
            if tile is not None and tile.symmetric:  # whole tiles that touch the diagonal or lie below it
                last_row = above + (np.arange(to.rows) // ROWS + 1) * ROWS - 1
                first_column = np.arange(to.columns) // tile.columns * tile.columns
                residues = np.where(last_row[:, None] >= first_column, residues, 77)
            seen(to.address, to.shape, to.strides, np.int8)[...] = residues

        return multiply

    def loaded(recipe, device):
        def launch(grid, values):
            launches.append((recipe.maker, recipe.parameters))
            address, step, pitch, of_rows, of_columns, d, d_pitch, c, c_pitch, c_along, rows, columns = values
            factors = (of_rows, of_columns) if of_rows else ()
            assert grid == (-(-rows * -(-columns // COLUMNS) // THREADS), 1, 1)
            if "complex" in recipe.maker:
                dtype, shape = np.dtype("c16"), (FORMS[2], len(moduli.MODULI), rows, columns)
                residues = seen(address, shape, (len(moduli.MODULI) * step, step, pitch, 1), np.int8).astype(np.int64)
                found = complex_twin.reconstructed(residues, np.ones((rows, columns)), recipe.parameters[2:] == (True,))
            else:
                dtype = np.dtype("f8" if factors else "i4")
                residues = seen(address, (len(MODULI), rows, columns), (step, pitch, 1), np.int8)
                found = integer_twin.reconstruct(residues, 32).astype(dtype)
            for at, shape in zip(factors, ((rows, 1), (1, columns)), strict=False):
                found *= seen(at, (max(shape),), (8,), "f8").reshape(shape)
            if recipe.parameters[1]:
                found += seen(c, (rows, columns), (c_pitch, c_along), dtype)
            seen(d, (rows, columns), (d_pitch, dtype.itemsize), dtype)[...] = found

        return SimpleNamespace(launch=launch)

    stream = SimpleNamespace(synchronize=lambda: launches.append("table"))
    cuda = SimpleNamespace(alloc=alloc, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, asarray=asarray))
    monkeypatch.setattr(hopper_launch, "hopper_gemm", hopper_gemm)
    monkeypatch.setattr(residue_products, "fragment_gemm", lambda *_: gemm(("mma.sync",)))
    monkeypatch.setattr(residue_products, "loaded", loaded)
    monkeypatch.setattr(residue_products, "address", lambda array: array.ctypes.data)
    return launches


def residues_of(numbers):
    """Stack of the residues of each row, or of given residues, in lines of 16 bytes, and the array that holds it."""
    found = numbers if numbers.ndim == 3 else integer_twin.split(numbers)
    held = np.zeros((*found.shape[:2], -(-found.shape[2] // 16) * 16), np.int8)
    held[..., : found.shape[2]] = found
    return Stack(held.ctypes.data, found.shape, held.strides, 1), held


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("order", [None, "C", "F"])
@pytest.mark.parametrize(("workspace", "parts"), [(1 << 29, 1), (128 * 512 * len(MODULI), 3), (1, 6)])
def test_each_part_of_c_comes_of_its_rows_columns_and_factors(launched, monkeypatch, workspace, parts, order, scaled):
    monkeypatch.setattr(residue_products, "WORKSPACE", workspace)
    rng, (m, k, n) = np.random.default_rng(0), (300, 20, 300)
    a, b = (rng.integers(-1000, 1000, (rows, k), "i4") for rows in (m, n))
    dtype = np.dtype("f8" if scaled else "i4")
    c = None if order is None else rng.integers(-9, 10, (m, n)).astype(dtype, order=order)
    factors = tuple(2.0 ** rng.integers(-9, 10, rows) for rows in (m, n)) if scaled else ()
    (left, _held), (right, _kept) = residues_of(a), residues_of(b)  # arrays live as long as their addresses are used
    d = np.full((m, 304), 7, dtype)
    products = ResidueProducts(NOWHERE, MODULI, Recipe("maker:name", (32,)), "wgmma")
    products.add(left, right, c, d[:, :n], tuple(each.ctypes.data for each in factors) or (0, 0))
    want = (a @ b.T).astype(dtype)
    want = want * factors[0][:, None] * factors[1] if scaled else want
    np.testing.assert_array_equal(d[:, :n], want if c is None else want + c)
    assert (d[:, n:] == 7).all()
    assert launched.pop(0) == "table"
    assert [each[0] for each in launched] == ["int8", "maker:name"] * parts
    assert all(each[:3] == ("int8", "int8", "k") for each in launched[::2])
    assert {each[1] for each in launched[1::2]} == {(32, c is not None)}


@pytest.mark.parametrize(("workspace", "heights"), [(1 << 29, [700]), (300 * 704 * len(MODULI), [256, 256, 188])])
@pytest.mark.parametrize("strip", [256, 1024])
def test_of_a_symmetric_product_the_lower_half_is_right(launched, monkeypatch, workspace, heights, strip):
    monkeypatch.setattr(residue_products, "WORKSPACE", workspace)
    monkeypatch.setattr(residue_products, "STRIP", strip)
    rng, (m, k) = np.random.default_rng(0), (700, 20)
    a = rng.integers(-1000, 1000, (m, k), "i4")
    c = rng.integers(-9, 10, (m, m)).astype("f8")
    factors = 2.0 ** rng.integers(-9, 10, m)
    (left, _held), d = residues_of(a), np.full((m, 704), 7.0)
    products = ResidueProducts(NOWHERE, MODULI, Recipe("maker:name", (32,)), "wgmma")
    products.add(left, left, c, d[:, :m], (factors.ctypes.data,) * 2, symmetric=True)
    want = (a @ a.T) * factors[:, None] * factors + c
    np.testing.assert_array_equal(np.tril(d[:, :m]), np.tril(want))
    assert (d[0, min(strip, heights[0]) : m] == 7).all()  # beyond the strip nothing is computed
    shapes = [each[3] for each in launched[1:] if each[0] == "int8"]
    assert shapes == list(zip(heights, np.cumsum(heights).tolist(), strict=True))


def test_with_another_instruction_another_kernel_multiplies_the_same(launched):
    rng, (m, k, n) = np.random.default_rng(0), (30, 20, 40)
    a, b = (rng.integers(-1000, 1000, (rows, k), "i4") for rows in (m, n))
    (left, _held), (right, _kept) = residues_of(a), residues_of(b)
    d = np.full((m, n), 7, "i4")
    ResidueProducts(NOWHERE, MODULI, Recipe("maker:name", (32,)), "mma.sync").add(left, right, None, d)
    np.testing.assert_array_equal(d, a @ b.T)
    assert launched == ["table", ("mma.sync", (m, n)), ("maker:name", (32, False))]


@pytest.mark.parametrize("instruction", ["wgmma", "mma.sync"])
@pytest.mark.parametrize(
    ("workspace", "n", "symmetric"), [(1 << 29, 200, False), (1 << 29, 300, True), (300 * 304 * 48, 300, True)]
)
def test_of_a_conjugate_its_own_residues_give_the_bits_of_its_product(
    launched, monkeypatch, workspace, n, symmetric, instruction
):
    monkeypatch.setattr(residue_products, "WORKSPACE", workspace)
    rng, (m, k) = np.random.default_rng(0), (300, 20)
    a, b, c = (rng.standard_normal((rows, 2 * wide)).view("c16") for rows, wide in ((m, k), (n, k), (m, n)))
    b = a if symmetric else b * 2.0**-30
    (of_a, row_factors, _), (of_b, column_factors, _) = complex_twin.split(a), complex_twin.split(b)
    (left, _held), (right, _kept) = (residues_of(each.reshape(-1, *each.shape[2:])) for each in (of_a, of_b))
    factors, d = (row_factors.ctypes.data, column_factors.ctypes.data), np.full((m, n), 7, "c16")
    recipe = Recipe("reconstruct_complex", (False,))
    products = ResidueProducts(NOWHERE, moduli.MODULI * FORMS[2], recipe, instruction)
    products.add(left, right, c, d, factors, symmetric, conjugated=True)
    want, _ = complex_twin.product(a, b.conj().T, c)
    whole = np.tri(m, n, dtype=bool) if symmetric else np.ones((m, n), bool)
    np.testing.assert_array_equal(d[whole], want[whole])


class CountsSplits(OnNumPy, ComplexResidueKernel):
    """The kernel with NumPy in place of a GPU. It counts the matrices that it splits."""

    _empty, _mirror = staticmethod(np.empty), staticmethod(mirror)

    def __init__(self, raised):
        super().__init__(Problem(1, 1, 1, np.dtype("complex128")), NOWHERE)
        self.splits, self.raised, self._split = 0, raised, self._by_twin
        self._ieee = SimpleNamespace(_accumulate=self._multiply_adds)

    def _by_twin(self, matrices):
        self.splits += 1
        residues, factors, _ = complex_twin.split(matrices)
        stack, kept = residues_of(residues.reshape(FORMS[2] * len(moduli.MODULI), *residues.shape[2:]))
        guards = (Guard.RANGE if self.raised else Guard(0),)
        made = SimpleNamespace(granule=lambda *_: stack, factors=lambda *_: factors.ctypes.data, kept=(kept, factors))
        return made, SimpleNamespace(here=True, raised=self.raised, guards=guards)

    def _multiply_adds(self, x, y, c, d):
        assert c is None
        d[...] = x @ y


@pytest.mark.parametrize(("k", "raised"), [(600, False), (600, True), (100, False)])
def test_a_hermitian_product_splits_its_operand_once_and_is_exact(launched, monkeypatch, k, raised):
    monkeypatch.setattr(guarded, "WORKSPACE", 1 << 20)
    kernel, rng = CountsSplits(raised), np.random.default_rng(0)
    block = rng.integers(-99, 100, (140, 2 * k)).astype("f8").view("c16")
    a, b = kernel.prepare_both(block, "hermitian")
    assert kernel.splits == 1
    assert b.made is a.made
    assert np.shares_memory(b.matrices, block), "it is not copied to be conjugated"
    for symmetry in (None, "hermitian"):
        np.testing.assert_array_equal(kernel.multiply(a, b, None, symmetry=symmetry), block @ block.conj().T)
    a, b = kernel.prepare_both(block, "symmetric")
    np.testing.assert_array_equal(kernel.multiply(a, b, None, symmetry="symmetric"), block @ block.T)
    assert bool(launched) is (k == 600 and not raised), "residues, or chains of multiply-adds"


@pytest.mark.parametrize("products", [10, 16, 18, 48])
@pytest.mark.parametrize("n", [4096, 8192, 16384])
def test_of_a_symmetric_product_no_tile_is_computed_in_vain(n, products):
    rows, columns = residue_products.strip(n, n, products)
    assert columns == n, "all columns fit"
    heights = [(down, min(rows, n - down) // ROWS) for down in range(0, n, rows)]
    pairs = (rows_in_pairs(high, 256, down) for down, high in heights)
    assert sum(number * tiles for number, tiles in pairs) == sum(i // 2 + 1 for i in range(n // ROWS))
