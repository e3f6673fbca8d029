"""What the kernel of `mma.sync` is launched on for residues, on the host: NumPy replaces it at its addresses."""

from __future__ import annotations

import numpy as np
import pytest

from distmm_kernels.device import Device
from distmm_kernels.emulation.moduli import MODULI, OFFSET, epilogue_multiplier
from distmm_kernels.launch import fragment_launch
from distmm_kernels.launch.fragment_launch import FragmentGemm
from distmm_kernels.launch.hopper_launch import Scales
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.fragment_tiles import tilings
from tests.kernels.gemm.test_residue_products import seen

A100 = Device("cuda", "part of an NVIDIA A100", 0, 0, (8, 0), 64)


@pytest.fixture
def launched(monkeypatch):
    """Parameters of the kernels, and grids, as they are launched."""
    launches = []

    class Launch:
        def __init__(self, recipe, device, blocks, stacks):
            self.recipe, self.blocks, self.stacks = recipe, blocks, stacks

        def __call__(self, *addresses):
            launches.append((self.recipe.parameters, self.blocks))
            kinds = np.int8, np.int8, np.uint32, np.int8
            a, b, table, d = (
                seen(address, stack.shape, stack.strides, kind)
                for address, stack, kind in zip(addresses, self.stacks, kinds, strict=True)
            )
            assert table[:, 0, 1].tolist() == [epilogue_multiplier(int(modulus)) for modulus in table[:, 0, 0]]
            sums = a.swapaxes(1, 2).astype(np.int64) @ b.astype(np.int64)
            d[...] = (sums + OFFSET) % table[:, :, :1].astype(np.int64) - OFFSET

    monkeypatch.setattr(fragment_launch, "Launch", Launch)
    return launches


@pytest.mark.parametrize("most", [65535, 5])
@pytest.mark.parametrize(("m", "n", "size"), [(3, 5, 1), (100, 130, 1), (1000, 960, 0)])
def test_each_modulus_has_its_own_matrices_and_its_own_number(launched, monkeypatch, m, n, size, most):
    monkeypatch.setattr(fragment_launch, "MAX_GRID_Y", most)
    rng, k = np.random.default_rng(0), 16
    a, b = (rng.integers(-128, 128, (len(MODULI), rows, k), np.int8) for rows in (m, n))
    table = np.array([(modulus, epilogue_multiplier(modulus)) for modulus in MODULI], np.uint32)
    d = np.zeros((len(MODULI), m, -(-n // 16) * 16), np.int8)
    left, right = (Stack(x.ctypes.data, x.shape, x.strides, 1) for x in (a, b))
    to = Stack(d.ctypes.data, (len(MODULI), m, n), d.strides, 1)
    choices = tilings("int8", A100.compute_capability, (True, True))
    FragmentGemm("int8", (True, True), A100)((left,), (right,), None, to, Scales(table.ctypes.data, 8, 0, 0))
    sums = a.astype(np.int64) @ b.swapaxes(1, 2).astype(np.int64)
    np.testing.assert_array_equal(d[..., :n], (sums + OFFSET) % np.reshape(MODULI, (-1, 1, 1)) - OFFSET)
    assert not d[..., n:].any()
    counts = [min(most, len(MODULI) - first) for first in range(0, len(MODULI), most)]
    tiling = choices[size]
    aligned = d.ctypes.data % 16 == 0  # NumPy promises less
    width = tiling.widest if n % 2 == 0 and aligned else 1
    blocks = -(-m // tiling.rows) * -(-n // tiling.columns)
    assert launched == [(("int8", tiling, width, True), (blocks, count)) for count in counts]
