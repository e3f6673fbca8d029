"""The tasks that write blocks of an array to a target."""

from __future__ import annotations

import pickle
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm.graph.consumers import stored
from distmm.graph.dask_tasks import stores


class Target:
    """A target that notes what is assigned to it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.array, self.writes = np.full(shape, -1), 0

    def __setitem__(self, place: tuple[slice, ...], block: Any) -> None:
        self.array[place] = block
        self.writes += 1

    def __dask_tokenize__(self) -> int:
        return id(self)


edges = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(st.lists(edges, min_size=1, max_size=3), st.data())
def test_the_blocks_of_a_region_are_written_to_their_place_and_no_others(cuts: list[list[int]], data: Any) -> None:
    shape = tuple(map(sum, cuts))
    numbers = np.arange(np.prod(shape)).reshape(shape)
    array = da.from_array(numbers, chunks=tuple(map(tuple, cuts)))
    region, blocks = [], 1
    for own in cuts:
        first = data.draw(st.integers(0, len(own) - 1))
        last = data.draw(st.integers(first, len(own) - 1))
        region.append(slice(sum(own[:first]), sum(own[: last + 1])))
        blocks *= last + 1 - first
    begin = [data.draw(st.integers(0, 3)) for _ in cuts]
    place = tuple(slice(at, at + cut.stop - cut.start) for at, cut in zip(begin, region, strict=True))
    target = Target(tuple(at + size for at, size in zip(begin, shape, strict=True)))
    writes = stored(array, tuple(region), target, place)
    assert all(map(stores, dask.core.flatten(writes.__dask_keys__())))
    dask.compute(writes, scheduler="sync")
    assert target.writes == blocks
    assert np.array_equal(target.array[place], numbers[tuple(region)])
    assert (target.array >= 0).sum() == numbers[tuple(region)].size


def test_empty_blocks_at_the_ends_of_a_region_are_not_asked_for() -> None:
    array, target = da.from_array(np.arange(6), chunks=((0, 2, 0, 0, 4, 0),)), Target((4,))
    writes = stored(array, (slice(2, 6),), target, (slice(0, 4),))
    assert writes.numblocks == (1,)
    dask.compute(writes, scheduler="sync")
    assert target.array.tolist() == [2, 3, 4, 5]


def test_without_a_place_a_region_goes_where_it_is_in_the_array() -> None:
    array, target = da.arange(10, chunks=4), Target((10,))
    dask.compute(stored(array, (slice(4, 10),), target), scheduler="sync")
    assert target.array.tolist() == [-1] * 4 + list(range(4, 10))


def test_without_a_region_all_blocks_are_written() -> None:
    array, target = da.arange(10, chunks=4), Target((10,))
    dask.compute(stored(array, None, target), stored(array, None, target, (slice(0, 10),)), scheduler="sync")
    assert target.writes == 6
    assert target.array.tolist() == list(range(10))


@pytest.mark.parametrize("other", [0, 1])
def test_each_target_and_place_has_tasks_of_its_own(other: int) -> None:
    array, target = da.arange(4, chunks=2), Target((8,))
    another = (Target((8,)), target)[other]
    places = (slice(0, 4),), (slice(4, 8),)
    assert stored(array, None, target, places[0]).name != stored(array, None, another, places[other]).name


def test_the_graph_is_sent_as_its_parameters() -> None:
    writes = stored(da.zeros((1000, 1000), chunks=10), None, None, (slice(0, 1000),) * 2)
    layer = writes.dask.layers[writes.name]
    assert not layer.is_materialized()
    assert len(pickle.dumps(layer)) < 3000
    assert len(layer.get_output_keys()) == 10_000 == len(pickle.loads(pickle.dumps(layer)))
