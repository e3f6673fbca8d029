"""A plan that is given decides how a product is computed; arguments that ask for something else are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dask
import numpy as np
import pytest

import distmm
from distmm.errors import InputError
from distmm.planning.plan import Plan

A = np.ones((8, 8), "f4")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return distmm.plan(A, A, precision="ieee", blocks=(4, 8, 4))


@pytest.mark.parametrize("blocks", [(4, 8), "abc", 4])
def test_blocks_that_are_no_edges_are_refused_beside_a_plan(plan: Plan, blocks: Any) -> None:
    with pytest.raises(InputError, match="give three positive edges"):
        distmm.matmul(A, A, plan=plan, blocks=blocks)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"precision": "highest"}, r"precision is 'highest', and the plan was made with precision='ieee'"),
        ({"kernel": "tiled"}, r"kernel is 'tiled', and the plan was made with kernel="),
        ({"device": "gpu"}, r"device is 'gpu', and the plan was made with device='cpu'"),
        ({"blocks": (8, 8, 8)}, r"blocks are \(8, 8, 8\), and the plan g1x1x1 b4x8x4 .* has blocks \(4, 8, 4\)"),
    ],
)
def test_arguments_that_contradict_a_plan_are_refused(plan: Plan, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.matmul(A, A, plan=plan, **asked)
    with pytest.raises(InputError, match=message):
        distmm.topk(A, A, 1, plan=plan, **asked)
    if "blocks" in asked:
        with pytest.raises(InputError, match=message):
            distmm.matmul(A, A, plan=str(plan), **asked)
    else:
        with dask.config.set({f"distmm.{name}": value for name, value in asked.items() if value != "highest"}):
            if asked.get("precision") != "highest":  # the default, which is not asked for
                with pytest.raises(InputError, match=message):
                    distmm.matmul(A, A, plan=plan)


def test_bits_that_a_plan_does_not_promise_are_refused_where_they_are_asked_for(plan: Plan) -> None:
    without = replace(plan, cluster=replace(plan.cluster, promises_bits=False))
    with pytest.raises(InputError, match=r"reproducible is True, and the plan was made with reproducible=False"):
        distmm.matmul(A, A, plan=without, reproducible=True)
    with dask.config.set({"distmm.reproducible": True}), pytest.raises(InputError, match="reproducible is True"):
        distmm.matmul(A, A, plan=without)


def test_arguments_that_repeat_a_plan_change_nothing(plan: Plan) -> None:
    asked = {"precision": "ieee", "kernel": plan.cluster.kernel, "device": "cpu", "blocks": (4, 9, 4)}
    for more in ({}, asked, {"device": "auto"}, {"reproducible": False}):
        C = distmm.matmul(A, A, plan=plan, **more)  # type: ignore[arg-type]
        assert C.chunks == ((4, 4), (4, 4))
    np.testing.assert_array_equal(C.compute(scheduler="synchronous"), A @ A)
