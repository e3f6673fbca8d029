"""Products of a matrix and its own transpose: lower halves with the full product's bits, and their mirror images."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.select import CANDIDATES
from distmm_kernels.symmetric import turned
from tests.kernels.reference.matrices import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KERNELS = [
    ("hopper", "bfloat16"),
    ("hopper", "float16"),
    ("hopper", "int8"),
    ("hopper", "uint8"),
    ("hopper", "bool"),
    ("hopper_tf32", "float32"),
    ("fp16x3", "float32"),
    ("tf32x3", "float32"),
    ("mma_sync_fp16x3", "float32"),
    ("complex_fp16x3", "complex64"),
    ("residues", "float64"),
    ("complex_residues", "complex128"),
    ("integer_residues", "int64"),
    ("complex_chain", "complex64"),
    ("cublas", "bfloat16"),
]
COMMUTE = "hopper", "hopper_tf32", "residues", "integer_residues"  # C[j, i] has the bits of C[i, j]
ONCE = [(m, k, ()) for m, k in ((1, 64), (100, 520), (130, 64), (257, 1024), (700, 300), (1500, 1030))]
# (4400, 9300): several launches that add to C, and more tiles than run at a time, in an odd number of rows
DEEP = [(200, 8193, ()), (1100, 20000, ()), (300, 17000, (3,)), (260, 1100, (2, 2)), (4400, 9300, ())]


@pytest.fixture
def kernel_for(hopper, monkeypatch):
    def make(name, dtype):
        kind = next(each.kernel for each in CANDIDATES if each.name == name)
        empty = kind._empty

        def poisoned(self, shape, dtype):
            d = empty(self, shape, dtype)
            (d if d.base is None else d.base).view("uint8")[...] = 0xFF
            return d

        monkeypatch.setattr(kind, "_empty", poisoned)
        return kind(Problem(1, 1, 1, BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)), hopper)

    return make


def drawn(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iub":
        return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def twice(full, symmetry):
    """What `multiply` promises, given the full product."""
    below = np.tril(np.ones(full.shape[-2:], bool), -1)
    other = full.swapaxes(-1, -2)
    other = other.conj() if symmetry == "hermitian" else other
    diagonal = full.real.astype(full.dtype) if symmetry == "hermitian" and full.dtype.kind == "c" else full
    return np.where(below, full, np.where(below.T, other, diagonal))


def host(array):
    made = array.get()
    return made.view(BFLOAT16).astype("f4") if made.dtype == BFLOAT16 else made


@pytest.mark.parametrize(("m", "k", "batch"), ONCE + DEEP)
@pytest.mark.parametrize(("name", "dtype"), KERNELS)
def test_the_lower_half_has_the_full_products_bits_and_the_upper_half_is_its_image(
    kernel_for, name, dtype, m, k, batch
):
    kernel = kernel_for(name, dtype)
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    for symmetry in ("symmetric", "hermitian") if kind.kind == "c" else ("symmetric",):
        block = on_gpu(drawn((*batch, m, k), kind, 1))
        a, b = kernel.prepare_both(block, symmetry)
        full, d = host(kernel.multiply(a, b, None)), host(kernel.multiply(a, b, None, symmetry=symmetry))
        np.testing.assert_array_equal(d, twice(full, symmetry))
        if name in COMMUTE and symmetry == "symmetric":  # a full Hermitian product has a rounded diagonal
            np.testing.assert_array_equal(d, full)
        c = on_gpu(twice(drawn((*batch, m, m), kernel.accumulator, 2), symmetry))
        full, d = host(kernel.multiply(a, b, c)), host(kernel.multiply(a, b, c, symmetry=symmetry))
        np.testing.assert_array_equal(d, twice(full, symmetry))


@pytest.mark.parametrize(("m", "k"), [(1, 64), (257, 520), (700, 8193), (64, 30000)])
@pytest.mark.parametrize("c0", [None, "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "dtype", "to"),
    [("hopper", "bfloat16", "bfloat16"), ("hopper", "float16", "float32"), ("fp16x3", "float32", "float32"),
     ("residues", "float64", "float64"), ("hopper", "int8", "int8"), ("complex_residues", "complex128", "complex128")],
)  # fmt: skip
def test_the_finish_uses_the_lower_half_of_c0(kernel_for, name, dtype, to, m, k, c0):
    kernel = kernel_for(name, dtype)
    if to == "int8":  # integers add no floats
        c0 = {"float32": "int32", "bfloat16": "int8"}.get(c0)
    kinds = [BFLOAT16 if kind == "bfloat16" else np.dtype(kind) for kind in (dtype, to, c0 or to)]
    block = on_gpu(drawn((m, k), kinds[0], 1))
    a, b = kernel.prepare_both(block, "hermitian")
    added = None if c0 is None else on_gpu(drawn((m, m), kinds[2], 2))
    factors = {"alpha": 3, "beta": 0 if c0 is None else 2, "c0": added, "dtype": kinds[1]}
    full, d = (
        host(kernel.multiply(a, b, None, **factors)),
        host(kernel.multiply(a, b, None, **factors, symmetry="hermitian")),
    )
    np.testing.assert_array_equal(d, twice(full, "hermitian"))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("pitch", [0, 3])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("hopper", "bfloat16"), ("fp16x3", "float32"), ("hopper", "int8"), ("complex_residues", "complex128")],
)
def test_operands_of_any_layout_serve_as_both(kernel_for, name, dtype, order, pitch):
    kernel, kind = kernel_for(name, dtype), BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    whole = on_gpu(drawn((400, 520 + pitch) if order == "C" else (520, 400 + pitch), kind, 1))
    block = whole[:, :520] if order == "C" else whole[:, :400].T
    symmetry = "hermitian" if kind.kind == "c" else "symmetric"
    a, b = kernel.prepare_both(block, symmetry)
    other = kernel.prepare_b(turned(block, symmetry))
    d = host(kernel.multiply(a, b, None, symmetry=symmetry))
    np.testing.assert_array_equal(d, twice(host(kernel.multiply(a, other, None)), symmetry))


@pytest.mark.parametrize("ways", ["ieee", "tf32"])
def test_granules_that_halves_do_not_hold_are_mirrored_too(kernel_for, ways):
    kernel, x = kernel_for("fp16x3", "float32"), drawn((300, 16384 + 500), "float32", 1)
    x[:, :8192] *= np.float32(1e-40) if ways == "ieee" else np.exp2(np.arange(8192) % 40 - 20).astype("f4")
    a, b = kernel.prepare_both(on_gpu(x), "symmetric")
    full = host(kernel.multiply(a, b, None))
    np.testing.assert_array_equal(host(kernel.multiply(a, b, None, symmetry="symmetric")), twice(full, "symmetric"))


@pytest.mark.parametrize("name", ["complex_residues", "mma_sync_complex_residues"])
def test_a_conjugate_is_multiplied_by_residues_and_by_multiply_adds(kernel_for, name):
    kernel, x = kernel_for(name, "complex128"), drawn((300, 2 * 8192 + 100), "complex128", 1)
    x[7, 8200] = 2.0**70  # a guard is raised for the second granule; the third one is short
    block = on_gpu(x)
    (a, b), other = kernel.prepare_both(block, "hermitian"), kernel.prepare_b(turned(block, "hermitian"))
    full = host(kernel.multiply(a, other, None))
    np.testing.assert_array_equal(host(kernel.multiply(a, b, None)), full)
    np.testing.assert_array_equal(host(kernel.multiply(a, b, None, symmetry="hermitian")), twice(full, "hermitian"))
