"""What a launch of the Hopper kernel is given."""

import ctypes
from types import SimpleNamespace

import pytest

from distmm_kernels.launch import hopper_launch
from distmm_kernels.launch.hopper_launch import HopperGemm, Scales
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.hopper_tiles import HopperTile


@pytest.fixture
def launches(monkeypatch):
    """All launches: grid, maps, values. A map is known by the address of its matrix and the box's columns."""
    made, maps = [], []

    def encoded(stack, kind, rows, columns):
        maps.append((stack.address, kind, columns))
        return SimpleNamespace(address=len(maps) - 1)

    def launch_with(grid, parameters):
        pointers = list((ctypes.c_int64 * 19).from_address(parameters))
        values = tuple(ctypes.c_int64.from_address(pointer).value for pointer in pointers[6:])
        made.append((grid, tuple(maps[number] for number in pointers[:6]), values))

    monkeypatch.setattr(hopper_launch, "tensor_map", encoded)
    kernel = SimpleNamespace(launch_with=launch_with)
    monkeypatch.setattr(hopper_launch, "loaded", lambda recipe, device: kernel)
    return made


def stack(address, rows, columns, matrices=1, itemsize=2):
    pitch = -(-columns * itemsize // 128) * 128
    return Stack(address, (matrices, rows, columns), (rows * pitch, pitch, itemsize), itemsize)


def test_each_launch_has_its_own_operands_sizes_and_results(launches):
    tile = HopperTile("float16", "float32", 256, "k", "n", adds=True)
    gemm = HopperGemm(tile, SimpleNamespace(multiprocessors=132))
    for m, n, k, base in (
        (300, 500, 100, 1000),
        (300, 500, 100, 2000),
        (1 << 14, 1 << 14, 64, 1000),
        (300, 500, 100, 1000),
    ):
        a, b = stack(base, m, k), stack(base + 1, k, n)
        for address in (7, 8):
            c, d = stack(address, m, n, itemsize=4), stack(address + 10, m, n, itemsize=4)
            gemm((a,), (b,), c, d)
            grid, maps, values = launches.pop()
            high, wide = -(-m // 128), -(-n // 256)
            assert grid == (min(132, high * wide), 1, 1)
            left, right = (base, "float16", 64), (base + 1, "float16", 64)
            added, result = (address, "float32", 32), (address + 10, "float32", 32)
            assert maps == (left, left, right, right, added, result)
            assert values == (0, 0, 0, 0, m, n, k, 1, 0, 0, 0, high, wide)


def test_a_broadcast_operand_has_one_matrix_and_each_part_its_map(launches):
    tile = HopperTile("float16", "float32", 192, "m", "k", products=3, scaled=True)
    gemm = HopperGemm(tile, SimpleNamespace(multiprocessors=132))
    a, b = (stack(1, 90, 200, 5), stack(2, 90, 200, 5)), (stack(3, 100, 90), stack(4, 100, 90))
    scales = Scales(100, 8, 200, 0)
    gemm(a, b, None, stack(5, 200, 100, 5, 4), scales)
    grid, maps, values = launches.pop()
    assert [each[0] for each in maps] == [1, 2, 3, 4, 5, 5]
    assert grid == (10, 1, 1)
    assert values == (*scales, 200, 100, 90, 5, 1, 0, 0, 2, 1)


@pytest.mark.parametrize("axis", ["m", "n", "k", "matrices"])
def test_sizes_that_32_bits_cannot_count_are_refused_before_the_launch(launches, axis):
    """Coordinates would wrap around: the TMA would store nothing, and D would be memory as it was."""
    gemm = HopperGemm(HopperTile("int8", "int32", 256, b_major="k"), SimpleNamespace(multiprocessors=132))
    for size in (2**31 - 1, 2**31):
        sizes = {"m": 8, "n": 16, "k": 32, "matrices": 1, axis: size}
        m, n, k, matrices = sizes.values()
        operands = (stack(1, m, k, itemsize=1),), (stack(2, n, k, itemsize=1),), None, stack(3, m, n, matrices, 4)
        if size < 2**31:
            gemm(*operands)
            assert size in launches.pop()[2]
        else:
            with pytest.raises(ValueError, match=r"count to 2\^31 along each axis"):
                gemm(*operands)
    assert not launches
