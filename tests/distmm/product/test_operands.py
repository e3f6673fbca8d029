"""What is no operand, no scalar and no wish is refused before any work, with the value and what to give instead."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import h5py
import ml_dtypes
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm.errors import InputError
from distmm.planning.problem import Problem
from distmm.product.choices import Choices
from distmm.product.operand import wrap
from distmm.product.operand_blocks import arriving
from distmm.product.operand_pair import pair
from distmm.product.request import PlanRequest
from distmm.product.resources import residence

A = np.arange(12.0).reshape(4, 3)
B = np.arange(15.0).reshape(3, 5)


def made_by(module: str, name: str, **attributes: Any) -> Any:
    """An object as another package makes it: `distmm` knows such by their types' names alone."""
    return type(name, (), {"__module__": module, **attributes})()


TABLE = {"shape": (4, 3), "__getitem__": lambda self, at: None, "dtypes": ["f8"] * 3}
SPARSE = {"shape": (4, 3), "dtype": np.dtype("f8"), "nnz": 0, "__getitem__": lambda self, at: None}

FOREIGN = [
    (made_by("pandas.core.frame", "DataFrame", **TABLE), r"A is a DataFrame of pandas.*A\.to_numpy\(\)"),
    (made_by("pandas.core.series", "Series", **SPARSE), r"A is a Series of pandas.*A\.to_numpy\(\)"),
    (made_by("polars.dataframe.frame", "DataFrame", **TABLE), r"A is a DataFrame of polars.*A\.to_numpy\(\)"),
    (made_by("dask.dataframe.dask_expr._collection", "DataFrame", **TABLE), r"A\.to_dask_array\(lengths=True\)"),
    (made_by("scipy.sparse._csr", "csr_array", **SPARSE), r"A is a csr_array of scipy.*A\.toarray\(\)"),
    (made_by("sparse.numba_backend._coo.core", "COO", **SPARSE), r"A is a COO of sparse.*A\.todense\(\)"),
    (dask.delayed(A), r"A is a DelayedLeaf of dask.*dask\.array\.from_delayed\(A, shape, dtype\)"),
    (made_by("distributed.client", "Future"), r"A is a Future of distributed.*from_delayed\(A, shape, dtype\)"),
    (made_by("xarray.core.dataset", "Dataset", data=A, dims=("x", "y")), r"A is a Dataset of xarray.*A\['variable'\]"),
    (made_by("torch", "Tensor", **{**SPARSE, "dtype": "torch.float32"}), "torch.float32, a type that NumPy does not"),
    ("A.zarr", r"A is a str of builtins, the name of a file: open it, as zarr\.open_array"),
    (Path("A.npy"), r"A is a PosixPath of pathlib, the name of a file: .*numpy\.load"),
    ([[1, 2], [3]], "A is a list that is not an array.*rows of the same length"),
]


@pytest.mark.parametrize(("operand", "message"), FOREIGN, ids=[type(operand).__name__ for operand, _ in FOREIGN])
def test_what_is_no_dense_array_is_refused_with_what_to_give_instead(operand: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.matmul(operand, B)
    with pytest.raises(InputError, match=re.sub(r"\bA\b", "B", message)):
        distmm.plan(A.T, operand)


@pytest.mark.parametrize("data", [A, da.from_array(A, chunks=2)], ids=["numpy", "dask"])
def test_the_data_of_xarray_objects_are_multiplied(data: Any) -> None:
    labelled = made_by("xarray.core.dataarray", "DataArray", data=data, dims=("x", "y"), shape=(4, 3), dtype=A.dtype)
    with dask.config.set(scheduler="synchronous"):
        np.testing.assert_array_equal(distmm.matmul(labelled, B).compute(), A @ B)
        np.testing.assert_array_equal(distmm.gemm(1, A, B, 1, A[:, :1] * 0 + 1).compute(), A @ B + 1)
        np.testing.assert_array_equal(distmm.gram(labelled).compute(), A @ A.T)


def test_a_data_array_of_xarray_becomes_a_dask_array() -> None:
    xarray = pytest.importorskip("xarray")
    with dask.config.set(scheduler="synchronous"):
        for data in (A, da.from_array(A, chunks=2)):
            left, right = xarray.DataArray(data, dims=("x", "y")), xarray.DataArray(data, dims=("y", "x"))
            product = distmm.matmul(left, right.T, precision="ieee")  # NumPy's product: "x" and "y" are not matched
            assert isinstance(product, da.Array)
            np.testing.assert_array_equal(product.compute(), A @ A.T)


def test_a_file_that_is_open_for_writing_is_no_operand_of_a_cluster(client: Client, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = A, A @ B
        refused = r"dataset /[xy] of .*a\.h5, which is open for writing \(r\+\).*h5py\.File"
        for operands in ((file["x"], B), (B.T, file["x"], 0), (A, B, 1, file["y"])):
            with pytest.raises(InputError, match=refused):
                distmm.gemm(1, *operands, transb=len(operands) == 3, client=client)
        with client.as_current():
            with pytest.raises(InputError, match=refused):
                distmm.verify(A, B, file["y"])
            with pytest.raises(InputError, match=refused):
                distmm.multiply(file["x"], B, tmp_path / "c.zarr", client=client)
        assert not (tmp_path / "c.zarr").exists()
        with dask.config.set(scheduler="synchronous"):  # this process reads it itself
            np.testing.assert_array_equal(distmm.matmul(file["x"], B).compute(), A @ B)
    with h5py.File(tmp_path / "a.h5", "r") as file, client.as_current():
        np.testing.assert_array_equal(distmm.matmul(file["x"], B).compute(), A @ B)


@pytest.mark.parametrize("driver", ["stdio", "core"])
def test_a_file_that_another_driver_has_opened_is_no_operand_of_a_cluster(
    driver: str, client: Client, tmp_path: Path
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = A
    with h5py.File(tmp_path / "a.h5", "r", driver=driver) as file:
        with pytest.raises(InputError, match=rf"the driver '{driver}' has opened: open it by its path"):
            distmm.matmul(file["x"], B, client=client)
        with dask.config.set(scheduler="synchronous"):  # this process reads it itself
            np.testing.assert_array_equal(distmm.matmul(file["x"], B).compute(), A @ B)


@pytest.mark.parametrize("letter", ["N", "T", "C", 1, None])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("transa", lambda flag: distmm.gemm(1, A, B, transa=flag)),
        ("transb", lambda flag: distmm.gemm(1, A, B, transb=flag)),
        ("transb", lambda flag: distmm.plan(A, B, transb=flag)),
        ("trans", lambda flag: distmm.gram(A, trans=flag)),
        ("hermitian", lambda flag: distmm.gram(A, hermitian=flag)),
        ("transa", lambda flag: distmm.verify(A, B, A @ B, transa=flag)),
    ],
)
def test_letters_of_blas_are_no_flags(name: str, call: Callable[[Any], Any], letter: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is {letter!r}: give True or False"):
        call(letter)


BYTES = np.ones((2, 2), "i1")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: distmm.gemm(1000, BYTES, BYTES), "alpha is 1000, and the product int8, which cannot represent it"),
        (lambda: distmm.gemm(-1, BYTES.astype("u1"), BYTES.astype("u1")), "alpha is -1, and the product uint8"),
        (lambda: distmm.gemm(2, BYTES, BYTES, 300, BYTES), "beta is 300, and the product int8"),
        (lambda: distmm.gram(BYTES, alpha=128), "alpha is 128, and the product int8"),
        (lambda: distmm.gemm(10**400, A, B), "alpha is 1000"),
        (lambda: distmm.gemm(Fraction(1, 3), A, B), r"alpha is Fraction\(1, 3\), a Fraction.*float\(alpha\)"),
        (lambda: distmm.gemm(1, A, B, Fraction(1, 3), A @ B), r"beta is Fraction\(1, 3\).*float\(beta\)"),
        (lambda: distmm.gemm(np.ones(3), A, B), "alpha is array.*must be a number"),
        (lambda: distmm.gemm(A, B, np.ones((3, 3))), "(?s)alpha is array.*must be a number"),
    ],
)
def test_scalars_that_the_product_cannot_hold_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_scalars_of_a_wider_type_make_the_product_wider() -> None:
    with dask.config.set(scheduler="synchronous"):
        c = distmm.gemm(np.int64(1000), BYTES, BYTES).compute()
        assert (distmm.gemm(127, BYTES, BYTES).compute() == np.int8(-2)).all()  # 127 * 2, as in NumPy
    np.testing.assert_array_equal(c, np.full((2, 2), 2000))


@pytest.mark.parametrize("other", ["i4", "i2", "f2"])
def test_types_have_the_product_that_numpy_gives_them_and_are_refused_without_one(other: str) -> None:
    a, b = np.ones((2, 2), ml_dtypes.bfloat16), np.ones((2, 2), other)
    try:
        wide = np.result_type(a, b)
    except TypeError:  # ml_dtypes before 0.7
        with pytest.raises(InputError, match=f"A is bfloat16, B is {np.dtype(other)}: NumPy has no type.*astype"):
            distmm.matmul(a, b)
        with pytest.raises(InputError, match="A is bfloat16, B is"):
            distmm.plan(a, b)
    else:
        assert distmm.matmul(a, b).dtype == distmm.plan(a, b).problem.dtype == wide


@pytest.mark.parametrize("blocks", [16, 16.0, "abc", (1.5, 1, 1), (2.0, 2.0, 2.0), (1, None, 1), (1, 2, 3, 4)])
def test_blocks_that_are_no_edges_are_refused(blocks: Any) -> None:
    with pytest.raises(InputError, match=r"blocks .*: give three positive edges"):
        distmm.matmul(A, B, blocks=blocks)
    with pytest.raises(InputError, match=r"blocks is .*: give two positive edges"):
        distmm.gram(A, blocks=blocks)


@pytest.mark.parametrize("plan", [5, ("g1x1x1",), b"g1x1x1"])
def test_what_is_no_plan_is_refused(plan: Any) -> None:
    with pytest.raises(InputError, match=r"plan is .*: give one that distmm\.plan has made, or its text"):
        distmm.matmul(A, B, plan=plan)


class Locked:
    """An array-like with a lock, which cannot be pickled."""

    shape, dtype, ndim = (6, 6), np.dtype("f8"), 2

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.ones(self.shape)[index]


def test_operands_that_cannot_be_sent_are_refused_by_name(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    b, lock = np.ones((6, 6)), threading.Lock()
    made = da.ones((6, 6), chunks=3)
    for x in (
        Locked(),
        da.from_array(Locked(), chunks=3, name=f"locked-{id(lock)}"),
        made.map_blocks(lambda block: block * bool(lock), dtype="f8", meta=np.empty((0, 0))) + 1,
    ):
        for call in (distmm.matmul, partial(distmm.threshold, t=1e9), partial(distmm.matmul, out=np.zeros((6, 6)))):
            with pytest.raises(InputError, match=r"^A cannot be sent to workers \(.*'_thread.lock' object"):
                call(x, b, client=client)
            with pytest.raises(InputError, match=r"^B cannot be sent to workers"):
                call(b, x, client=client)
        assert distmm.matmul(x, b).compute(scheduler="synchronous").min() >= 6  # this process needs no copy
    functions = (lambda c, first: c.max(axis=-1) * bool(first or lock)), (lambda parts: parts[0]), (lambda part: part)
    with pytest.raises(InputError, match=r"^how cannot be sent to workers"):
        distmm.reduce(b, b, functions, client=client)
    assert not caplog.records


def test_operands_get_the_plans_blocks_in_tasks_whatever_dask_would_do(client: Client) -> None:
    x = np.arange(120 * 60).reshape(120, 60) % 9.0
    lines, plan = da.from_array(x, chunks=(1, 60)), "g2x1x1 b60x30x60 p1 w1 l2"
    with client.as_current(), dask.config.set({"array.rechunk.method": "p2p"}):
        made = {
            "A and B": (distmm.matmul(lines, lines.T, plan=plan), x @ x.T),
            "C": (distmm.gemm(1, lines, lines.T, 1, da.ones((120, 120), chunks=(1, 120)), plan=plan), x @ x.T + 1),
            "labels": (distmm.einsum("ij,kj->ik", lines, lines), x @ x.T),
        }
        for name, (lazy, expected) in made.items():
            assert not [layer for layer in lazy.dask.layers if "p2p" in layer], name
            np.testing.assert_array_equal(lazy[:50].compute(), expected[:50], err_msg=name)


def test_only_blocks_that_are_persisted_count_as_resident(client: Client) -> None:
    X = da.ones((60, 60), chunks=20).persist(scheduler=client)
    v = da.ones(60, chunks=20).persist(scheduler=client)
    arrays = {"X": X, "X.T": X.T, "-X": -X, "centred": X - X.mean(0), "half": X[:40], "lazy": da.ones_like(X)}
    planned = {name: distmm.plan(array, X, client=client).operands[0] for name, array in arrays.items()}
    made = dict.fromkeys(("-X", "centred"), "made")
    assert planned == {"X": "resident", "X.T": "resident", "half": "loaded", "lazy": "loaded"} | made
    assert distmm.plan(v, X, client=client).operands[0] == "resident"


def test_gpus_multiply_copies_of_numpy_blocks_that_are_persisted(client: Client) -> None:
    X = wrap(da.ones((60, 60), chunks=20).persist(scheduler=client), "A")
    request = PlanRequest(Problem(60, 60, 60, np.dtype("f8")), X, X, Choices())
    cuts = (20,) * 3, (20,) * 3
    assert residence(X, cuts, request, streamed=False, device="cuda") == "made"
    assert residence(X, cuts, request, streamed=False, device="cpu") == "resident"


def test_a_matrix_and_its_transpose_are_read_as_the_same_blocks_however_they_are_given() -> None:
    X = da.ones((40, 40), chunks=20)
    for A, B, transa, transb in product((X, X.T), (X, X.T), (False, True), (False, True)):
        found = [arriving(x, x.chunks or (), "cpu", None) for x in pair(A, B, transa, transb)[:2]]
        turned = [(x is not X) != flag for x, flag in ((A, transa), (B, transb))]
        assert [(array.name, form == "transpose") for array, form in found] == [(X.name, each) for each in turned]
