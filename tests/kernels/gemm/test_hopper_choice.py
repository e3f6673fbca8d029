"""Which variant of the Hopper kernel a product takes, on the host: launches are replaced."""

from __future__ import annotations

import numpy as np
import pytest

from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.gemm import hopper
from distmm_kernels.gemm.hopper import HopperBf16Kernel, HopperKernel, HopperTf32Kernel
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.hopper_tiles import STRETCH

NOWHERE = Device("cuda", "none", 0, 0, (9, 0), 132)
KERNELS = pytest.mark.parametrize(
    ("kernel", "dtype"), [(HopperKernel, "float16"), (HopperTf32Kernel, "float32"), (HopperBf16Kernel, "float32")]
)


@pytest.fixture
def tiles(monkeypatch):
    """The tiles that are launched, in order."""
    launched = []
    monkeypatch.setattr(hopper, "hopper_gemm", lambda tile, device: lambda *operands: launched.append(tile))
    monkeypatch.setattr("distmm_kernels.layout.stack.address", lambda array: 4096)
    monkeypatch.setattr(Stack, "loadable", lambda self: True)
    return launched


def multiplied(kernel, m, k, n, adds=False):
    a, b = kernel._format(np.zeros((m, k), kernel.dtype), "A"), kernel._format(np.zeros((k, n), kernel.dtype), "B")
    c = np.zeros((m, n), kernel.accumulator) if adds else None
    kernel._accumulate(a, b, c, np.zeros((m, n), kernel.accumulator))


@KERNELS
@pytest.mark.parametrize("adds", [False, True])
def test_deep_float_products_take_sums_out_and_others_keep_their_wide_tiles(tiles, kernel, dtype, adds):
    made = kernel(Problem(1, 1, 1, np.dtype(dtype)), NOWHERE)
    for k, deep in ((64, False), (STRETCH, False), (STRETCH + 1, True), (3 * STRETCH, True)):
        multiplied(made, 128, k, 256, adds)
        tile = tiles.pop()
        assert (tile.promotes, tile.adds) == (deep, adds)
        assert tile.columns <= (192 if deep else 256)


def test_sums_of_int8_products_are_exact_and_stay(tiles):
    multiplied(HopperKernel(Problem(1, 1, 1, np.dtype("int8")), NOWHERE), 128, 2 * STRETCH, 256)
    assert not tiles.pop().promotes


def test_cuts_of_k_where_sums_are_taken_out_leave_the_bits_and_plans_know():
    granules = {c.name: c.granule for c in CANDIDATES}
    for kernel in (HopperKernel, HopperTf32Kernel, HopperBf16Kernel):
        assert kernel.granule == granules[kernel.name] == STRETCH
