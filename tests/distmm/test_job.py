"""Products of matrices on disk: right in any mix of formats, refused early, and never half-written under C's name."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from distributed import Client

from distmm import job
from distmm.errors import DoesNotFitError, InputError, WrongResultError
from distmm.plan import Plan
from distmm.storage import hdf5, open_matrix

M, K, N = 97, 71, 83


def operand(shape: tuple[int, int], dtype: str = "float64", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


def save(path: Path, values: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".h5":
        with h5py.File(path, "w") as file:
            file["values"] = values
    else:
        zarr.create_array(path, data=values, chunks=(32, 24))
    return path


def pair(
    folder: Path, suffixes: tuple[str, str] = (".npy", ".zarr"), dtypes: tuple[str, str] = ("float64", "float64")
) -> Any:
    """Write A and B; return their paths and their product."""
    a, b = operand((M, K), dtypes[0], 1), operand((K, N), dtypes[1], 2)
    return save(folder / f"A{suffixes[0]}", a), save(folder / f"B{suffixes[1]}", b), a @ b


@pytest.mark.parametrize(
    ("suffixes", "out"),
    [
        ((".npy", ".npy"), "C.npy"),
        ((".zarr", ".h5"), "C.zarr"),
        ((".npy", ".zarr"), "C.h5"),
        ((".h5", ".npy"), "C.h5:/results/C"),
        ((".zarr", ".zarr"), "C"),
    ],
)
def test_any_mix_of_formats_gives_numpys_product(
    suffixes: tuple[str, str], out: str, client: Client, tmp_path: Path
) -> None:
    a, b, expected = pair(tmp_path, suffixes)
    plans: list[Plan] = []
    seen: list[tuple[int, int]] = []
    summary = job.multiply(
        a, b, tmp_path / out, client=client, blocks=(40, 20, 30), check="full",
        announce=plans.append, progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    np.testing.assert_array_equal(open_matrix(tmp_path / out)[...], expected)
    assert sorted(os.listdir(tmp_path)) == sorted([a.name, b.name, out.partition(":")[0]])
    assert plans == [summary.plan]
    assert seen[-1] == (plans[0].cost.tasks, plans[0].cost.tasks)
    assert summary.verdict is not None
    assert (summary.verdict.ok, summary.shape, summary.dtype) == (True, (M, N), np.float64)
    # Beside the blocks, the last task learns from each block's writer that it is done: 16 bytes each.
    assert 0 <= summary.bytes_moved - summary.plan.bytes_moved <= 16 * 9
    assert summary.plan.bytes_moved > 0
    assert [label for label, _ in summary.rows()] == ["time", "rate", "moved", "error", "C"]


def test_blocks_are_chosen_by_the_plan_and_become_the_chunks_of_c(client: Client, tmp_path: Path) -> None:
    a, b, expected = pair(tmp_path)
    summary = job.multiply(a, b, tmp_path / "C.zarr", client=client)
    stored = open_matrix(tmp_path / "C.zarr")
    np.testing.assert_array_equal(stored[...], expected)
    m, _, n = summary.plan.block_shape
    assert stored.chunks == (m, n)


def test_transposes_are_read_in_place(client: Client, tmp_path: Path) -> None:
    a, b = operand((K, M), seed=1), operand((N, K), seed=2)
    save(tmp_path / "A.npy", np.asfortranarray(a))
    save(tmp_path / "B.zarr", b)
    job.multiply(
        tmp_path / "A.npy", tmp_path / "B.zarr", tmp_path / "C.npy", client=client, transa=True, transb=True,
        blocks=(40, 20, 30), check="full",
    )  # fmt: skip
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), a.T @ b.T)


@pytest.mark.parametrize(
    "dtypes", [("int32", "float32"), ("int8", "int64"), ("float32", "complex64"), ("float16", "float16")]
)
def test_the_type_of_c_follows_numpy(dtypes: tuple[str, str], client: Client, tmp_path: Path) -> None:
    a, b, expected = pair(tmp_path, dtypes=dtypes)
    job.multiply(a, b, tmp_path / "C.npy", client=client, blocks=(64, 71, 64), check="full")
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), expected, strict=True)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 5, 3), (3, 0, 2), (4, 5, 0), (1, 1, 1)])
@pytest.mark.parametrize("out", ["C.npy", "C.zarr", "C.h5"])
def test_empty_and_single_matrices_are_products_too(
    m: int, k: int, n: int, out: str, client: Client, tmp_path: Path
) -> None:
    a, b = operand((m, k)), operand((k, n))
    job.multiply(save(tmp_path / "A.npy", a), save(tmp_path / "B.npy", b), tmp_path / out, client=client)
    np.testing.assert_array_equal(open_matrix(tmp_path / out)[...], a @ b, strict=True)


def test_c_may_replace_an_operand(client: Client, tmp_path: Path) -> None:
    a, b, expected = pair(tmp_path)
    job.multiply(a, b, a, client=client, overwrite=True, blocks=(40, 71, 40))
    np.testing.assert_array_equal(np.load(a), expected)


def test_an_unchecked_product_says_so(client: Client, tmp_path: Path) -> None:
    a, b, _ = pair(tmp_path)
    summary = job.multiply(a, b, tmp_path / "C.npy", client=client, check="none")
    assert summary.verdict is None
    assert dict(summary.rows())["error"] == "not checked"


def empty(path: Path, n: int) -> Path:
    """A file of zeros that takes no space on the disk."""
    np.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=(n, n)).flush()
    return path


def refuse(expected: type[Exception], message: str, folder: Path, *paths: Path, **options: Any) -> None:
    """The job must fail before work: no plan is announced, and the folder stays as it is."""
    before = sorted(os.listdir(folder))

    def announced(plan: Plan) -> None:
        pytest.fail("the work began")

    with pytest.raises(expected, match=message):
        job.multiply(*paths, announce=announced, **options)
    assert sorted(os.listdir(folder)) == before


def test_what_cannot_be_done_is_refused_before_any_work(client: Client, tmp_path: Path) -> None:
    a, b, _ = pair(tmp_path)
    c = save(tmp_path / "C.npy", np.arange(4.0).reshape(2, 2))
    refuse(InputError, "no such file", tmp_path, tmp_path / "nothing.npy", b, tmp_path / "D.npy", client=client)
    refuse(InputError, r"\(97, 71\).*\(97, 71\)", tmp_path, a, a, tmp_path / "D.npy", client=client)
    refuse(InputError, "exists", tmp_path, a, b, c, client=client)
    refuse(InputError, "no folder", tmp_path, a, b, tmp_path / "no" / "D.npy", client=client)
    refuse(InputError, "not one of freivalds", tmp_path, a, b, tmp_path / "D.npy", client=client, check="maybe")
    flags = save(tmp_path / "F.npy", np.ones((5, 5), bool))
    refuse(InputError, "boolean", tmp_path, flags, flags, tmp_path / "D.npy", client=client)
    long = empty(tmp_path / "long.npy", 4200)
    refuse(InputError, "full check", tmp_path, long, long, c, client=client, overwrite=True, check="full")
    large = empty(tmp_path / "large.npy", 40_000)
    refuse(DoesNotFitError, "short by", tmp_path, large, large, c, client=client, overwrite=True)
    np.testing.assert_array_equal(np.load(c), [[0, 1], [2, 3]])


def test_damaged_data_stop_the_job_and_leave_nothing_behind(client: Client, tmp_path: Path) -> None:
    a, b, _ = pair(tmp_path)
    (b / "c" / "1" / "2").write_bytes(b"rot")
    for out in ["C.zarr", "C.h5"]:
        with pytest.raises(InputError, match=r"B\.zarr: cannot read \[\d+:\d+, \d+:\d+\]"):
            job.multiply(a, b, tmp_path / out, client=client, blocks=(40, 20, 30))
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.zarr"]


def test_a_wrong_product_is_kept_under_a_name_that_says_so(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, expected = pair(tmp_path)
    c = save(tmp_path / "C.h5", expected + 7)
    write = hdf5.Hdf5Target._write

    def spoil(target: Any, rows: slice, cols: slice, block: np.ndarray) -> None:
        block = block.copy()
        block[0, 0] += 10_000 * (rows.start == 40 and cols.start == 30)
        write(target, rows, cols, block)

    monkeypatch.setattr(hdf5.Hdf5Target, "_write", spoil)
    with pytest.raises(WrongResultError, match=r"\[40, 30\].*kept as .*C\.wrong\.h5"):
        job.multiply(a, b, c, client=client, overwrite=True, blocks=(40, 20, 30))
    np.testing.assert_array_equal(open_matrix(c)[...], expected + 7)
    difference = open_matrix(tmp_path / "C.wrong.h5")[...] - expected
    assert np.flatnonzero(difference).tolist() == [40 * N + 30]
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.zarr", "C.h5", "C.wrong.h5"]


@pytest.mark.parametrize("out", ["C.zarr", "C.h5"])
def test_an_interrupt_stops_the_workers_and_removes_the_draft(out: str, client: Client, tmp_path: Path) -> None:
    a, b, _ = pair(tmp_path)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.multiply(a, b, tmp_path / out, client=client, blocks=(8, 8, 8), progress=interrupt)
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.zarr"]
    deadline = time.monotonic() + 5
    while any(client.processing().values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(client.processing().values())
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.zarr"]
