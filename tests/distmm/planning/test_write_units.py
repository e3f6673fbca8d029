"""Blocks and the units in which arrays are written: borders move to units, and nothing is lost."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from distmm.planning.write_units import are_shared, unit_of, whole_units


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(0, 50), st.integers(1, 25))
def test_no_two_blocks_have_a_part_of_one_unit(edges: list[int], start: int, unit: int) -> None:
    moved = whole_units(tuple(edges), start, unit)
    assert sum(moved) == sum(edges)
    assert all(edge > 0 for edge in moved) or moved == (0,)
    *inner, _ = (start + end for end in accumulate(moved))
    assert all(border % unit == 0 for border in inner)
    old = [start + end for end in accumulate(edges)]
    # A block has grown by less than a unit at each end, or is one unit.
    assert max(moved) <= max(max(edges) + unit, 2 * unit)
    if all(border % unit == 0 for border in old[:-1]):
        assert moved == (tuple(edge for edge in edges if edge) or (0,))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(1, 7), st.integers(1, 7),
)  # fmt: skip
def test_units_that_are_not_shared_are_in_one_region(rows: list[int], columns: list[int], m: int, n: int) -> None:
    shape = sum(rows), sum(columns)
    writers: dict[tuple[int, int], set[int]] = {}
    regions = []
    for down, height in zip(accumulate(rows, initial=0), rows, strict=False):
        for across, width in zip(accumulate(columns, initial=0), columns, strict=False):
            regions.append((slice(down, down + height), slice(across, across + width)))
    for number, (i, j) in enumerate(regions):
        for unit in np.ndindex(-(-shape[0] // m), -(-shape[1] // n)):
            if (
                unit[0] * m < i.stop
                and i.start < unit[0] * m + m
                and unit[1] * n < j.stop
                and j.start < unit[1] * n + n
            ):
                writers.setdefault(unit, set()).add(number)
    shared = {number for numbers in writers.values() if len(numbers) > 1 for number in numbers}
    assert shared == {number for number, region in enumerate(regions) if are_shared(region, shape, (m, n))}


def test_shards_are_the_unit_and_else_chunks() -> None:
    store = zarr.storage.MemoryStore()
    sharded = zarr.create_array(store, name="a", shape=(20, 20), chunks=(2, 5), shards=(10, 10), dtype="f4")
    plain = zarr.create_array(store, name="b", shape=(20, 20), chunks=(2, 5), dtype="f4")
    older = zarr.create_array(store, name="c", shape=(20, 20), chunks=(2, 5), dtype="f4", zarr_format=2)
    assert [unit_of(array) for array in (sharded, plain, older, np.ones(3))] == [(10, 10), (2, 5), (2, 5), None]


@pytest.mark.parametrize("chunks", [None, True, ((5, 5), (5, 5)), (5,), (0, 5), "auto"])
def test_chunks_of_another_kind_promise_nothing(chunks: object) -> None:
    class Array:
        shape = (10, 10)

    Array.chunks = chunks  # type: ignore[attr-defined]
    assert unit_of(Array()) is None
