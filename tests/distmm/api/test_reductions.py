"""Reductions of products that nobody holds: what NumPy has, for any blocks, workers and waves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import zarr
from distributed import Client

import distmm
from distmm import InputError
from distmm.clusters.hardware import cpus
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.product.choices import Choices
from distmm.product.operand import wrap
from distmm.product.product import Gemm
from distmm.product.resources import _with_room_for_parts
from distmm.storage import open_matrix
from distmm.worker.tasks.rows import WORKSPACE
from tests.distmm.api.reduced import TEXTS, best, compute, operands
from tests.tables import later


@pytest.mark.parametrize("text", TEXTS)
def test_topk_is_that_of_the_whole_product(client: Client, text: str) -> None:
    a, b = operands()
    values, indices = compute(client, distmm.topk(a, b, 6, plan=TEXTS[text], client=client))
    np.testing.assert_array_equal(indices, best(a @ b, 6))
    np.testing.assert_array_equal(values, np.take_along_axis(a @ b, indices, axis=1))
    assert (values.dtype, indices.dtype) == (np.float32, np.int64)


@pytest.mark.parametrize("where", ["workers", "threads"])
def test_topk_computes_both_arrays_at_once(client: Client, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    persisted: list[Any] = []
    persist = dask.persist
    monkeypatch.setattr(dask, "persist", lambda *arrays: persist(*(persisted.append(arrays) or arrays)))
    a, b = operands()
    on = client if where == "workers" else None
    with client.as_current() if on else dask.config.set(scheduler="threads"):
        values, indices = distmm.topk(a, b, 6, plan=TEXTS["one worker"], client=on).compute()
    np.testing.assert_array_equal(indices, best(a @ b, 6))
    np.testing.assert_array_equal(values, np.take_along_axis(a @ b, indices, axis=1))
    assert values.flags.writeable
    assert len(persisted) == 1  # of both


def test_compute_of_topk_raises_the_error_of_a_failed_operand(client: Client) -> None:
    def load(block_info: Any = None) -> Any:
        raise OSError("the disk is lost")

    a = da.map_blocks(load, chunks=((20, 14), (20,)), dtype="f4", meta=np.empty((0, 0), "f4"))
    with client.as_current(), pytest.raises(OSError, match="the disk is lost"):
        distmm.topk(a, operands()[1], 6, client=client).compute()


@pytest.mark.parametrize("k", [1, 17, 40])
def test_k_may_be_as_large_as_rows_are(k: int) -> None:
    a, b = operands()
    _, indices = compute(None, distmm.topk(a, b, k, plan=TEXTS["one worker"]))
    np.testing.assert_array_equal(indices, best(a @ b, k))


def test_nan_comes_first_as_in_the_order_of_numpy() -> None:
    a, b = operands()
    b[0, [5, 35]] = np.nan
    a[0, 0] = 0  # NaN times zero is NaN, too
    _, indices = compute(None, distmm.topk(a, b, 3, plan=TEXTS["one worker"]))
    np.testing.assert_array_equal(indices[:, :2], [[5, 35]] * 34)


def test_batches_have_lines_of_their_own(client: Client) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.integers(-3, 4, (3, 2, 20, 6)).astype("f4"), rng.integers(-3, 4, (2, 6, 30)).astype("f4")
    text = "g2x1x1 b1x2x16x6x16 p1 w1 l2"
    _, indices = compute(client, distmm.topk(a, b, 3, plan=text, client=client))
    np.testing.assert_array_equal(indices, best(a @ b, 3))
    sums = distmm.reduce(a, b, "sum", axis=-2, plan=text).compute()
    np.testing.assert_array_equal(sums, (a @ b).sum(axis=-2))


@pytest.mark.parametrize("axis", later([-1, -2]))
@pytest.mark.parametrize("text", ["split k", "no cluster"])
def test_lines_are_reduced_as_by_numpy(client: Client, axis: int, text: str) -> None:
    with_cluster = None if text == "no cluster" else client
    a, b = operands()
    C, bins = a @ b, np.arange(-20, 21, 4.0)
    common: dict[str, Any] = {"plan": TEXTS.get(text, TEXTS["waves"]), "client": with_cluster}
    asked = {how: distmm.reduce(a, b, how, axis=axis, **common) for how in ("max", "sum", "norm")}
    asked["argmax"] = distmm.reduce(a, b, "argmax", axis=axis + 2, **common)
    asked["histogram"] = distmm.reduce(a, b, "histogram", bins=bins, axis=axis, **common)
    found = dict(zip(asked, compute(with_cluster, asked.values()), strict=True))
    lines = C if axis == -1 else C.T
    np.testing.assert_array_equal(found["max"], C.max(axis))
    np.testing.assert_array_equal(found["argmax"], C.argmax(axis))
    np.testing.assert_array_equal(found["sum"], C.sum(axis))
    np.testing.assert_array_equal(found["histogram"], [np.histogram(line, bins)[0] for line in lines])
    np.testing.assert_allclose(found["norm"], np.linalg.norm(C, axis=axis), rtol=1e-6)
    assert all(found[how].dtype == asked[how].dtype for how in asked)
    assert all(found[how].shape == asked[how].shape for how in asked)


def extremes(block: Any, first: int) -> tuple[Any, Any]:
    """The smallest element of each line, and where it is."""
    return block.min(axis=-1), block.argmin(axis=-1) + first


def smaller(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    least, at = (np.stack(each) for each in zip(*parts, strict=True))
    chosen = least.argmin(axis=0)[None]
    return np.take_along_axis(least, chosen, 0)[0], np.take_along_axis(at, chosen, 0)[0]


@pytest.mark.parametrize("axis", [0, 1])
def test_functions_of_the_users_own_reduce_lines(client: Client, axis: int) -> None:
    a, b = operands()
    own = (extremes, smaller, lambda part: np.stack(part, axis=-1))
    lazy = distmm.reduce(a, b, own, axis=axis, dtype="i8", shape=(2,), plan=TEXTS["waves"], client=client)
    found = client.compute(lazy, sync=True)
    assert (lazy.shape, lazy.dtype) == (found.shape, found.dtype)
    np.testing.assert_array_equal(found[:, 0], (a @ b).min(axis))
    np.testing.assert_array_equal(found[:, 1], (a @ b).argmin(axis))


@pytest.mark.bits
def test_rounded_sums_have_the_same_bits_for_any_number_of_workers_and_waves(client: Client) -> None:
    a, b = operands()
    a /= 3
    found = []
    for text in ("g1x1x1 b34x20x4 p1 w1 l2", "g1x2x1 b34x20x4 p1 w1 l2", "g1x4x1 b34x20x4 p1 w1x2 l2"):
        sums = distmm.reduce(a, b, "sum", plan=text, client=client)
        norms = distmm.reduce(a, b, "norm", plan=text, client=client)
        found.append(client.compute([sums, norms], sync=True))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize(
    ("kind", "metric"),
    later(
        [
            *((kind, "euclidean") for kind in ("numpy", "dask", "zarr", "itself")),
            ("numpy", "inner"),
            *((kind, "cosine") for kind in ("dask", "itself")),
        ],
        first=3,
    ),
)
def test_nearest_rows_are_found(client: Client, metric: Any, kind: str, tmp_path: Any) -> None:
    rng = np.random.default_rng(6)
    x, y = rng.standard_normal((40, 12)), rng.standard_normal((60, 12))
    y = x if kind == "itself" else y
    given: list[Any] = [x, y]
    if kind == "dask":
        given = [da.from_array(x, chunks=(16, 12)), da.from_array(y, chunks=(16, 5))]
    elif kind == "zarr":
        given = [zarr.array(each, store=tmp_path / f"{at}.zarr", chunks=(16, 12)) for at, each in enumerate((x, y))]
    elif kind == "itself":
        given[1] = None
    blocks = {"blocks": (16, 12) if kind == "itself" else (16, 12, 16)} if kind != "dask" else {}
    values, indices = compute(client, distmm.nearest(*given, 5, metric, client=client, **blocks))
    inner = x @ y.T
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)
    distances = np.linalg.norm(x[:, None] - y, axis=-1)
    truth = {"inner": inner, "cosine": inner / lengths, "euclidean": distances}[metric]
    expected = best(-truth if metric == "euclidean" else truth, 5)
    np.testing.assert_array_equal(indices, expected)
    # a row's distance to itself is the square root of a rounding error
    np.testing.assert_allclose(values, np.take_along_axis(truth, expected, axis=1), rtol=1e-7, atol=1e-6)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize(
    ("scale", "dtype", "text"),
    [
        (1e3, "f2", "waves"),
        (1e25, "f4", "waves"),
        (1e-25, "f4", "itself"),
        (1e25, ml_dtypes.bfloat16, "split k"),
        (10.0 ** np.arange(-25, 26), "f4", "split k"),
        (10.0 ** np.arange(-25, 26), "f4", "itself"),
    ],
)
def test_metrics_are_those_of_float64_where_products_leave_the_type(
    metric: Any, scale: Any, dtype: Any, text: str
) -> None:
    rng = np.random.default_rng(8)
    x, y = (rng.standard_normal((n, 20)) * rng.choice(np.atleast_1d(scale), (n, 1)) for n in (34, 40))
    x[2], y[3] = 0, 0
    x, y = x.astype(dtype), y.astype(dtype)
    itself = text == "itself"
    given, plan = ((x, None), "g2x1x1 b16x10x16 p1 w2 l2") if itself else ((x, y), TEXTS[text])
    wide, other = x.astype(float), (x if itself else y).astype(float)
    of_rows, of_columns = (np.linalg.norm(each, axis=1) for each in (wide, other))
    with np.errstate(invalid="ignore"):
        cosines = np.nan_to_num(wide @ other.T / np.outer(of_rows, of_columns))
    # Squares, larger for nearer rows. A square of a distance has the error of those of the norms.
    truth = cosines if metric == "cosine" else -(((wide[:, None] - other) ** 2).sum(axis=-1))
    error = 1e-6 * (1 if metric == "cosine" else of_rows[:, None] ** 2 + of_columns**2)

    found = distmm.nearest(*given, 5, metric, plan=plan)
    assert found.values.dtype == np.float32
    values, indices = compute(None, found)
    own = np.take_along_axis(truth, indices, axis=1)
    allowed = error if metric == "cosine" else np.take_along_axis(error, indices, axis=1)
    squares = values if metric == "cosine" else -(values.astype(float) ** 2)
    assert (abs(squares - own) <= allowed).all()
    assert (own >= np.take_along_axis(truth, best(truth, 5), axis=1) - allowed).all()

    t = 0.3 if metric == "cosine" else float(np.median(np.sqrt(-truth)))
    kept = distmm.threshold(*given, t, metric=metric, transb=not itself, plan=plan)
    is_kept, at = np.zeros(truth.shape, bool), t if metric == "cosine" else -t * t
    is_kept[kept.rows, kept.columns] = True
    near = np.tril(truth >= at) if itself else truth >= at
    assert kept.values.dtype == np.float32
    assert (is_kept == near)[abs(truth - at) > error].all()
    assert is_kept.any()


@pytest.mark.parametrize("dtype", ["?", "f2", "bfloat16", "u1", "c8"])
def test_types_are_those_of_the_product_and_of_numpys_sums(dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    a, b = np.ones((2, 3), kind), np.ones((3, 4), kind)
    product, norm = distmm.matmul(a, b).compute(), distmm.reduce(a, b, "norm").compute()
    sums = distmm.reduce(a, b, "sum").compute()
    assert sums.dtype == product.sum(axis=1).dtype
    np.testing.assert_array_equal(sums, product.sum(axis=1))
    np.testing.assert_array_equal(norm.astype("f8"), np.linalg.norm(product.astype("c16"), axis=1))
    if dtype != "c8":
        values, _ = compute(None, distmm.topk(a, b, 2))
        assert values.dtype == product.dtype
        np.testing.assert_array_equal(values, product[:, :2])


def test_matrices_without_rows_have_no_lines() -> None:
    a, b = np.ones((0, 3)), np.ones((3, 4))
    assert [x.shape for x in compute(None, distmm.topk(a, b, 2))] == [(0, 2), (0, 2)]
    assert [x.shape for x in compute(None, distmm.nearest(a, b.T, 2, "cosine"))] == [(0, 2), (0, 2)]
    assert distmm.reduce(a, b, "sum").compute().shape == (0,)
    assert len(distmm.threshold(a, b, 0).rows) == len(distmm.threshold(b.T, np.ones((3, 0)), 0).rows) == 0


def test_files_are_read_again_for_each_wave(client: Client, tmp_path: Any) -> None:
    a, b = operands()
    a_file = zarr.array(a, store=tmp_path / "A.zarr", chunks=(16, 10))
    lazy = distmm.nearest(a_file, b.T, 4, "euclidean", plan=TEXTS["waves"], client=client)
    loads = [name for name in lazy.values.dask.layers if name.startswith("distmm-load")]
    assert len(loads) == 4 + 1  # of A for each wave, and for the norms
    _, indices = compute(client, lazy)
    np.testing.assert_array_equal(indices, best(-np.linalg.norm(a[:, None] - b.T, axis=-1), 4))


def test_results_are_stored_while_they_are_made(client: Client, tmp_path: Any) -> None:
    a, b = operands()
    lazy = distmm.topk(a, b, 5, plan=TEXTS["waves"], client=client)
    to = [zarr.create_array(tmp_path / f"{x.dtype}.zarr", shape=x.shape, chunks=(16, 5), dtype=x.dtype) for x in lazy]
    with client.as_current():
        da.store(list(lazy), to, lock=False)
    np.testing.assert_array_equal(to[1][:], best(a @ b, 5))


def test_a_gpu_has_room_for_one_block_that_is_reduced_and_one_merge_whatever_its_slots() -> None:
    cluster = ClusterSpec(2, 10**10, "cuda", 1e13, 1e10, host_memory=10**9, threads=3, workspace=7)
    with_room = _with_room_for_parts(cluster, kept=10**6)
    assert (with_room.memory, with_room.workspace) == (10**10 - 2 * WORKSPACE, 7)
    assert with_room.host_memory == 10**9 - 10**6 // 2


def test_waves_are_small_if_the_parts_of_large_ones_do_not_fit(tmp_path: Path) -> None:
    with open(tmp_path / "A.bin", "wb") as file:
        file.truncate(20000 * 20 * 8)
    a, b = (wrap(open_matrix(f"{tmp_path}/A.bin:{shape}:float64"), shape) for shape in ("20000x20", "20x20000"))
    line = 16 * 1600  # bytes of the 1600 largest elements, with their columns

    def parts(plan: Plan) -> int:
        return line * (20000 + max(wave.c_blocks for wave in plan.waves) * plan.block_shape[0])

    choices = Choices.of(hardware=replace(cpus(1, memory="1200MB"), here=True))
    large = Gemm.of(a, b).plan(choices, kept=0)
    made = Gemm.of(a, b).plan_reduced(choices, parts)
    assert parts(large) > large.cluster.memory
    made.check_memory()
    assert parts(made) + made.peak.worker <= large.cluster.memory


X = np.ones((4, 3))
WRONG: dict[str, tuple[Any, str]] = {
    "k is too large": (lambda: distmm.topk(X, X.T, 5), "k is 5, and the product has rows of 4 elements"),
    "k is 0": (lambda: distmm.topk(X, X.T, 0), "whole number from 1 to 4"),
    "k is no number": (lambda: distmm.topk(X, X.T, 1.5), "k is 1.5"),
    "k is an array": (lambda: distmm.topk(X, X.T, np.array([2, 3])), r"k is array\(.*whole number from 1 to 4"),  # type: ignore[arg-type]
    "k of no columns": (lambda: distmm.topk(X, np.ones((3, 0)), 1), "rows of 0 elements: there is nothing to choose"),
    "vectors": (lambda: distmm.topk(X, X[0], 1), "B has shape"),
    "widths": (lambda: distmm.topk(X, X, 1), "must equal"),
    "complex numbers": (lambda: distmm.topk(X + 1j, X.T, 1), "complex numbers have no order"),
    "an empty batch": (lambda: distmm.topk(np.ones((0, 2, 3)), X.T, 1), "nothing to reduce"),
    "metric": (lambda: distmm.nearest(X, X, 1, "manhattan"), "not one of inner, cosine, euclidean"),
    "metrics": (lambda: distmm.nearest(X, X, 1, np.array(["cosine", "inner"])), "not one of inner"),  # type: ignore[arg-type]
    "integers": (lambda: distmm.nearest(X.astype(int), X, 1), "a metric needs real floating-point numbers"),
    "rows of two lengths": (
        lambda: distmm.nearest(X, X[:3, :2], 1),
        r"X has shape \(4, 3\) and Y \(3, 2\): the last dimension of X \(3\) must equal the last dimension of Y \(2\)",
    ),
    "neighbours of a stack": (lambda: distmm.nearest(X[None], X, 1), "one row for each point"),
    "a row in place of Y": (lambda: distmm.nearest(X, X[0], 1), r"Y has shape \(.,\): give a matrix, as vectors"),
    "more neighbours than rows": (lambda: distmm.nearest(X, None, 9), "X has 4 rows"),
    "how": (lambda: distmm.reduce(X, X.T, "median"), "give one of max, argmax, sum, norm, histogram"),
    "two functions": (lambda: distmm.reduce(X, X.T, (len, len)), "three functions"),
    "axis": (lambda: distmm.reduce(X, X.T, "sum", axis=2), "axis is 2"),
    "axes": (lambda: distmm.reduce(X, X.T, "sum", axis=np.array([0, 1])), "axis is array"),  # type: ignore[arg-type]
    "no bins": (lambda: distmm.reduce(X, X.T, "histogram"), "give the edges of bins"),
    "bins for a sum": (lambda: distmm.reduce(X, X.T, "sum", bins=[0, 1]), "only for one"),
    "bins that descend": (lambda: distmm.reduce(X, X.T, "histogram", bins=[1, 0]), "ascending"),
    "a type for a sum": (lambda: distmm.reduce(X, X.T, "sum", dtype="f8"), "belong to functions of your own"),
    "no columns": (lambda: distmm.reduce(X, np.ones((3, 0)), "sum"), "nothing to reduce along axis"),
    "threshold": (lambda: distmm.threshold(X, X.T, float("nan")), "give a real number"),
    "negative distance": (lambda: distmm.threshold(X, X, -1, metric="euclidean", transb=True), "no Euclidean distance"),
    "metric of a threshold": (lambda: distmm.threshold(X, X.T, 1, metric="l1"), "not one of inner, cosine, euclidean"),  # type: ignore[arg-type]
    "cosine of integers": (lambda: distmm.threshold(X.astype(int), X.T, 1, metric="cosine"), "A is int64: a metric"),
    "threshold beyond float64": (lambda: distmm.threshold(X, X.T, -(10**400)), "1329 bits, beyond all types"),
    "threshold of a batch": (lambda: distmm.threshold(X[None], X.T, 1), "one product of matrices"),
    "most": (lambda: distmm.threshold(X, X.T, 1, most=-1), "largest number of elements to keep"),
    "an array of most": (lambda: distmm.threshold(X, X.T, 1, most=np.array([1, 2])), "most is array"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_before_any_work(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(("chunk", "shape"), [(lambda c, first: c.sum(), ()), (lambda c, first: c.min(axis=-1), (2,))])
def test_functions_that_give_no_result_for_each_line_are_refused(chunk: Any, shape: tuple[int, ...]) -> None:
    own = chunk, sum, lambda part: part
    with pytest.raises(InputError, match=r"return shape .* a result of shape .* for each line"):
        distmm.reduce(X, X.T, own, shape=shape).compute(scheduler="sync")
