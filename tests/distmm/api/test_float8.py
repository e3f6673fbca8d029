"""Products of 8-bit floats: float32 results of both types, in any order."""

from __future__ import annotations

import itertools

import dask.array as da
import numpy as np
import pytest

import distmm
from distmm.checking.sampled_elements import lines
from distmm.checking.thin_products import largest
from distmm.planning.problem import FLOAT8
from distmm.product.scalars import common_type
from distmm.transfer.serialization import _with_types
from distmm.worker import gpu
from distmm.worker.tasks.arrivals import arrived
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_facts
from distmm.worker.tasks.metrics import squared_norms
from tests.kernels.reference import twins


@pytest.mark.parametrize(("of_a", "of_b"), list(itertools.product(FLOAT8, FLOAT8)))
def test_products_are_float32_and_right(of_a, of_b):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((70, 200)).astype(of_a), rng.standard_normal((200, 50)).astype(of_b)
    exact = a.astype("f8") @ b.astype("f8")
    for x, y in ((a, b), (da.from_array(a, chunks=64), da.from_array(b, chunks=(50, 40)))):
        c = np.asarray(distmm.matmul(x, y))
        assert c.dtype == np.float32
        np.testing.assert_allclose(c, exact, rtol=1e-5, atol=1e-4)
        assert distmm.verify(x, y, c)


def test_verify_allows_the_sums_of_13_bits_of_a_product_of_precision_high():
    rng = np.random.default_rng(2)
    a, b = rng.random((60, 1000)).astype(FLOAT8[0]), rng.random((1000, 70)).astype(FLOAT8[0])
    c = np.zeros((60, 70), np.float32)
    for first in range(0, 1000, 128):
        c += twins.float8(a[:, first : first + 128], b[first : first + 128])
    assert distmm.verify(a, b, c, precision="high")
    assert not distmm.verify(a, b, c)
    c[5, 7] *= 1.2
    assert not distmm.verify(a, b, c, precision="high")


@pytest.mark.parametrize("dtype", FLOAT8)
def test_checks_and_norms_read_the_type_that_8_bit_floats_have_on_gpus(dtype):
    x = np.random.default_rng(3).standard_normal((30, 20)).astype(dtype)
    on_gpu = x.view(gpu.carrier(dtype))
    assert on_gpu.dtype != dtype
    at = np.array([3, 17])
    np.testing.assert_array_equal(lines(on_gpu, at), x[at].astype("f2"))
    np.testing.assert_array_equal(largest(on_gpu, np.dtype("f8")), abs(x.astype("f8")).max(axis=0))
    np.testing.assert_array_equal(squared_norms(on_gpu), squared_norms(x))
    assert arrived(on_gpu, "it", (30, 20), dtype) is not None
    header, frames = (
        _with_types(lambda x: ({"typestr": "|V1"}, [x.tobytes()]), lambda header, _: header)[0](on_gpu),
        None,
    )
    assert _with_types(lambda x: x, lambda header, _: header["typestr"])[1](header[0], frames) == on_gpu.dtype


def test_a_product_with_a_wider_operand_has_its_type():
    a, b = np.ones((3, 4), FLOAT8[0]), np.full((4, 2), 0.1)
    assert distmm.matmul(a, b).dtype == np.float64
    np.testing.assert_allclose(distmm.matmul(a, b), 0.4)
    assert common_type({"A": FLOAT8[1], "B": np.dtype("f2")}) == np.float32


def test_gram_of_8_bit_floats():
    a = np.random.default_rng(1).standard_normal((40, 90)).astype(FLOAT8[0])
    np.testing.assert_allclose(distmm.gram(a), a.astype("f8") @ a.astype("f8").T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("precision", "kernel"), [("highest", "hopper"), ("high", "hopper_float8")])
def test_plans_on_hopper_take_the_kernels_of_8_bit_floats(precision, kernel):
    a, b = (np.ones((512, 512), FLOAT8[i]) for i in (0, 1))
    plan = distmm.plan(a, b, precision=precision, cluster=distmm.gpus(1, "H200"))
    assert plan.cluster.kernel == kernel
    choice = KernelChoice("cuda", plan.problem.multiplied, precision)
    assert kernel in kernel_facts(choice, absent=("NVIDIA H200", (9, 0)))["kernels"]
