"""What the kernels that split floats and integers into residues have in common: tiles, loads and stores.

A matrix is ``(rows, k)``. A thread block reads `ROWS` rows and `STRETCH` steps of k: along k, four neighbours a lane,
or along the rows, a row a lane, and then through a tile in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code.emit import I32, I64, assembly, cuda, i32, i64, inlined, intrinsic, u32, u64
from distmm_kernels.emulation.moduli import byte_weights, multiplier, start
from distmm_kernels.emulation.residues import ROWS, STRETCH, THREADS

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


def write_residues(moduli: tuple[int, ...], neighbours: int) -> Callable[..., None]:
    """Make ``(to, step, x0, x1, ...)``: write residues of two or four neighbours for each modulus, ``step`` apart.

    ``x + 2^63`` is an unsigned number of 8 bytes; the sum of its bytes by their weights has the residue of x, and is
    small enough for an exact quotient by one multiplication.
    """
    dot = assembly("dp4a.u32.s32 $0, $1, $2, $3;", [I32], [I32] * 3, pure=True)
    high = assembly("mul.hi.u32 $0, $1, $2;", [I32], [I32] * 2, pure=True)
    put = assembly(PUT[neighbours], [I64], [I64, I32, I64])

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


def placed(parts: int) -> Any:
    """Make ``(at, along)``: bytes from the first number along k to number ``at``."""

    def of_numbers(at, along):
        return u64(at) * along

    def of_pairs(at, along):
        return (u64(at) >> u64(1)) * along + (u64(at) & u64(1)) * u64(8)

    return inlined(of_numbers if parts == 1 else of_pairs)


def fours(load: Callable[..., Any], parts: int = 1) -> Any:
    """Make ``(address, along, left)``: load four neighbours along k; from the ``left``-th on they are zero."""
    place = placed(parts)

    def four(address, along, left):
        x0, x1 = load(address, i32(left > i32(0))), load(address + place(1, along), i32(left > i32(1)))
        x2 = load(address + place(2, along), i32(left > i32(2)))
        return x0, x1, x2, load(address + place(3, along), i32(left > i32(3)))

    return inlined(four)


def filler(load: Callable[..., Any], parts: int = 1) -> Any:
    """Make the function by which the lanes of a block read rows to a tile in shared memory, for `four_of_tile`."""
    place = placed(parts)

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
    x0, x1 = tile[row, lane], tile[row, lane + u32(FOURS)]
    return x0, x1, tile[row, lane + u32(2 * FOURS)], tile[row, lane + u32(3 * FOURS)]


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
