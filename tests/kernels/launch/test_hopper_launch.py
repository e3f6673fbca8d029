"""What a launch of the Hopper kernel is given."""

import ctypes
import struct
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from distmm_kernels.launch import hopper_launch
from distmm_kernels.launch.hopper_launch import NO_FINISH, Finish, HopperGemm, Scales, pace_counter
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.hopper_tiles import MAP_BYTES, MOST_PANELS, HopperTile

COUNTER = 77  # its address


@pytest.fixture(autouse=True)
def counter(monkeypatch):
    monkeypatch.setattr(hopper_launch, "pace_counter", lambda device, stream=None: COUNTER)


@pytest.fixture
def launches(monkeypatch):
    """All launches: grid; of each array of maps the matrices' addresses, types and boxes; values."""
    made, maps = [], {}

    def encoded(stack, kind, rows, columns):
        memory = ctypes.create_string_buffer(struct.pack("q", len(maps)), MAP_BYTES)
        maps[len(maps)] = (stack.address, kind, rows, columns), memory
        return SimpleNamespace(address=ctypes.addressof(memory))

    def of(address, count):
        return [maps[ctypes.c_int64.from_address(address + MAP_BYTES * i).value][0] for i in range(count)]

    def launch_with(grid, parameters):
        pointers = list((ctypes.c_int64 * 25).from_address(parameters))
        values = tuple(ctypes.c_int64.from_address(pointer).value for pointer in pointers[5:])
        count = values[-2]
        made.append((grid, [of(at, count if i < 2 else 1) for i, at in enumerate(pointers[:5])], values))

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
            left, right = (base, "float16", 128, 64), (base + 1, "float16", 64, 64)
            added, result = (address, "float32", 128, 32), (address + 10, "float32", 16, 32)
            assert maps == [[left], [right], [added], [result], [result]]
            assert values == (0, 0, 0, 0, m, n, k, 1, 0, 0, 0, 0, high, wide, COUNTER, 0, *NO_FINISH.factors, 1, k)


def test_a_broadcast_operand_has_one_matrix_and_each_part_its_map(launches):
    tile = HopperTile("float16", "float32", 192, "m", "k", products=3, scaled=True)
    gemm = HopperGemm(tile, SimpleNamespace(multiprocessors=132))
    a, b = (stack(1, 90, 200, 5), stack(2, 90, 200, 5)), (stack(3, 100, 90), stack(4, 100, 90))
    scales = Scales(100, 8, 200, 0)
    gemm(a, b, None, stack(5, 200, 100, 5, 4), scales)
    grid, maps, values = launches.pop()
    assert [[each[0] for each in array] for array in maps] == [[1, 2], [3, 4], [5], [5], [5]]
    assert grid == (10, 1, 1)
    assert values[:16] == (*scales, 200, 100, 90, 5, 1, 0, 0, 0, 2, 1, COUNTER, 0)


def test_a_symmetric_product_has_a_grid_of_pairs_of_rows_of_tiles(launches):
    tile = HopperTile("int8", "int8", 256, b_major="k", symmetric=True)
    gemm = HopperGemm(tile, SimpleNamespace(multiprocessors=132))
    a, b = stack(1, 640, 128, 3, 1), stack(2, 1664, 128, 3, 1)
    gemm((a,), (b,), None, stack(3, 640, 1664, 3, 1), above=1024)
    grid, _, values = launches.pop()
    assert values[4:16] == (640, 1664, 128, 3, 1, 1, 0, 0, 3, 12, COUNTER, 1024)
    assert grid == (108, 1, 1)


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


@pytest.mark.parametrize("count", range(1, MOST_PANELS + 1))
def test_panels_have_their_maps_one_behind_the_other_and_the_last_its_own_k(launches, count):
    tile = HopperTile("int8", "int32", 256, b_major="k", panels=True, adds=True)
    gemm = HopperGemm(tile, SimpleNamespace(multiprocessors=132))
    ks = [100] * (count - 1) + [37]
    a = tuple(stack(10 + i, 300, k, itemsize=1) for i, k in enumerate(ks))
    b = tuple(stack(30 + i, 500, k, itemsize=1) for i, k in enumerate(ks))
    gemm(a, b, stack(1, 300, 500, itemsize=4), stack(2, 300, 500, itemsize=4))
    ((grid, maps, values),) = launches
    assert grid == (6, 1, 1)
    assert [each[0] for each in maps[0]] == [10 + i for i in range(count)]
    assert [each[0] for each in maps[1]] == [30 + i for i in range(count)]
    assert maps[2:4] == [[(1, "int32", 128, 32)], [(2, "int32", 16, 32)]]
    assert values[4:16] == (300, 500, ks[0], 1, 0, 0, 0, 0, 3, 2, COUNTER, 0)
    assert values[-2:] == (count, 37)


@pytest.mark.parametrize(("kind", "columns", "itemsize"), [("float32", 32, 4), ("bfloat16", 64, 2), ("float16", 64, 2)])
def test_the_finish_has_its_factors_and_boxes_of_c0(launches, kind, columns, itemsize):
    tile = HopperTile("bfloat16", "bfloat16", 256, finishes=True, c0=kind)
    gemm = HopperGemm(tile, SimpleNamespace(multiprocessors=132))
    a, b, d = stack(1, 300, 100, 3), stack(2, 100, 500, 3), stack(3, 300, 500, 3)
    for matrices in (1, 3):
        gemm((a,), (b,), None, d, finish=Finish.of(0.3, -2.0, None)._replace(c0=stack(4, 300, 500, matrices, itemsize)))
        _, maps, values = launches.pop()
        assert maps[4] == [(4, kind, 128, columns)]
        assert struct.unpack("2f", struct.pack("2I", *values[16:18])) == (np.float32(0.3), -2.0)
        assert values[11] == int(matrices == 3)


def test_panels_whose_steps_together_exceed_32_bits_are_refused(launches):
    gemm = HopperGemm(HopperTile("int8", "int32", 256, b_major="k", panels=True), SimpleNamespace(multiprocessors=132))
    a, b = (tuple(stack(i, rows, 2**30, itemsize=1) for i in range(2)) for rows in (8, 16))
    with pytest.raises(ValueError, match=r"2147483648\) @ .* count to 2\^31 along each axis"):
        gemm(a, b, None, stack(3, 8, 16, itemsize=4))


def test_launches_share_a_counter_only_if_they_share_a_stream(monkeypatch):
    """Even if two threads launch on a device for the first time: a counter that is dropped would be freed memory."""
    made, stream, gpu = [], SimpleNamespace(ptr=5, synchronize=lambda: None), SimpleNamespace(index=0)

    def zeros(size, dtype):
        number = len(made)
        made.append(SimpleNamespace(data=SimpleNamespace(ptr=100_000 * (1 + number))))
        if number == 0:  # meanwhile, in another thread
            assert pace_counter(gpu) == 200_008
        return made[number]

    numbers = iter(range(1, 100))
    known: dict[int, int] = {}
    current = SimpleNamespace(get_current_stream=lambda: stream, using_allocator=lambda _: nullcontext())
    pool = SimpleNamespace(malloc=None)
    cupy = SimpleNamespace(cuda=current, zeros=zeros, get_default_memory_pool=lambda: pool)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(hopper_launch, "_pace_counters", {})
    monkeypatch.setattr(hopper_launch, "stream_number", lambda ptr: known.setdefault(ptr, next(numbers)))
    assert pace_counter(gpu) == pace_counter(gpu) == 200_008
    stream.ptr = 6
    assert pace_counter(gpu) not in (200_008, pace_counter(SimpleNamespace(index=1)))
    stream.ptr = 5
    known.clear()  # the stream is destroyed, and another one has its handle
    assert pace_counter(gpu) != 200_008
