"""Float64 on tensor cores: a warp's `mma.sync` replaces its threads' multiply-adds.

The instruction adds its products one by one in ascending k, each by a fused multiply-add that rounds to nearest. So the
result has the same bits as that of `register_tiled` without tensor cores. The rest of the kernel is the same code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.device_code.elements import Registers, Shared
from distmm_kernels.device_code.emit import ANY, F64, assembly, intrinsic, types
from distmm_kernels.device_code.register_tiled import register_tiled, source_of
from distmm_kernels.launch.compiler import Source
from distmm_kernels.tiles.mma_tiles import MmaTiling


def multiply(tiling: MmaTiling, first: int, last: int) -> Callable[..., None]:
    """Make what `unrolled.multiply` makes. Here a step has as many steps of k as an instruction.

    A fragment is loaded for the next step as soon as it has been multiplied. The first ``tiling.early`` fragments of A
    are multiplied for the next step, too.
    """
    (of_a, of_b), early = map(range, tiling.fragments), range(tiling.early)
    along, first_b = (tiling.steps(0)[1], tiling.steps(1)[1]), tiling.thread_rows * tiling.step // 4
    steps, issue = tiling.depth // tiling.step, _instruction(*tiling.instruction)

    def write(builder, totals, held, array_a, base_a, array_b, base_b):
        acc, operands = Registers(builder, totals), Registers(builder, held)
        tiles = Shared(builder, array_a, base_a), Shared(builder, array_b, base_b)

        def fetch(operand, number, step):
            for register, place, count in tiling.loads(operand, number):
                vector = tiles[operand].load(step * tiling.step * along[operand] + place, count)
                operands.set_values(register + operand * first_b, vector)

        def product(i, j):
            for a, b, c in tiling.products(i, j):
                registers = [*a, *(first_b + register for register in b)]
                values = [operands.values(x)[0] for x in registers] + [acc.values(x)[0] for x in c]
                for register, value in zip(c, issue(builder, values), strict=True):
                    acc.set_values(register, [value])

        for k in range(first, last):
            step = (k + 1) % steps  # that is loaded
            if k < 0:
                for j in of_b:
                    fetch(1, j, step)
            for i in of_a:
                for j in of_b if k >= 0 and i not in early else ():
                    product(i, j)
                    if i == of_a[-1]:
                        fetch(1, j, step)
                fetch(0, i, step)
            for i, j in itertools.product(early, of_b):
                product(i, j)

    return intrinsic(write, (ANY, ANY, ANY, types.int32, ANY, types.int32))


def _instruction(rows: int, steps: int) -> Callable[[Any, Any], list[Any]]:
    """Return a function that writes one instruction. It takes values of A, B and C; D has the registers of C."""
    a, b, c = rows * steps // 32, steps // 4, rows // 4
    ends = itertools.accumulate((0, c, a, b, c))
    sets = ["{" + ", ".join(f"${i}" for i in range(*ends_of)) + "}" for ends_of in itertools.pairwise(ends)]
    text = f"mma.sync.aligned.m{rows}n8k{steps}.row.col.f64.f64.f64.f64 {', '.join(sets)};"
    return assembly(text, [F64] * c, [F64] * (a + b + c), pure=True, of_warp=True, tied=True)


def source(dtype: str, tiling: MmaTiling, width: int) -> Source:
    """Return the source that `distmm_kernels.launch.binary` compiles."""
    return source_of(register_tiled(np.dtype(dtype), tiling, width, multiply), dtype, tiling)
