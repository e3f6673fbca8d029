"""Float64 on tensor cores: a warp's `mma.sync` replaces its threads' multiply-adds.

The instruction adds its products one by one in ascending k, each by a fused multiply-add that rounds to nearest. So the
result has the same bits as that of `register_tiled` without tensor cores. The rest of the kernel is the same code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.device_code import simulated
from distmm_kernels.device_code.elements import Registers, Shared
from distmm_kernels.device_code.emit import ANY, F64, SIMULATED, assembly, intrinsic, types
from distmm_kernels.device_code.register_tiled import register_tiled, source_of
from distmm_kernels.launch.compiler import Source
from distmm_kernels.tiles.mma_tiles import MmaTiling

__all__ = ["multiply", "source"]


def multiply(tiling: MmaTiling, first: int, last: int) -> Callable[..., None]:
    """Make what `unrolled.multiply` makes. Here a step is one instruction: 4 steps of k."""
    loads, along = (tiling.loads(0), tiling.loads(1)), (tiling.steps(0)[1], tiling.steps(1)[1])
    counts, first_b = tiling.operands // 2, tiling.thread_rows
    steps, products = tiling.depth // tiling.step, tiling.products()
    issue = _instruction(tiling.instruction_rows)

    def write(builder, totals, held, array_a, base_a, array_b, base_b):
        acc, operands = Registers(builder, totals), Registers(builder, held)
        tiles = Shared(builder, array_a, base_a), Shared(builder, array_b, base_b)
        for k in range(first, last):
            now, following = k % 2 * counts, (k + 1) % 2 * counts
            for operand, (tile, start) in enumerate(zip(tiles, (following, following + first_b), strict=True)):
                step = (k + 1) % steps * tiling.step * along[operand]
                for register, place, count in loads[operand]:
                    operands.put(start + register, tile.load(step + place, count))
            for a, b, c in products if k >= 0 else ():
                registers = [*(now + row for row in a), now + first_b + b]
                values = [operands.get(x, 1)[0][0] for x in registers] + [acc.get(x, 1)[0][0] for x in c]
                for register, value in zip(c, issue(builder, values), strict=True):
                    acc.put(register, [(value,)])

    return intrinsic(write, (ANY, ANY, ANY, types.int32, ANY, types.int32))


def _instruction(rows: int) -> Callable[[Any, Any], list[Any]]:
    """Return a function that writes one instruction. It takes values of A, B and C, and returns those of D."""
    a, c = rows // 8, rows // 4
    ends = itertools.accumulate((0, c, a, 1, c))
    sets = ["{" + ", ".join(f"${i}" for i in range(*ends_of)) + "}" for ends_of in itertools.pairwise(ends)]
    text = f"mma.sync.aligned.m{rows}n8k4.row.col.f64.f64.f64.f64 {', '.join(sets)};"
    letters = ["=d"] * c + ["d"] * (a + 1) + [str(i) for i in range(c)]  # D has the registers of C
    return assembly(text, [F64] * c, [F64] * (a + 1 + c), letters, pure=True)


def source(dtype: str, tiling: MmaTiling, width: int) -> Source:
    """Return the source that `distmm_kernels.launch.binary` compiles."""
    makes = simulated.multiply_by_warp if SIMULATED else multiply
    return source_of(register_tiled(np.dtype(dtype), tiling, width, makes), dtype, tiling)
