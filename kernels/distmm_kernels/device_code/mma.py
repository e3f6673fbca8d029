"""Float64 on tensor cores: a warp's `mma.sync` in place of its threads' multiply-adds.

Such an instruction adds its products one by one in ascending k, each by a fused multiply-add that rounds to nearest. So
the chain is the one that `register_tiled` has without it, and so are the bits. The rest of the kernel is the same too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types

from distmm_kernels.compiler import Source
from distmm_kernels.device_code import llvm
from distmm_kernels.device_code.ptx import assembly
from distmm_kernels.device_code.register_tiled import register_tiled, source_of
from distmm_kernels.mma_tiles import LANES, MmaTiling

__all__ = ["multiply", "source"]


def multiply(tiling: MmaTiling, first: int, last: int) -> Callable[..., None]:
    """Make what `unrolled.multiply` makes, where a step is an instruction's: 4 steps of k.

    The simulator has no instructions that are a warp's. There a thread computes its part of C by itself, from what the
    other lanes of its warp would load, and adds each step when it would load it.
    """
    loads, (across, along) = (tiling.loads(0), tiling.loads(1)), zip(tiling.steps(0), tiling.steps(1), strict=True)
    counts, first_b = tiling.operands, tiling.thread_rows
    steps, products = tiling.depth // tiling.step, tiling.products()

    def simulated(acc, operands, tile_a, base_a, tile_b, base_b):
        below, beside = _lane(base_a % tiling.stage_elements(0), tiling)
        places = [[place + e for _, place, count in loads[operand] for e in range(count)] for operand in (0, 1)]

        def held(operand, lane_below, lane_beside, register):
            tile, base = ((tile_a, base_a), (tile_b, base_b))[operand]
            lanes = (lane_below - below) * 2 * across[operand] + (lane_beside - beside) * along[operand]
            return tile[base + lanes + step * along[operand] + places[operand][register]]

        for k in range(first, last):
            step = (k + 1) % steps * tiling.step
            for a, b, c in products:
                for (r, row), e, q in itertools.product(enumerate(a), (0, 1), range(tiling.step)):
                    acc[c[2 * r + e]] += held(0, below, q, row) * held(1, 2 * beside + e, q, b)

    if config.ENABLE_CUDASIM:
        return simulated
    issue = _instruction(tiling.instruction_rows)

    def generated(context, builder, signature, arguments):
        acc = llvm.Registers(context, builder, signature.args[0], arguments[0])
        operands = llvm.Registers(context, builder, signature.args[1], arguments[1])
        tile_a = llvm.Shared(context, builder, signature.args[2], arguments[2], arguments[3])
        tile_b = llvm.Shared(context, builder, signature.args[4], arguments[4], arguments[5])
        for k in range(first, last):
            now, following = k % 2 * counts, (k + 1) % 2 * counts
            for operand, (tile, start) in enumerate(((tile_a, following), (tile_b, following + first_b))):
                step = (k + 1) % steps * tiling.step * along[operand]
                for register, place, count in loads[operand]:
                    operands.put(start + register, tile.load(step + place, count))
            for a, b, c in products if k >= 0 else ():
                held = [*(now + row for row in a), now + first_b + b]
                values = [operands.get(x, 1)[0][0] for x in held] + [acc.get(x, 1)[0][0] for x in c]
                for register, value in zip(c, issue(builder, values), strict=True):
                    acc.put(register, [(value,)])
        return context.get_dummy_value()

    def typed(acc, operands, tile_a, base_a, tile_b, base_b):
        return types.void(acc, operands, tile_a, types.int32, tile_b, types.int32)

    return llvm.intrinsic(generated, typed)


def _lane(start: int, tiling: MmaTiling) -> tuple[int, int]:
    """Return which of the ``LANES`` begins to read A at such an element of a tile."""
    row, column = divmod(start, tiling.pitch(0))
    i, k = (row, column) if tiling.along_k[0] else (column, row)
    return i % (2 * LANES[0]) // 2, k


def _instruction(rows: int) -> Callable[[Any, Any], list[Any]]:
    """Return what emits one instruction: values of A, B and C to those of D."""
    a, c = rows // 8, rows // 4
    ends = itertools.accumulate((0, c, a, 1, c))
    sets = ["{" + ", ".join(f"${i}" for i in range(*ends_of)) + "}" for ends_of in itertools.pairwise(ends)]
    text = f"mma.sync.aligned.m{rows}n8k4.row.col.f64.f64.f64.f64 {', '.join(sets)};"
    double = ir.DoubleType()
    letters = ["=d"] * c + ["d"] * (a + 1) + [str(i) for i in range(c)]  # D is where C is
    return assembly(text, [double] * c, [double] * (a + 1 + c), letters, pure=True)


def source(dtype: str, tiling: MmaTiling, width: int) -> Source:
    """Return what `distmm_kernels.binary` compiles."""
    return source_of(register_tiled(np.dtype(dtype), tiling, width, multiply), dtype, tiling)
