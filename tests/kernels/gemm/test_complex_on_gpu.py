"""complex64 and complex128 products on tensor cores, on a real GPU: the twins' bits, layouts, guards, errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE, Guard, granules
from distmm_kernels.layout.real_view import REALS, as_real, doubled
from distmm_kernels.select import select
from tests.kernels.reference import accuracy, complex_twin, exact, twins
from tests.kernels.reference import products as reference
from tests.kernels.reference.exact import doubled_twin
from tests.kernels.reference.matrices import RAGGED_SHAPES, as_complex, error_bound, on_gpu
from tests.kernels.reference.products import first_difference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

DTYPES = pytest.mark.parametrize("dtype", ["complex64", "complex128"])
NAMES = {"complex64": "complex_fp16x3", "complex128": "complex_residues"}
ORDERS = ["C", "F", "offset", "every other", "reversed"]


@pytest.fixture
def kernel_for(hopper):
    return lambda dtype: select(Problem(1, 1, 1, np.dtype(dtype)), hopper, name=NAMES[dtype])


def normal(shape, seed, dtype):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)


def integers(shape, seed, dtype):
    rng = np.random.default_rng(seed)
    return (rng.integers(-9, 10, shape) + 1j * rng.integers(-9, 10, shape)).astype(dtype)


def pair(name, m, k, n, dtype):
    drawn = [accuracy.draw(name, m, k, n, seed, dtype=REALS[dtype]) for seed in (1, 2)]
    return tuple(as_complex(np.stack(parts, axis=-1).reshape(len(parts[0]), -1)) for parts in zip(*drawn, strict=True))


def multiply(kernel, a, b, c=None):
    """Multiply where freed memory holds NaN, so that an element left unwritten shows."""
    import cupy

    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    size = max(1, int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])))) * a.shape[-2] * (b.shape[-1] + 2)
    poison = cupy.full(size, complex(np.nan, np.nan), kernel.accumulator)
    del poison
    return kernel.multiply(a, b, c)


def check(d, a, b, c=None):
    """Compare with the bound of a product of its type; that of halves is 256 steps' at least."""
    expected = reference.multiply(a, b) if c is None else reference.multiply(a, b) + c
    bound = 2 * error_bound(a, b, d.dtype, c)
    if d.dtype == np.complex64:
        bound = bound + 400 * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b))
    assert d.dtype == a.dtype
    difference = first_difference(d.get(), expected, atol=bound)
    assert difference is None, str(difference)


def found_in(operand):
    return (operand if hasattr(operand, "found") else operand.made).found


def guards(kernel, a, b):
    """Whether a guard is raised in each granule."""
    found = [found_in(operand).guards for operand in (kernel.prepare_a(a), kernel.prepare_b(b))]
    return [bool(mine or yours) for mine, yours in zip(*found, strict=True)]


@DTYPES
@pytest.mark.parametrize("order", [*ORDERS, "broadcast"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_b_becomes_the_real_matrix_of_the_twin(gpu, dtype, order, batch):
    for k, n in ((1, 1), (3, 2), (5, 127), (128, 129), (33, 1000)):
        b = on_gpu(normal((*batch, k, n), 1, dtype), order)
        with b.device:
            assert np.array_equal(doubled(b, gpu).get(), doubled_twin(b.get()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (31, 63), (32, 64), (33, 65), (9, 1025), (3, 8193), (2, 17000)])
def test_residues_are_those_of_the_twin(kernel_for, order, shape):
    import cupy

    values = normal((2, *shape), 1, "complex128")
    residues, found = kernel_for("complex128")._split(on_gpu(values, order))
    for index in range(granules(shape[1])):
        raised = Guard(0)
        for z in range(2):
            part = values[z, :, index * GRANULE : (index + 1) * GRANULE]
            want, factor, flag = complex_twin.split(part)
            raised |= flag
            if flag in (0, Guard.SPARSE):
                stack = residues.granule(index, z)
                pointer = residues.memory + (stack.address - residues.memory.ptr)
                there = cupy.ndarray(stack.shape, np.int8, pointer, stack.strides).get()
                assert np.array_equal(there, want.reshape(there.shape))
                pointer = residues.memory + (residues.factors(index, z) - residues.memory.ptr)
                assert np.array_equal(cupy.ndarray((shape[0],), np.float64, pointer).get(), factor)
        assert found.guards[index] == raised


@DTYPES
@pytest.mark.parametrize("k", [512, 1000, GRANULE // 2 + 320])
def test_the_device_has_the_bits_of_the_twin(kernel_for, dtype, k):
    a, b, c = normal((40, k), 1, dtype), normal((k, 70), 2, dtype), normal((40, 70), 3, dtype)
    for added in (None, c):
        d = multiply(kernel_for(dtype), a, b, None if added is None else on_gpu(added)).get()
        if dtype == "complex64":
            twin = as_complex(twins.fp16x3(as_real(a), doubled_twin(b), None if added is None else as_real(added)))
        else:
            twin, guard = complex_twin.product(a, b, added)
            assert guard == 0
        assert (d == twin).all(), f"{(d != twin).mean():.3f} differ, by {np.abs(d - twin).max():.3g}"


@DTYPES
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (127, 512, 191), (128, 640, 64), (129, 1001, 65), (300, 513, 5)])
def test_every_ragged_shape_is_right(kernel_for, dtype, shape):
    m, k, n = shape
    a, b, c = normal((m, k), 1, dtype), normal((k, n), 2, dtype), normal((m, n), 3, dtype)
    kernel = kernel_for(dtype)
    check(multiply(kernel, a, b), a, b)
    for order in ("C", "F", "every other"):
        check(multiply(kernel, a, b, on_gpu(c, order)), a, b, c)


@DTYPES
@pytest.mark.parametrize("order_a", ORDERS)
@pytest.mark.parametrize("order_b", ["C", "F", "offset", "every other"])
def test_the_layout_of_operands_does_not_change_the_bits(kernel_for, dtype, order_a, order_b):
    a, b = normal((203, 617), 1, dtype), normal((617, 150), 2, dtype)
    kernel = kernel_for(dtype)
    plain = multiply(kernel, a, b)
    check(plain, a, b)
    assert (multiply(kernel, on_gpu(a, order_a), on_gpu(b, order_b)) == plain).all()


@DTYPES
def test_every_tile_of_a_large_c_is_right_and_bits_repeat(kernel_for, monkeypatch, dtype):
    from distmm_kernels.gemm import residue_products as residues

    (m, k, n), kernel = (1500, 1024, 2900), kernel_for(dtype)
    a, b, c = integers((m, k), 1, dtype), integers((k, n), 2, dtype), integers((m, n), 3, dtype)
    want = on_gpu((a.astype("complex128") @ b + c).astype(dtype))  # exact: below 2^24
    for workspace in (residues.WORKSPACE, 1 << 20):  # in one strip and in many
        monkeypatch.setattr(residues, "WORKSPACE", workspace)
        for _ in range(2):
            assert bool((multiply(kernel, a, b, on_gpu(c)) == want).all())


@DTYPES
def test_bits_do_not_depend_on_cuts_of_k_at_the_granule(kernel_for, dtype):
    kernel = kernel_for(dtype)
    granule = kernel.granule
    k = 2 * granule + 700
    a, b, c = (on_gpu(normal(s, i, dtype)) for i, s in enumerate(((200, k), (k, 150), (200, 150))))
    a[7, granule + 5] = 2.0**70  # the second granule goes another way
    assert guards(kernel, a, b) == [False, True, False]
    whole = multiply(kernel, a, b, c)
    check(whole, a.get(), b.get(), c.get())
    for cuts in ((0, granule, 2 * granule, k), (0, 2 * granule, k), (0, granule, k)):
        d = c
        for first, last in itertools.pairwise(cuts):
            d = multiply(kernel, a[:, first:last], b[first:last], d)
        assert (d == whole).all()


@DTYPES
def test_small_numbers_that_the_other_operand_selects_are_kept(kernel_for, dtype):
    kernel, a, one = kernel_for(dtype), normal((300, 1024), 1, dtype), np.eye(1024, dtype=dtype)
    a[:, ::100] *= 2.0**-40
    roundoff = float(np.finfo(dtype).eps)
    for d, expected in ((multiply(kernel, a, one), a), (multiply(kernel, one[:300], a.T), a.T[:300])):
        error, magnitude = (np.abs(as_real(np.ascontiguousarray(x))) for x in (d.get() - expected, expected))
        assert (error <= 4 * roundoff * magnitude).all()
    whole = np.rint(64 * as_real(normal((300, 1024), 1, dtype))).view(dtype)
    assert (multiply(kernel, whole, one).get() == whole).all()


@DTYPES
@pytest.mark.parametrize(
    "set_name", [name for name in accuracy.SETS if name not in ("not finite", "subnormal", "tiny")]
)
def test_errors_are_no_larger_than_those_of_cublas(kernel_for, dtype, set_name):
    # large enough in complex64 that cuBLAS adds in one chain
    m, k, n = (1024, 2048, 1024) if dtype == "complex64" else (200, 1024, 180)
    a, b = pair(set_name, m, k, n, dtype)
    kernel, some = kernel_for(dtype), slice(0, 40)
    results = multiply(kernel, a, b), on_gpu(a) @ on_gpu(b), multiply(chain_of(kernel), a, b)
    measured = errors_of_complex64 if dtype == "complex64" else exact.complex_errors
    ours, theirs, chain = (measured(d.get()[some], a[some], b) for d in results)
    raised = any(guards(kernel, a, b))
    line = f"{ours.normwise:.1e} {ours.componentwise:.1e} chain {chain.normwise:.1e} {chain.componentwise:.1e}"
    print(dtype, set_name, raised, line, f"cuBLAS {theirs.normwise:.1e} {theirs.componentwise:.1e}")  # noqa: T201
    few = 1.6 if set_name == "very wide exponents" else 1.05  # as for real numbers
    assert ours.normwise <= few * chain.normwise
    assert ours.componentwise <= 1.25 * chain.componentwise
    if not raised:
        assert ours.normwise <= 1.05 * theirs.normwise


def errors_of_complex64(d, a, b):
    return accuracy.errors(as_real(np.ascontiguousarray(d)), as_real(np.ascontiguousarray(a)), doubled_twin(b))


def chain_of(kernel):
    return select(Problem(1, 1, 1, kernel.dtype), kernel.device, name="complex_chain")


@DTYPES
@pytest.mark.parametrize("value", [complex(np.inf, 0), complex(0, -np.inf), complex(np.nan, 1)])
def test_what_is_not_finite_goes_where_four_real_products_take_it(kernel_for, dtype, value):
    a, b = normal((130, 700), 1, dtype), normal((700, 90), 2, dtype)
    a[5, 20], b[30, 7] = value, value
    with np.errstate(invalid="ignore"):
        expected = reference.multiply(as_real(a), doubled_twin(b))
    d = as_real(np.ascontiguousarray(multiply(kernel_for(dtype), a, b).get()))
    others = np.ones(d.shape, bool)
    others[5], others[:, 14:16] = False, False
    assert np.isfinite(d[others]).all()
    assert not np.isfinite(d[5]).any()
    assert not np.isfinite(d[:, 14:16]).any()
    assert np.array_equal(np.isnan(d), np.isnan(expected))
    assert np.array_equal(np.isposinf(d), np.isposinf(expected))


@DTYPES
@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((3,), (3,)), ((), (4,)), ((2, 1), (3,)), ((5, 1, 2), (2,)), ((0,), ())]
)
def test_batches_broadcast(kernel_for, dtype, batch_a, batch_b):
    a, b = normal((*batch_a, 70, 600), 1, dtype), normal((*batch_b, 600, 90), 2, dtype)
    kernel = kernel_for(dtype)
    d = multiply(kernel, a, b)
    assert d.shape == (*np.broadcast_shapes(batch_a, batch_b), 70, 90)
    for place in np.ndindex(d.shape[:-2]):
        left, right = (np.broadcast_to(x, (*d.shape[:-2], *x.shape[-2:]))[place] for x in (a, b))
        assert (multiply(kernel, left, right) == d[place]).all()
    assert (multiply(kernel, a, b, d * 0) == d).all()


@DTYPES
def test_operands_of_another_kernel_are_refused(kernel_for, dtype):
    kernel, other = kernel_for(dtype), chain_of(kernel_for(dtype))
    a, b = normal((5, 6), 1, dtype), normal((6, 7), 2, dtype)
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(kernel.prepare_a(a), other.prepare_b(b), None)


@DTYPES
def test_neither_c_nor_the_operands_are_written(kernel_for, dtype):
    arrays = [on_gpu(normal(shape, i, dtype)) for i, shape in enumerate(((150, 600), (600, 170), (150, 170)))]
    before = [x.copy() for x in arrays]
    multiply(kernel_for(dtype), *arrays)
    assert all((x == y).all() for x, y in zip(arrays, before, strict=True))


@DTYPES
def test_a_hermitian_product_is_right(kernel_for, dtype):
    a = normal((300, 700), 1, dtype)
    on = on_gpu(a)
    check(multiply(kernel_for(dtype), on, on.T.conj()), a, np.ascontiguousarray(a.T.conj()))
