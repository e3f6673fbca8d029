"""Reductions of a product of a matrix with its own transpose: one triangle is multiplied, and mirrored."""

from __future__ import annotations

from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm.graph.dask_tasks import ProductTask
from distmm.graph.product_graph import ProductLayer
from tests.distmm.api.reduced import best, compute, operands


@pytest.mark.parametrize("text", ["one worker", "waves"])
@pytest.mark.parametrize("trans", [False, True])
def test_a_product_with_itself_is_reduced_by_one_triangle(client: Client, text: str, trans: bool) -> None:
    a, _ = operands()
    C = a.T @ a if trans else a @ a.T
    text = f"g2x1x1 b16x10x16 p1 w{2 if text == 'waves' else 1} l2"
    lazy = distmm.topk(a, None, 4, transa=trans, plan=text, client=client)
    chains = {task.placement.chain for task in lazy.values.__dask_graph__().values() if isinstance(task, ProductTask)}
    blocks = -(-len(C) // 16)
    assert len(chains) == blocks * (blocks + 1) // 2
    _, indices = compute(client, lazy)
    np.testing.assert_array_equal(indices, best(C, 4))


@pytest.mark.parametrize("down", [False, True])
def test_lines_of_a_hermitian_product_are_conjugated_where_their_blocks_are_mirrored(down: bool) -> None:
    rng = np.random.default_rng(4)
    a = (rng.integers(-3, 4, (40, 9)) + 1j * rng.integers(-3, 4, (40, 9))).astype("c16")
    sums = distmm.reduce(a, None, "sum", axis=-2 if down else -1, blocks=(16, 4)).compute()
    np.testing.assert_array_equal(sums, (a @ a.conj().T).sum(axis=-2 if down else -1))


def transposed(how: str) -> tuple[Any, Any, dict[str, bool]]:
    """A matrix, and its transpose as it may be written."""
    x = np.random.default_rng(3).integers(-9, 9, (30, 20)).astype("f8")
    if how.startswith("dask"):
        x = da.from_array(x, chunks=(7, 9))
    given = {
        "numpy view": (x, x.T, {}),
        "flag": (x, x, {"transb": True}),
        "dask T": (x, x.T, {}),
        "dask swapaxes": (x.swapaxes(0, 1), x, {}),
        "copy": (x, x.T.copy(), {}),
        "other columns": (x[:, :10], x.T[10:], {}),
    }
    return given[how]  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["numpy view", "flag", "dask T", "dask swapaxes", "copy", "other columns"])
def test_an_operand_that_is_the_others_transpose_costs_half(how: str) -> None:
    X, Y, flags = transposed(how)
    exact = np.asarray(X) @ (np.asarray(Y).T if flags else np.asarray(Y))
    with dask.config.set(scheduler="synchronous"):
        best = distmm.reduce(X, Y, "max", **flags)
        (layer,) = (layer for layer in best.dask.layers.values() if isinstance(layer, ProductLayer))
        assert (layer.plan.problem.symmetry == "symmetric") == (how not in ("copy", "other columns"))
        np.testing.assert_array_equal(best, exact.max(axis=1))
        np.testing.assert_array_equal(distmm.reduce(X, Y, "sum", axis=0, **flags), exact.sum(axis=0))
        np.testing.assert_array_equal(distmm.topk(X, Y, 1, **flags).indices[:, 0], exact.argmax(axis=1))
        found = distmm.threshold(X, Y, 50.0, **flags)
        np.testing.assert_array_equal(np.stack([found.rows, found.columns]), np.nonzero(exact >= 50))
        np.testing.assert_array_equal(found.values, exact[exact >= 50])
        if how == "flag":
            near = distmm.nearest(X, Y, 2, "euclidean")
            np.testing.assert_array_equal(near.indices, distmm.nearest(X, None, 2, "euclidean").indices)


def test_a_product_with_the_plain_transpose_of_complex_numbers_is_not_hermitian() -> None:
    x = np.random.default_rng(4).integers(-9, 9, (2, 12, 8))
    z = da.from_array(x[0] + 1j * x[1], chunks=5)
    exact = np.asarray(z) @ np.asarray(z).T
    with dask.config.set(scheduler="synchronous"):
        np.testing.assert_array_equal(distmm.reduce(z, z.T, "sum"), exact.sum(axis=1))
        np.testing.assert_array_equal(distmm.reduce(z, z.T, "sum", axis=0), exact.sum(axis=0))
