"""How matrices lie in memory, apart from any device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.layout.copies import choose
from distmm_kernels.layout.stack import VECTOR_BYTES, Stack

START = 4096


def lying(values: np.ndarray) -> SimpleNamespace:
    """What of a CuPy array is looked at."""
    return SimpleNamespace(
        shape=values.shape,
        strides=values.strides,
        ndim=values.ndim,
        itemsize=values.itemsize,
        data=SimpleNamespace(ptr=START),
    )


def test_a_matrix_is_described_by_its_rows():
    whole = np.zeros((30, 64), np.float16)
    assert Stack.for_tensor_map(lying(whole)) == (START, (1, 30, 64), (30 * 128, 128, 2), 2)
    assert Stack.for_tensor_map(lying(whole[:, :50])) == (START, (1, 30, 50), (30 * 128, 128, 2), 2)


def test_a_stack_keeps_its_step_and_a_broadcast_one_is_one_matrix():
    stack = np.zeros((5, 30, 64), np.float32)
    assert Stack.for_tensor_map(lying(stack)) == (START, (5, 30, 64), (30 * 256, 256, 4), 4)
    assert Stack.for_tensor_map(lying(stack[::2])) == (START, (3, 30, 64), (60 * 256, 256, 4), 4)
    assert Stack.for_tensor_map(lying(np.broadcast_to(stack[0], (7, 30, 64)))) == (
        START,
        (1, 30, 64),
        (30 * 256, 256, 4),
        4,
    )


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (1, 1, 1), (4, 1, 3), (1, 7, 64)])
def test_the_strides_of_axes_of_length_1_count_for_nothing(shape):
    values = np.zeros(shape, np.float32)
    strides = tuple(4 if size == 1 else stride for size, stride in zip(shape, values.strides, strict=True))
    stack = Stack.for_tensor_map(lying(np.lib.stride_tricks.as_strided(values, strides=strides)))
    assert (stack.rows, stack.columns) == shape[-2:]
    assert stack.pitch % VECTOR_BYTES == 0
    assert stack.pitch >= 4 * stack.columns
    assert stack.matrices > 1 or stack.step == stack.rows * stack.pitch


def aligned_zeros(shape):
    """Zeros that begin on 16 bytes."""
    memory = np.zeros(int(np.prod(shape)) + 4, np.float32)
    first = -(memory.__array_interface__["data"][0] // 4) % 4
    return memory[first : first + int(np.prod(shape))].reshape(shape)


def placed(array):
    return Stack(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)


@pytest.mark.parametrize(
    ("cut", "rows", "aligned", "columns"),
    [
        ((slice(None), slice(None), slice(None)), True, True, False),
        ((slice(None), slice(None), slice(4, None)), True, True, False),
        ((slice(None), slice(None), slice(1, None)), True, False, False),
        ((slice(None), slice(None), slice(None, None, 2)), False, False, False),
        ((slice(None), slice(None), slice(None, None, -1)), False, False, False),
        ((slice(None), slice(None, None, -1), slice(None)), True, True, False),
        ((slice(None), slice(None), slice(3, 4)), True, False, False),
        ((slice(None), slice(2, 3), slice(None, None, 2)), False, False, True),
    ],
)
def test_a_stack_tells_along_which_axis_neighbours_touch(cut, rows, aligned, columns):
    stack = placed(aligned_zeros((3, 8, 16))[cut])
    turned = placed(aligned_zeros((3, 8, 16))[cut].swapaxes(1, 2))
    assert (stack.contiguous(-1), stack.contiguous(-2)) == (rows, columns)
    assert (turned.contiguous(-1), turned.contiguous(-2)) == (columns, rows)
    assert (rows and stack.aligned(-1)) == (rows and turned.aligned(-2)) == aligned


@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 4), st.booleans())
def test_aligned_means_every_line_begins_on_16_bytes(shape, offset, turned):
    whole = aligned_zeros((shape[0], shape[1], shape[2] + offset))
    x = whole[:, :, offset:]
    x = x.swapaxes(1, 2) if turned else x
    stack = placed(x)
    axis = -1 if stack.contiguous(-1) else -2
    starts = np.moveaxis(x, axis, 2)[:, :, :1]
    addresses = [starts[i].__array_interface__["data"][0] for i in np.ndindex(starts.shape[:2])]
    assert stack.aligned(axis) == all(address % 16 == 0 for address in addresses)
    assert stack.aligned(axis) or not stack.has_vectors(axis)


@pytest.mark.parametrize(
    ("address", "shape", "strides", "loadable"),
    [
        (4096, (3, 5, 7), (160, 32, 4), True),
        (4096, (2, 3, 5, 7), (480, 160, 32, 4), True),
        (4100, (3, 5, 7), (160, 32, 4), False),  # begins beside 16 bytes
        (4096, (3, 5, 7), (160, 28, 4), False),  # so do rows
        (4096, (3, 5, 7), (150, 32, 4), False),  # so do matrices
        (4096, (2, 3, 5, 7), (484, 160, 32, 4), False),
        (4096, (3, 5, 7), (160, 32, 8), False),  # neighbours lie apart
        (4096, (3, 5, 1), (160, 32, 8), True),
        (4096, (3, 5, 7), (-160, 32, 4), False),
        (4096, (3, 5, 7), (160, -32, 4), False),
        (4096, (3, 5, 7), (160, 0, 4), False),  # one row for all
        (4096, (3, 5, 7), (0, 32, 4), True),  # one matrix for all
        (4096, (3, 1, 7), (160, 4, 4), True),  # one row has no next one
        (4096, (1, 5, 7), (2**50, 2**40, 4), False),
    ],
)
def test_the_tensor_memory_accelerator_loads_aligned_rows_only(address, shape, strides, loadable):
    assert Stack(address, shape, strides, 4).loadable() == loadable


@given(st.integers(0, 8), st.integers(1, 4))
def test_rows_of_a_stack_lie_where_those_of_the_array_do(first, count):
    whole = np.zeros((3, 12, 5), np.float32)
    assert placed(whole).part(-2, first, first + count) == placed(whole[:, first : first + count])


ROWS = (480, 32, 1)  # strides in elements of (5, 9, 12): C order, Fortran order, neither
COLUMNS, APART = (480, 1, 16), (480, 64, 2)


@pytest.mark.parametrize(
    ("itemsize", "strides", "address", "kernel"),
    [
        (1, ROWS, 1, "realign:source()"),
        (16, ROWS, 0, "realign:source()"),
        (1, COLUMNS, 0, "transpose:source('uint8', 1)"),  # 9 bytes are no whole words
        (2, COLUMNS, 0, "transpose:source('uint16', 1)"),
        (4, COLUMNS, 0, "transpose:source('uint32', 1)"),
        (4, APART, 0, None),
    ],
)
def test_one_place_says_which_kernel_copies_what(itemsize, strides, address, kernel):
    stack = Stack(4096 + address, (5, 9, 12), tuple(itemsize * stride for stride in strides), itemsize)
    recipe = choose(stack)
    made = recipe and f"{recipe.maker.rpartition('.')[2]}({', '.join(map(repr, recipe.parameters))})"
    assert made == kernel


@pytest.mark.parametrize(("itemsize", "rows", "words"), [(1, 12, 4), (2, 10, 2)])
def test_columns_of_small_numbers_are_transposed_by_words_where_they_begin_and_end_with_them(itemsize, rows, words):
    stack = Stack(4096, (5, rows, 7), (4 * 480, itemsize, 16), itemsize)
    recipe = choose(stack)
    assert (recipe.maker.rpartition(".")[2], recipe.parameters) == ("transpose:source", ("uint32", words))
    shape = (5, rows, 7)
    for address, size, strides in (
        (4097, shape, stack.strides),
        (4096, (5, rows - 1, 7), stack.strides),
        (4096, shape, (4 * 480 + 2, itemsize, 16)),
        (4096, shape, (4 * 480, itemsize, 18)),
    ):
        recipe = choose(Stack(address, size, strides, itemsize))
        assert recipe.parameters == (f"uint{8 * itemsize}", 1)
