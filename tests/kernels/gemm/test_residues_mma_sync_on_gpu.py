"""Products of residues by `mma.sync`, on a real GPU: the bits of the Hopper kernel, or of the NumPy twin elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.residues import SHORTEST
from distmm_kernels.select import select
from tests.kernels.gemm.test_residues_on_gpu import check_bits, multiply, normal, ways
from tests.kernels.reference import accuracy
from tests.kernels.reference.matrices import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ampere")]

NAMES = {
    "float64": "residues",
    "complex128": "complex_residues",
    "int32": "integer_residues",
    "int64": "integer_residues",
}
# around tiles of 64 x 128 and 128 x 128 and stages of 64 and 128 steps of k; one row or column; k short and deep
SHAPES = [
    (1, 1, 1), (127, 1023, 127), (128, 1024, 128), (129, 1025, 129), (63, 1151, 255), (64, 1152, 256), (65, 1153, 257),
    (1, 1100, 300), (300, 1100, 1), (200, 1, 170), (1030, 1024, 1300), (140, GRANULE, 130), (70, GRANULE + 1, 97),
    (131, 2 * GRANULE + SHORTEST + 3, 66), (65, 511, 129), (64, 512, 128), (63, 513, 127),
]  # fmt: skip


@pytest.fixture
def kernels(ampere):
    """Make the kernel of `mma.sync` for a type, and the one of Hopper GPUs."""

    def make(dtype):
        if ampere.compute_capability != (9, 0):
            pytest.skip(f"the Hopper kernel runs on compute capability 9.0, {ampere} has {ampere.compute_capability}")
        problem, name = Problem(1, 1, 1, np.dtype(dtype)), NAMES[dtype]
        return select(problem, ampere, name=f"mma_sync_{name}"), select(problem, ampere, name=name)

    return make


def drawn(shape, dtype, seed):
    """Numbers that use all bits of their type."""
    dtype = np.dtype(dtype)
    if dtype.kind == "i":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        return np.random.default_rng(seed).integers(least, most, shape, dtype, endpoint=True)
    return normal(shape, seed) + (1j * normal(shape, seed + 9) if dtype.kind == "c" else 0)


def same(x, y):
    """Whether two arrays on the GPU have the same bits."""
    return x.dtype == y.dtype and x.get().tobytes() == y.get().tobytes()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", NAMES)
def test_the_bits_are_those_of_the_hopper_kernel(kernels, dtype, shape):
    ours, hopper = kernels(dtype)
    m, k, n = shape
    a, b, c = drawn((m, k), dtype, 1), drawn((k, n), dtype, 2), drawn((m, n), dtype, 3)
    for added in (None, on_gpu(c), on_gpu(c, "F")):
        assert same(multiply(ours, a, b, added), multiply(hopper, a, b, added))


@pytest.mark.parametrize("set_name", accuracy.SETS)
def test_the_bits_are_those_of_the_hopper_kernel_where_guards_are_raised_too(kernels, set_name):
    ours, hopper = kernels("float64")
    a, b = accuracy.draw(set_name, 150, 1100, 130, seed=1, dtype=np.float64)
    assert ways(ours, a, b) == ways(hopper, a, b)
    with np.errstate(invalid="ignore"):
        assert same(multiply(ours, a, b), multiply(hopper, a, b))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_a_guarded_granule_between_others_changes_its_way_alone(kernels, dtype):
    ours, hopper = kernels(dtype)
    k = 2 * GRANULE + 1100
    a, b = drawn((131, k), dtype, 1), drawn((k, 97), dtype, 2)
    a[7, GRANULE + 5] = 2.0**70
    assert ways(ours, a, b) == ["RESIDUES", "IEEE", "RESIDUES"]
    assert same(multiply(ours, a, b), multiply(hopper, a, b))


@pytest.mark.parametrize("order", ["C", "F", "offset", "every other"])
def test_batches_and_layouts_do_not_change_the_bits(kernels, order):
    ours, hopper = kernels("float64")
    a, b = normal((2, 1, 70, 1100), 1), normal((3, 1100, 90), 2)
    assert same(multiply(ours, on_gpu(a, order), on_gpu(b, order)), multiply(hopper, a, b))


@pytest.mark.parametrize("dtype", NAMES)
def test_every_tile_of_a_large_c_in_many_strips_has_the_bits(kernels, monkeypatch, dtype):
    from distmm_kernels.gemm import residue_products

    ours, hopper = kernels(dtype)
    a, b, c = (on_gpu(drawn(shape, dtype, i)) for i, shape in enumerate(((3000, 1024), (1024, 2900), (3000, 2900))))
    want = multiply(hopper, a, b, c)
    for workspace in (residue_products.WORKSPACE, 1 << 20):
        monkeypatch.setattr(residue_products, "WORKSPACE", workspace)
        assert same(multiply(ours, a, b, c), want)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_sums_of_integers_have_the_bits_of_sums_of_floats(kernels, monkeypatch, dtype):
    """As on GPUs with few float64 units."""
    ours, hopper = kernels(dtype)
    a, b, c = (drawn(shape, dtype, i) for i, shape in enumerate(((301, 1100), (1100, 403), (301, 403))))
    a[:, :700], b[:700] = np.rint(1e3 * a[:, :700].real), np.rint(1e3 * b[:700].real)
    recipe = hopper._products._reconstruction
    assert recipe.parameters == (False,)
    monkeypatch.setattr(ours._products, "_reconstruction", replace(recipe, parameters=(True,)))
    for added in (None, on_gpu(c)):
        assert same(multiply(ours, a, b, added), multiply(hopper, a, b, added))


@pytest.mark.parametrize("k", [SHORTEST, 1500, 2 * GRANULE + 1100])
def test_the_device_has_the_bits_of_the_twin(ampere, k):
    check_bits(select(Problem(1, 1, 1, np.dtype("float64")), ampere, name="mma_sync_residues"), k)
