"""Contractions of arrays of this process on a cluster: workers load boxes, rearrange them, and write the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm.product import contraction
from tests.exact_sums import whole_numbers

CONTRACTIONS = [
    ("aijkl,amnkl->ijmn", (4, 10, 11, 12, 30), (4, 9, 13, 12, 30)),
    ("aijkl,amnkl->mnij", (4, 10, 11, 12, 30), (4, 9, 13, 12, 30)),
    ("aijkl,amnkl->imjn", (4, 10, 11, 12, 30), (4, 9, 13, 12, 30)),  # C is no matrix in this order
    ("aibj,cbja->ic", (20, 30, 20, 12), (14, 20, 12, 20)),
    ("zaib,zcab->zic", (3, 20, 30, 80), (3, 40, 20, 80)),
]


@pytest.fixture
def client(cluster: Callable[[int], Client]) -> Client:
    return cluster(2)


def copies(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("Dask's compute joins all blocks on one worker")


@pytest.mark.parametrize(("text", "of_a", "of_b"), CONTRACTIONS)
@pytest.mark.parametrize("out", [False, True])
def test_large_arrays_are_read_and_results_written_by_workers(
    client: Client, monkeypatch: pytest.MonkeyPatch, text: str, of_a: Any, of_b: Any, out: bool
) -> None:
    a, b = whole_numbers(of_a, "c16"), whole_numbers(of_b, "c16", 1)
    expected = np.einsum(text, a, b, optimize=True)
    monkeypatch.setattr(contraction, "SMALLEST", 1 << 12)
    with client.as_current():
        if out:
            filled = np.empty_like(expected)
            C = distmm.einsum(text, a, b, out=filled)
            assert C is filled
        else:
            C = distmm.einsum(text, a, b)
            a *= 2  # an array is read when the product is computed, also where it has to be rearranged
            expected = 2 * expected
            if "imjn" not in text:
                monkeypatch.setattr(da.Array, "compute", copies)
            C = C.compute()
    np.testing.assert_array_equal(C, expected)


def test_boxes_follow_the_plans_blocks(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contraction, "SMALLEST", 1 << 12)
    a, b = whole_numbers((6, 20, 8, 10), "f8"), whole_numbers((6, 30, 8, 10), "f8", 1)
    with client.as_current():
        for each, other in ((a, b), (a, da.from_array(b, chunks=(4, 10, 8, 5))), (da.from_array(a, chunks=5), b)):
            C = distmm.einsum("aikl,amkl->im", each, other)
            np.testing.assert_array_equal(C.compute(), np.einsum("aikl,amkl->im", a, b))


def test_one_task_reshapes_a_block_of_an_array_that_is_multiplied_by_itself(client: Client) -> None:
    t = whole_numbers((16, 20, 30), "f8")
    T = client.persist(da.from_array(t, (4, 20, 30)))
    with client.as_current():
        C = distmm.tensordot(T, T, axes=((0, 1), (0, 1)))
        kinds = Counter(str(key[0]).rpartition("-")[0] for key in dict(dask.optimize(C)[0].dask))
        np.testing.assert_array_equal(C.compute(), np.tensordot(t, t, axes=((0, 1), (0, 1))))
    assert kinds["distmm-reshape"] == T.npartitions
    assert set(kinds) <= {"distmm-reshape", "distmm-step", "distmm-sum", "distmm-matmul"}


def test_the_largest_of_each_row_is_dasks_whatever_reads_the_blocks(client: Client) -> None:
    x = np.random.default_rng(0).standard_normal((40, 8))
    X = da.from_array(x, chunks=(10, 8))
    with client.as_current():
        for k, axis in ((3, 1), (-3, 1), (3, 0), (40, 1)):
            got = da.topk(distmm.matmul(X, X.T), k, axis=axis).compute()
            np.testing.assert_allclose(got, da.topk(da.from_array(x @ x.T), k, axis=axis).compute(scheduler="sync"))
