"""Conversion of int32 and int64 to residues, and of a product's residues to integers that are added to C.

Both types wrap around modulo 2^32 or 2^64 (`distmm_kernels.emulation.integers` says why that is exact).
`tests/kernels/reference/integer_twin.py` does the same in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code import residue_tiles as tiles
from distmm_kernels.device_code.emit import I32, I64, cuda, i32, i64, inlined, instruction, intrinsic, types, u32, u64
from distmm_kernels.device_code.reconstruct import adder, byte_of, of_fours, words_of
from distmm_kernels.device_code.residue_tiles import PITCH, ROWS_EACH
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.emulation.integers import SHIFT, SYSTEMS
from distmm_kernels.emulation.residues import COLUMNS, ROWS, THREADS
from distmm_kernels.launch.compiler import Source


def split(bits: int, along_k: bool) -> Source:
    """Write the residues of each row, contiguous along k. Grid: tiles, 1, matrices.

    A matrix is ``(rows, k)``: A as it is, B transposed. A thread block reads `ROWS` rows and `STRETCH` steps of k. If
    the operand is k-major (``along_k``), each lane of a warp reads four neighbours along k. Otherwise each lane reads a
    row.

    The kernel's parameters are unsigned integers of 64 bits, in this order:

    - address of the operand, and of the memory that receives its residues;
    - bytes from one matrix to the next, from one row to the next, and from one step of k to the next;
    - rows, k;
    - bytes from one granule's residues to those of the next, and from one line to the next in the last granule;
    - the matrix that the grid begins with.
    """
    moduli = SYSTEMS[bits].moduli
    count, write = len(moduli), tiles.write_residues(moduli, 4)
    # to 64 bits: a load of 32 bits extends the sign
    load = instruction(
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.s64 $0, 0; @p ld.global.nc.s{bits} $0, [$1]; }}",
        (u64, i32),
        i64,
        pure=True,
    )

    four, fill = tiles.fours(load), tiles.filler(load)

    def kernel(source, memory, between, pitch, along, rows, k, granule_step, last_ld, first_matrix):
        tile = cuda.shared.array((ROWS, PITCH), i64)
        lane, warp, base, _, matrix, first, steps = tiles.tile_of_block(rows, k, first_matrix)
        granule = first // u64(GRANULE)
        ld = u64(GRANULE) if (granule + u64(1)) * u64(GRANULE) < k else last_ld
        start = source + matrix * between + first * along
        if not along_k:
            fill(tile, start, pitch, along, base, lane, warp, rows, steps)
        for i in range(ROWS_EACH):
            here = warp * u32(ROWS_EACH) + u32(i)
            row = base + here
            at = lane * u32(4)
            left = steps - i32(at)
            if row < u32(rows) and left > i32(0):
                if along_k:
                    x = four(start + u64(row) * pitch + u64(at) * along, along, left)
                else:
                    x = tiles.four_of_tile(tile, here, lane)
                line = (matrix * u64(count) * rows + u64(row)) * ld
                to = memory + granule * granule_step + line + first + u64(at) - granule * u64(GRANULE)
                write(to, rows * ld, x[0], x[1], x[2], x[3])

    return Source(kernel, types.void(*[u64] * 10), THREADS, blocks=4)


def _integers(bits: int) -> Callable[..., Any]:
    """Make ``(address, step)``: integers of four neighbours; ``step`` is the bytes from one modulus to the next."""
    system, wide = SYSTEMS[bits], I32 if bits == 32 else I64

    def write(builder, address, step):
        words, found = words_of(builder, address, step, len(system.moduli)), []
        for column in range(COLUMNS):
            total, multiple = wide(system.start), I32(system.shares_start)
            for word, weight, share in zip(words, system.weights, system.shares, strict=True):
                byte = byte_of(builder, word, column)
                multiple = builder.add(multiple, builder.mul(byte, I32(share)))
                number = byte if bits == 32 else builder.zext(byte, I64)
                total = builder.add(total, builder.mul(number, wide(weight)))
            multiple = builder.ashr(multiple, I32(SHIFT))
            multiple = multiple if bits == 32 else builder.sext(multiple, I64)
            found.append(builder.sub(total, builder.mul(multiple, wide(system.product % (1 << bits)))))
        return found

    return intrinsic(write, (u64, u64), (i32 if bits == 32 else i64,) * COLUMNS)


def reconstruct(bits: int, adds: bool) -> Source:
    """Return the kernel ``D = C + x`` of `distmm_kernels.device_code.reconstruct.of_fours`; D may be C."""
    kind, size = (i32, 4) if bits == 32 else (i64, 8)
    put = instruction(f"st.global.s{bits} [$0], $1;", (u64, kind))
    put_four = instruction(
        "st.global.v4.s32 [$0], {$1, $2, $3, $4};"
        if bits == 32
        else "st.global.v2.s64 [$0], {$1, $2}; st.global.v2.s64 [$0+16], {$3, $4};",
        (u64, *[kind] * COLUMNS),
    )
    add = instruction(f"{{ .reg .s{bits} c; ld.global.s{bits} c, [$2]; add.s{bits} $0, $1, c; }}", (kind, u64), kind)

    plus = adder(adds, add)

    def store(x, mine, theirs, c, c_along, d, left):
        x0 = plus(x[0], c)
        if left == i32(COLUMNS):
            x1, x2 = plus(x[1], c + c_along), plus(x[2], c + u64(2) * c_along)
            put_four(d, x0, x1, x2, plus(x[3], c + u64(3) * c_along))
        else:
            put(d, x0)
            if left > i32(1):
                put(d + u64(size), plus(x[1], c + c_along))
            if left > i32(2):
                put(d + u64(2 * size), plus(x[2], c + u64(2) * c_along))

    return of_fours(_integers(bits), inlined(store), size, blocks=4)
