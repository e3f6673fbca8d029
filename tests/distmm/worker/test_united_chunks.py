"""Blocks that are made of the user's chunks: joined on CPUs and GPUs, and gathered from several workers."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm.errors import InputError
from distmm.planning.blocks import slices
from distmm.worker import united_chunks
from distmm.worker.tasks.arrivals import arrived_block, gather
from distmm.worker.united_chunks import Edges, Gathered, Union

EDGES = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=2, max_size=3).map(tuple)


def cut(edges: Edges) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a block and its chunks."""
    shape = tuple(map(sum, edges))
    block = np.arange(np.prod(shape), dtype="f4").reshape(shape)
    return block, [block[place] for place in itertools.product(*map(slices, edges))]


@given(EDGES)
def test_chunks_make_their_block(edges: Edges) -> None:
    block, chunks = cut(edges)
    union = Union(edges, chunks)
    assert (union.shape, union.nbytes) == (block.shape, block.nbytes)
    np.testing.assert_array_equal(union.joined(), block)


@given(EDGES)
def test_chunks_on_a_gpu_are_joined_along_each_dimension(edges: Edges) -> None:
    block, chunks = cut(edges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", np)  # `concatenate` is all that is called
        np.testing.assert_array_equal(united_chunks._concatenated(iter(chunks), edges), block)


@given(EDGES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_chunks_of_several_workers_come_in_one_array_of_each_and_make_their_block(edges, workers, random) -> None:  # type: ignore[no-untyped-def]
    block, chunks = cut(edges)
    homes = [random.randrange(workers) for _ in chunks]
    numbers = tuple(tuple(n for n, home in enumerate(homes) if home == rank) for rank in sorted({*homes}))
    shapes = list(itertools.product(*edges))
    sent = [gather([chunks[n] for n in own], "a block", [shapes[n] for n in own], "f4", "matrix") for own in numbers]
    assert [array.ndim for array in sent] == [1] * len(numbers)
    made = arrived_block(sent, "a block", Gathered(edges, numbers), block.dtype, "matrix")
    np.testing.assert_array_equal(made, block)


def test_gathered_chunks_are_checked_and_turned_as_they_arrive() -> None:
    chunk = np.arange(6, dtype="f8").reshape(2, 3)
    np.testing.assert_array_equal(gather([chunk, chunk], "A", [(3, 2)] * 2, "f8", "transpose"), [*chunk.T.flat] * 2)
    np.testing.assert_array_equal(gather([chunk[0]], "B", [(3, 1)], "f4", "vector"), chunk[0].astype("f4"))
    with pytest.raises(InputError, match=r"a block of A is a ndarray of shape \(2, 3\), and its array says \(2, 2\)"):
        gather([chunk], "a block of A", [(2, 2)], "f8", "matrix")
