"""Loops over the registers of a thread, unrolled when the kernel is built.

An array of registers exists only while every index into it is a constant: one loop that the compiler leaves standing,
and the array goes to local memory. So these loops are written out as LLVM code, with vectors as wide as a thread can
load, in place of hoping for the optimiser. Numba's simulator runs no LLVM code: there each of them is the same loop in
Python, over the same offsets.

``registers`` is a ``cuda.local.array``; shared memory is one flat array; a matrix is ``matrices[batch]``, of a stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from numba import config, types

from distmm_kernels.device_code import llvm
from distmm_kernels.tiling import VECTOR_BYTES, Offsets, Tiling

__all__ = ["address", "close_stage", "copy", "copy_along_k", "load", "multiply", "store", "wait_for_stages"]


def load(offsets: Offsets) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: load elements, zero outside the matrix.

    Parameters
    ----------
    offsets
        ``(row, column)`` of each element, added to the thread's own.

    The kernel's ``inside`` promises that no element of the thread's block lies outside, which saves the tests.
    """

    def simulated(registers, matrices, batch, row, column, inside):
        matrix = matrices[batch]
        for p, (i, j) in enumerate(offsets):
            valid = row + i < matrix.shape[0] and column + j < matrix.shape[1]
            assert valid or not inside
            registers[p] = matrix[row + i, column + j] if valid else 0

    def generated(builder, registers, matrix, inside):
        for p, offset in enumerate(offsets):
            registers.put(p, registers.zeros(1))
            with builder.if_then(builder.or_(inside, matrix.contains(offset))):
                registers.put(p, matrix.load(offset, 1))

    return _on_matrix(simulated, generated, None)


def store(offsets: Offsets, width: int) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: store vectors along rows, where inside.

    A vector wider than one element has unit stride, is aligned, and does not stick out of the matrix.
    """

    def simulated(registers, matrices, batch, row, column, inside):
        matrix = matrices[batch]
        for p, (i, j) in enumerate(offsets):
            for e in range(width):
                at = row + i, column + j + e
                valid = at[0] < matrix.shape[0] and at[1] < matrix.shape[1]
                assert valid or not inside
                if valid:
                    matrix[at] = registers[p * width + e]

    def generated(builder, registers, matrix, inside):
        for p, offset in enumerate(offsets):
            with builder.if_then(builder.or_(inside, matrix.contains(offset))):
                # A vector is stored from neighbouring registers. Were these the ones that the loop before adds in, the
                # order would put operands of multiply-adds into one bank of the register file, which gives one a cycle.
                matrix.store(offset, [registers.disguised(element) for element in registers.get(p * width, width)])

    return _on_matrix(simulated, generated, 1 if width > 1 else None)


def address(unit: int = 1) -> Callable[..., Any]:
    """Make ``(matrices, batch, row, column)``: where an element lies, for `copy`; 0 where there are no addresses.

    ``unit`` is the axis of unit stride.
    """

    def simulated(matrices, batch, row, column):
        return 0

    if config.ENABLE_CUDASIM:
        return simulated

    def generated(context, builder, signature, arguments):
        return llvm.Matrix(context, builder, signature.args[0], arguments, unit).address()

    def typed(matrices, batch, row, column):
        return types.int64(matrices, types.int64, types.int64, types.int64)

    return llvm.intrinsic(generated, typed)


def copy(steps: Sequence[int], width: int, vector: int) -> Callable[..., None]:
    """Make ``(tile, base, matrices, batch, k, column, first)``: start copies to shared memory, past the registers.

    Parameters
    ----------
    steps
        Rows of the matrix, from row ``k`` on, of which the thread copies the 16 bytes that begin at ``column``.
    width
        Elements of the tile from one row to the next.
    vector
        Elements in 16 bytes.

    Rows beyond the last arrive as zeros; what lies in a vector beyond the last column is of no meaning. The address of
    element ``(k, column)`` is given as ``first``, since that is cheaper to move on than to compute. The data is there
    after `wait_for_stages` and a barrier.
    """

    def simulated(tile, base, matrices, batch, k, column, first):
        matrix = matrices[batch]
        for step, e in itertools.product(steps, range(vector)):
            valid = k + step < matrix.shape[0] and column + e < matrix.shape[1]
            tile[base + step * width + e] = matrix[k + step, column + e] if valid else 0

    if config.ENABLE_CUDASIM:
        return simulated

    def generated(context, builder, signature, arguments):
        tile = llvm.Shared(context, builder, signature.args[0], arguments[0], arguments[1])
        stack = context.make_array(signature.args[2])(context, builder, arguments[2])
        rows, stride = builder.extract_value(stack.shape, 1), builder.extract_value(stack.strides, 1)
        k, first = arguments[4], arguments[6]
        for step in steps:
            source = builder.add(first, builder.mul(stride, llvm.I64(step)))
            valid = builder.icmp_signed("<", builder.add(k, llvm.I64(step)), rows)
            llvm.copy_vector(builder, tile.pointer(step * width), source, valid)
        return context.get_dummy_value()

    def typed(tile, base, matrices, batch, k, column, first):
        return types.void(tile, types.int32, matrices, *(types.int64,) * 4)

    return llvm.intrinsic(generated, typed)


def copy_along_k(steps: Sequence[int], width: int) -> Callable[..., None]:
    """Make what `copy` makes, for matrices whose columns have unit stride, and tiles whose rows are such columns.

    ``steps`` are columns then. What lies beyond the last row arrives as zeros, and so do columns beyond the last.
    """

    def simulated(tile, base, matrices, batch, k, column, first):
        matrix, vector = matrices[batch], VECTOR_BYTES // matrices.dtype.itemsize
        for step, e in itertools.product(steps, range(vector)):
            valid = k + e < matrix.shape[0] and column + step < matrix.shape[1]
            tile[base + step * width + e] = matrix[k + e, column + step] if valid else 0

    if config.ENABLE_CUDASIM:
        return simulated

    def generated(context, builder, signature, arguments):
        tile = llvm.Shared(context, builder, signature.args[0], arguments[0], arguments[1])
        stack = context.make_array(signature.args[2])(context, builder, arguments[2])
        _, rows, columns = (builder.extract_value(stack.shape, axis) for axis in range(3))
        stride = builder.extract_value(stack.strides, 2)
        k, column, first = arguments[4:]
        left = builder.mul(builder.sub(rows, k), llvm.I64(tile.itemsize))
        most, none = llvm.I64(VECTOR_BYTES), llvm.I64(0)
        left = builder.select(builder.icmp_signed("<", left, most), left, most)
        left = builder.trunc(builder.select(builder.icmp_signed("<", left, none), none, left), llvm.I32)
        for step in steps:
            source = builder.add(first, builder.mul(stride, llvm.I64(step)))
            valid = builder.icmp_signed("<", builder.add(column, llvm.I64(step)), columns)
            llvm.copy_part(builder, tile.pointer(step * width), source, builder.select(valid, left, llvm.I32(0)))
        return context.get_dummy_value()

    def typed(tile, base, matrices, batch, k, column, first):
        return types.void(tile, types.int32, matrices, *(types.int64,) * 4)

    return llvm.intrinsic(generated, typed)


def close_stage() -> Callable[[], None]:
    """Make ``()``: what this thread began to copy since the last call is one stage."""
    return _instruction("cp.async.commit_group;")


def wait_for_stages(open_stages: int) -> Callable[[], None]:
    """Make ``()``: wait until no more than so many stages of this thread, the youngest, are still on their way."""
    return _instruction(f"cp.async.wait_group {open_stages};")


def multiply(tiling: Tiling, first: int, last: int) -> Callable[..., None]:
    """Make ``(acc, operands, tile_a, base_a, tile_b, base_b)``: multiply-add steps ``first <= k < last`` of a tile.

    One step adds an outer product, ``thread_rows`` elements of A times ``thread_columns`` of B. They are in registers
    already, and those of the next step are loaded meanwhile. After a tile's last step that is step 0 of the next tile,
    whose place is then to be given. Step -1 is none, and only loads those of step 0.
    """
    rows, columns = tiling.thread_rows, tiling.thread_columns

    def operands_of(k):
        """First of A's and first of B's in registers, which have room for two steps."""
        return k % 2 * (rows + columns), k % 2 * (rows + columns) + rows

    def vectors(k):
        """Place in registers and in the tile of each vector, of A and of B."""
        a, b = operands_of(k)
        along_a = [(a + i, k * tiling.rows + tiling.row_of(i)) for i in range(0, rows, tiling.vector)]
        return along_a, [(b + j, k * tiling.columns + tiling.column_of(j)) for j in range(0, columns, tiling.vector)]

    def simulated(acc, operands, tile_a, base_a, tile_b, base_b):
        for k in range(first, last):
            tiles = (tile_a, base_a), (tile_b, base_b)
            for (tile, base), moves in zip(tiles, vectors((k + 1) % tiling.depth), strict=True):
                for (register, place), e in itertools.product(moves, range(tiling.vector)):
                    operands[register + e] = tile[base + place + e]
            a, b = operands_of(k)
            for i, j in itertools.product(range(rows), range(columns)) if k >= 0 else ():
                acc[i * columns + j] += operands[a + i] * operands[b + j]

    if config.ENABLE_CUDASIM:
        return simulated

    def generated(context, builder, signature, arguments):
        acc = llvm.Registers(context, builder, signature.args[0], arguments[0])
        operands = llvm.Registers(context, builder, signature.args[1], arguments[1])
        tile_a = llvm.Shared(context, builder, signature.args[2], arguments[2], arguments[3])
        tile_b = llvm.Shared(context, builder, signature.args[4], arguments[4], arguments[5])
        for k in range(first, last):
            for tile, moves in zip((tile_a, tile_b), vectors((k + 1) % tiling.depth), strict=True):
                for register, place in moves:
                    operands.put(register, tile.load(place, tiling.vector))
            if k >= 0:
                a, b = operands.get(operands_of(k)[0], rows), operands.get(operands_of(k)[1], columns)
                for j in range(columns):
                    # there and back: neighbours in time share an operand, which its register's cache then serves
                    for i in range(rows) if j % 2 == 0 else reversed(range(rows)):
                        (old,) = acc.get(i * columns + j, 1)
                        acc.put(i * columns + j, [acc.multiply_add(old, a[i], b[j])])
        return context.get_dummy_value()

    def typed(acc, operands, tile_a, base_a, tile_b, base_b):
        return types.void(acc, operands, tile_a, types.int32, tile_b, types.int32)

    return llvm.intrinsic(generated, typed)


def _instruction(text: str) -> Callable[[], None]:
    """Make the function of nothing that is one PTX instruction; the simulator needs none of them."""

    def simulated():
        pass

    def generated(context, builder, signature, arguments):
        llvm.assembly(builder, text)
        return context.get_dummy_value()

    return simulated if config.ENABLE_CUDASIM else llvm.intrinsic(generated, lambda: types.void())


def _on_matrix(simulated: Callable[..., None], generated: Callable[..., None], unit: int | None) -> Callable[..., None]:
    """Make the intrinsic ``(registers, matrices, batch, row, column, inside)``; ``unit`` is the axis of unit stride."""
    if config.ENABLE_CUDASIM:
        return simulated

    def code(context, builder, signature, arguments):
        registers = llvm.Registers(context, builder, signature.args[0], arguments[0])
        matrix = llvm.Matrix(context, builder, signature.args[1], arguments[1:5], unit)
        generated(builder, registers, matrix, arguments[5])
        return context.get_dummy_value()

    def signature(registers, matrices, batch, row, column, inside):
        return types.void(registers, matrices, types.int64, types.int64, types.int64, types.boolean)

    return llvm.intrinsic(code, signature)
