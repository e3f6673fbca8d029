"""The keywords that all functions have in common: the same names, with the same meaning, and no others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import distmm
from distmm.errors import InputError

A = np.eye(8, dtype="f4")

COMMON = {"precision", "kernel", "reproducible", "device", "client"}
OF_PRODUCTS = (distmm.matmul, distmm.gemm, distmm.gram, distmm.plan, distmm.topk, distmm.reduce, distmm.nearest,
               distmm.threshold)  # fmt: skip
OTHERS = (distmm.einsum, distmm.multi_dot, distmm.tensordot, distmm.cov, distmm.corrcoef)

CALLS: list[Callable[..., Any]] = [
    partial(distmm.matmul, A, A), partial(distmm.gemm, 1, A, A), partial(distmm.gram, A), partial(distmm.plan, A, A),
    partial(distmm.topk, A, A, 1), partial(distmm.reduce, A, A, "sum"), partial(distmm.nearest, A, A, 1),
    partial(distmm.threshold, A, A, 1), partial(distmm.einsum, "ij,jk", A, A), partial(distmm.multi_dot, [A, A]),
    partial(distmm.tensordot, A, A, 1), partial(distmm.cov, A), partial(distmm.corrcoef, A),
]  # fmt: skip


@pytest.mark.parametrize("function", OF_PRODUCTS + OTHERS, ids=lambda function: function.__name__)
def test_signatures_name_the_common_keywords(function: Callable[..., Any]) -> None:
    shown = inspect.signature(function).parameters
    assert {name for name in COMMON if shown[name].default is None} == COMMON
    assert (function in OF_PRODUCTS) == ({"blocks", "plan"} <= shown.keys())
    assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in shown.values())


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.func.__name__)
def test_common_keywords_mean_the_same_everywhere(call: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'percision'"):
        call(percision="ieee")
    with pytest.raises(InputError, match="promises the same bits for any cuts of k"):
        call(reproducible=True)
    with pytest.raises(InputError, match="precision 'low' is not one of"):
        call(precision="low")
    with pytest.raises(InputError, match=r"precision array\(.* is not one of"):
        call(precision=np.array(["highest", "ieee"]))
    with pytest.raises(InputError, match="client is 'tcp://"):
        call(client="tcp://10.0.0.1:8786")


def test_blocks_and_plans_are_for_functions_that_compute_one_product() -> None:
    with pytest.raises(TypeError, match=r"einsum\(\) got an unexpected keyword argument 'blocks'"):
        distmm.einsum("ij,jk", A, A, blocks=(4, 4, 4))  # type: ignore[call-arg]


@pytest.mark.parametrize("out", [None, A.copy()])
def test_blocks_may_be_an_array(out: np.ndarray | None) -> None:
    np.testing.assert_array_equal(distmm.matmul(A, A, blocks=np.array([4, 8, 4]), out=out), A)  # type: ignore[arg-type]
    assert distmm.plan(A, blocks=np.array([4, 8])).block_shape == (4, 8, 4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="blocks"):
        distmm.matmul(A, A, blocks=np.array(4), out=out)  # type: ignore[arg-type]


def test_the_name_of_arguments_without_a_name_is_no_keyword() -> None:
    with pytest.raises(TypeError, match=r"einsum\(\) got an unexpected keyword argument 'operands'"):
        distmm.einsum("ij,jk", A, A, operands=1)  # type: ignore[call-arg]


def test_reductions_take_a_plan_as_they_take_its_text() -> None:
    plan = distmm.plan(A, A, blocks=(4, 8, 4))
    for given in (plan, str(plan)):
        values, indices = distmm.topk(A, A, 1, plan=given)
        assert values.chunks == ((4, 4), (1,))
        np.testing.assert_array_equal(indices.compute(scheduler="sync")[:, 0], range(8))
