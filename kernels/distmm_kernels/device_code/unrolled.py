"""Loops over the registers of a thread, unrolled when the kernel is built.

An array of registers exists only while every index into it is a constant: one loop that the compiler leaves standing,
and the array goes to local memory. So these loops are written out as LLVM code, with vectors as wide as a thread can
load, in place of hoping for the optimiser. Numba's simulator runs no LLVM code: there each of them is the same loop in
Python, over the same offsets.

``registers`` is a ``cuda.local.array``; shared memory is one flat array; a matrix is ``matrices[batch]``, of a stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from numba import config, types

from distmm_kernels.device_code import llvm
from distmm_kernels.tiling import Fetch, Offsets, Tiling

__all__ = ["load", "multiply", "store", "store_shared"]


def load(offsets: Offsets, axis: int, width: int) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: load vectors, zero outside the matrix.

    Parameters
    ----------
    offsets
        ``(row, column)`` of each vector, added to the thread's own.
    axis, width
        Of a vector: axis 1 runs along a row. A vector wider than one element has unit stride, is aligned, and does not
        stick out of the matrix.

    The kernel's ``inside`` promises that no element of the thread's block lies outside, which saves the tests.
    """

    def simulated(registers, matrices, batch, row, column, inside):
        matrix = matrices[batch]
        for p, (i, j) in enumerate(offsets):
            for e in range(width):
                at = (row + i + e, column + j) if axis == 0 else (row + i, column + j + e)
                valid = at[0] < matrix.shape[0] and at[1] < matrix.shape[1]
                assert valid or not inside
                registers[p * width + e] = matrix[at] if valid else 0

    def generated(builder, registers, matrix, inside):
        def move(p, vector):
            registers.put(p * width, vector)

        with builder.if_else(inside) as (within, at_the_edge):
            with within:
                for p, offset in enumerate(offsets):
                    move(p, matrix.load(offset, width))
            with at_the_edge:
                for p, offset in enumerate(offsets):
                    move(p, registers.zeros(width))
                    with builder.if_then(matrix.contains(offset)):
                        move(p, matrix.load(offset, width))

    return _on_matrix(simulated, generated, axis if width > 1 else None)


def store(offsets: Offsets, width: int) -> Callable[..., None]:
    """Make ``(registers, matrices, batch, row, column, inside)``: store vectors along rows, as `load` loads them."""

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
                matrix.store(offset, registers.get(p * width, width))

    return _on_matrix(simulated, generated, 1 if width > 1 else None)


def store_shared(fetch: Fetch, pitch: int, along_k: bool) -> Callable[..., None]:
    """Make ``(registers, tile, base)``: put what `load` fetched into a tile that lies as (k, row or column).

    Parameters
    ----------
    pitch
        Elements of the tile from one k to the next.
    along_k
        Whether the vectors run along k; if so, they are stored element by element, ``pitch`` apart.
    """
    width = fetch.access.width
    k_axis = fetch.access.axis if along_k else 1 - fetch.access.axis
    places = [offset[k_axis] * pitch + offset[1 - k_axis] for offset in fetch.offsets]

    def simulated(registers, tile, base):
        for p, place in enumerate(places):
            for e in range(width):
                tile[base + place + e * (pitch if along_k else 1)] = registers[p * width + e]

    if config.ENABLE_CUDASIM:
        return simulated

    def generated(context, builder, signature, arguments):
        registers = llvm.Registers(context, builder, signature.args[0], arguments[0])
        tile = llvm.Shared(context, builder, signature.args[1], arguments[1], arguments[2])
        for p, place in enumerate(places):
            if along_k:
                for e in range(width):
                    tile.store(place + e * pitch, registers.get(p * width + e, 1))
            else:
                tile.store(place, registers.get(p * width, width))
        return context.get_dummy_value()

    def typed(registers, tile, base):
        return types.void(registers, tile, types.int32)

    return llvm.intrinsic(generated, typed)


def multiply(tiling: Tiling, first: int, last: int) -> Callable[..., None]:
    """Make ``(registers, tile_a, base_a, tile_b, base_b)``: multiply-add steps ``first <= k < last`` of two tiles.

    One step adds an outer product: ``thread_rows`` elements of A times ``thread_columns`` of B, loaded as vectors. The
    compiler moves the loads ahead, so that those of the next step arrive while this one computes.
    """
    rows, columns, vector = tiling.thread_rows, tiling.thread_columns, tiling.vector

    def simulated(registers, tile_a, base_a, tile_b, base_b):
        for k in range(first, last):
            for i in range(rows):
                x = tile_a[base_a + k * tiling.pitch_a + tiling.row_of(i)]
                for j in range(columns):
                    y = tile_b[base_b + k * tiling.pitch_b + tiling.column_of(j)]
                    registers[i * columns + j] += x * y

    if config.ENABLE_CUDASIM:
        return simulated

    def generated(context, builder, signature, arguments):
        registers = llvm.Registers(context, builder, signature.args[0], arguments[0])
        tile_a = llvm.Shared(context, builder, signature.args[1], arguments[1], arguments[2])
        tile_b = llvm.Shared(context, builder, signature.args[3], arguments[3], arguments[4])

        def fragments(k):
            a = [tile_a.load(k * tiling.pitch_a + tiling.row_of(i), vector) for i in range(0, rows, vector)]
            b = [tile_b.load(k * tiling.pitch_b + tiling.column_of(j), vector) for j in range(0, columns, vector)]
            return [*itertools.chain(*a)], [*itertools.chain(*b)]

        acc = registers.get(0, rows * columns)
        for k in range(first, last):
            a, b = fragments(k)
            for i in range(rows):
                # there and back, so that neighbours in time share an operand, which its register's cache then serves
                for j in range(columns) if i % 2 == 0 else reversed(range(columns)):
                    acc[i * columns + j] = registers.multiply_add(acc[i * columns + j], a[i], b[j])
        registers.put(0, acc)
        return context.get_dummy_value()

    def typed(registers, tile_a, base_a, tile_b, base_b):
        return types.void(registers, tile_a, types.int32, tile_b, types.int32)

    return llvm.intrinsic(generated, typed)


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
