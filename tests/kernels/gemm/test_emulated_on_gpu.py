"""float32 products on tensor cores, on a real GPU: errors next to cuBLAS, bits, layouts, what guards lead to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.select import CANDIDATES, select, why_not
from tests.kernels.reference import accuracy, exact, twins
from tests.kernels.reference import products as reference
from tests.kernels.reference.matrices import RAGGED_SHAPES, error_bound, on_gpu
from tests.kernels.reference.products import first_difference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

ON_HOPPER = ("fp16x3", "tf32x3")
NAMES = pytest.mark.parametrize("name", [*ON_HOPPER, "mma_sync_fp16x3"])


@pytest.fixture
def kernel_for(gpu):
    problem = Problem(1, 1, 1, np.dtype(np.float32))

    def make(name):
        candidate = next(each for each in CANDIDATES if each.name == name)
        if reason := why_not(candidate, problem, gpu):
            pytest.skip(reason)
        return select(problem, gpu, name=name)

    return make


def multiply(kernel, a, b, c=None):
    """Multiply where freed memory holds NaN, so that an element left unwritten shows."""
    import cupy

    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    size = max(1, int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2])))) * a.shape[-2] * (b.shape[-1] + 4)
    poison = cupy.full(size, np.nan, np.float32)
    del poison
    return kernel.multiply(a, b, c)


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check(d, a, b, c=None):
    """Compare with float64; the bound is that of any float32 product, 256 steps or more deep."""
    expected = reference.multiply(a, b) if c is None else reference.multiply(a, b) + c
    bound = error_bound(a, b, np.float32, c) + 130 * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b))
    assert d.dtype == np.float32
    difference = first_difference(d.get(), expected, atol=bound)
    assert difference is None, str(difference)


def ways(kernel, a, b):
    a, b = kernel.prepare_a(a), kernel.prepare_b(b)
    count = len(a.found.guards)
    return [kernel._way(a, b, index).name for index in range(count)]


FALLS_TO = {  # where it is not the kernel's own way
    "wide exponents": ("TF32X3", "TF32X3"),
    "very wide exponents": ("TF32X3", "TF32X3"),
    "steep skew along k": ("TF32X3", "TF32X3"),
    "outliers": ("TF32X3", "TF32X3"),
    "large": ("FP16X3", "IEEE"),
    "small": ("FP16X3", "IEEE"),
    "tiny": ("IEEE", "IEEE"),
    "subnormal": ("IEEE", "IEEE"),
}
FINITE = [name for name in accuracy.SETS if name != "not finite"]


@NAMES
@pytest.mark.parametrize("set_name", FINITE)
def test_errors_are_no_larger_than_those_of_cublas(kernel_for, name, set_name):
    # large enough that cuBLAS adds in one chain; for small ones it cuts k in parallel parts, with a smaller error
    a, b = accuracy.draw(set_name, 4096, 4096, 4000, seed=1, module=cupy_of())
    kernel = kernel_for(name)
    way = FALLS_TO.get(set_name, ("FP16X3", "TF32X3"))[name.endswith("tf32x3")]
    assert ways(kernel, a, b) == [way]
    d = multiply(kernel, a, b)
    ours, theirs = accuracy.errors(d, a, b), accuracy.errors(a @ b, a, b)
    line = f"{ours.normwise:.2e} {ours.componentwise:.1e} cuBLAS {theirs.normwise:.2e} {theirs.componentwise:.1e}"
    print(name, set_name, way, line)  # noqa: T201 (a table to read, with -rP)
    if set_name == "integers":
        assert ours == exact.Errors(0.0, 0.0)
    else:  # a chain is a chain, in whatever tiles: only the last digits of its error differ
        slack = 1.05 if way == "IEEE" else 1.0
        assert ours.normwise <= slack * theirs.normwise
        assert ours.componentwise <= 1.25 * theirs.componentwise  # the largest of 16 million


@NAMES
@pytest.mark.parametrize("set_name", FINITE)
@pytest.mark.parametrize("shape", [(300, 1000, 260), (130, 256, 200)])
def test_errors_are_no_larger_than_those_of_a_float32_chain(kernel_for, name, set_name, shape):
    m, k, n = shape
    a, b = accuracy.draw(set_name, m, k, n, seed=1)
    ours = accuracy.errors(multiply(kernel_for(name), a, b).get(), a, b)
    chain = accuracy.errors(twins.fma_chain(a, b), a, b)
    # so few products make each sum that it is hardly rounded
    few = (1.6 if name in ON_HOPPER else 2.0) if set_name == "very wide exponents" else 1.01
    assert ours.normwise <= few * chain.normwise
    assert ours.componentwise <= 1.25 * chain.componentwise


@NAMES
@pytest.mark.parametrize("exponent", [-138, -126, -116, -115, -90])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_element_that_reads_only_a_tiny_number_keeps_the_bound(kernel_for, name, exponent, order):
    # Column j of B selects column 100 j of A, which is tiny beside its row.
    rng = np.random.default_rng(5)
    m, k, n = 70, 1024, 10
    a = np.ldexp(rng.uniform(1, 2, (m, k)), -50).astype("f4")
    b = np.zeros((k, n), "f4")
    for j in range(n):
        a[:, 100 * j] = np.ldexp(rng.uniform(1, 2, m), exponent)
        b[100 * j, j] = 2.0**40
    a, b = np.asarray(a, order=order), np.asarray(b, order=order)
    d = multiply(kernel_for(name), a, b).get()
    exact = a.astype("f8") @ b.astype("f8")
    assert (np.abs(d - exact) <= (k + 2) * 2.0**-24 * np.abs(exact)).all()


def cupy_of():
    import cupy

    return cupy


@NAMES
def test_infinities_and_nans_are_where_they_belong(kernel_for, name):
    a, b = accuracy.draw("not finite", 300, 700, 260)
    with np.errstate(invalid="ignore"):
        expected = reference.multiply(a, b)
        d = multiply(kernel_for(name), a, b).get()
    assert np.array_equal(np.isnan(d), np.isnan(expected))
    infinite = np.isinf(expected)
    assert np.array_equal(np.isinf(d), infinite)
    assert np.array_equal(d[infinite], expected[infinite])


@pytest.mark.parametrize("name", ON_HOPPER)
@pytest.mark.parametrize("k", [256, 1000, GRANULE, GRANULE + 320])
def test_the_device_has_the_bits_of_the_twin(kernel_for, name, k):
    a, b, c = normal((40, k), 1), normal((k, 72), 2), normal((40, 72), 3)
    for added in (None, c):
        d = multiply(kernel_for(name), a, b, added if added is None else on_gpu(added)).get()
        twin = getattr(twins, name)(a, b, added)
        assert (d == twin).mean() == 1, f"{(d != twin).mean():.3f} differ, by {np.abs(d - twin).max():.3g}"


@NAMES
@pytest.mark.parametrize("shape", [*RAGGED_SHAPES, (127, 256, 191), (128, 320, 192), (129, 321, 193), (257, 511, 385)])
def test_every_ragged_shape_is_right(kernel_for, name, shape):
    m, k, n = shape
    a, b, c = normal((m, k), 1), normal((k, n), 2), normal((m, n), 3)
    kernel = kernel_for(name)
    check(multiply(kernel, a, b), a, b)
    check(multiply(kernel, a, b, on_gpu(c)), a, b, c)


@NAMES
def test_every_tile_of_a_large_c_is_added(kernel_for, name):
    """Each block has 15 tiles or more: C of the next one comes while this one's is read."""
    rng, (m, k, n) = np.random.default_rng(0), (8192, 512, 6140)
    a, b, c = (on_gpu(rng.integers(-8, 9, shape).astype("float32")) for shape in ((m, k), (k, n), (m, n)))
    kernel = kernel_for(name)
    want = multiply(kernel, a, b) + c
    for _ in range(3):
        assert bool((multiply(kernel, a, b, c) == want).all())


@NAMES
@pytest.mark.parametrize("order_a", ["C", "F", "offset", "every other", "reversed"])
@pytest.mark.parametrize("order_b", ["C", "F", "offset"])
def test_the_layout_of_operands_does_not_change_the_bits(kernel_for, name, order_a, order_b):
    a, b = normal((203, 517), 1), normal((517, 150), 2)
    kernel = kernel_for(name)
    plain = multiply(kernel, a, b)
    check(plain, a, b)
    assert (multiply(kernel, on_gpu(a, order_a), on_gpu(b, order_b)) == plain).all()


@NAMES
def test_bits_repeat_and_do_not_depend_on_cuts_of_k_at_the_granule(kernel_for, name):
    k = 2 * GRANULE + 700
    a, b, c = on_gpu(normal((200, k), 1)), on_gpu(normal((k, 300), 2)), on_gpu(normal((200, 300), 3))
    a[7, GRANULE + 5] = 2.0**70  # the second granule goes another way
    kernel = kernel_for(name)
    whole = multiply(kernel, a, b, c)
    check(whole, a.get(), b.get(), c.get())
    for _ in range(3):
        assert (multiply(kernel, a, b, c) == whole).all()
    for cuts in ((0, GRANULE, 2 * GRANULE, k), (0, 2 * GRANULE, k), (0, GRANULE, k)):
        d = c
        for first, last in itertools.pairwise(cuts):
            d = multiply(kernel, a[:, first:last], b[first:last], d)
        assert (d == whole).all()


@NAMES
def test_bits_of_an_element_do_not_depend_on_the_size_of_the_product(kernel_for, name):
    # tiles of other widths, in other numbers of rounds
    a, b, c = on_gpu(normal((2200, 2048), 1)), on_gpu(normal((2048, 1900), 2)), on_gpu(normal((2200, 1900), 3))
    kernel = kernel_for(name)
    for start in (None, c):
        whole = multiply(kernel, a, b, start)
        for rows, columns in ((slice(0, 130), slice(0, 200)), (slice(2100, 2200), slice(1800, 1900))):
            part = multiply(kernel, a[rows], b[:, columns], None if start is None else start[rows, columns])
            assert (part == whole[rows, columns]).all()


@NAMES
def test_the_guarded_granule_alone_goes_another_way(kernel_for, name):
    a, b = normal((20, 3 * GRANULE), 1), normal((3 * GRANULE, 30), 2)
    b[GRANULE + 3, 4] = np.nan
    a[3, 2 * GRANULE :: 2] *= np.float32(2.0**-25)
    first = "FP16X3" if name.endswith("fp16x3") else "TF32X3"
    assert ways(kernel_for(name), a, b) == [first, "IEEE", "TF32X3"]


@NAMES
def test_small_numbers_that_the_other_operand_selects_are_kept(kernel_for, name):
    kernel, a, one = kernel_for(name), normal((300, 1024), 1), np.eye(1024, dtype=np.float32)
    a[:, ::100] *= np.float32(2.0**-40)
    assert ways(kernel, a, one) == ["TF32X3"]
    for d, expected in ((multiply(kernel, a, one), a), (multiply(kernel, one[:300], a.T), a.T[:300])):
        assert (np.abs(d.get() - expected) <= 2.0**-21 * np.abs(expected)).all()
    whole = np.rint(64 * normal((300, 1024), 1))  # no number is small beside the others
    assert ways(kernel, whole, one) == [kernel.first.name]
    assert (multiply(kernel, whole, one).get() == whole).all()


@NAMES
def test_granules_side_by_side_have_the_bits_of_one_after_the_other(kernel_for, name):
    a, b, c = (
        on_gpu(normal((300, 4 * GRANULE + 900), 1)),
        on_gpu(normal((4 * GRANULE + 900, 260), 2)),
        normal((300, 260), 3),
    )
    kernel = kernel_for(name)
    for order in ("C", "F"):
        x, y = (kernel.prepare_a(on_gpu(a, order)), kernel.prepare_b(on_gpu(b, order)))
        for start in (None, on_gpu(c)):
            assert kernel._at_once([kernel.first] * 5, a.shape[1], kernel._empty((300, 260), kernel.accumulator)) == 4
            whole = kernel.multiply(x, y, start)
            d = start
            for first in range(0, a.shape[1], GRANULE):
                some = slice(first, first + GRANULE)
                d = kernel.multiply(kernel.prepare_a(a[:, some]), kernel.prepare_b(b[some]), d)
            assert (d == whole).all()


@NAMES
@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((3,), (3,)), ((), (4,)), ((2, 1), (3,)), ((2, 3), (1, 3)), ((5, 1, 2), (2,))]
)
def test_batches_broadcast(kernel_for, name, batch_a, batch_b):
    a, b = normal((*batch_a, 70, 300), 1), normal((*batch_b, 300, 90), 2)
    kernel = kernel_for(name)
    d = multiply(kernel, a, b)
    check(d, a, b)
    assert (multiply(kernel, a, b, d * 0) == d).all()


@NAMES
def test_operands_of_another_kernel_are_refused(kernel_for, name):
    kernel, other = kernel_for(name), kernel_for("tf32x3" if name.endswith("fp16x3") else "fp16x3")
    a, b = normal((5, 6)), normal((6, 7))
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(other.prepare_a(a), kernel.prepare_b(b), None)
    with pytest.raises(TypeError, match="prepare it with this kernel"):
        kernel.multiply(kernel.prepare_a(a), on_gpu(b), None)


@NAMES
def test_neither_c_nor_the_operands_are_written(kernel_for, name):
    a, b, c = on_gpu(normal((150, 600), 1)), on_gpu(normal((600, 170), 2)), on_gpu(normal((150, 170), 3))
    before = [x.copy() for x in (a, b, c)]
    multiply(kernel_for(name), a, b, c)
    assert all((x == y).all() for x, y in zip((a, b, c), before, strict=True))


def wide(shape, seed):
    """Numbers that float16 halves do not hold, and TF32 halves do."""
    values = normal(shape, seed)
    values[:, ::2] *= np.float32(2.0**-25)
    return values


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("name", ["fp16x3", "mma_sync_fp16x3"])
def test_parts_of_guarded_granules_do_not_change_the_bits(kernel_for, monkeypatch, name, batch):
    from distmm_kernels.gemm import guarded

    kernel, k = kernel_for(name), GRANULE + 700
    a = np.stack([wide((300, k), i) for i in range(3)])[: batch[0] if batch else 1].reshape(*batch, 300, k)
    b, c = on_gpu(normal((k, 277), 2)), on_gpu(normal((*batch, 300, 277), 3))
    assert ways(kernel, a, b) == ["TF32X3", "TF32X3"]
    whole = multiply(kernel, a, b, c)
    a[..., 5, 3] = np.inf
    with_infinity = multiply(kernel, a, b, c)
    monkeypatch.setattr(guarded, "WORKSPACE", 1)
    assert bool((multiply(kernel, a, b, c)[..., 6:, :] == with_infinity[..., 6:, :]).all())
    a[..., 5, 3] = wide((300, k), 0)[5, 3]
    if not batch:
        assert bool((multiply(kernel, a, b, c) == whole).all())


def test_guarded_granules_take_no_more_than_the_workspace_and_leave_nothing(kernel_for, live_memory, monkeypatch):
    import cupy

    from distmm_kernels.gemm import guarded

    (m, k, n), workspace = (1500, 3 * GRANULE, 1201), 1 << 26
    kernel, a, b = kernel_for("fp16x3"), on_gpu(wide((m, k), 1)), on_gpu(normal((k, n), 2))
    multiply(kernel, a, b)  # loads the kernels
    monkeypatch.setattr(guarded, "WORKSPACE", workspace)  # TF32 halves of a whole granule would take 3 times as much
    with live_memory() as live:
        left, right = kernel.prepare_a(a), kernel.prepare_b(b)
        before = live.now
        d = kernel.multiply(left, right, None)
        after = live.now
    cupy.cuda.Device().synchronize()
    assert after - before <= 1.02 * d.nbytes + (1 << 16)
    assert live.peak - before <= 1.02 * d.nbytes + workspace + (1 << 20)
