"""Launches of the `mma.sync` kernel on halves and on residues, called as the Hopper kernel is."""

from __future__ import annotations

import functools

from distmm_kernels.device import Device
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.hopper_launch import NO_SCALES, Scales, Stacks
from distmm_kernels.launch.launches import MAX_GRID_Y, Launch
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.fragment_tiles import Multiplicand, tilings, tilings_of_halves
from distmm_kernels.tiles.tiling import tiling_for


class FragmentGemm:
    """The kernel for products of halves or of residues on one device.

    Parameters
    ----------
    operand
        Type that the tensor cores read. If it is int8, D has the residues of the products in int8. Others are halves.
    along_k
        Whether A and B are k-major. Residues are.
    """

    def __init__(self, operand: Multiplicand, along_k: tuple[bool, bool], device: Device) -> None:
        self.operand, self.device, self._along_k = operand, device, along_k
        of_kind = tilings if operand == "int8" else tilings_of_halves
        self._choices = of_kind(operand, device.compute_capability, along_k)
        self._kept = functools.lru_cache(maxsize=1024)(self._launch)

    def __call__(self, a: Stacks, b: Stacks, c: Stack | None, d: Stack, scales: Scales = NO_SCALES) -> None:
        """Enqueue ``D = C + scales * (A_high B_high + A_low B_high + A_high B_low)`` on CuPy's current stream.

        Of residues it is ``D = A B`` modulo the numbers in ``scales``.
        """
        for first in range(0, d.matrices, MAX_GRID_Y):
            count = min(MAX_GRID_Y, d.matrices - first)
            a_parts = [self._operand(x, first, count, self._along_k[0]) for x in a]
            b_parts = [self._operand(x, first, count, self._along_k[1]) for x in b]
            to = _part(d, first, count)
            stacks: tuple[Stack | None, ...]
            if self.operand == "int8":  # in place of C the kernel reads moduli
                moduli = Stack(scales.rows + first * scales.row_step, (count, 1, 2), (scales.row_step, 8, 4), 4)
                stacks = *a_parts, *b_parts, moduli, to
            else:
                added = None if c is None else _part(c, first, count)
                stacks = *a_parts, *b_parts, added, to, *_factors(scales, first, to)
            found = self._kept(tuple(x and x.at(0) for x in stacks), to.at(0), to.has_vectors(-1))
            found(*(0 if x is None else x.address for x in stacks))

    def _launch(self, stacks: tuple[Stack | None, ...], d: Stack, vectors: bool) -> Launch:
        """Return the launch on stacks of these shapes and strides, at any addresses."""
        tiling = tiling_for(self._choices, d.rows, d.columns, d.matrices, self.device.multiprocessors)
        width = tiling.widest if vectors and d.columns % tiling.widest == 0 else 1
        parameters = self.operand, tiling, width, self.operand == "int8"
        recipe = Recipe("distmm_kernels.device_code.fragments:source", parameters)
        blocks = -(-d.rows // tiling.rows) * -(-d.columns // tiling.columns), d.matrices
        return Launch(recipe, self.device, blocks, stacks)

    def _operand(self, x: Stack, first: int, count: int, along_k: bool) -> Stack:
        """Return matrices ``(k, rows)`` for the kernel, from parts with either axis contiguous."""
        part = _part(x, first, count)
        if not along_k:
            return part
        (matrices, rows, k), (step, pitch, itemsize) = part.shape, part.strides
        return part._replace(shape=(matrices, k, rows), strides=(step, itemsize, pitch))


def _factors(scales: Scales, first: int, d: Stack) -> tuple[Stack | None, Stack | None]:
    """Return the factors of rows and of columns as matrices of D's size."""
    if not scales.rows:
        return None, None
    rows, columns = scales.rows + first * scales.row_step, scales.columns + first * scales.column_step
    return (Stack(rows, d.shape, (scales.row_step, 4, 0), 4), Stack(columns, d.shape, (scales.column_step, 0, 4), 4))


def _part(x: Stack, first: int, count: int) -> Stack:
    """Return ``count`` matrices of a stack from number ``first`` on; a stack of one matrix is broadcast."""
    if x.matrices == 1:
        return x._replace(shape=(count, *x.shape[1:]), strides=(0, *x.strides[1:]))
    return x._replace(address=x.address + first * x.step, shape=(count, *x.shape[1:]))


fragment_gemm = functools.cache(FragmentGemm)
"""fragment_gemm(operand, along_k, device): a process has one launcher of each kind on a device."""
