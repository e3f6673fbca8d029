"""Trees that merge the parts of reduced blocks: fixed by the plan alone, each part once, and small on their way."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import dask
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import distmm
from distmm.graph.consumers import GROUP, ConsumerLayer, Grid, Merge
from distmm.graph.dask_tasks import ProductTask
from distmm.graph.product_graph import ProductLayer
from distmm.graph.reduced_blocks import Reduced
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.worker.tasks.reductions import sums

F4 = np.dtype("f4")
SPEC = ClusterSpec(1, 10**12, "cpu", 1e11, 1e9)


def layer(rows: int, columns: int, down: bool, symmetric: bool, batch: int = 1) -> ConsumerLayer:
    shape = (batch,) * (batch > 1)
    problem = Problem(rows, 4, columns, F4, shape, shape, "symmetric" if symmetric else None)
    edges = "x".join(["1"] * (len(shape) + 1) + ["4", "1"])
    plan = make_plan(problem, SPEC, text=f"g1x1x1 b{edges} p1 w1 l2", result="reduced")
    take = Merge("distmm-matmul-token", plan, Reduced(sums(F4), down))
    return ConsumerLayer("distmm-merged-token", Grid((*shape, columns if down else rows)), take)


@given(st.integers(1, 20), st.integers(1, 20), st.booleans(), st.booleans(), st.integers(1, 2))
def test_each_line_takes_each_part_once_and_in_the_order_of_blocks(
    rows: int, columns: int, down: bool, symmetric: bool, batch: int
) -> None:
    columns = rows if symmetric else columns
    merge = layer(rows, columns, down, symmetric, batch)
    used: Counter[Any] = Counter()

    def parts(key: Any) -> list[tuple[int, int]]:
        """Rows and columns of C whose parts a task has, in the order in which it takes them."""
        task = merge[key]
        _, made, sides, *_ = task.args
        keys = [ref.key for ref in made.args]
        assert len(keys) <= GROUP
        if sides is None:
            return [part for each in keys for part in parts(each)]
        used.update(zip(keys, sides, strict=True))
        return [tuple(each[-2:])[:: -1 if side else 1] for each, side in zip(keys, sides, strict=True)]

    assert len(merge.get_output_keys()) == batch * (columns if down else rows)
    for key in merge.get_output_keys():
        *_, line = key
        other = range(rows if down else columns)
        assert parts(key) == [(at, line) if down else (line, at) for at in other]
    assert set(used.values()) == {1}
    assert len(used) == batch * rows * columns


def test_a_layer_travels_as_its_parameters() -> None:
    merge = layer(100, 100, False, False)
    sent = pickle.dumps(merge)
    assert not merge.is_materialized()
    assert len(sent) < 5_000  # the edges of 200 blocks among them
    assert set(pickle.loads(sent)) == set(merge)
    assert merge.is_materialized()


@pytest.mark.parametrize("symmetric", [False, True])
def test_blocks_that_are_reduced_have_no_mirror_images_and_keep_their_tasks(symmetric: bool) -> None:
    a = np.ones((40, 6), "f4")
    lazy = distmm.topk(a, None if symmetric else a.T, 2, plan="g1x1x1 b10x3x10 p1 w1 l2")
    layers = [x for x in lazy.values.dask.layers.values() if isinstance(x, ProductLayer)]
    (product,) = layers
    assert len(product) == len(list(product)) == (10 if symmetric else 16) * 2
    assert product.get_output_keys() <= set(product)
    optimized = dask.optimize(*lazy)
    found = {key for x in optimized for key, task in x.__dask_graph__().items() if isinstance(task, ProductTask)}
    assert found == set(product)


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 2])
def test_gpus_return_parts_in_host_memory(layers: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-3, 4, (300, 128)).astype("f4"), rng.integers(-3, 4, (128, 500)).astype("f4")
    text = f"g1x1x{layers} b128x64x256 p1 w1 l2"
    values, indices = dask.compute(*distmm.topk(a, b, 15, plan=text, device="gpu"), scheduler="synchronous")
    expected = np.argsort(-(a @ b), axis=1, kind="stable")[:, :15]
    assert isinstance(values, np.ndarray)
    np.testing.assert_array_equal(indices, expected)
    distances, near = dask.compute(*distmm.nearest(a, None, 3, "euclidean", device="gpu"), scheduler="synchronous")
    np.testing.assert_array_equal(near[:, 0], np.arange(300))
    assert not distances[:, 0].any()
