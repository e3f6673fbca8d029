"""The client's memory and the GPU: both ways, pinned and not, any layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from distmm import transfer
from distmm.transfer import client_array

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda a: a,
    "transposed": lambda a: a.swapaxes(-1, -2),
    "rows from the last": lambda a: a[..., ::-1, :],
    "columns of a wider one": lambda a: a[..., 3:200],
}


def filled(shape: tuple[int, ...], pinned: bool) -> np.ndarray:
    array = transfer.empty(shape, "f4") if pinned else np.empty(shape, "f4")
    array[...] = np.random.default_rng(1).standard_normal(shape, dtype="f4")
    return array


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(700, 300), (3, 70, 300), (1, 300)])
def test_a_block_arrives_on_the_gpu_and_comes_back(shape: tuple[int, ...], layout: str, pinned: bool) -> None:
    array = LAYOUTS[layout](filled(shape, pinned))
    index = tuple(slice(n // 3, n - n // 4) for n in array.shape)
    block = client_array.whole(array).to_device(index)
    np.testing.assert_array_equal(block.get(), array[index])
    back = LAYOUTS[layout](filled(shape, pinned))
    expected = back.copy()
    expected[index] = 2 * array[index]
    client_array.whole(back)[index] = 2 * block
    np.testing.assert_array_equal(back, expected)


@pytest.mark.gpu
def test_pieces_larger_than_the_staging_buffers_arrive() -> None:
    from distmm.worker import gpu_copies

    array = np.random.default_rng(2).standard_normal((5 * gpu_copies.STAGE // 2 // 6000, 1500), dtype="f4")
    block = client_array.whole(array).to_device((slice(None), slice(1, 1400)))
    assert block.nbytes > 2 * gpu_copies.STAGE
    np.testing.assert_array_equal(block.get(), array[:, 1:1400])
    np.testing.assert_array_equal(gpu_copies.fetch(block), array[:, 1:1400])
