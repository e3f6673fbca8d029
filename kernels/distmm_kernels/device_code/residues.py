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
least, last_least
    Exponents of the smallest integer that does not count as small: in all granules but the last, and in the last.
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

from distmm_kernels.device_code.copies.halves import OVERFLOW, RANGE, SPARSE, UNDERFLOW, guards_of_counts, raise_guards
from distmm_kernels.device_code.copies.split import add_global, warp_sum
from distmm_kernels.device_code.emit import I32, I64, assembly, cuda, inlined, instruction, intrinsic, types
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.moduli import LIMIT, MODULI, byte_weights, multiplier, start
from distmm_kernels.emulation.residues import FORMS, LARGEST_SQUARES, LEAST_SQUARES, NEAR, ROWS, STRETCH, THREADS
from distmm_kernels.emulation.sparsity import FAR_BITS
from distmm_kernels.launch.compiler import Source

f64, i32, i64, u32, u64 = types.float64, types.int32, types.int64, types.uint32, types.uint64

SIGNATURE = types.void(*[u64] * 16)
# Stores of residues. They return the address of the next modulus' residues. The compiler must not see that this is a
# sum: it would keep all multiples of the step for the next row, and there are too few registers for them.
PUT = {
    4: "st.global.b32 [$1], $2; add.s64 $0, $1, $3;",
    2: "{ .reg .b16 low, high; mov.b32 {low, high}, $2; st.global.b16 [$1], low; add.s64 $0, $1, $3; }",
}
WARPS = THREADS // 32
ROWS_EACH = ROWS // WARPS  # of a warp, if its lanes read along k
FOURS = STRETCH // 4  # groups of four neighbours along k in a stretch: one for each lane
FOURS_EACH = FOURS // WARPS  # of a warp, if its lanes read rows
PITCH = STRETCH + 1  # float64 in shared memory: one element of 16 rows is in 16 different pairs of banks

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


def write_residues(moduli: tuple[int, ...], neighbours: int) -> Callable[..., None]:
    """Make ``(to, step, x0, x1, ...)``: write residues of two or four neighbours for each modulus, ``step`` apart.

    ``x + 2^63`` is an unsigned number of 8 bytes; the sum of its bytes by their weights has the residue of x, and is
    small enough for an exact quotient by one multiplication.
    """
    dot = assembly("dp4a.u32.s32 $0, $1, $2, $3;", [I32], [I32] * 3, ["=r", "r", "r", "r"], pure=True)
    high = assembly("mul.hi.u32 $0, $1, $2;", [I32], [I32] * 2, ["=r", "r", "r"], pure=True)
    put = assembly(PUT[neighbours], [I64], [I64, I32, I64], ["=l", "l", "r", "l"])

    def write(builder, to, step, *numbers):
        words = []
        for number in numbers:
            biased = builder.xor(number, I64(1 << 63))
            words.append((builder.trunc(biased, I32), builder.trunc(builder.lshr(biased, I64(32)), I32)))
        for modulus in moduli:
            weights = byte_weights(modulus)
            first, second = (I32(_packed(weights[i : i + 4])) for i in (0, 4))
            packed = I32(0x80808080)
            for i, (low, upper) in enumerate(words):
                value = dot(builder, [low, first, I32(start(modulus))])[0]
                value = dot(builder, [upper, second, value])[0]
                quotient = high(builder, [value, I32(multiplier(modulus))])[0]
                residue = builder.sub(value, builder.mul(quotient, I32(modulus)))
                packed = builder.xor(packed, builder.shl(residue, I32(8 * i)))
            to = put(builder, [to, packed, step])[0]

    return intrinsic(write, (u64, u64, *[i64] * neighbours))


def _packed(weights: tuple[int, ...]) -> int:
    """Return four int8 as a word."""
    return sum((weight & 0xFF) << 8 * i for i, weight in enumerate(weights))


def _placed(parts: int) -> Any:
    """Make ``(at, along)``: bytes from the first number along k to number ``at``."""

    def of_numbers(at, along):
        return u64(at) * along

    def of_pairs(at, along):
        return (u64(at) >> u64(1)) * along + (u64(at) & u64(1)) * u64(8)

    return inlined(of_numbers if parts == 1 else of_pairs)


def fours(load: Callable[..., Any], parts: int = 1) -> Any:
    """Make ``(address, along, left)``: load four neighbours along k; from the ``left``-th on they are zero."""
    place = _placed(parts)

    def four(address, along, left):
        return (
            load(address, i32(left > i32(0))),
            load(address + place(1, along), i32(left > i32(1))),
            load(address + place(2, along), i32(left > i32(2))),
            load(address + place(3, along), i32(left > i32(3))),
        )

    return inlined(four)


def filler(load: Callable[..., Any], parts: int = 1) -> Any:
    """Make the function by which the lanes of a block read rows to a tile in shared memory, for `four_of_tile`."""
    place = _placed(parts)

    def fill(tile, start, pitch, along, base, lane, warp, rows, steps):
        row = base + lane
        for i in range(STRETCH // WARPS):
            at = warp * u32(STRETCH // WARPS) + u32(i)
            there = i32(row < u32(rows) and i32(at) < steps)
            # element j of all groups of four is contiguous: a warp reads without bank conflicts
            column = (at & u32(3)) * u32(FOURS) + (at >> u32(2))
            tile[lane, column] = load(start + u64(row) * pitch + place(at, along), there)
        cuda.syncthreads()

    return inlined(fill)


@inlined
def four_of_tile(tile, row, lane):
    """Return a lane's four neighbours along k from a tile."""
    return (
        tile[row, lane],
        tile[row, lane + u32(FOURS)],
        tile[row, lane + u32(2 * FOURS)],
        tile[row, lane + u32(3 * FOURS)],
    )


@inlined
def tile_of_block(rows, k, first_matrix):
    """Return lane and warp of the thread, and the part of the operand that its block reads.

    That is the first of `ROWS` rows, the number of the stretch, the matrix, the first step of k and the count of steps.
    """
    thread = u32(cuda.threadIdx.x)
    lane, warp = thread & u32(31), thread >> u32(5)
    wide = (u32(rows) + u32(ROWS - 1)) // u32(ROWS)
    down = u32(cuda.blockIdx.x) // wide
    base = (u32(cuda.blockIdx.x) - down * wide) * u32(ROWS)
    matrix, first = u64(cuda.blockIdx.z) + first_matrix, u64(down) * u64(STRETCH)
    steps = i32(min(k - first, u64(STRETCH)))
    return lane, warp, base, down, matrix, first, steps


@inlined
def _squares(x):
    return ((square(x[0]) + square(x[1])) + square(x[2])) + square(x[3])


def sum_squares(along_k: bool, parts: int = 1) -> Source:
    """Sum the squares of each row and stretch: fours from left to right, then by halves. Grid: tiles, 1, matrices."""
    place, four = _placed(parts), fours(load_double, parts)

    def kernel(
        source, memory, flags, sums, between, pitch, along, rows, k, factors, words, granule_step, last_ld, least,
        last_least, first_matrix,
    ):  # fmt: skip
        held = cuda.shared.array((WARPS, ROWS), f64)
        lane, warp, base, down, matrix, first, steps = tile_of_block(rows, k, first_matrix)
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
        last_least, first_matrix,
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
    write = write_residues(MODULI, 4 // parts)
    place, four = _placed(parts), fours(load_double, parts)
    fill = filler(load_double, parts)

    def word_of(x, y, least, there):
        size = y if y >= i64(0) else -y
        word = u32(1) if size < least << i64(NEAR) else u32(0)
        word = word + u32(1 << FAR_BITS) if size < least and x != f64(0) else word
        return word if there else u32(0)

    count = inlined(word_of)

    def kernel(
        source, memory, flags, sums, between, pitch, along, rows, k, factors, words, granule_step, last_ld, least,
        last_least, first_matrix,
    ):  # fmt: skip
        tile = cuda.shared.array((ROWS, PITCH), f64)
        lane, warp, base, _, matrix, first, steps = tile_of_block(rows, k, first_matrix)
        granule, granules = first // u64(wide_granule), (k + u64(wide_granule - 1)) // u64(wide_granule)
        whole = (granule + u64(1)) * u64(wide_granule) < k
        length = u32(min(k - granule * u64(wide_granule), u64(wide_granule)))
        ld = u64(GRANULE) if whole else last_ld
        bound = i64(1) << i64(least if granule + u64(1) < granules else last_least)
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
                    x = four_of_tile(tile, here, lane)
                own = table + u64(row)
                scale = power_of_two(-exponent_of(read_double(memory + factors + own * u64(8))))
                y = (
                    to_integer(x[0] * scale),
                    to_integer(x[1] * scale),
                    to_integer(x[2] * scale),
                    to_integer(x[3] * scale),
                )
                word = count(x[0], y[0], bound, left > i32(0)) + count(x[1], y[1], bound, left > i32(1))
                word += count(x[2], y[2], bound, left > i32(2)) + count(x[3], y[3], bound, left > i32(3))
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
                        write(to, rows * ld, y[0], y[1], y[2], y[3])
                    else:
                        further = u64(moduli) * rows * ld
                        write(to, rows * ld, y[0], y[2])
                        write(to + further, rows * ld, y[1], y[3])
                        write(to + further + further, rows * ld, y[0] + y[1], y[2] + y[3])

    return _source(kernel)


def _source(kernel: Callable[..., Any]) -> Source:
    return Source(kernel, SIGNATURE, THREADS, blocks=4)
