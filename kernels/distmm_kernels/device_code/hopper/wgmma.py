"""Warpgroup matrix multiply-add: 64 rows of A times a tile of B, both in shared memory; the sums are in registers.

Accumulators are a ``cuda.local.array`` in registers, since every index into it is a constant. Thread ``t``
of a warpgroup holds parts of row ``16 (t // 32) + t % 32 // 4`` and of the row 8 further down: of every 8 columns,
column ``2 (t % 4)`` and the next. Elements ``4 j`` and ``4 j + 1`` are in the ``j``-th 8 columns of the first row, the
next two in the second row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code.elements import Registers
from distmm_kernels.device_code.emit import ANY, F32, I32, I64, PTX_NAMES, assembly, i32, instruction, intrinsic, u64
from distmm_kernels.tiles.hopper_tiles import SPAN, HopperTile

fence = instruction("wgmma.fence.sync.aligned;")
"""Orders accesses to accumulators before the wgmma that follow."""

commit = instruction("wgmma.commit_group.sync.aligned;")
"""Commits the wgmma issued since the last commit as one group."""


def wait_for(pending: int) -> Callable[[], None]:
    """Make a function that waits until all groups but the last ``pending`` are complete."""
    return instruction(f"wgmma.wait_group.sync.aligned {pending};")


def descriptor(along_k: bool, depth: int) -> int:
    """Return the constant part of a tile's 64-bit descriptor in shared memory; the caller adds ``address // 16``.

    Rows are 128 bytes long and swizzled over 128 bytes, in groups of 8 rows, 1024 bytes apart. For a k-major
    operand, such a row is a row of the matrix. Otherwise it is 64 columns at one k, and the next 64 columns begin
    ``depth`` rows later.
    """
    swizzle_128_bytes = 1
    chunk = 16 if along_k else depth * SPAN
    return swizzle_128_bytes << 62 | 8 * SPAN // 16 << 32 | chunk // 16 << 16


def step(along_k: bool, instruction_depth: int) -> int:
    """Return the distance of the next wgmma's descriptor, in units of 16 bytes: 32 bytes along k, or rows of k."""
    return 2 if along_k else instruction_depth * SPAN // 16


def multiply(tile: HopperTile) -> Callable[..., None]:
    """Make ``multiply(acc, a, b, add)``: acc = A B, plus acc if ``add`` is not 0; a and b are descriptors."""
    count, number = tile.columns // 2, F32 if tile.accumulator == "float32" else I32
    of_d, of_a, of_b = (PTX_NAMES[each] for each in (tile.accumulator, tile.operand, tile.b_operand or tile.operand))
    tail = ", 1, 1" if number == F32 else ""
    if tile.itemsize == 2:  # the instruction has bits for transposed operands
        tail += f", {int(tile.a_major != 'k')}, {int(tile.b_major != 'k')}"
    registers = ", ".join(f"${i}" for i in range(count))
    shape = f"m64n{tile.columns}k{tile.instruction_depth}"
    emit = assembly(
        f"{{ .reg .pred p; setp.ne.b32 p, ${count + 2}, 0; "
        f"wgmma.mma_async.sync.aligned.{shape}.{of_d}.{of_a}.{of_b} "
        f"{{{registers}}}, ${count}, ${count + 1}, p{tail}; }}",
        [number] * count,
        [I64, I64, I32] + [number] * count,
        clobbers_memory=False,
        tied=True,
    )

    def write(builder, array, a, b, add):
        acc = Registers(builder, array)
        acc.set_values(0, emit(builder, [a, b, add, *acc.values(0, count)]))

    return intrinsic(write, (ANY, u64, u64, i32))


def clear(count: int) -> Callable[[Any], None]:
    """Make a function that sets ``count`` accumulators to 0."""

    def write(builder, array):
        acc = Registers(builder, array)
        acc.set_values(0, acc.zeros(count))

    return intrinsic(write, (ANY,))


def add(count: int) -> Callable[[Any, Any], None]:
    """Make ``add(totals, acc)``: add accumulators to totals, each rounded to nearest."""

    def write(builder, *arrays):
        totals, acc = (Registers(builder, array) for array in arrays)
        totals.set_values(0, map(builder.fadd, totals.values(0, count), acc.values(0, count)))

    return intrinsic(write, (ANY, ANY))
