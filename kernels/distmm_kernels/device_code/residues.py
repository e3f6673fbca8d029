"""Kernels that split float64 operands into residues: two passes over the operand, one over the result.

A matrix is ``(rows, k)``: A as it is, B transposed. A thread block reads `ROWS` rows and `STRETCH` steps of k. If
the operand is k-major (``along_k``), each lane of a warp reads four neighbours along k. Otherwise each lane reads a
row.

All kernels have the same parameters, unsigned integers of 64 bits:

source
    Address of the operand.
memory
    Address of the memory that receives the residues, factors and words.
flags
    Address of the flags.
sums
    Address of the partial sums ``(matrices, stretches, rows)``.
between, pitch, along
    Bytes from one matrix to the next, from one row to the next, and from one step of k to the next.
rows, k
    Sizes of a matrix.
factors, words
    Offsets in memory of the tables of factors and of words, ``(matrices, granules, rows)`` each.
granule_step, last_ld
    Bytes from one granule's residues to those of the next, and from one line to the next in the last granule.
least, near, last_least, last_near
    The smallest integers that do not count as small, and as far: in all granules but the last, and in the last.
first_matrix
    The matrix that the grid begins with.

A matrix of complex numbers is ``(rows, k)`` real ones, with k twice as large: re, im, re, im (``parts`` is 2). A
granule has as many complex numbers as real ones. Residues of re, of im and of re + im are written, as three matrices.
Products of these make a complex product, since sums of residues lose nothing.

Squares are added in the same order for each layout of the operand. The scale depends on their sum, and all bits of a
product depend on the scale. `tests/kernels/reference/residue_twin.py` does the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code import residue_tiles as tiles
from distmm_kernels.device_code.copies.halves import OVERFLOW, RANGE, SPARSE, UNDERFLOW, guards_of_counts, raise_guards
from distmm_kernels.device_code.copies.split import add_global, warp_sum
from distmm_kernels.device_code.emit import cuda, f64, i32, i64, inlined, instruction, types, u32, u64
from distmm_kernels.device_code.residue_tiles import FOURS_EACH, PITCH, ROWS_EACH, WARPS
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.moduli import LIMIT, MODULI
from distmm_kernels.emulation.residues import FORMS, LARGEST_SQUARES, LEAST_SQUARES, ROWS, STRETCH, THREADS
from distmm_kernels.emulation.sparsity import FAR_BITS
from distmm_kernels.launch.compiler import Source

SIGNATURE = types.void(*[u64] * 18)

load_double = instruction(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.f64 $0, 0d0000000000000000; @p ld.global.nc.f64 $0, [$1]; }",
    (u64, i32),
    f64,
    pure=True,
)
"""load_double(address, there): returns zero, and reads nothing, if ``there`` is 0."""

read_double = instruction("ld.global.f64 $0, [$1];", (u64,), f64)
store_double = instruction("st.global.f64 [$0], $1;", (u64, f64))
square = instruction("mul.rn.f64 $0, $1, $1;", (f64,), f64, pure=True)
"""square(x): rounded, never fused with an addition."""
to_integer = instruction("cvt.rni.s64.f64 $0, $1;", (f64,), i64, pure=True)
"""to_integer(x): to nearest, ties to even."""
exponent_of = instruction(
    "{ .reg .b32 low, high; mov.b64 {low, high}, $1; shr.u32 $0, high, 20; sub.s32 $0, $0, 1023; }",
    (f64,),
    i32,
    pure=True,
)
"""exponent_of(x): floor(log2 x) of a normal positive number."""
power_of_two = instruction(
    "{ .reg .b32 high; add.s32 high, $1, 1023; shl.b32 high, high, 20; mov.b64 $0, {0, high}; }", (i32,), f64, pure=True
)
"""power_of_two(exponent), from -1022 to 1023."""


@inlined
def _squares(x):
    return ((square(x[0]) + square(x[1])) + square(x[2])) + square(x[3])


def sum_squares(along_k: bool, parts: int = 1) -> Source:
    """Sum the squares of each row and stretch: fours from left to right, then by halves. Grid: tiles, 1, matrices."""
    place, four = tiles.placed(parts), tiles.fours(load_double, parts)

    def kernel(
        source, memory, flags, sums, between, pitch, along, rows, k, factors, words, granule_step, last_ld, least,
        near, last_least, last_near, first_matrix,
    ):  # fmt: skip
        held = cuda.shared.array((WARPS, ROWS), f64)
        lane, warp, base, down, matrix, first, steps = tiles.tile_of_block(rows, k, first_matrix)
        stretches = (k + u64(STRETCH - 1)) // u64(STRETCH)
        start = source + matrix * between + place(first, along)
        to = sums + (matrix * stretches + u64(down)) * rows * u64(8)
        if along_k:
            for i in range(ROWS_EACH):
                row = base + warp * u32(ROWS_EACH) + u32(i)
                left = steps - i32(lane * u32(4)) if row < u32(rows) else i32(0)
                total = _squares(four(start + u64(row) * pitch + place(lane * u32(4), along), along, left))
                for level in range(5):
                    total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1 << level)
                if lane == u32(0) and row < u32(rows):
                    store_double(to + u64(row) * u64(8), total)
        else:
            row = base + lane
            mine = cuda.local.array(FOURS_EACH, f64)
            for i in range(FOURS_EACH):
                at = (warp * u32(FOURS_EACH) + u32(i)) * u32(4)
                left = steps - i32(at) if row < u32(rows) else i32(0)
                mine[i] = _squares(four(start + u64(row) * pitch + place(at, along), along, left))
            held[warp, lane] = (mine[0] + mine[1]) + (mine[2] + mine[3])
            cuda.syncthreads()
            if warp == u32(0) and row < u32(rows):
                upper = (held[0, lane] + held[1, lane]) + (held[2, lane] + held[3, lane])
                lower = (held[4, lane] + held[5, lane]) + (held[6, lane] + held[7, lane])
                store_double(to + u64(row) * u64(8), upper + lower)

    return _source(kernel)


def find_factors(parts: int = 1) -> Source:
    """Choose the scale of each row and granule, and write the factor that undoes it. Grid: rows, granules, matrices."""
    limit, least_squares, largest_squares = f64(LIMIT), f64(LEAST_SQUARES), f64(LARGEST_SQUARES)
    each = parts * GRANULE // STRETCH

    def kernel(
        source, memory, flags, sums, between, pitch, along, rows, k, factors, words, granule_step, last_ld, least,
        near, last_least, last_near, first_matrix,
    ):  # fmt: skip
        row = u64(cuda.blockIdx.x) * u64(THREADS) + u64(cuda.threadIdx.x)
        granule, matrix = u64(cuda.blockIdx.y), u64(cuda.blockIdx.z) + first_matrix
        if row < rows:
            stretches = (k + u64(STRETCH - 1)) // u64(STRETCH)
            stretch = granule * u64(each)
            last = min(stretch + u64(each), stretches)
            total = f64(0)
            while stretch < last:
                total += read_double(sums + ((matrix * stretches + stretch) * rows + row) * u64(8))
                stretch += u64(1)
            exponent, guard = i32(0), u32(0)
            if total >= least_squares and total <= largest_squares:
                exponent = exponent_of(limit / total) >> i32(1)
            elif total > f64(0) and total < least_squares:
                guard = UNDERFLOW
            elif total != f64(0):  # infinite, or not a number
                guard = OVERFLOW
            raise_guards(flags, granule, guard)
            own = (matrix * u64(cuda.gridDim.y) + granule) * rows + row
            store_double(memory + factors + own * u64(8), power_of_two(-exponent))

    return _source(kernel)


def split(along_k: bool, parts: int = 1) -> Source:
    """Scale, round, and write the residues of each row, contiguous along k. Grid: as for `sum_squares`."""
    moduli, wide_granule = len(MODULI), parts * GRANULE
    forms = FORMS[parts]
    write = tiles.write_residues(MODULI, 4 // parts)
    place, four = tiles.placed(parts), tiles.fours(load_double, parts)
    fill = tiles.filler(load_double, parts)

    def word_of(x, y, least, near, there):
        size = y if y >= i64(0) else -y
        word = u32(1) if size < near else u32(0)
        word = word + u32(1 << FAR_BITS) if size < least and x != f64(0) else word
        return word if there else u32(0)

    count = inlined(word_of)

    def kernel(
        source, memory, flags, sums, between, pitch, along, rows, k, factors, words, granule_step, last_ld, least,
        near, last_least, last_near, first_matrix,
    ):  # fmt: skip
        tile = cuda.shared.array((ROWS, PITCH), f64)
        lane, warp, base, _, matrix, first, steps = tiles.tile_of_block(rows, k, first_matrix)
        granule, granules = first // u64(wide_granule), (k + u64(wide_granule - 1)) // u64(wide_granule)
        whole = (granule + u64(1)) * u64(wide_granule) < k
        length = u32(min(k - granule * u64(wide_granule), u64(wide_granule)))
        ld = u64(GRANULE) if whole else last_ld
        small, far = i64(least), i64(near)
        if granule + u64(1) == granules:
            small, far = i64(last_least), i64(last_near)
        start = source + matrix * between + place(first, along)
        table = (matrix * granules + granule) * rows
        if not along_k:
            fill(tile, start, pitch, along, base, lane, warp, rows, steps)
        for i in range(ROWS_EACH):
            here = warp * u32(ROWS_EACH) + u32(i)
            row = base + here
            if row < u32(rows):  # the same in all lanes
                at = lane * u32(4)
                left = steps - i32(at)
                if along_k:
                    x = four(start + u64(row) * pitch + place(at, along), along, left)
                else:
                    x = tiles.four_of_tile(tile, here, lane)
                own = table + u64(row)
                scale = power_of_two(-exponent_of(read_double(memory + factors + own * u64(8))))
                y0, y1 = to_integer(x[0] * scale), to_integer(x[1] * scale)
                y2, y3 = to_integer(x[2] * scale), to_integer(x[3] * scale)
                word = count(x[0], y0, small, far, left > i32(0)) + count(x[1], y1, small, far, left > i32(1))
                word += count(x[2], y2, small, far, left > i32(2)) + count(x[3], y3, small, far, left > i32(3))
                word = warp_sum(word)
                if lane == u32(0) and word != u32(0):
                    # the word only grows: the block whose count exceeds a limit raises the guard, once for each row
                    before = add_global(memory + words + own * u64(4), word)
                    guard = guards_of_counts(before + word, length, RANGE, SPARSE)
                    raise_guards(flags, granule, guard ^ guards_of_counts(before, length, RANGE, SPARSE))
                if left > i32(0):
                    line = (matrix * u64(forms * moduli) * rows + u64(row)) * ld
                    column = (first + u64(at) - granule * u64(wide_granule)) // u64(parts)
                    to = memory + granule * granule_step + line + column
                    if parts == 1:
                        write(to, rows * ld, y0, y1, y2, y3)
                    else:
                        further = u64(moduli) * rows * ld
                        write(to, rows * ld, y0, y2)
                        write(to + further, rows * ld, y1, y3)
                        write(to + further + further, rows * ld, y0 + y1, y2 + y3)

    return _source(kernel)


def _source(kernel: Callable[..., Any]) -> Source:
    return Source(kernel, SIGNATURE, THREADS, blocks=4)
