"""Complex products as real ones: where each number goes, what the three verbs do with it, how accurate it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE, Guard
from distmm_kernels.layout import real_view
from distmm_kernels.layout.real_view import as_real
from tests.kernels.on_numpy import NOWHERE, OnNumPy
from tests.kernels.reference import accuracy, exact, residue_twin, twins
from tests.kernels.reference import products as reference
from tests.kernels.reference.exact import doubled_twin
from tests.kernels.reference.matrices import as_complex, error_bound, matrix

SIZES = st.integers(1, 7)
TYPES = pytest.mark.parametrize("dtype", ["complex64", "complex128"])


def pair(name, m, k, n, seed=0, dtype="complex64"):
    """Complex matrices whose parts are of one of the sets of `accuracy`."""
    real = real_view.REALS[dtype]
    drawn = [accuracy.draw(name, m, k, n, seed + i, dtype=real) for i in (0, 1)]
    return tuple(as_complex(np.stack(parts, axis=-1).reshape(len(parts[0]), -1)) for parts in zip(*drawn, strict=True))


@given(SIZES, SIZES, SIZES, st.sampled_from(["complex64", "complex128"]), st.sampled_from([(), (2,), (2, 3)]))
def test_the_product_of_the_real_matrices_is_the_complex_one_as_it_lies(m, k, n, dtype, batch):
    a, b = matrix((*batch, m, k), dtype, 1, "integers"), matrix((*batch, k, n), dtype, 2, "integers")
    left, right = as_real(a), doubled_twin(b)
    assert (left.shape[-2:], right.shape[-2:]) == ((m, 2 * k), (2 * k, 2 * n))
    assert np.shares_memory(left, a)
    d = left @ right
    assert d.dtype == real_view.REALS[dtype]
    np.testing.assert_array_equal(as_complex(d), a @ b)
    np.testing.assert_array_equal(as_complex(as_real(a)), a)


@given(SIZES, SIZES, SIZES, st.integers(0, 6))
def test_a_cut_of_k_is_the_same_cut_of_the_real_matrices(m, k, n, cut):
    a, b = matrix((m, k), "complex64", 1), matrix((k, n), "complex64", 2)
    np.testing.assert_array_equal(as_real(a)[:, : 2 * cut], as_real(np.ascontiguousarray(a[:, :cut])))
    np.testing.assert_array_equal(doubled_twin(b)[: 2 * cut], doubled_twin(b[:cut]))


def test_bits_of_signs_infinities_and_nans_are_kept():
    b = np.array([[complex(0.0, -0.0), complex(np.inf, np.nan)]], np.complex64)
    made = doubled_twin(b)
    np.testing.assert_array_equal(made, np.array([[0, 0, np.inf, np.nan], [0, 0, np.nan, np.inf]], np.float32))
    assert np.signbit(made[:, :2]).tolist() == [[False, True], [False, False]]


class OnHost:
    """What stands in for a GPU: NumPy's arrays, and its products of real matrices."""

    anywhere = False

    def __init__(self, problem, device):
        self.dtype, self.reads = problem.dtype, (problem.dtype.name,)

    def _format(self, block, operand):
        assert block.dtype == self.dtype
        return block

    def _accumulate(self, a, b, c, d):
        assert d.strides[-1] == d.itemsize
        assert self.anywhere or d.strides[-2] % 16 == 0, "the tensor memory accelerator stores rows at such places"
        d[...] = np.matmul(a, b) if c is None else c + np.matmul(a, b)


@pytest.fixture
def on_host(monkeypatch):
    """A function from a type to the kernel, with NumPy in place of the GPU."""
    gemm = pytest.importorskip("distmm_kernels.gemm.real_view")

    def contiguous(rows, device):
        return np.ascontiguousarray(rows)

    class HostKernel(OnNumPy, gemm.ComplexFp16x3Kernel):
        pass

    class HostChain(OnNumPy, gemm.ComplexChainKernel):
        def _kernel(self, problem, device):
            made = OnHost(problem, device)
            made.anywhere = True
            return made

    monkeypatch.setattr(real_view, "in_vectors", contiguous)
    monkeypatch.setattr(gemm, "Fp16x3Kernel", OnHost)
    monkeypatch.setattr(
        gemm, "doubled", lambda block, _, conjugated=False: doubled_twin(block.conj() if conjugated else block)
    )
    kinds = {"halves": HostKernel, "chain": HostChain}
    return lambda dtype, kind="halves": kinds[kind](Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)


@TYPES
@pytest.mark.parametrize("order", ["C", "F", "offset", "every other", "reversed"])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("kind", ["halves", "chain"])
def test_the_verbs_take_operands_and_c_of_any_strides(on_host, dtype, order, batch, kind):
    for m, k, n in ((1, 1, 1), (3, 1, 2), (4, 7, 5), (1, 3, 8)):
        a, b, c = (matrix((*batch, *s), dtype, i, "integers", order) for i, s in enumerate(((m, k), (k, n), (m, n))))
        kernel = on_host(dtype, kind)
        left, right = kernel.prepare_a(a), kernel.prepare_b(b)
        assert (left.shape, right.shape) == (a.shape, b.shape)
        for added in (None, c):
            d = kernel.multiply(left, right, added)
            assert d.dtype == dtype
            assert d.flags.c_contiguous or kind == "halves"
            np.testing.assert_array_equal(kernel.multiply(a, b, added), d)  # operands as they are
            np.testing.assert_array_equal(d, a @ b if added is None else a @ b + c)
        np.testing.assert_array_equal(kernel.finish(d, 2j, 1, c, dtype), 2j * (a @ b + c) + c)


@TYPES
def test_empty_operands_and_those_of_other_kernels(on_host, dtype):
    kernel = on_host(dtype)
    for m, k, n in ((0, 3, 2), (2, 0, 3), (2, 3, 0)):
        left, right = kernel.prepare_a(np.ones((m, k), dtype)), kernel.prepare_b(np.ones((k, n), dtype))
        np.testing.assert_array_equal(kernel.multiply(left, right, None), np.zeros((m, n), dtype))
    with pytest.raises(TypeError, match="prepare it with this kernel first"):
        kernel.multiply(kernel.prepare_a(np.ones((2, 3), dtype)), np.ones((3, 2)), None)


def test_granules_count_complex_numbers(on_host):
    assert on_host("complex64").granule == GRANULE // 2


@pytest.mark.parametrize("set_name", ["normal", "uniform", "cancellation", "half zeros", "integers", "skew along k"])
def test_complex64_by_halves_has_no_larger_error_than_a_chain_of_float32(set_name):
    a, b = pair(set_name, 12, 400, 10)
    left, right = as_real(a), doubled_twin(b)
    ours = accuracy.errors(twins.fp16x3(left, right), left, right)
    chain = accuracy.errors(twins.fma_chain(left, right), left, right)
    assert ours.normwise <= 1.01 * chain.normwise
    assert ours.componentwise <= 1.25 * chain.componentwise
    if set_name == "integers":
        assert ours.normwise == 0


@pytest.mark.parametrize("set_name", ["normal", "uniform", "cancellation", "half zeros", "integers"])
def test_complex128_by_residues_has_no_larger_error_than_a_chain_of_float64(set_name):
    a, b = pair(set_name, 12, 700, 10, dtype="complex128")
    left, right = as_real(a), doubled_twin(b)
    product, guard = residue_twin.product(left, right)
    assert guard == (Guard.SPARSE if set_name == "half zeros" else 0)
    ours = exact.errors(product, left, right)
    chain = exact.errors(residue_twin.fma_chain(left, right), left, right)
    assert ours.normwise <= chain.normwise
    assert ours.componentwise <= chain.componentwise


def test_the_bound_of_complex_products_holds():
    a, b = pair("normal", 12, 400, 10)
    d = as_complex(twins.fp16x3(as_real(a), doubled_twin(b)))
    assert reference.first_difference(d, reference.multiply(a, b), atol=error_bound(a, b, np.complex64)) is None
