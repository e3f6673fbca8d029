"""Products into arrays that are written in chunks and shards of any shape: no block is lost."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import h5py
import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.errors import DoesNotFitError, InputError
from tests.tables import later, number_of


def operands(m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m * n)
    return rng.integers(1, 9, (m, k)), rng.integers(1, 9, (k, n))


class Watched:
    """An array of int64 in a file, which notes when the write of a region begins and ends."""

    dtype = np.dtype("i8")

    def __init__(self, folder: Path | str, shape: tuple[int, int], chunks: tuple[int, int]) -> None:
        self.folder, self.shape, self.chunks = os.fspath(folder), shape, chunks
        np.memmap(f"{self.folder}/c", self.dtype, "w+", shape=shape)

    def __setitem__(self, index: tuple[slice, slice], block: np.ndarray) -> None:
        rows, columns = index
        where = f"{rows.start} {rows.stop} {columns.start} {columns.stop}\n"
        self.note(f"begin {where}")
        self.values[index] = block
        self.note(f"end {where}")

    def note(self, line: str) -> None:
        file = os.open(f"{self.folder}/log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)

    @property
    def values(self) -> np.ndarray:
        return np.memmap(f"{self.folder}/c", self.dtype, "r+", shape=self.shape)

    def writers(self) -> dict[tuple[int, int], int]:
        """Tasks that wrote to each unit, none of them while another one did."""
        writers: defaultdict[tuple[int, int], int] = defaultdict(int)
        busy: set[tuple[int, int]] = set()
        for line in Path(self.folder, "log").read_text().splitlines():
            what, *numbers = line.split()
            top, bottom, left, right = map(int, numbers)
            (m, n), units = self.chunks, set()
            for i in range(top // m, -(-bottom // m)):
                units |= {(i, j) for j in range(left // n, -(-right // n))}
            if what == "begin":
                assert not units & busy, f"two tasks write to {units & busy} at the same time"
                busy |= units
                for unit in units:
                    writers[unit] += 1
            else:
                busy -= units
        return dict(writers)


sizes, edges = st.integers(1, 40), st.integers(1, 45)


@pytest.mark.minutes
@settings(max_examples=12)
@given(sizes, sizes, st.tuples(edges, edges), st.tuples(edges, edges), st.booleans(), st.integers(1, 3))
def test_blocks_chunks_and_shards_of_any_shape(
    client: Client, m: int, n: int, unit: tuple[int, int], block: tuple[int, int], sharded: bool, waves: int
) -> None:
    a, b = operands(m, 6, n)
    block = max(block[0], m // 4), max(block[1], n // 4)  # a few blocks: tasks take 10 ms
    how = {"chunks": (1, 1), "shards": unit} if sharded else {"chunks": unit}
    text = f"g2x2x1 b{block[0]}x6x{block[1]} p1 w{waves} l2"
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(folder, (m, n), unit)
        distmm.matmul(a, b, out=watched, client=client, plan=text)
        np.testing.assert_array_equal(watched.values, a @ b)
        writers = watched.writers()
        assert len(writers) == -(-m // unit[0]) * -(-n // unit[1])
        if waves == 1:
            assert set(writers.values()) == {1}
        out = zarr.create_array(f"{folder}/c.zarr", shape=(m, n), dtype="i8", **how)
        distmm.matmul(a, b, out=out, client=client, plan=text)
        np.testing.assert_array_equal(out[:], a @ b)


@settings(max_examples=number_of(8))
@given(sizes, st.tuples(edges, edges), edges, st.integers(1, 3))
def test_symmetric_products_in_chunks_of_any_shape(
    client: Client, m: int, unit: tuple[int, int], block: int, waves: int
) -> None:
    a, block = operands(m, 6, m)[0], max(block, m // 4)
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(folder, (m, m), unit)
        distmm.gram(a, out=watched, client=client, plan=f"g2x2x1 b{block}x6x{block} p1 w{waves} l2")
        np.testing.assert_array_equal(watched.values, a @ a.T)
        assert len(watched.writers()) == -(-m // unit[0]) * -(-m // unit[1])


@pytest.mark.parametrize(
    ("symmetric", "how"), later([(False, "one chunk"), (True, "misaligned"), (True, "shards"), (False, "version 2")])
)
def test_default_arguments_fill_a_zarr_array(client: Client, tmp_path: Path, how: str, symmetric: bool) -> None:
    a, b = operands(1200, 50, 1200)
    chunks: dict[str, Any] = {
        "one chunk": {"chunks": (1200, 1200)},
        "misaligned": {"chunks": (500, 700)},
        "shards": {"chunks": (50, 50), "shards": (350, 250)},
        "version 2": {"chunks": (500, 700), "zarr_format": 2},
    }
    out = zarr.create_array(tmp_path / "c", shape=(1200, 1200), dtype="i8", **chunks[how])
    product = distmm.gram(a, out=out, client=client) if symmetric else distmm.matmul(a, b, out=out, client=client)
    assert product is out
    np.testing.assert_array_equal(out[:], a @ (a.T if symmetric else b))


def test_blocks_are_multiples_of_units_where_they_are_free(client: Client, tmp_path: Path) -> None:
    a, b = np.ones((3000, 500)), np.ones((500, 4000))
    out = zarr.create_array(tmp_path / "c", shape=(3000, 4000), chunks=(100, 50), shards=(700, 900), dtype="f8")
    plan = distmm.plan(a, b, out=out, client=client)
    assert (plan.block_shape[0] % 700, plan.block_shape[2] % 900) == (0, 0)
    assert plan.blocking.c_blocks >= 4
    out = zarr.create_array(tmp_path / "g", shape=(3000, 3000), chunks=(200, 300), dtype="f8")
    plan = distmm.plan(a, out=out, client=client)
    assert plan.block_shape[0] % 600 == 0
    # As many blocks as workers are worth more than whole units.
    out = zarr.create_array(tmp_path / "d", shape=(3000, 4000), chunks=(3000, 4000), dtype="f8")
    assert distmm.plan(a, b, out=out, client=client).blocking.c_blocks >= 4
    # Dask's chunks stay; what they leave free follows the units.
    out = zarr.create_array(tmp_path / "e", shape=(3000, 4000), chunks=(70, 90), dtype="f8")
    blocking = distmm.plan(da.from_array(a, chunks=(1000, 500)), b, out=out, client=client).blocking
    assert (set(blocking.m), blocking.n[0]) == ({1000}, 990)


def test_the_call_uses_the_plan_that_is_shown(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands(600, 50, 600)
    out = zarr.create_array(tmp_path / "c", shape=(600, 600), chunks=(90, 110), dtype="i8")
    shown, used = distmm.plan(a, b, out=out, client=client), []
    build = distmm.graph.product_graph.build
    monkeypatch.setattr(
        distmm.graph.product_graph,
        "build",
        lambda name, plan, *args, **how: used.append(plan) or build(name, plan, *args, **how),
    )
    distmm.matmul(a, b, out=out, client=client)
    assert [str(plan) for plan in used] == [str(shown)] * len(shown.waves)


def test_vectors_and_stacks_are_written_in_units(client: Client, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    for number, (sa, sb, chunks) in enumerate(
        (((40, 9), (9,), (7,)), ((9,), (9, 40), (7,)), ((9,), (9,), ()), ((6, 20, 9), (9, 15), (4, 7, 8)))
    ):
        a, b = rng.integers(0, 9, sa), rng.integers(0, 9, sb)
        out = zarr.create_array(tmp_path / str(number), shape=(a @ b).shape, chunks=chunks, dtype="i8")
        distmm.matmul(a, b, out=out, client=client, blocks=(15, 9, 11))
        np.testing.assert_array_equal(out[...], a @ b)


@pytest.mark.minutes
def test_one_process_writes_what_others_cannot(client: Client, tmp_path: Path) -> None:
    class Plain:
        """An array that says nothing of chunks, and that no other process has."""

        shape, dtype = (60, 50), np.dtype("i8")

        def __init__(self) -> None:
            self.values = np.zeros(self.shape, self.dtype)

        def __setitem__(self, index: Any, block: np.ndarray) -> None:
            self.values[index] = block

        def __getitem__(self, index: Any) -> np.ndarray:
            return self.values[index]

        def __reduce__(self) -> Any:
            raise AssertionError("sent to another process")

    a, b = operands(60, 20, 50)
    like: dict[str, Any] = {"shape": (60, 50), "chunks": (7, 9), "dtype": "i8"}
    with h5py.File(tmp_path / "c.h5", "w") as file:
        for out in (
            file.create_dataset("c", **like),
            zarr.create_array(zarr.storage.MemoryStore(), **like),
            zarr.create_array(zarr.storage.LoggingStore(zarr.storage.MemoryStore(), log_level="ERROR"), **like),
            Plain(),
        ):
            for cluster, text in ((client, "g2x2x1 b20x10x20 p1 w2 l2"), (None, None)):
                distmm.matmul(a, b, out=out, client=cluster, plan=text)
                np.testing.assert_array_equal(out[...], a @ b)


@pytest.mark.parametrize("clustered", [True, False])
def test_each_chunk_of_a_zip_file_is_written_once(client: Client, tmp_path: Path, clustered: bool) -> None:
    a, b = operands(60, 20, 50)
    store = zarr.storage.ZipStore(tmp_path / "c.zip", mode="w")  # warns of a second time
    out = zarr.create_array(store, shape=(60, 50), chunks=(7, 9), dtype="i8")
    distmm.matmul(a, b, out=out, client=client if clustered else None, blocks=(10, 10, 10))
    np.testing.assert_array_equal(out[...], a @ b)
    store.close()


def test_other_processes_are_not_asked_to_write_this_ones_memory() -> None:
    a, b = operands(60, 20, 50)
    with dask.config.set(scheduler="processes"), pytest.raises(InputError, match="cannot write into this ndarray"):
        distmm.matmul(a, b, out=np.zeros((60, 50), "i8"))


def test_chunks_that_no_worker_can_hold_are_refused(client: Client, tmp_path: Path) -> None:
    size = 16000
    out = zarr.create_array(tmp_path / "c", shape=(size, size), chunks=(size, size), dtype="i8")
    a = da.ones((size, 10), chunks=(4000, 10), dtype="i8")
    with pytest.raises(DoesNotFitError, match=r"out is written in chunks of 16000 x 16000, 2.05 GB each"):
        distmm.matmul(a, a.T, out=out, client=client)
