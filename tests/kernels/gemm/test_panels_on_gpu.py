"""Several panels of k in one launch, on a real GPU: the bits of one panel after the other."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.select import select
from distmm_kernels.tiles.hopper_tiles import MOST_PANELS, STRETCH
from tests.kernels.reference import twins
from tests.kernels.reference.matrices import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CASES = [
    ("hopper", "float16"),
    ("hopper", BFLOAT16),
    ("hopper", "int8"),
    ("hopper", "uint8"),
    ("hopper", "bool"),
    ("hopper_tf32", "float32"),
    ("hopper_bf16", "float32"),
]
# steps of k of each panel
PANELS = [
    (1,), (512,), (1, 1), (100, 100, 37), (64, 64, 64, 64), (1000, 1000, 1000, 1000, 999), (512, 512, 1), (128,) * 11,
    (200, 300, 300, 5, 7), (STRETCH, STRETCH, 3), (STRETCH + 8, STRETCH + 8),
]  # fmt: skip


@pytest.fixture
def kernel_for(hopper):
    return lambda name, dtype: select(Problem(1, 1, 1, np.dtype(dtype)), hopper, name=name)


def drawn(kernel, panels, m=300, n=520, orders="CC"):
    """Prepared panels; of bools few are true."""
    rng, made = np.random.default_rng(0), []
    for k in panels:
        a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
        if kernel.dtype.kind == "b":
            a, b = a > 2.5, b > 2.5
        elif kernel.dtype.kind in "iu":
            a, b = (50 * a).astype("i8"), (50 * b).astype("i8")
        a, b = (on_gpu(x.astype(kernel.dtype), order) for x, order in zip((a, b), orders, strict=True))
        made.append((kernel.prepare_a(a), kernel.prepare_b(b)))
    return made


def one_by_one(kernel, panels, c=None):
    for a, b in panels:
        c = kernel.multiply(a, b, c)
    return c


def in_runs(kernel, panels, c=None, **last):
    *others, (a, b) = kernel.joined(panels)
    for left, right in others:
        c = kernel.multiply(left, right, c)
    return kernel.multiply(a, b, c, **last)


def agree(joined, separate):
    assert joined.dtype == separate.dtype
    np.testing.assert_array_equal(joined.astype("f8").get(), separate.astype("f8").get())  # -0.0 is 0.0


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("ks", PANELS, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_bits_are_those_of_one_panel_after_the_other(kernel_for, name, dtype, ks, adds):
    kernel = kernel_for(name, dtype)
    panels = drawn(kernel, ks)
    c = on_gpu(np.random.default_rng(1).integers(0, 9, (300, 520)), dtype=kernel.accumulator) if adds else None
    want = one_by_one(kernel, panels, c)
    agree(in_runs(kernel, panels, c), want)
    to = {"f": "float16", "i": "int8"}.get(kernel.accumulator.kind) if kernel.dtype.kind != "b" else "bool"
    agree(in_runs(kernel, panels, c, dtype=to), kernel.finish(want, 1, 0, None, to))
    if kernel.accumulator.kind == "f":
        c0 = on_gpu(np.random.default_rng(2).standard_normal((300, 520)), dtype="f4")
        finished = kernel.finish(want, 0.3, 0.7, c0, "f4")
        agree(in_runs(kernel, panels, c, alpha=0.3, beta=0.7, c0=c0), finished)


@pytest.mark.parametrize(("name", "dtype"), [("hopper", "float16"), ("hopper", BFLOAT16), ("hopper_tf32", "float32")])
def test_bits_are_those_of_the_twin(kernel_for, name, dtype):
    kernel, rng = kernel_for(name, dtype), np.random.default_rng(0)
    blocks = [
        tuple(rng.standard_normal(shape).astype(kernel.dtype) for shape in ((17, k), (k, 24))) for k in (512, 512, 328)
    ]
    want = rng.standard_normal((17, 24)).astype("f4")
    ((a, b),) = kernel.joined([(kernel.prepare_a(a), kernel.prepare_b(b)) for a, b in blocks])
    d = kernel.multiply(a, b, on_gpu(want))
    for left, right in blocks:
        want = twins.one_product(left, right, want)
    np.testing.assert_array_equal(d.get(), want)


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize(
    ("shape", "orders"),
    [
        ((1, 1), "CC"),
        ((1, 600), "FC"),
        ((127, 63), "CF"),
        ((1100, 1160), "FF"),
        ((4200, 1020), "CC"),
        ((4000, 4100), "CF"),
    ],
)
def test_any_c_and_operands_in_any_order(kernel_for, name, dtype, shape, orders):
    kernel = kernel_for(name, dtype)
    panels = drawn(kernel, (264, 264, 40), *shape, orders)
    agree(in_runs(kernel, panels), one_by_one(kernel, panels))


@pytest.mark.parametrize(("name", "dtype"), [("hopper", "float16"), ("hopper", "int8"), ("hopper_tf32", "float32")])
@pytest.mark.parametrize("adds", [False, True])
def test_deep_panels_of_many_tiles_are_one_launch_with_the_same_bits(kernel_for, name, dtype, adds):
    kernel, shape = kernel_for(name, dtype), (4100, 4500)
    panels = drawn(kernel, (STRETCH + 72, STRETCH + 72, 520), *shape)
    assert len(kernel.joined(panels)) == 1
    c = on_gpu(np.random.default_rng(1).integers(0, 9, shape), dtype=kernel.accumulator) if adds else None
    agree(in_runs(kernel, panels, c), one_by_one(kernel, panels, c))


def test_what_is_joined(kernel_for):
    kernel = kernel_for("hopper", BFLOAT16)

    def sizes(*ks, **how):
        return [a.shape[-1] for a, _ in kernel.joined(drawn(kernel, ks, 9, 9, **how))]

    assert sizes(64, 64, 64, 8) == [200]
    assert sizes(64, 8, 64) == [72, 64]
    assert sizes(8, 64, 64) == [8, 128]
    assert sizes(*[16] * (MOST_PANELS + 1)) == [16 * MOST_PANELS, 16]
    assert sizes(STRETCH + 8, STRETCH + 8) == [STRETCH + 8] * 2, "few tiles are multiplied in slices of k"


@pytest.mark.parametrize(("name", "dtype"), [("hopper", BFLOAT16), ("hopper", "int8")])
def test_streams_and_threads_that_do_not_wait(kernel_for, hopper, name, dtype):
    import cupy

    kernel = kernel_for(name, dtype)
    panels = drawn(kernel, (512, 512, 512, 200), 1200, 1300)
    want, failed = one_by_one(kernel, panels), []

    def work():
        try:
            with cupy.cuda.Device(hopper.index), cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(5):
                    ((a, b),) = kernel.joined(panels)
                    d = kernel.multiply(a, b, kernel.multiply(a, b, None, wait=False), wait=False)
                    twice = kernel.multiply(a, b, None, wait=False)
                    stream.synchronize()
                    agree(twice, want)
                    agree(d, one_by_one(kernel, panels, want))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
