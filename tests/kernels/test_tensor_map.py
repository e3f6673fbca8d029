"""How matrices are described to the tensor memory accelerator, apart from any device."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from distmm_kernels.tensor_map import ALIGNMENT, MatrixStack

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
    assert MatrixStack.of(lying(whole)) == (START, 1, 30, 64, 128, 30 * 128)
    assert MatrixStack.of(lying(whole[:, :50])) == (START, 1, 30, 50, 128, 30 * 128)


def test_a_stack_keeps_its_step_and_a_broadcast_one_is_one_matrix():
    stack = np.zeros((5, 30, 64), np.float32)
    assert MatrixStack.of(lying(stack)) == (START, 5, 30, 64, 256, 30 * 256)
    assert MatrixStack.of(lying(stack[::2])) == (START, 3, 30, 64, 256, 60 * 256)
    assert MatrixStack.of(lying(np.broadcast_to(stack[0], (7, 30, 64)))) == (START, 1, 30, 64, 256, 30 * 256)


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (1, 1, 1), (4, 1, 3), (1, 7, 64)])
def test_the_strides_of_axes_of_length_1_count_for_nothing(shape):
    values = np.zeros(shape, np.float32)
    strides = tuple(4 if size == 1 else stride for size, stride in zip(shape, values.strides, strict=True))
    stack = MatrixStack.of(lying(np.lib.stride_tricks.as_strided(values, strides=strides)))
    assert (stack.rows, stack.columns) == shape[-2:]
    assert stack.pitch % ALIGNMENT == 0
    assert stack.pitch >= 4 * stack.columns
    assert stack.matrices > 1 or stack.step == stack.rows * stack.pitch
