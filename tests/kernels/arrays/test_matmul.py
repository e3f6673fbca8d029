"""`matmul` and `gram` give NumPy's product for arrays of this process, at once, whatever their layout."""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import MagicMock, patch

import ml_dtypes
import numpy as np
import pytest

import distmm_kernels
from distmm_kernels import device, gram, matmul, verify
from distmm_kernels.arrays import products
from distmm_kernels.device import Device
from distmm_kernels.gemm.guarded import GuardedKernel

TYPES = ["float32", "float64", "complex64", "complex128", "int8", "int32", "int64", "float16"]
SHAPES = [
    ((5, 7), (7, 3)),
    ((2, 1, 5, 7), (3, 7, 4)),
    ((7,), (7, 3)),
    ((2, 5, 7), (7,)),
    ((7,), (7,)),
    ((5, 0), (0, 3)),
]


def numbers(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = 4 * rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_products_are_those_of_numpy(dtype):
    for a_shape, b_shape in SHAPES:
        a, b = numbers(a_shape, dtype), numbers(b_shape, dtype, 1)
        expected = a.astype("float64" if a.dtype.kind == "f" else dtype) @ b
        made = matmul(a, b)
        assert type(made) is type(a @ b)
        assert (made.shape, made.dtype) == (expected.shape, a.dtype)
        np.testing.assert_allclose(made, expected.astype(dtype), rtol=1e-2 if dtype == "float16" else 1e-5, atol=1e-2)


def test_layouts_do_not_matter():
    a, b = numbers((12, 20), "float64"), numbers((20, 8), "float64", 1)
    for x in (a, np.asfortranarray(a), a[:, ::-1][:, ::-1], np.repeat(a, 2, 1)[:, ::2]):
        for y in (b, np.asfortranarray(b), np.repeat(b, 3, 0)[::3]):
            np.testing.assert_allclose(matmul(x, y), a @ b)


def test_factors_and_an_addend_make_a_gemm():
    a, b, c = numbers((4, 6), "float64"), numbers((6, 5), "float64", 1), numbers((5,), "float64", 2)
    np.testing.assert_allclose(matmul(a, b, alpha=2, beta=-1, c=c), 2 * a @ b - c)
    np.testing.assert_allclose(matmul(a, b, c=c), a @ b + c)
    np.testing.assert_allclose(matmul(a[0], b, c=c), a[0] @ b + c)
    np.testing.assert_allclose(matmul(a[0], b[:, 0], c=c[0]), a[0] @ b[:, 0] + c[0])
    with pytest.raises(ValueError, match="beta is 2, but there is no c"):
        matmul(a, b, beta=2)


def test_operands_are_not_read_with_an_alpha_of_zero():
    a, b, c = np.full((5, 4), np.nan), np.full((2, 4, 6), np.inf), np.full((2, 5, 6), 3.0)
    assert (matmul(a, b, alpha=0) == np.zeros((2, 5, 6))).all()
    assert (matmul(a, b, np.empty_like(c), alpha=0, beta=2, c=c) == 6).all()
    assert (gram(a, alpha=0) == np.zeros((5, 5))).all()
    assert verify(a, b, np.zeros((2, 5, 6)), alpha=0)
    assert not verify(a, b, c, alpha=0)


def test_out_may_be_wider_and_may_share_memory():
    a = numbers((6, 6), "int8")
    out = np.empty((6, 6), "int32")
    assert matmul(a, a, out) is out
    np.testing.assert_array_equal(out, a.astype("int32") @ a)
    x = numbers((6, 6), "float64")
    expected = x @ x.T + x
    assert matmul(x, x.T, x, c=x) is x
    np.testing.assert_allclose(x, expected)
    turned = numbers((6, 6), "float64")
    expected = turned @ turned + turned.T
    matmul(turned.copy(), turned.copy(), turned, c=turned.T)
    np.testing.assert_allclose(turned, expected)


@pytest.mark.parametrize("out", ["int64", "float64"])
@pytest.mark.parametrize(
    ("dtype", "k"), [("uint32", 1), ("int32", 2), ("uint16", 2), ("int16", 2), ("uint8", 40000), ("int8", 140000)]
)
def test_a_wider_out_has_sums_that_leave_32_bits(dtype, k, out):
    largest = min(np.iinfo(dtype).max, 3 * 10**9)
    a = np.full((1, k), largest, dtype)
    made = matmul(a, a.T, np.empty((1, 1), out))
    assert made[0, 0] == k * largest**2


def test_a_gram_is_hermitian_and_adds_in_place():
    x = numbers((5, 9), "complex128")
    made = gram(x)
    np.testing.assert_allclose(made, x @ x.conj().T)
    assert np.array_equal(made, made.conj().T)
    hessian, batches = np.zeros((4, 4), "float32"), numbers((3, 50, 4), ml_dtypes.bfloat16)
    for batch in batches:
        gram(batch.T, hessian, c=hessian)
    wide = batches.astype("float32")
    np.testing.assert_allclose(hessian, sum(x.T @ x for x in wide), rtol=1e-4, atol=1e-3)
    assert np.array_equal(hessian, hessian.T)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: matmul(x, [[1.0]]), TypeError, "b is a builtins.list"),
        (lambda x: matmul(x, np.ones((4, 2))), ValueError, "a has 3 columns and b has 4 rows"),
        (lambda x: matmul(x, x, np.ones((2, 2))), ValueError, r"out is \(2, 2\) float64, the product \(3, 3\)"),
        (lambda x: matmul(x, x, np.ones((3, 3), int)), TypeError, "of a type that holds such numbers"),
        (lambda x: matmul(x, x, precision="best"), ValueError, "precision is 'best'"),
        (lambda x: matmul(x, x, reproducible=True), ValueError, "leave out reproducible=True"),
        (lambda x: matmul(x, x, device="tpu"), ValueError, "device is 'tpu'"),
        (lambda x: matmul(x, np.float64(2)), ValueError, "b is a scalar"),
        (lambda x: matmul(x, np.ma.array(x, mask=x > 0)), TypeError, "b is a masked array, whose mask would be lost"),
        (lambda x: matmul(x, x, c=1j * x), TypeError, "c is complex128, the product float64"),
        (lambda x: matmul(x.astype(int), x.astype(int), c=x), TypeError, "c is float64, the product int64"),
        (lambda x: matmul(x, x, c=x[None]), ValueError, r"c has shape \(1, 3, 3\), .*\(3, 3\)"),
        (lambda x: matmul(x, x, alpha=None), TypeError, "alpha is None: give a number"),
        (lambda x: gram(x, c=x, beta="2"), TypeError, "beta is '2': give a number"),
        (lambda x: gram([[1.0]]), TypeError, "a is a builtins.list"),
        (lambda x: gram(x[0]), ValueError, r"a has shape \(3,\)"),
    ],
)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones((3, 3)))


def test_arrays_of_any_package_with_dlpack_come_back_as_such():
    class Foreign:
        """An array of a package that distmm_kernels does not know, such as JAX's on the host."""

        def __init__(self, x):
            self.x, self.ndim, self.dtype, self.shape = x, x.ndim, x.dtype, x.shape

        def __dlpack__(self, **how):
            return self.x.__dlpack__(**how)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

        def __array_namespace__(self):
            return self

        @property
        def mT(self):  # noqa: N802  of the array API standard
            return Foreign(self.x.mT)

        asarray = staticmethod(lambda x: Foreign(x))

    a = numbers((4, 3), "float32")
    made = matmul(Foreign(a), Foreign(a.T.copy()))
    assert isinstance(made, Foreign)
    np.testing.assert_allclose(made.x, a @ a.T, rtol=1e-5)
    np.testing.assert_allclose(gram(Foreign(a)).x, a @ a.T, rtol=1e-5)
    with pytest.raises(ValueError, match="leave out out"):
        matmul(Foreign(a), Foreign(a.T.copy()), Foreign(a))


def test_the_choice_counts_the_time_of_the_host():
    h200 = Device("cuda", "NVIDIA H200", 0, 141 << 30, (9, 0), 132)

    def name(n, dtype, **how):
        how = {"precision": "highest", "reproducible": False, "in_graph": False, **how}
        with patch.object(products, "named", lambda name, dtype, device: name):
            return products.chosen.__wrapped__(n, n, n, (), np.dtype(dtype), h200, **how)

    assert name(256, "float32") == name(128, "float64") == "cublas"  # one launch on the operands as they are
    assert name(1024, "complex64") == "cublas"  # the split of operands takes longer than the product
    assert name(8192, "float16", symmetric=True) == "hopper"  # the library multiplies both halves
    assert name(8192, "float32") == "fp16x3"
    assert name(8192, "float32", in_graph=True) == "register_tiled"  # guards are read by the host
    assert name(8192, "float32", reproducible=True) == "fp16x3"


def test_the_package_offers_the_functions_and_imports_nothing_for_it():
    assert {"gram", "matmul", "verify"} == set(distmm_kernels.__all__)
    code = (
        "import sys; from distmm_kernels import matmul, gram, verify; import numpy as np; "
        "matmul(np.eye(2), np.eye(2)); "
        "sys.exit(bool({'numba', 'cupy', 'torch', 'jax', 'dask'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'multiply'"):
        _ = distmm_kernels.multiply


def test_a_product_is_there_although_the_gpu_is_full_when_its_kernel_looks_at_the_data(monkeypatch):
    full = MagicMock(spec=GuardedKernel)
    full.declines.return_value, full.look.side_effect = True, MemoryError
    cpu = products.named("cpu", np.dtype("f8"), device.cpu())
    monkeypatch.setattr(products, "chosen", lambda *asked: full)
    monkeypatch.setattr(products, "named", lambda *asked: cpu)
    a, b = numbers((4, 6), "float64"), numbers((6, 3), "float64", 1)
    np.testing.assert_allclose(matmul(a, b), a @ b)
    full.look.assert_called_once()
