"""Products of matrices on disk: right in any mix of formats, refused early, and never half-written under C's name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import h5py
import numpy as np
import pytest
import zarr
from distributed import Client

from distmm import job
from distmm.errors import DoesNotFitError, InputError
from distmm.graph import product_graph
from distmm.planning.plan import Plan
from distmm.storage import open_matrix
from tests.distmm.storage.samples import save_matrix as save
from tests.tables import later

M, K, N = 97, 71, 83


def operand(shape: tuple[int, int], dtype: str = "float64", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


def pair(
    folder: Path, suffixes: tuple[str, str] = (".npy", ".zarr"), dtypes: tuple[str, str] = ("float64", "float64")
) -> Any:
    """Write A and B; return their paths and their product."""
    a, b = operand((M, K), dtypes[0], 1), operand((K, N), dtypes[1], 2)
    return save(folder / f"A{suffixes[0]}", a), save(folder / f"B{suffixes[1]}", b), a @ b


def beside(out: str) -> list[str]:
    """What a finished job leaves."""
    file = out.partition(":")[0]
    return [file, f"{file}.certificate.json", f"{file}.report.html"]


@pytest.mark.parametrize(
    ("suffixes", "out"),
    later(
        [
            ((".zarr", ".h5"), "C.zarr"),
            ((".npy", ".zarr"), "C.h5"),
            ((".npy", ".npy"), "C.npy"),
            ((".h5", ".npy"), "C.h5:/results/C"),
            ((".zarr", ".zarr"), "C"),
        ],
        first=2,
    ),
)
def test_any_mix_of_formats_gives_numpys_product(
    suffixes: tuple[str, str], out: str, client: Client, tmp_path: Path
) -> None:
    a, b, expected = pair(tmp_path, suffixes)
    plans: list[Plan] = []
    seen: list[tuple[int, int]] = []
    summary = job.multiply(
        a, b, tmp_path / out, client=client, blocks=(40, 40, 30),
        announce=lambda plan, flops: plans.append(plan), progress=lambda f: seen.append((f.done, f.total)),
    )  # fmt: skip
    np.testing.assert_array_equal(open_matrix(tmp_path / out)[...], expected)
    assert sorted(os.listdir(tmp_path)) == sorted([a.name, b.name, *beside(out)])
    assert plans == [summary.plan]
    assert seen[-1] == (plans[0].schedule.tasks, plans[0].schedule.tasks)
    assert (summary.shape, summary.dtype, summary.blocks, summary.kept) == ((M, N), np.float64, 9, 0)
    assert summary.residual is not None
    assert summary.residual <= 1
    # Beside the blocks of A and B, their sketches travel: two vectors and some sums a block.
    steps, sketch = 2, 8 * (40 * (2 * 3 + 1) + 3)
    assert 0 <= summary.bytes_moved - plans[0].bytes_moved <= 2 * 9 * steps * sketch
    assert plans[0].bytes_moved > 0
    assert [label for label, _ in summary.rows()] == [
        "time",
        "rate",
        "moved",
        "blocks",
        "error",
        "C",
        "certificate",
        "report",
    ]


def test_blocks_are_chosen_by_the_plan_and_become_the_chunks_of_c(client: Client, tmp_path: Path) -> None:
    a, b, expected = pair(tmp_path)
    summary = job.multiply(a, b, tmp_path / "C.zarr", client=client)
    stored = open_matrix(tmp_path / "C.zarr")
    np.testing.assert_array_equal(stored[...], expected)
    m, _, n = summary.plan.block_shape
    assert stored.chunks == (m, n)


@pytest.mark.minutes
def test_waves_of_a_job_are_one_run_for_the_places_of_its_workers(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, expected = pair(tmp_path)
    build, runs = product_graph.build, []

    def noted(*args: Any, run: str, **kwargs: Any) -> Any:
        runs.append(run)
        return build(*args, run=run, **kwargs)

    monkeypatch.setattr(product_graph, "build", noted)
    job.multiply(a, b, tmp_path / "C.zarr", client=client, plan="g2x2x1 b16x32x16 p1 w2x2 l2")
    np.testing.assert_array_equal(open_matrix(tmp_path / "C.zarr")[...], expected)
    assert len(runs) == 4
    assert len(set(runs)) == 1


def test_transposes_are_read_in_place(client: Client, tmp_path: Path) -> None:
    a, b = operand((K, M), seed=1), operand((N, K), seed=2)
    save(tmp_path / "A.npy", np.asfortranarray(a))
    save(tmp_path / "B.zarr", b)
    job.multiply(
        tmp_path / "A.npy", tmp_path / "B.zarr", tmp_path / "C.npy", client=client, transa=True, transb=True,
        blocks=(40, 40, 30), check="full",
    )  # fmt: skip
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), a.T @ b.T)


@pytest.mark.parametrize(
    "dtypes",
    later(
        (pair,) for pair in [("int32", "float32"), ("int8", "int64"), ("float32", "complex64"), ("float16", "float16")]
    ),
)
def test_the_type_of_c_follows_numpy(dtypes: tuple[str, str], client: Client, tmp_path: Path) -> None:
    a, b, expected = pair(tmp_path, dtypes=dtypes)
    job.multiply(a, b, tmp_path / "C.npy", client=client, blocks=(64, 71, 64), check="full")
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), expected, strict=True)


@pytest.mark.parametrize(
    ("m", "k", "n", "out"),
    later(
        [(0, 5, 3, "C.npy"), (3, 0, 2, "C.zarr"), (4, 5, 0, "C.h5"), (0, 5, 3, "C.zarr"), (1, 1, 1, "C.h5")], first=2
    ),
)
def test_empty_and_single_matrices_are_products_too(
    m: int, k: int, n: int, out: str, client: Client, tmp_path: Path
) -> None:
    a, b = operand((m, k)), operand((k, n))
    job.multiply(save(tmp_path / "A.npy", a), save(tmp_path / "B.npy", b), tmp_path / out, client=client)
    np.testing.assert_array_equal(open_matrix(tmp_path / out)[...], a @ b, strict=True)


@pytest.mark.parametrize(
    ("alpha", "beta", "out"),
    later([(3, 1, "C.zarr"), (-2, 0, "C.npy"), (np.float32(0.5), np.float64(-1.5), "C.h5"), (0, np.int64(2), "C.npy")]),
)
def test_beta_adds_the_c_that_is_there(alpha: float, beta: float, out: str, client: Client, tmp_path: Path) -> None:
    a, b, product = pair(tmp_path)
    before = operand((M, N), seed=3)
    save(tmp_path / out, before)
    summary = job.multiply(
        a, b, tmp_path / out, client=client, alpha=alpha, beta=beta, blocks=(np.int64(40), 40, 30),
        overwrite=beta == 0, seed=np.int64(1),
    )  # fmt: skip
    np.testing.assert_array_equal(open_matrix(tmp_path / out)[...], alpha * product + beta * before)
    assert job.recheck(tmp_path / out, seed=np.int64(2)).outcome == ("right" if beta == 0 else "cannot tell")
    assert summary.residual is not None
    if out == "C.h5":
        with h5py.File(tmp_path / out) as file:
            assert list(file) == ["values"]


@pytest.mark.parametrize(
    ("dtypes", "dtype"),
    later([("f4f4", "float64"), ("i1i1", "int32"), ("i4i4", "float32"), ("f4f4", "float16"), ("f4f4", ">f4")]),
)
def test_c_may_have_another_type(dtypes: str, dtype: str, client: Client, tmp_path: Path) -> None:
    a, b, _ = pair(tmp_path, dtypes=(dtypes[:2], dtypes[2:]))
    job.multiply(a, b, tmp_path / "C.npy", client=client, blocks=(64, 30, 64), dtype=dtype)
    exact = np.load(a).astype("f8") @ operand((K, N), dtypes[2:], 2).astype("f8")
    native = np.dtype(dtype).newbyteorder("=")  # a job that is asked again finds its C whole, in any byte order
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), exact.astype(native), strict=True)
    assert job.multiply(a, b, tmp_path / "C.npy", client=client, blocks=(64, 30, 64), dtype=dtype).plan is None


def test_arrays_of_a_program_are_operands_too(client: Client, tmp_path: Path) -> None:
    a, b = operand((M, K)), operand((K, N), seed=1)
    lazy = da.from_array(a, chunks=(50, 17)).map_blocks(np.negative)
    job.multiply(lazy, b, tmp_path / "C.zarr", client=client)
    np.testing.assert_array_equal(open_matrix(tmp_path / "C.zarr")[...], -a @ b)


def test_uneven_chunks_of_an_operand_do_not_make_uneven_chunks_of_c(client: Client, tmp_path: Path) -> None:
    a, b = operand((M, K)), operand((K, N), seed=1)
    ragged = da.from_array(a, chunks=((10, 50, 37), (30, 41)))
    job.multiply(ragged, da.from_array(b, chunks=40), tmp_path / "C.zarr", client=client)
    np.testing.assert_array_equal(open_matrix(tmp_path / "C.zarr")[...], a @ b)


@pytest.mark.minutes
def test_a_member_of_a_zarr_group_is_made_beside_the_group(client: Client, tmp_path: Path) -> None:
    a, b, expected = pair(tmp_path)
    zarr.open_group(tmp_path / "all.zarr", mode="w").create_group("sub").create_array("A", data=np.load(a))
    out = tmp_path / "all.zarr" / "sub" / "C"
    job.multiply(tmp_path / "all.zarr" / "sub" / "A", b, out, client=client, blocks=(40, 40, 30))
    np.testing.assert_array_equal(open_matrix(out)[...], expected)
    assert set(zarr.open_group(tmp_path / "all.zarr", mode="r")["sub"].array_keys()) == {"A", "C"}
    assert sorted(os.listdir(tmp_path)) == [
        "A.npy",
        "B.zarr",
        "all.zarr",
        "all.zarr.sub.C.certificate.json",
        "all.zarr.sub.C.report.html",
    ]


def test_an_unchecked_product_says_so(client: Client, tmp_path: Path) -> None:
    a, b, _ = pair(tmp_path)
    summary = job.multiply(a, b, tmp_path / "C.npy", client=client, check="none")
    assert (summary.residual, summary.certificate) == (None, None)
    assert dict(summary.rows())["error"] == "not checked"
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.zarr", "C.npy", "C.npy.report.html"]


def empty(path: Path, n: int) -> Path:
    """A file of zeros that takes no space on the disk."""
    np.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=(n, n)).flush()
    return path


def refuse(expected: type[Exception], message: str, folder: Path, *paths: Path, **options: Any) -> None:
    """The job must fail before work: no plan is announced, and the folder stays as it is."""
    before = sorted(os.listdir(folder))

    def announced(plan: Plan, flops: float) -> None:
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
    for seed in (-1, np.int64(-1), 1.5):
        refuse(InputError, f"seed is .*{seed}", tmp_path, a, b, tmp_path / "D.npy", client=client, seed=seed)
    refuse(InputError, "alpha is '2'", tmp_path, a, b, tmp_path / "D.npy", client=client, alpha="2")
    flags = save(tmp_path / "F.npy", np.ones((5, 5), bool))
    refuse(InputError, "boolean", tmp_path, flags, flags, tmp_path / "D.npy", client=client)
    long = empty(tmp_path / "long.npy", 4200)
    refuse(InputError, "full check", tmp_path, long, long, c, client=client, overwrite=True, check="full")
    large = empty(tmp_path / "large.npy", 40_000)
    whole = {"blocks": (40_000, 40_000, 40_000), "overwrite": True}  # of edges that were left free, waves would fit
    refuse(DoesNotFitError, "short by", tmp_path, large, large, c, client=client, **whole)
    refuse(InputError, r"C has shape \(2, 2\)", tmp_path, a, b, c, client=client, beta=1)
    refuse(InputError, "cannot represent", tmp_path, a, b, tmp_path / "E.npy", client=client, dtype="int32")
    d = save(tmp_path / "D.npy", np.ones((M, N)))
    refuse(InputError, "a full check does not support", tmp_path, a, b, d, client=client, beta=1, check="full")
    np.testing.assert_array_equal(np.load(c), [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "C.npy: exists; give another name"),
        ({"plan": "nope"}, "plan 'nope' does not fit"),
        ({"kernel": "nope"}, "kernel 'nope' is not one of"),
        ({"stop": 55}, "stop is 55: give an object"),
        ({"overwrite": "no"}, "overwrite is 'no': give True or False"),
        ({"stop": 0}, "stop is 0: give an object"),
        ({"kernel": "tiled", "device": "cpu"}, "kernel 'tiled' needs device 'gpu', and the device is 'cpu'"),
        ({"kernel": "cpu", "device": "gpu"}, "kernel 'cpu' needs device 'cpu', and the device is 'gpu'"),
        ({"kernel": "hopper_bf16"}, "kernel 'hopper_bf16' does not multiply float64, but "),
    ],
)
def test_an_existing_output_and_wrong_choices_are_refused_before_a_cluster_starts(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    names = [tmp_path / f"{name}.npy" for name in "ABC"]
    for name in names if not options else names[:2]:
        np.save(name, np.ones((4, 4)))

    def connect() -> Any:
        raise AssertionError("a cluster starts")

    with pytest.raises(InputError, match=message):
        job.multiply(*names, connect=connect, **options)


@pytest.mark.parametrize("verb", ["multiply", "topk"])
def test_an_output_that_appears_while_the_cluster_starts_is_refused_before_any_work(
    verb: str, client: Client, tmp_path: Path
) -> None:
    a, b = (save(tmp_path / f"{name}.npy", np.ones((4, 4))) for name in "AB")
    c = tmp_path / "C.zarr"

    @contextmanager
    def connect() -> Iterator[Client]:
        c.mkdir()
        yield client

    def announce(*_: Any) -> None:
        raise AssertionError("work starts")

    call = partial(job.multiply, a, b) if verb == "multiply" else partial(job.topk, a, b, 2)
    with pytest.raises(InputError, match=r"C.zarr: exists; give another name"):
        call(c, connect=connect, announce=announce)
    assert os.listdir(c) == []
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.npy", "C.zarr"]
