"""Arrays of other packages are operands, and may be `out`, in their own memory."""

from __future__ import annotations

import sys
from typing import Any

import dask
import ml_dtypes
import numpy as np
import pytest
from distributed import Client

import distmm
from distmm.errors import InputError
from distmm.product.operand import wrap


class Lent:
    """An array of a package that lends its memory by DLPack and has nothing else of NumPy's."""

    def __init__(self, array: np.ndarray, where: tuple[int, int] = (1, 0)) -> None:
        self.array, self.where, self.shape, self.dtype = array, where, array.shape, f"lent.{array.dtype}"

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.where

    def __dlpack__(self, **how: Any) -> Any:
        return self.array.__dlpack__(**how)


class LentByAnOlderVersion(Lent):
    """DLPack before 1.0, which does not say whether memory may be written."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()


class LentAlone(Lent):
    """Only DLPack's two methods, as the protocol asks for."""

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        del self.shape, self.dtype


class LentWithArray(LentByAnOlderVersion):
    """The same with NumPy's protocol beside it, as PyTorch has it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array


writes = pytest.mark.skipif(
    not np.from_dlpack(Lent(np.zeros(1))).flags.writeable, reason="this NumPy writes to no memory of other packages"
)


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    """Whole numbers: their products have the same bits however they are cut."""
    return np.random.default_rng(seed).integers(-9, 9, shape).astype("f8")


@pytest.mark.parametrize("kind", [Lent, LentByAnOlderVersion, LentAlone])
def test_operands_are_not_copied_and_are_read_when_the_product_is_computed(kind: Any, client: Client) -> None:
    a, b, c = whole(400, 300), whole(400, 300, seed=1), whole(400, 400, seed=2)
    assert np.shares_memory(wrap(kind(a), "A").source, a)
    with client.as_current():
        product = distmm.gemm(2, kind(a), kind(b), -1, kind(c), transb=True)
        a[:] = whole(400, 300, seed=3)
        np.testing.assert_array_equal(product.compute(), 2 * a @ b.T - c)
        assert distmm.verify(kind(a), kind(a.T), kind(a @ a.T))
    assert distmm.plan(kind(a)).problem.symmetry == "symmetric"


@pytest.mark.parametrize("cluster", [True, False])
@pytest.mark.parametrize("kind", [pytest.param(Lent, marks=writes), LentWithArray])
def test_an_array_of_another_package_is_filled_and_returned_as_out(kind: Any, cluster: bool, client: Client) -> None:
    a, c = whole(500, 400), np.zeros((500, 500))
    out = kind(c)
    with dask.config.set(scheduler="threads"):
        given = distmm.gram(kind(a), out=out, client=client if cluster else None)
    assert given is out
    np.testing.assert_array_equal(c, a @ a.T)


def test_an_out_that_may_not_be_written_or_shares_memory_is_refused() -> None:
    a, c = whole(4, 4), np.zeros((4, 4))
    with pytest.raises(InputError, match="out shares memory with A"):
        distmm.matmul(a, np.eye(4), out=LentWithArray(a))
    with pytest.raises(InputError, match="out is read-only"):
        distmm.matmul(a, a, out=LentByAnOlderVersion(c))
    c.flags.writeable = False
    for kind in (Lent, LentWithArray):
        with pytest.raises(InputError, match=r"out is (read-only|a .* that does not export its memory)"):
            distmm.matmul(a, a, out=kind(c))


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (Lent(np.ones((4, 4), ml_dtypes.bfloat16)), r"test_dlpack\.Lent that does not export its memory by DLPack"),
        (Lent(np.ones((4, 4)), where=(8, 0)), r"on a device of DLPack's type 8.*A\.cpu\(\)"),
    ],
)
def test_memory_that_cannot_be_taken_is_refused(operand: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.matmul(operand, np.ones((4, 4)))


def test_an_array_on_a_gpu_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match=r"on a GPU, which needs CuPy.*A\.cpu\(\)"):
        distmm.matmul(Lent(np.ones((4, 4)), where=(2, 0)), np.ones((4, 4)))


def test_tensors_of_pytorch_are_multiplied_in_their_memory(client: Client) -> None:
    torch = pytest.importorskip("torch")
    a, out = torch.from_numpy(whole(400, 400)), torch.zeros((400, 400), dtype=torch.float64)
    assert distmm.matmul(a, a.T, out=out, client=client) is out
    assert torch.equal(out, a @ a.T)
    narrow = wrap(a.to(torch.bfloat16), "A").source
    assert narrow.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(narrow.astype("f8"), a.numpy())
    with pytest.raises(InputError, match="detach"):
        distmm.matmul(a.clone().requires_grad_(), a)
    with client.as_current():
        for x in (a, a.sign().to(torch.bfloat16)):
            eye = torch.eye(400, dtype=x.dtype)
            for value in (distmm.matmul(x, eye).compute(), distmm.matmul(x, eye).persist().compute()):
                assert value.dtype == x.dtype
                assert torch.equal(value, x)
            assert distmm.matmul(x[0], eye).compute().dtype == x.dtype
            out = torch.empty_like(x)
            assert distmm.matmul(x, eye, out=out) is out
            assert torch.equal(out, x)
    assert distmm.matmul(a[0], a[1], client=None).compute() == a[0] @ a[1]
    cube = torch.from_numpy(whole(3, 4, 5))
    for labels, arrays in (
        ("ij,jk->ik", (a, a)),
        ("ijk,ljk->il", (cube, cube)),
        ("ijk->kj", (cube,)),
        ("i,j->ij", (a[0], a[1])),
    ):
        expected = torch.einsum(labels, *arrays)
        assert torch.equal(distmm.einsum(labels, *arrays).compute(), expected)
        assert torch.equal(distmm.einsum(labels, *arrays, client=client).persist().compute(), expected)


def test_arrays_of_jax_are_multiplied_in_their_memory(client: Client) -> None:
    numpy = pytest.importorskip("jax.numpy")
    a = numpy.asarray(whole(400, 400).astype("f4"))
    with client.as_current():
        for x in (a, numpy.sign(a).astype("bfloat16")):
            value = distmm.matmul(x, numpy.eye(400, dtype=x.dtype)).compute()
            assert (type(value), value.dtype) == (type(a), x.dtype)
            assert (value == x).all()
    assert wrap(a.astype("bfloat16"), "A").source.dtype == ml_dtypes.bfloat16
    with pytest.raises(InputError, match="out is an array of JAX, which is read-only"):
        distmm.matmul(a, a, out=a + 1)


@pytest.mark.gpu
def test_tensors_on_a_gpu_stay_there() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.from_numpy(whole(300, 300)).to("cuda", dtype)
        operand = wrap(a, "A")
        assert (operand.kind, operand.source.data.ptr) == ("cupy", a.data_ptr())
        with dask.config.set(scheduler="synchronous"):
            c = distmm.matmul(a, a).compute()
        assert (c.dtype, c.device) == (a.dtype, a.device)
        torch.testing.assert_close(c.double(), a.double() @ a.double(), rtol=1e-2, atol=0)
