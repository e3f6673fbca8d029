"""What products of residues launch, and where, on the host: both kernels are replaced by NumPy at their addresses."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from distmm_kernels.device import Device
from distmm_kernels.emulation.integers import SYSTEMS
from distmm_kernels.emulation.moduli import OFFSET, epilogue_multiplier
from distmm_kernels.emulation.residues import COLUMNS, THREADS
from distmm_kernels.gemm import residue_products
from distmm_kernels.gemm.residue_products import ResidueProducts
from distmm_kernels.launch import hopper_launch
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.hopper_places import rows_in_pairs
from distmm_kernels.tiles.hopper_tiles import ROWS
from tests.kernels.reference import integer_twin

NOWHERE = Device("cuda", "none", 0, 0, (9, 0), 132)
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
            assert table[:, 1].tolist() == [epilogue_multiplier(modulus) for modulus in MODULI]
            x, y = (seen(each.address, each.shape, each.strides, np.int8).astype(np.int64) for (each,) in (a, b))
            moduli = table[:, :1, None].astype(np.int64)
            residues = (x @ y.swapaxes(-1, -2) + OFFSET) % moduli - OFFSET
            if tile is not None and tile.symmetric:  # whole tiles that touch the diagonal or lie below it
                last_row = above + (np.arange(to.rows) // ROWS + 1) * ROWS - 1
                first_column = np.arange(to.columns) // tile.columns * tile.columns
                residues = np.where(last_row[:, None] >= first_column, residues, 77)
            seen(to.address, to.shape, to.strides, np.int8)[...] = residues

        return multiply

    def loaded(recipe, device):
        def launch(grid, maps, values):
            launches.append((recipe.maker, recipe.parameters))
            address, step, pitch, of_rows, of_columns, d, d_pitch, c, c_pitch, c_along, rows, columns = values
            factors = (of_rows, of_columns) if of_rows else ()
            assert grid == (-(-rows * -(-columns // COLUMNS) // THREADS), 1, 1)
            dtype = np.dtype("f8" if factors else "i4")
            residues = seen(address, (len(MODULI), rows, columns), (step, pitch, 1), np.int8)
            found = integer_twin.reconstruct(residues, 32).astype(dtype)
            for at, shape in zip(factors, ((rows, 1), (1, columns)), strict=False):
                found *= seen(at, (max(shape),), (8,), dtype).reshape(shape)
            if recipe.parameters[-1]:
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
    """Stack of the residues of each row, in lines of 16 bytes, and the array that holds it."""
    found = integer_twin.split(numbers)
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
    products = ResidueProducts(NOWHERE, MODULI, "maker:name", (32,))
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
    products = ResidueProducts(NOWHERE, MODULI, "maker:name", (32,))
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
    ResidueProducts(NOWHERE, MODULI, "maker:name", (32,), "mma.sync").add(left, right, None, d)
    np.testing.assert_array_equal(d, a @ b.T)
    assert launched == ["table", ("mma.sync", (m, n)), ("maker:name", (32, False))]


@pytest.mark.parametrize("products", [10, 16, 18, 48])
@pytest.mark.parametrize("n", [4096, 8192, 16384])
def test_of_a_symmetric_product_no_tile_is_computed_in_vain(n, products):
    rows, columns = residue_products.strip(n, n, products)
    assert columns == n, "all columns fit"
    heights = [(down, min(rows, n - down) // ROWS) for down in range(0, n, rows)]
    pairs = (rows_in_pairs(high, 256, down) for down, high in heights)
    assert sum(number * tiles for number, tiles in pairs) == sum(i // 2 + 1 for i in range(n // ROWS))
