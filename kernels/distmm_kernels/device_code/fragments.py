"""Tensor cores with operands from `ldmatrix`: bfloat16, float16, int8 and TF32 by `mma.sync`, since Ampere.

The kernel is `register_tiled`; a warp's `mma.sync` replaces its threads' multiply-adds. Asynchronous copies load tiles
into shared memory, a few pipeline stages ahead. `ldmatrix` loads a step's operands into registers one step early.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from distmm_kernels.device_code.elements import Registers, Shared
from distmm_kernels.device_code.emit import ANY, F32, I32, PTX_NAMES, assembly, constant, intrinsic, types
from distmm_kernels.device_code.register_tiled import register_tiled, source_of
from distmm_kernels.launch.compiler import Source
from distmm_kernels.tiles.fragment_tiles import EDGE, ITEMSIZE, FragmentTiling, Multiplicand


def multiply(operand: Multiplicand) -> Callable[[FragmentTiling, int, int], Callable[..., None]]:
    """Return a function of a tiling that makes what `unrolled.multiply` makes. A step is 32 bytes of k.

    Tensor cores truncate their sums. So with halves, a step's three products are summed from zero, and that sum is
    added to the accumulators outside of the tensor cores, rounded to nearest.
    """
    issue = _instruction(operand)

    def make(tiling: FragmentTiling, first: int, last: int) -> Callable[..., None]:
        steps, (of_a, of_b) = tiling.depth // tiling.step, (edge // EDGE for edge in tiling.part)
        parts, high, low = range(tiling.parts), 0, 1
        first_b = 8 * of_a * tiling.parts  # A has registers for two steps, B for one
        fragments = [[tiling.fragments(which, step) for which in (0, 1)] for step in range(steps)]
        reads = [_read(not along_k) for along_k in tiling.along_k]

        def write(builder, totals, held, array_a, base_a, array_b, base_b):
            acc, operands = Registers(builder, totals), Registers(builder, held)
            tiles = (array_a, base_a), (array_b, base_b)

            def load(which, number, step, first):
                (array, base), fragment = tiles[which], fragments[step][which][number]
                tile = Shared(builder, array, builder.xor(base, I32(fragment.flipped)))
                for part in parts:
                    place = tile.pointer(fragment.offset + part * tiling.part_elements(which))
                    words = reads[which](builder, [builder.ptrtoint(place, I32)])
                    operands.set_values(first + 4 * ((of_a, of_b)[which] * part + number), words)

            def multiplied(product, now, of, c):
                """Return C plus the products of a part of A and a part of B."""
                a, b = now + 4 * of_a * of[0], first_b + 4 * of_b * of[1]
                registers = [*(a + x for x in product.a), *(b + x for x in product.b)]
                return issue(builder, [*(operands.values(x)[0] for x in registers), *c])

            for k in range(first, last):
                now, following, step = k % 2 * first_b // 2, (k + 1) % 2 * first_b // 2, (k + 1) % steps
                for i in range(of_a):
                    load(0, i, step, following)
                for j in range(of_b):
                    products = tiling.products(j) if k >= 0 else ()
                    old = [[acc.values(x)[0] for x in product.c] for product in products]
                    if tiling.halves:
                        new = [[constant(F32, 0)] * 4] * len(products)
                        for of in ((low, high), (high, low), (high, high)):  # the smallest first
                            new = [multiplied(p, now, of, c) for p, c in zip(products, new, strict=True)]
                        new = [list(map(builder.fadd, *each)) for each in zip(old, new, strict=True)]
                    else:
                        new = [multiplied(p, now, (high, high), c) for p, c in zip(products, old, strict=True)]
                    for product, values in zip(products, new, strict=True):
                        for register, value in zip(product.c, values, strict=True):
                            acc.set_values(register, [value])
                    load(1, j, step, first_b)  # overwrites registers that were just multiplied

        return intrinsic(write, (ANY, ANY, ANY, types.int32, ANY, types.int32))

    return make


def _read(transposed: bool) -> Callable[[Any, Any], list[Any]]:
    """Return a function that writes the ldmatrix of four matrices."""
    turned = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return assembly(text, [I32] * 4, [I32])


def _sums(operand: Multiplicand) -> str:
    """Return the type of sums of products."""
    return "int32" if operand == "int8" else "float32"


def _instruction(operand: Multiplicand) -> Callable[[Any, Any], list[Any]]:
    """Return a function that writes one instruction. It takes values of A, B and C; D has the registers of C."""
    number, depth = I32 if operand == "int8" else F32, 32 // ITEMSIZE[operand]
    name, of_d = PTX_NAMES[operand], PTX_NAMES[_sums(operand)]
    text = (
        f"mma.sync.aligned.m16n8k{depth}.row.col.{of_d}.{name}.{name}.{of_d} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return assembly(text, [number] * 4, [I32] * 6 + [number] * 4, pure=True, of_warp=True, tied=True)


def source(operand: Multiplicand, tiling: FragmentTiling, width: int, modulo: bool = False) -> Source:
    """Return the source that `distmm_kernels.launch.binary` compiles; ``modulo`` is for residues in int8."""
    sums, narrow = _sums(operand), f"uint{8 * ITEMSIZE[operand]}"  # only the operands' bits matter in memory
    kernel = register_tiled(np.dtype(sums), tiling, width, multiply(operand), np.dtype(narrow), modulo)
    return source_of(kernel, sums, tiling, narrow, modulo)
