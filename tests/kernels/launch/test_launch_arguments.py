"""What a launch hands to the driver: where each parameter lies, and how arrays become parameters."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from distmm_kernels.device import Device
from distmm_kernels.launch import driver
from distmm_kernels.launch import launches as launch
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.driver import ParameterBlock
from distmm_kernels.launch.launches import Launch
from distmm_kernels.layout import stack
from distmm_kernels.layout.stack import Stack

GPU = Device("cuda", "none", 0, 0, (9, 0), 1)


@pytest.mark.parametrize(("maps", "values"), [((100, 200), (7, -8, 2**62)), ((), (7,)), ((100,), ())])
def test_a_parameter_block_points_to_maps_and_then_to_values(maps, values):
    block = ParameterBlock(len(maps), len(values))
    for sign in (1, -1):  # what a second launch writes replaces the first one's
        written = [sign * value for value in values]
        address = block.fill(maps, written)
        pointers = list((ctypes.c_int64 * (len(maps) + len(values))).from_address(address))
        assert tuple(pointers[: len(maps)]) == maps
        assert [ctypes.c_int64.from_address(pointer).value for pointer in pointers[len(maps) :]] == written


@pytest.fixture
def launched(monkeypatch):
    """All launches: grid and values."""
    made = []
    kernel = SimpleNamespace(launch=lambda grid, values: made.append((grid, list(values))))
    monkeypatch.setattr(driver, "loaded", lambda recipe, device: kernel)
    monkeypatch.setattr(stack, "address", lambda array: array.ctypes.data)  # of NumPy's arrays
    return made


def test_a_launch_puts_each_address_in_its_place_and_keeps_the_rest(launched):
    matrix, batch = np.zeros((4, 6), np.float32)[:, :5], np.zeros((3, 5, 4), np.float32)
    stacks = Stack.of(matrix), Stack.of(batch.swapaxes(1, 2)), None
    assert [each[1:] for each in stacks[:2]] == [((1, 4, 5), (0, 24, 4), 4), ((3, 4, 5), (80, 4, 16), 4)]
    prepared = Launch(Recipe("none:none"), GPU, (2, 3), stacks)
    for first, second in ((1000, 2000), (3000, 4000)):
        prepared(first, second, 0)
        expected = [0, 0, 20, 4, first, 1, 4, 5, 0, 24, 4, 0, 0, 60, 4, second, 3, 4, 5, 80, 4, 16, *launch.NO_MATRICES]
        assert launched.pop() == ((2, 3, 1), expected)


def test_a_launch_refuses_another_number_of_addresses(launched):
    with pytest.raises(ValueError, match="extended slice"):
        Launch(Recipe("none:none"), GPU, (1, 1), (None, None))(0)
    assert not launched
