"""The epilogue of a tile in registers: read C from shared memory, scale or reduce sums.

Each warp handles its own 16 rows, so no warp waits for another. The layout of registers is that of
`distmm_kernels.device_code.hopper.wgmma`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distmm_kernels.device_code.elements import Registers
from distmm_kernels.device_code.emit import ANY, F32, I32, I64, assembly, intrinsic, types, u32, u64
from distmm_kernels.device_code.modulo import reduced
from distmm_kernels.tiles.hopper_tiles import C_BOX_BYTES, SPAN, Output

together = assembly("bar.warp.sync 0xffffffff;", [], [])  # all threads of a warp
# orders the thread's accesses of shared memory before the TMA's
fence = assembly("fence.proxy.async.shared::cta;", [], [])


def hand_over(builder: Any) -> None:
    """Write what orders all accesses of shared memory by the warp before those of the TMA."""
    fence(builder, [])
    together(builder, [])


def read_c(first: int, boxes: int, accumulator: Output, added: bool) -> Callable[..., None]:
    """Make ``read_c(acc, row, permuted, factors)``: read boxes of 32-bit C, from a tile's ``first`` on.

    They replace the accumulators, or, if ``added``, are added to them; floats are rounded to nearest. ``row`` is the
    address of the thread's row of the first box in shared memory. ``permuted`` is its position in that row, from
    `distmm_kernels.tiles.hopper_places.box_place`. When the function returns, the TMA may overwrite the boxes that the
    warp has read. ``factors`` are not used; `finish_d` has the same signature.
    """
    quads = quads_of(accumulator)

    def write(builder, array, row, permuted, _):
        acc, plus = Registers(builder, array), builder.add if accumulator == "int32" else builder.fadd
        for at, quad in quads(builder, first, boxes, row, permuted):
            if added:
                quad = [plus(x, y) for x, y in zip(acc.values(at, 4), quad, strict=True)]
            acc.set_values(at, quad)
        hand_over(builder)

    return intrinsic(write, (ANY, u32, u32, ANY))


def finish_d(first: int, boxes: int, c0: Output | None) -> Callable[..., None]:
    """Make ``finish_d(acc, row, permuted, factors)``: ``alpha * acc + beta * C0``, with the parameters of `read_c`.

    ``factors`` are the bits of alpha and of beta. Each operation is rounded, as in `Kernel.finish`: none is
    fused with another. Without a C0 nothing is read or added.
    """
    times = assembly("mul.rn.f32 $0, $1, $2;", [F32], [F32] * 2, pure=True)
    plus = assembly("add.rn.f32 $0, $1, $2;", [F32], [F32] * 2, pure=True)
    number = assembly("mov.b32 $0, $1;", [F32], [I32], pure=True)
    quads, every = quads_of(c0) if c0 else None, range(16 * first, 16 * (first + boxes), 4)

    def write(builder, array, row, permuted, factors):
        acc = Registers(builder, array)
        alpha, beta = (number(builder, [builder.trunc(builder.extract_value(factors, i), I32)])[0] for i in (0, 1))
        for at, quad in quads(builder, first, boxes, row, permuted) if quads else ((at, []) for at in every):
            sums = [times(builder, [x, alpha])[0] for x in acc.values(at, 4)]
            if quad:
                sums = [plus(builder, [x, times(builder, [y, beta])[0]])[0] for x, y in zip(sums, quad, strict=True)]
            acc.set_values(at, sums)
        if c0:
            hand_over(builder)

    return intrinsic(write, (ANY, u32, u32, types.UniTuple(u64, 2)))


def quads_of(kind: Output) -> Callable[..., Iterator[tuple[int, list[Any]]]]:
    """Make ``(builder, first, boxes, row, permuted)``: read boxes; yield four elements and their accumulators' number.

    Elements of 16 bits are converted to float32.
    """
    number = I32 if kind == "int32" else F32
    text = {
        "float16": "{ .reg .b32 w; .reg .b16 x, y; ld.shared.b32 w, [$2]; mov.b32 {x, y}, w; "
        "cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }",
        "bfloat16": "{ .reg .b32 w, x; ld.shared.b32 w, [$2]; shl.b32 x, w, 16; mov.b32 $0, x; "
        "and.b32 x, w, 0xffff0000; mov.b32 $1, x; }",
    }.get(kind, "ld.shared.v2.b32 {$0, $1}, [$2];")
    pair = assembly(text, [number, number], [I32], clobbers_memory=False)
    # 8 columns are two units of 16 bytes, or one
    groups, unit = (8, 16) if kind in ("float16", "bfloat16") else (4, 32)

    def read(builder: Any, first: int, boxes: int, row: Any, permuted: Any) -> Iterator[tuple[int, list[Any]]]:
        for box in range(boxes):
            for j in range(groups):
                place = builder.add(row, builder.xor(permuted, I32(unit * j)))
                upper = builder.add(place, I32(box * C_BOX_BYTES))
                quad = [*pair(builder, [upper]), *pair(builder, [builder.add(upper, I32(8 * SPAN))])]
                yield 4 * (groups * (first + box) + j), quad

    return read


def scale(columns: int) -> Callable[..., None]:
    """Make ``scale(acc, rows, columns)``: multiply by a factor of the row, then by one of the column.

    There are two steps, since the product of both factors may exceed float32's range although the result does not.
    ``rows`` and ``columns`` are the addresses of the factors of the thread's first element. Both lists are padded to
    whole tiles.
    """
    read = _read_factors(columns)

    def write(builder, array, row_factors, column_factors):
        acc, factors = Registers(builder, array), read(builder, row_factors, column_factors)
        acc.set_values(0, _scaled(builder, acc.values(0, columns // 2), factors))

    return intrinsic(write, (ANY, u64, u64))


def load_factors(columns: int) -> Callable[..., None]:
    """Make ``load_factors(factors, rows, columns)``: read the factors of `scale` to ``columns // 4 + 2`` registers."""
    read = _read_factors(columns)

    def write(builder, array, row_factors, column_factors):
        Registers(builder, array).set_values(0, read(builder, row_factors, column_factors))

    return intrinsic(write, (ANY, u64, u64))


def add_scaled(columns: int) -> Callable[..., None]:
    """Make ``add_scaled(totals, acc, factors)``: add accumulators, scaled as by `scale`, to totals."""

    def write(builder, *arrays):
        totals, acc, factors = (Registers(builder, array) for array in arrays)
        each = _scaled(builder, acc.values(0, columns // 2), factors.values(0, columns // 4 + 2))
        before = totals.values(0, columns // 2)
        totals.set_values(0, map(builder.fadd, before, each))

    return intrinsic(write, (ANY, ANY, ANY))


def _read_factors(columns: int) -> Callable[[Any, Any, Any], list[Any]]:
    """Make ``(builder, rows, columns)``: read the factors of a thread's two rows, then those of its columns."""
    one = assembly("ld.global.nc.f32 $0, [$1];", [F32], [I64], pure=True)
    two = assembly("ld.global.nc.v2.f32 {$0, $1}, [$2];", [F32, F32], [I64], pure=True)

    def read(builder: Any, rows: Any, by_column: Any) -> list[Any]:
        pairs = [two(builder, [builder.add(by_column, I64(32 * j))]) for j in range(columns // 8)]
        return [one(builder, [builder.add(rows, I64(4 * row))])[0] for row in (0, 8)] + [
            x for pair in pairs for x in pair
        ]

    return read


def _scaled(builder: Any, elements: Sequence[Any], factors: Sequence[Any]) -> list[Any]:
    """Return a thread's accumulators times the factors of their rows, then of their columns."""
    return [
        builder.fmul(builder.fmul(x, factors[i % 4 // 2]), factors[2 + i // 4 * 2 + i % 2])
        for i, x in enumerate(elements)
    ]


def residue(columns: int) -> Callable[..., None]:
    """Make ``residue(acc, modulus)``: replace int32 sums below 2^27 by their residues plus 128.

    ``modulus`` is the address that `distmm_kernels.device_code.modulo.reduced` takes.
    """

    def write(builder, array, address):
        acc = Registers(builder, array)
        acc.set_values(0, reduced(builder, acc.values(0, columns // 2), address))

    return intrinsic(write, (ANY, u64))


def not_zero(columns: int) -> Callable[[Any], None]:
    """Make a function that replaces int32 sums by 1 if they are not 0."""
    truth = assembly("{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.b32 $0, 1, 0, p; }", [I32], [I32], True)

    def write(builder, array):
        acc = Registers(builder, array)
        for i, element in enumerate(acc.values(0, columns // 2)):
            acc.set_values(i, truth(builder, [element]))

    return intrinsic(write, (ANY,))
