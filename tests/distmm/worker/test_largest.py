"""The k largest elements of rows, and reductions of blocks: the same as by sorting, however blocks are cut."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm.planning.problem import accumulator_dtype
from distmm.worker import gpu, prepared_operands
from distmm.worker.tasks import metrics, products, reductions, rows
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice
from distmm.worker.tasks.largest import largest, sortable, topk_of_chunk
from distmm.worker.tasks.reductions import (
    BlockReduction,
    Custom,
    Largest,
    Reduction,
    histogram,
    merge,
    norms,
    on_host,
    sums,
)
from distmm.worker.tasks.rows import by_rows, pieces
from distmm.worker.tasks.threshold import Threshold
from distmm_kernels import device
from distmm_kernels.config import Problem
from distmm_kernels.gemm.cpu import CpuKernel

TYPES = ["f4", "f8", "f2", "i1", "u8", "?"]


def by_sorting(x: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k largest elements of each row: NumPy's order, from its end, the first of equal ones first."""
    backwards = x[:, ::-1].argsort(axis=1, kind="stable")[:, ::-1]
    return (x.shape[1] - 1 - backwards)[:, :k]


def few_values(shape: tuple[int, int], dtype: str, seed: int, kinds: int) -> np.ndarray:
    """A matrix with many equal elements; of floating-point numbers some are NaN, infinite or a zero of either sign."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, kinds, shape)
    if np.dtype(dtype).kind != "f":
        return x.astype(dtype)
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0])
    return np.where(rng.random(shape) < 0.2, special[rng.integers(0, 5, shape)], x - kinds // 2).astype(dtype)


@given(
    st.integers(0, 6),
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from(TYPES),
    st.sampled_from([2, 100]),
    st.integers(0, 99),
)
def test_the_largest_are_those_of_a_stable_sort(m: int, n: int, k: int, dtype: str, kinds: int, seed: int) -> None:
    k = min(k, n)
    x = few_values((m, n), dtype, seed, kinds)
    values, columns = largest(sortable(x), k)
    assert values.shape == columns.shape == (m, k)
    assert columns.dtype == np.int64
    np.testing.assert_array_equal(columns, by_sorting(x, k))
    np.testing.assert_array_equal(values, sortable(np.take_along_axis(x, columns, axis=1)))


def test_bfloat16_is_ordered_like_float32() -> None:
    x = few_values((5, 200), "f4", 0, 50).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(largest(sortable(x), 7)[1], by_sorting(x.astype("f4"), 7))


@given(st.integers(1, 4), st.integers(0, 7), st.integers(1, 9), st.integers(1, 40))
def test_pieces_of_rows_make_up_the_block(batch: int, m: int, n: int, piece: int) -> None:
    block = np.arange(batch * m * n).reshape(batch, m, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rows.PIECE, "numpy", piece)
        assert all(block[index].size <= max(n, piece) for index in pieces(block))
        doubled, first = by_rows(block, lambda x, at: (2 * x, block[at][:, 0]))
    np.testing.assert_array_equal(doubled, 2 * block)
    np.testing.assert_array_equal(first, block[..., 0])


def parts_of(reduction: Reduction, x: np.ndarray, cuts: list[int], squares: Any = None) -> list[Any]:
    """Parts of the lines of a matrix that is cut at some columns."""
    return [
        reduction.chunk(x[:, a:b], a, None if squares is None else (squares[0], squares[1][a:b]))
        for a, b in pairwise([0, *sorted(cuts), x.shape[1]])
        if a < b
    ]


def reduced(reduction: Reduction, parts: list[Any], group: int) -> tuple[np.ndarray, ...]:
    """Results of parts that are merged in groups."""
    while len(parts) > 1:
        parts = [merge(reduction, parts[a : a + group], None, False, "cpu") for a in range(0, len(parts), group)]
    return merge(reduction, parts, None, True, "cpu")


@given(st.integers(1, 120), st.lists(st.integers(0, 120), max_size=6), st.sampled_from(TYPES), st.integers(0, 99))
def test_the_largest_do_not_depend_on_cuts_or_groups(k: int, cuts: list[int], dtype: str, seed: int) -> None:
    x = few_values((4, 120), dtype, seed, 30)
    reduction = Largest(k, x.dtype)
    columns = by_sorting(x, k)
    for group in (2, 8):
        values, indices = reduced(reduction, parts_of(reduction, x, cuts), group)
        np.testing.assert_array_equal(indices, columns)
        np.testing.assert_array_equal(values, np.take_along_axis(x, columns, axis=1))
        assert values.dtype == x.dtype


@pytest.mark.parametrize("dtype", ["f4", "i2", "c8", "?", "f2"])
def test_sums_norms_and_histograms_are_numpys(dtype: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (6, 90)).astype(dtype)
    cuts = [17, 40, 41]
    for reduction, expected in (
        (sums(x.sum(axis=1).dtype), x.sum(axis=1)),
        (norms(np.dtype("f8")), np.linalg.norm(x.astype(np.result_type(x.dtype, "f8")), axis=1)),
    ):
        (found,) = reduced(reduction, parts_of(reduction, x, cuts), 2)
        np.testing.assert_allclose(found, expected, rtol=1e-15)
        assert found.dtype == expected.dtype


@pytest.mark.parametrize("edges", [np.arange(-3, 4), np.array([-2.5, -2.5, 0, 0.5, 3.0])])
def test_bins_are_those_of_numpy_histogram(edges: np.ndarray) -> None:
    x = few_values((5, 70), "f4", 3, 9)
    reduction = histogram(tuple(edges.tolist()))
    (found,) = reduced(reduction, parts_of(reduction, x, [8, 50]), 8)
    np.testing.assert_array_equal(found, [np.histogram(row, edges)[0] for row in x])


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_the_nearest_rows_are_those_of_the_definition(metric: metrics.Metric) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((5, 8)), rng.standard_normal((60, 8))
    y[7] = 0
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1)
    cosines = np.divide(x @ y.T, lengths, out=np.zeros((5, 60)), where=lengths > 0)
    distances = np.linalg.norm(x[:, None] - y, axis=-1)
    truth = {"inner": x @ y.T, "cosine": cosines, "euclidean": distances}[metric]
    order = np.argsort(truth if metric == "euclidean" else -truth, axis=1, kind="stable")[:, :9]
    squares = [metrics.squared_norms(each)[:, 0] for each in (x, y)]
    reduction = Largest(9, np.dtype("f8"), metric)
    parts = parts_of(reduction, x @ y.T, [20, 31], None if metric == "inner" else squares)
    values, indices = reduced(reduction, parts, 2)
    np.testing.assert_array_equal(indices, order)
    np.testing.assert_allclose(values, np.take_along_axis(truth, order, axis=1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_a_row_with_nan_is_farther_than_all_others(metric: metrics.Metric) -> None:
    x, y = np.ones((1, 2)), np.array([[np.nan, 0.0], [3.0, 1.0], [-5.0, 0.0]])
    squares = [metrics.squared_norms(each)[:, 0] for each in (x, y)]
    reduction = Largest(3, np.dtype("f8"), metric)
    values, indices = reduced(reduction, parts_of(reduction, x @ y.T, [1], squares), 8)
    assert indices.tolist() == [[1, 2, 0]]
    assert values[0, -1] == (np.inf if metric == "euclidean" else -np.inf)


def is_held(lock: Any) -> bool:
    """Whether another thread cannot take a lock."""

    def taken() -> bool:
        free = lock.acquire(blocking=False)
        if free:
            lock.release()
        return not free

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(taken).result()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_block_on_a_gpu_is_reduced_while_no_other_is(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[bool] = []

    def of_rows(block: Any, first: int) -> Any:
        alone.append(is_held(gpu.product_lock))
        return block.sum(axis=1)

    if on_gpu:
        monkeypatch.setattr(gpu, "namespace", lambda block: object())
    reduction = Custom((of_rows, sum, lambda part: part), np.dtype("f8"))
    (part,) = BlockReduction(reduction, 0, 0)(np.ones((2, 3)))
    assert part.tolist() == [3.0, 3.0]
    assert alone == [on_gpu]
    assert not is_held(gpu.product_lock)


def test_a_product_and_its_reduction_are_enqueued_while_no_other_product_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two tasks alternate on the stream, end at the same time, and the GPU idles until the next ones."""
    held: list[str] = []

    class Noting(CpuKernel):
        def _accumulate(self, a: Any, b: Any, c: Any, d: Any) -> None:
            held.extend(["product"] * is_held(gpu.product_lock))
            super()._accumulate(a, b, c, d)

    def of_rows(block: Any, first: int) -> Any:
        held.extend(["reduction"] * is_held(gpu.product_lock))
        return block.sum(axis=1)

    monkeypatch.setattr(gpu, "working", lambda work: nullcontext())
    monkeypatch.setattr(gpu, "namespace", lambda block: object())
    monkeypatch.setattr(prepared_operands, "alias", lambda block: block)
    dtype = np.dtype("f8")
    monkeypatch.setattr(products, "kernel_for", lambda *_: Noting(Problem(m=2, k=3, n=2, dtype=dtype), device.cpu()))
    reduction = BlockReduction(Custom((of_rows, sum, lambda part: part), dtype), 0, 0)
    a, b, last = [np.ones((2, 3))], [np.ones((3, 2))], Epilogue(dtype, "numpy")
    (part,) = products.multiply(None, KernelChoice("cuda", dtype), None, a, b, last, reduction=reduction)
    assert part.tolist() == [6.0, 6.0]
    assert held == ["product", "reduction"]
    assert not is_held(gpu.product_lock)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "?"])
def test_gpus_reduce_blocks_to_what_cpus_do(dtype: str) -> None:
    import cupy

    x = few_values((40, 3000), dtype, 5, 1000)
    edges = tuple(np.arange(-9.0, 10.0).tolist())
    reductions = [Largest(k, x.dtype) for k in (1, 15, 200, 2000)]
    for reduction in (*reductions, histogram(edges), Threshold(3, 10**6)):
        for turned in (False, True):
            host, device = (each.T if turned else each for each in (x, cupy.asarray(x)))
            found = in_host_memory(reduction.chunk(device, 7, None))
            expected = in_host_memory(reduction.chunk(host, 7, None))
            for mine, own in zip(found, expected, strict=True):
                np.testing.assert_array_equal(mine, own)
    numbers = x if x.dtype.kind != "f" else np.where(np.isfinite(x), x, 0)
    (found,) = in_host_memory(sums(numbers.sum(axis=1).dtype).chunk(cupy.asarray(numbers), 0, None))
    np.testing.assert_array_equal(found, numbers.sum(axis=1))


@pytest.mark.parametrize("lines", [0, 1, 50])
def test_parts_are_merged_beside_products_some_lines_at_a_time(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy stands in for CuPy: what is tested is how lines are cut."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(reductions, "MERGED", 2000)
    taken: list[int] = []
    streams: set[str] = set()
    released: list[str] = []
    monkeypatch.setattr(reductions, "slot_released", lambda kind: nullcontext(released.append(kind)))

    def working(work: str) -> Any:
        streams.add(work)
        return nullcontext()

    monkeypatch.setattr(gpu, "working", working)

    class Noting(Largest):
        def combine(self, parts: list[Any]) -> Any:
            assert gpu.merge_lock.locked()
            taken.append(sum(each.nbytes for part in parts for each in part))
            return super().combine(parts)

    x = np.random.default_rng(6).integers(-99, 99, (lines, 60)).astype("f4")
    squares = [np.ones(lines), np.arange(60.0)]
    parts = parts_of(Largest(5, x.dtype, "euclidean"), x, [20, 30], squares)
    found = merge(Noting(5, x.dtype, "euclidean"), parts, None, True, "cuda")
    assert max(taken) <= 2000
    assert streams == {"merge"}
    assert released == ["merge"]
    expected = merge(Largest(5, x.dtype, "euclidean"), parts, None, True, "cpu")
    for mine, own in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, own)
        assert mine.dtype == own.dtype


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "metric"),
    [(dtype, metric) for dtype in ("f4", "f8", "f2") for metric in (None, *metrics.METRICS)] + [("i4", None)],
)
def test_gpus_merge_parts_to_what_cpus_do(
    dtype: str, metric: metrics.Metric | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setattr(reductions, "MERGED", 4000)  # some of the 50 lines at a time
    rng = np.random.default_rng(6)
    x = rng.integers(-999, 999, (50, 2000)).astype(dtype)
    if x.dtype.kind == "f":
        x[rng.random(x.shape) < 0.05] = np.nan
    squares = None if metric in (None, "inner") else [rng.integers(1, 9, n).astype("f8") ** 2 for n in x.shape]
    there = None if squares is None else [cupy.asarray(each) for each in squares]
    reduction = Largest(15, x.dtype if metric is None else accumulator_dtype(x.dtype), metric)
    expected = reduced(reduction, parts_of(reduction, x, [700, 1500], squares), 3)
    parts = [on_host(part) for part in parts_of(reduction, cupy.asarray(x), [700, 1500], there)]
    for mine, own in zip(merge(reduction, parts, None, True, "cuda"), expected, strict=True):
        np.testing.assert_array_equal(mine, own)


def in_host_memory(part: Any) -> tuple[Any, ...]:
    there = on_host(part)
    return there if isinstance(there, tuple) else (there,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4"])
@pytest.mark.parametrize("axis", [0, 1])
def test_dasks_topk_of_a_chunk_on_a_gpu_has_the_same_elements(dtype: str, axis: int) -> None:
    cupy = pytest.importorskip("cupy")
    x = np.random.default_rng(0).permutation(200 * 300).reshape(200, 300).astype(dtype)
    for k in (7, 300, -4):
        chunk = topk_of_chunk(cupy.asarray(x), k, (axis,), True)
        assert (type(chunk), chunk.dtype) == (cupy.ndarray, x.dtype)
        ordered = np.sort(x, axis=axis)
        best = np.take(ordered, range(-min(k, x.shape[axis]), 0) if k > 0 else range(-k), axis=axis)
        np.testing.assert_array_equal(np.sort(chunk.get(), axis=axis), best)
