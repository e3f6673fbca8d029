"""Loops over the registers of a thread, unrolled when the kernel is built.

An array stays in registers only if every index into it is a constant. If the compiler does not unroll a loop, the array
is placed in local memory. So these loops are unrolled here, with vectors as wide as a thread can load.
`simulated.py` of the tests has the same functions as loops in Python, for Numba's simulator.

``registers`` is a ``cuda.local.array``. Shared memory is one flat array. A matrix is ``matrices[batch]`` in a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from distmm_kernels.device_code.elements import Matrix, Registers, Shared
from distmm_kernels.device_code.emit import ANY, I32, I64, assembly, i32, i64, instruction, intrinsic, is_integer, types
from distmm_kernels.device_code.modulo import reduced
from distmm_kernels.tiles.tiling import VECTOR_BYTES, Offsets, Tiling

boolean = types.boolean

# asynchronous copies of 16 bytes from global to shared memory: of zeros if the last argument is 0; of so many bytes,
# completed with zeros
_copy_vector = assembly(
    "{ .reg .pred none; setp.eq.u32 none, $2, 0; cp.async.cg.shared.global [$0], [$1], 16, none; }", [], [I32, I64, I32]
)
_copy_part = assembly("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [I32, I64, I32])


def load(offsets: Offsets) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: load elements, zero outside the matrix.

    Parameters
    ----------
    offsets
        ``(row, column)`` of each element, relative to the thread's first element.

    If ``inside`` is true, all elements of the thread's block are in the matrix, and they are not tested one by one.
    """

    def write(builder, array, stack, batch, row, column, inside):
        registers, matrix = Registers(builder, array), Matrix(builder, stack, (batch, row, column), None)
        for p, offset in enumerate(offsets):
            registers.set_values(p, registers.zeros(1))
            with builder.if_then(builder.or_(inside, matrix.contains(offset))):
                registers.set_values(p, matrix.load(offset, 1))

    return intrinsic(write, (ANY, ANY, i64, i64, i64, boolean))


def add(offsets: Offsets, width: int) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: add vectors along rows, where inside, to registers.

    Rows have unit stride. A vector wider than one element is aligned, and completely inside or outside of the matrix.
    """
    return _combined(offsets, width, 1, lambda builder, kind: builder.add if is_integer(kind) else builder.fadd)


def reduce(count: int) -> Callable[..., None]:
    """Make ``(registers, moduli, batch, row, column, inside)``: replace ``count`` sums by residues, as int8 in a word.

    ``moduli[batch, 0]`` has the modulus of the batch and the multiplier for `distmm_kernels.device_code.modulo`. The
    other arguments are not used; `add` has the same signature.
    """

    def write(builder, array, stack, batch, row, column, inside):
        registers = Registers(builder, array)
        modulus = Matrix(builder, stack, (batch, I64(0), I64(0)), None).address()
        residues = reduced(builder, registers.values(0, count), modulus)
        # the lowest byte of residue + 128, with its highest bit inverted, is that of the residue
        registers.set_values(0, [builder.xor(value, I32(0x80)) for value in residues])

    return intrinsic(write, (ANY, ANY, i64, i64, i64, boolean))


def scale(offsets: Offsets) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: multiply by elements of a matrix, where inside."""
    return _combined(offsets, 1, None, lambda builder, _: builder.fmul)


def _combined(offsets: Offsets, width: int, unit: int | None, operation: Callable[..., Any]) -> Callable[..., None]:
    """Make a function that replaces registers by the results of an operation with vectors of a matrix, where inside."""

    def write(builder, array, stack, batch, row, column, inside):
        registers, matrix = Registers(builder, array), Matrix(builder, stack, (batch, row, column), unit)
        of_two = operation(builder, registers.real)
        for p, offset in enumerate(offsets):
            with builder.if_then(builder.or_(inside, matrix.contains(offset))):
                results = map(of_two, registers.values(p * width, width), matrix.load(offset, width))
                registers.set_values(p * width, results)

    return intrinsic(write, (ANY, ANY, i64, i64, i64, boolean))


def store(offsets: Offsets, width: int) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: store vectors along rows, where inside.

    A vector wider than one element has unit stride, is aligned, and is completely inside or outside of the matrix.
    Of integers that are wider than those of the matrix, the lowest bits are stored.
    """

    def write(builder, array, stack, batch, row, column, inside):
        registers = Registers(builder, array)
        matrix = Matrix(builder, stack, (batch, row, column), 1 if width > 1 else None)
        for p, offset in enumerate(offsets):
            with builder.if_then(builder.or_(inside, matrix.contains(offset))):
                # A vector store needs neighbouring registers. If these were the accumulators of the loop before, their
                # order would put operands of a multiply-add into one register bank, which gives one operand a cycle.
                elements = [registers.disguised(element) for element in registers.values(p * width, width)]
                if matrix.itemsize < registers.itemsize:
                    elements = [builder.trunc(element, matrix.real) for element in elements]
                matrix.store(offset, elements)

    return intrinsic(write, (ANY, ANY, i64, i64, i64, boolean))


def address(unit: int = 1) -> Callable[..., Any]:
    """Make ``(matrices, batch, row, column)``: the address of an element, for `copy`.

    ``unit`` is the axis of unit stride.
    """

    def write(builder, stack, batch, row, column):
        return Matrix(builder, stack, (batch, row, column), unit).address()

    return intrinsic(write, (ANY, i64, i64, i64), i64)


def copy(steps: Sequence[int], width: int, vector: int) -> Callable[..., None]:
    """Make ``(tile, base, matrices, batch, k, column, first)``: start asynchronous copies to shared memory.

    Parameters
    ----------
    steps
        Rows of the matrix, relative to row ``k``. The thread copies the 16 bytes that begin at ``column`` of each.
    width
        Leading dimension of the tile, in elements.
    vector
        Elements in 16 bytes.

    The copies bypass registers. Rows beyond the last become zeros. Elements of a vector beyond the last column are
    undefined. ``first`` is the address of element ``(k, column)``: the caller adds to it, which is cheaper than to
    compute it again. The data has arrived after `wait_for_stages` and a barrier.
    """

    def write(builder, array, base, stack, batch, k, column, first):
        tile = Shared(builder, array, base)
        rows, stride = stack.shape(1), stack.stride(1)
        for step in steps:
            source = builder.add(first, builder.mul(stride, I64(step)))
            valid = builder.icmp_signed("<", builder.add(k, I64(step)), rows)
            target = builder.ptrtoint(tile.pointer(step * width), I32)
            _copy_vector(builder, [target, source, builder.zext(valid, I32)])

    return intrinsic(write, (ANY, i32, ANY, i64, i64, i64, i64))


def copy_along_k(steps: Sequence[int], width: int) -> Callable[..., None]:
    """Make what `copy` makes, for k-major operands: columns have unit stride, and are rows of the tile.

    ``steps`` are columns in this case. Elements beyond the last row, and columns beyond the last, become zeros.
    """

    def write(builder, array, base, stack, batch, k, column, first):
        tile = Shared(builder, array, base)
        rows, columns, stride = stack.shape(1), stack.shape(2), stack.stride(2)
        left = builder.mul(builder.sub(rows, k), I64(tile.itemsize))
        most, none = I64(VECTOR_BYTES), I64(0)
        left = builder.select(builder.icmp_signed("<", left, most), left, most)
        left = builder.trunc(builder.select(builder.icmp_signed("<", left, none), none, left), I32)
        for step in steps:
            source = builder.add(first, builder.mul(stride, I64(step)))
            valid = builder.icmp_signed("<", builder.add(column, I64(step)), columns)
            target, count = tile.pointer(step * width), builder.select(valid, left, I32(0))
            _copy_part(builder, [builder.ptrtoint(target, I32), source, count])

    return intrinsic(write, (ANY, i32, ANY, i64, i64, i64, i64))


def close_stage() -> Callable[[], None]:
    """Make ``()``: the copies that this thread started since the last call become one stage."""
    return instruction("cp.async.commit_group;")


def wait_for_stages(open_stages: int) -> Callable[[], None]:
    """Make ``()``: wait until all stages of this thread but the last ``open_stages`` have arrived."""
    return instruction(f"cp.async.wait_group {open_stages};")


def multiply(tiling: Tiling, first: int, last: int) -> Callable[..., None]:
    """Make ``(acc, operands, tile_a, base_a, tile_b, base_b)``: multiply-add steps ``first <= k < last`` of a tile.

    One step adds an outer product, ``thread_rows`` elements of A times ``thread_columns`` of B. Its operands are in
    registers already, and it loads those of the next step. After a tile's last step that is step 0 of the next tile;
    the caller gives its position. Step -1 adds nothing and loads the operands of step 0.
    """
    rows, columns = tiling.thread_rows, tiling.thread_columns

    def write(builder, totals, held, array_a, base_a, array_b, base_b):
        acc, operands = Registers(builder, totals), Registers(builder, held)
        tiles = Shared(builder, array_a, base_a), Shared(builder, array_b, base_b)
        for k in range(first, last):
            for tile, vectors in zip(tiles, tiling.step_vectors((k + 1) % tiling.depth), strict=True):
                for register, place in vectors:
                    operands.set_values(register, tile.load(place, tiling.vector))
            if k >= 0:
                first_a, first_b = tiling.step_registers(k)
                a, b = operands.values(first_a, rows), operands.values(first_b, columns)
                for j in range(columns):
                    # alternately down and up: successive multiply-adds share an operand, which the reuse cache holds
                    for i in range(rows) if j % 2 == 0 else reversed(range(rows)):
                        (old,) = acc.values(i * columns + j)
                        acc.set_values(i * columns + j, [acc.multiply_add(old, a[i], b[j])])

    return intrinsic(write, (ANY, ANY, ANY, i32, ANY, i32))
