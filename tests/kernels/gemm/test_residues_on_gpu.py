"""float64 products by residues, on a real GPU: the bits of the NumPy twin, layouts, guards, errors next to cuBLAS."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE, Guard, granules
from distmm_kernels.emulation.moduli import MODULI
from distmm_kernels.emulation.residues import SHORTEST, STRETCH
from tests.kernels.reference import accuracy, exact, residue_twin
from tests.kernels.reference import products as reference
from tests.kernels.reference.matrices import RAGGED_SHAPES, error_bound, on_gpu
from tests.kernels.reference.products import first_difference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

SHAPES = [(1, 1), (3, 2), (31, 127), (32, 128), (33, 129), (65, 600), (9, 1025), (5, 4100), (2, 8192), (3, 8193),
          (2, 17000)]  # fmt: skip
ORDERS = pytest.mark.parametrize("order", ["C", "F", "offset", "every other", "reversed"])


@pytest.fixture
def kernel(hopper):
    from distmm_kernels.gemm.residues import ResidueKernel

    return ResidueKernel(Problem(1, 1, 1, np.dtype(np.float64)), hopper)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def multiply(kernel, a, b, c=None):
    """Multiply where freed memory holds NaN, so that an element left unwritten shows."""
    import cupy

    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    size = max(1, int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])))) * a.shape[-2] * (b.shape[-1] + 2)
    poison = cupy.full(size, np.nan)
    del poison
    return kernel.multiply(a, b, c)


def ways(kernel, a, b):
    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    return [kernel._way(a, b, index).name for index in range(len(a.found.guards))]


def check(d, a, b, c=None):
    expected = reference.multiply(a, b) if c is None else reference.multiply(a, b) + c
    assert d.dtype == np.float64
    difference = first_difference(d.get(), expected, atol=2 * error_bound(a, b, np.float64, c))
    assert difference is None, str(difference)


def bytes_at(residues, stack):
    """The residues of one granule of one matrix, as a CuPy array."""
    import cupy

    pointer = residues.memory + (stack.address - residues.memory.ptr)
    return cupy.ndarray(stack.shape, np.int8, pointer, stack.strides)


def check_residues(residues, found, values):
    import cupy

    batch, rows, k = values.shape
    assert len(found.guards) == granules(k)
    for index, guard in enumerate(found.guards):
        raised = Guard(0)
        for z in range(batch):
            part = values[z, :, index * GRANULE : (index + 1) * GRANULE]
            want, factor, flag = residue_twin.split(part)
            raised |= flag
            if flag in (0, Guard.SPARSE):
                assert np.array_equal(bytes_at(residues, residues.granule(index, z)).get(), want)
                pointer = residues.memory + (residues.factors(index, z) - residues.memory.ptr)
                assert np.array_equal(cupy.ndarray((rows,), np.float64, pointer).get(), factor)
        assert guard == raised, index
        if raised == Guard.SPARSE:
            each = [residue_twin.row_counts(matrix[:, index * GRANULE : (index + 1) * GRANULE]) for matrix in values]
            assert residues.counts[index] == tuple(max(some) for some in zip(*each, strict=True))


@ORDERS
@pytest.mark.parametrize("shape", SHAPES)
def test_residues_are_those_of_the_twin(gpu, kernel, order, shape):
    values = normal((2, *shape))
    check_residues(*kernel._split(on_gpu(values, order)), values)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("granule", [0, 1])
@pytest.mark.parametrize("value", [np.inf, np.nan, 1e200, 1e-130, 1e-300, 0.0])
def test_what_cannot_be_held_raises_the_guard_of_its_granule(kernel, order, granule, value):
    values = np.abs(normal((2, 6, GRANULE + 700))) + 0.5
    own = slice(granule * GRANULE, (granule + 1) * GRANULE)
    values[1, 4, own.start] = value
    if value < 1:  # a row of such numbers
        values[1, 4, own] = value
    residues, found = kernel._split(on_gpu(values, order))
    check_residues(residues, found, values)
    assert (found.guards[granule] in (0, Guard.SPARSE)) == (value == 0)
    assert found.guards[1 - granule] == 0


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("zeros", [0, 300])
@pytest.mark.parametrize("more", [0, 1])
def test_the_share_of_small_numbers_is_counted_exactly(kernel, order, zeros, more):
    values = np.ones((1, 40, 65 * 20 + zeros + more))
    values[0, 7, :zeros] = 0
    values[0, 7, zeros : zeros + 20 + more] = 2.0**-40
    residues, found = kernel._split(on_gpu(values, order))
    check_residues(residues, found, values)
    assert (found.guards[0] != 0) == bool(more)


def check_bits(kernel, k):
    """A product of N(0, 1) has the bits of the NumPy twin."""
    a, b, c = normal((140, k), 1), normal((k, 270), 2), normal((140, 270), 3)
    for added in (None, c):
        d = multiply(kernel, a, b, added if added is None else on_gpu(added)).get()
        twin, guard = residue_twin.product(a, b, added)
        assert guard == 0
        assert (d == twin).all(), f"{(d != twin).mean():.3f} differ, by {np.abs(d - twin).max():.3g}"


@pytest.mark.parametrize("k", [SHORTEST, 1500, GRANULE, 2 * GRANULE + 1100])
def test_the_device_has_the_bits_of_the_twin(kernel, k):
    check_bits(kernel, k)


@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (127, 1024, 191), (128, 1152, 256), (129, 2001, 257), (9, 1025, 5)])
def test_every_ragged_shape_is_right(kernel, shape):
    m, k, n = shape
    a, b, c = normal((m, k), 1), normal((k, n), 2), normal((m, n), 3)
    check(multiply(kernel, a, b), a, b)
    for order in ("C", "F", "every other"):
        check(multiply(kernel, a, b, on_gpu(c, order)), a, b, c)


def test_small_numbers_that_the_other_operand_selects_are_kept(kernel):
    a, one = normal((300, 1024), 1), np.eye(1024)
    a[:, ::100] *= 2.0**-60
    assert ways(kernel, a, one) == ["IEEE"]
    assert (multiply(kernel, a, one).get() == a).all()
    assert (multiply(kernel, one[:300], a.T).get() == a.T[:300]).all()
    whole = np.rint(64 * normal((300, 1024), 1))  # no number is small beside the others
    assert ways(kernel, whole, one) == ["RESIDUES"]
    assert (multiply(kernel, whole, one).get() == whole).all()


def test_few_zeros_of_one_operand_leave_the_way_as_it_is(kernel):
    a, b = normal((300, 2048), 1), normal((2048, 200), 2)
    a[:, ::2] = 0
    assert ways(kernel, a, b) == ["RESIDUES"]
    a[7], a[8, 9] = 0, 1e-3
    assert ways(kernel, a, b) == ["RESIDUES"]
    b[1::2] = 0
    assert ways(kernel, a, b) == ["IEEE"]


@ORDERS
@pytest.mark.parametrize("order_b", ["C", "F", "offset"])
def test_the_layout_of_operands_does_not_change_the_bits(kernel, order, order_b):
    a, b = normal((203, 1617), 1), normal((1617, 150), 2)
    plain = multiply(kernel, a, b)
    check(plain, a, b)
    assert (multiply(kernel, on_gpu(a, order), on_gpu(b, order_b)) == plain).all()


def test_every_tile_of_a_large_c_is_right_and_bits_repeat(kernel, monkeypatch):
    from distmm_kernels.gemm import residue_products as residues

    rng, (m, k, n) = np.random.default_rng(0), (3000, 1024, 2900)
    a, b, c = (on_gpu(rng.integers(-1000, 1001, shape).astype("float64")) for shape in ((m, k), (k, n), (m, n)))
    want = a.astype("int64") @ b.astype("int64") + c.astype("int64")
    for workspace in (residues.WORKSPACE, 1 << 20):  # in one strip and in many
        monkeypatch.setattr(residues, "WORKSPACE", workspace)
        for _ in range(3):
            assert bool((multiply(kernel, a, b, c) == want).all())


def test_strips_do_not_change_the_bits(kernel, monkeypatch):
    from distmm_kernels.gemm import residue_products as residues

    a, b, c = on_gpu(normal((1500, 1600), 1)), on_gpu(normal((1600, 700), 2)), on_gpu(normal((1500, 700), 3))
    whole = multiply(kernel, a, b, c)
    monkeypatch.setattr(residues, "WORKSPACE", 1)
    assert residues.strip(1500, 700) == (128, 256)
    assert (multiply(kernel, a, b, c) == whole).all()
    part = multiply(kernel, a[1300:1430], b[:, 600:], c[1300:1430, 600:])
    assert (part == whole[1300:1430, 600:]).all()


@pytest.mark.parametrize("k", [1100, GRANULE + 1])
def test_parts_of_guarded_granules_do_not_change_the_bits(kernel, monkeypatch, k):
    from distmm_kernels.gemm import guarded

    a, b, c = on_gpu(normal((301, k), 1)), on_gpu(normal((k, 277), 2)), on_gpu(normal((301, 277), 3))
    a[150, 300] = 2.0**70
    whole = multiply(kernel, a, b, c)
    check(whole, a.get(), b.get(), c.get())
    monkeypatch.setattr(guarded, "WORKSPACE", 1)
    assert (multiply(kernel, a, b, c) == whole).all()


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1500, GRANULE + 1, 1201), (3000, 1025, 3000), (1999, 301, 1901)])
def test_a_product_takes_no_more_memory_than_residues_and_the_workspace(
    kernel, live_memory, monkeypatch, m, k, n, guarded
):
    import cupy

    from distmm_kernels.gemm import guarded as guarding
    from distmm_kernels.gemm import residue_products as residues

    a, b, c = on_gpu(normal((m, k), 1)), on_gpu(normal((k, n), 2)), on_gpu(normal((m, n), 3))
    if guarded:
        a[m // 2, k // 2] = np.inf
    multiply(kernel, a[:200], b[:, :200])  # loads the kernels
    for module in (residues, guarding):
        monkeypatch.setattr(module, "WORKSPACE", 1 << 24)  # less than C's residues take, and copies of A and B
    with live_memory() as live:
        left, right = kernel.prepare_a(a, wait=False), kernel.prepare_b(b, wait=False)
        d = kernel.multiply(left, right, c, wait=False)
    cupy.cuda.Device().synchronize()
    held = left.made.layout.end + right.made.layout.end + 1.02 * d.nbytes
    squares = 8 * max(m, n) * -(-k // STRETCH)
    short = k % GRANULE if k % GRANULE < SHORTEST else 0  # without residues, but dmma may need copies in vectors
    assert live.peak <= held + squares + 8 * (m + n) * (1.1 * short + 1) + (1 << 24) + (1 << 20)


def test_bits_do_not_depend_on_cuts_of_k_at_the_granule(kernel):
    k = 2 * GRANULE + 1100
    a, b, c = on_gpu(normal((200, k), 1)), on_gpu(normal((k, 300), 2)), on_gpu(normal((200, 300), 3))
    a[7, GRANULE + 5] = 2.0**70  # the second granule goes another way
    assert ways(kernel, a, b) == ["RESIDUES", "IEEE", "RESIDUES"]
    whole = multiply(kernel, a, b, c)
    check(whole, a.get(), b.get(), c.get())
    for cuts in ((0, GRANULE, 2 * GRANULE, k), (0, 2 * GRANULE, k), (0, GRANULE, k)):
        d = c
        for first, last in itertools.pairwise(cuts):
            d = multiply(kernel, a[:, first:last], b[first:last], d)
        assert (d == whole).all()


def test_infinities_and_nans_are_where_they_belong(kernel):
    a, b = accuracy.draw("not finite", 300, 1100, 260, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        expected = reference.multiply(a, b)
        d = multiply(kernel, a, b).get()
    assert np.array_equal(np.isnan(d), np.isnan(expected))
    infinite = np.isinf(expected)
    assert np.array_equal(np.isinf(d), infinite)
    assert np.array_equal(d[infinite], expected[infinite])


@pytest.mark.parametrize("set_name", [name for name in accuracy.SETS if name not in ("not finite", "subnormal")])
def test_errors_are_no_larger_than_those_of_a_chain_and_of_cublas(kernel, set_name):
    m, k, n = 300, 2048, 260
    a, b = accuracy.draw(set_name, m, k, n, seed=1, dtype=np.float64)
    some = slice(0, 40)
    ours = exact.errors(multiply(kernel, a, b).get()[some], a[some], b)
    chain = exact.errors(residue_twin.fma_chain(a[some], b), a[some], b)
    theirs = exact.errors((on_gpu(a) @ on_gpu(b)).get()[some], a[some], b)
    way = ways(kernel, a, b)[0]
    line = f"{ours.normwise:.1e} {ours.componentwise:.1e} chain {chain.normwise:.1e} {chain.componentwise:.1e}"
    print(set_name, way, line, f"cuBLAS {theirs.normwise:.1e} {theirs.componentwise:.1e}")  # noqa: T201 (with -rP)
    assert ours.normwise <= 1.01 * chain.normwise
    assert ours.componentwise <= 1.01 * chain.componentwise
    if way == "RESIDUES":
        assert ours.normwise <= theirs.normwise
        assert ours.componentwise <= max(theirs.componentwise, 2.0**-53)


@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((3,), (3,)), ((), (4,)), ((2, 1), (3,)), ((5, 1, 2), (2,)), ((0,), ())]
)
def test_batches_broadcast(kernel, batch_a, batch_b):
    a, b = normal((*batch_a, 70, 1100), 1), normal((*batch_b, 1100, 90), 2)
    d = multiply(kernel, a, b)
    assert d.shape == (*np.broadcast_shapes(batch_a, batch_b), 70, 90)
    for place in np.ndindex(d.shape[:-2]):
        left, right = (np.broadcast_to(x, (*d.shape[:-2], *x.shape[-2:]))[place] for x in (a, b))
        assert (multiply(kernel, left, right) == d[place]).all()
    assert (multiply(kernel, a, b, d * 0) == d).all()


def test_operands_of_another_kernel_are_refused(kernel):
    a, b = normal((5, 6)), normal((6, 7))
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(kernel.prepare_a(a), on_gpu(b), None)


def test_neither_c_nor_the_operands_are_written(kernel):
    a, b, c = on_gpu(normal((150, 1100), 1)), on_gpu(normal((1100, 170), 2)), on_gpu(normal((150, 170), 3))
    before = [x.copy() for x in (a, b, c)]
    multiply(kernel, a, b, c)
    assert all((x == y).all() for x, y in zip((a, b, c), before, strict=True))


def test_what_an_operand_takes_is_what_the_plan_counts(kernel):
    a = kernel.prepare_a(on_gpu(normal((2048, GRANULE))))
    assert len(MODULI) / 8 <= a.made.layout.end / a.matrices.nbytes < 1.001 * len(MODULI) / 8
