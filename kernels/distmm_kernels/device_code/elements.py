"""Loads and stores of elements in registers, in shared memory and in matrices, written with a builder.

Vectors are loaded as LLVM vectors: each becomes one instruction of up to 16 bytes, which the compiler may move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distmm_kernels.device_code import emit
from distmm_kernels.device_code.emit import I8, I32, I64, Array, assembly, is_integer
from distmm_kernels.tiles.tiling import VECTOR_BYTES

GLOBAL, SHARED = 1, 3  # address spaces of NVVM

_block_z = assembly("mov.u32 $0, %ctaid.z;", [I32], [], pure=True)


class _Elements:
    """Elements in memory, of any address space: loads and stores of vectors. A subclass sets ``first``, a pointer."""

    first: Any

    def __init__(self, builder: Any, array: Array) -> None:
        self.builder, self.real, self.itemsize = builder, array.real, array.itemsize

    def pointer(self, place: Any) -> Any:
        """Return the address of an element."""
        return self.builder.gep(self.first, [I32(place)])

    def load(self, place: Any, count: int) -> list[Any]:
        """Load ``count`` neighbours as one vector."""
        builder, pointer = self.builder, self.pointer(place)
        kind = self.real if count == 1 else emit.vector(self.real, count)
        value = builder.load(builder.bitcast(pointer, kind.as_pointer(pointer.type.addrspace)))
        value.align = min(count * self.itemsize, VECTOR_BYTES)
        return [value] if count == 1 else [builder.extract_element(value, I32(i)) for i in range(count)]

    def store(self, place: Any, elements: Sequence[Any]) -> None:
        """Store neighbours as one vector."""
        builder, pointer, kind, value = self.builder, self.pointer(place), self.real, elements[0]
        if len(elements) > 1:
            kind = emit.vector(self.real, len(elements))
            value = emit.undefined(kind)
            for i, element in enumerate(elements):
                value = builder.insert_element(value, element, I32(i))
        stored = builder.store(value, builder.bitcast(pointer, kind.as_pointer(pointer.type.addrspace)))
        stored.align = min(len(elements) * self.itemsize, VECTOR_BYTES)


class Registers(_Elements):
    """A ``cuda.local.array`` that the compiler keeps in registers, since every index is a constant here."""

    def __init__(self, builder: Any, array: Array) -> None:
        super().__init__(builder, array)
        data = array.data
        self.first = builder.bitcast(data, self.real.as_pointer(data.type.addrspace))

    def values(self, first: int, count: int = 1) -> list[Any]:
        """Return ``count`` elements from the first on."""
        return [self.builder.load(self.pointer(i)) for i in range(first, first + count)]

    def set_values(self, first: int, values: Iterable[Any]) -> None:
        """Set elements from the first on."""
        for i, value in enumerate(values):
            self.builder.store(value, self.pointer(first + i))

    def zeros(self, count: int) -> list[Any]:
        """Return ``count`` zeros of the elements' type."""
        return [emit.constant(self.real, 0)] * count

    def disguised(self, element: Any) -> Any:
        """Return a copy of the element in a new register, which the compiler cannot merge with the old one.

        The copy is the element xor the block's number along the grid's third axis. That number is 0, since the axis has
        one block, but the compiler does not know this.
        """
        builder, kind = self.builder, emit.integer(self.itemsize * 8)
        (third,) = _block_z(builder, [])
        zero = third if kind == I32 else builder.zext(third, kind)
        return builder.bitcast(builder.xor(builder.bitcast(element, kind), zero), self.real)

    def multiply_add(self, acc: Any, x: Any, y: Any) -> Any:
        """Return ``acc + x * y``; of floats fused."""
        builder = self.builder
        return builder.add(acc, builder.mul(x, y)) if is_integer(self.real) else builder.fma(x, y, acc)


class Shared(_Elements):
    """A flat array in shared memory, from element ``base`` on. Positions are constants in the instructions."""

    def __init__(self, builder: Any, array: Array, base: Any) -> None:
        super().__init__(builder, array)
        data = array.data
        data = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED))
        self.first = builder.gep(data, [base])


class Matrix(_Elements):
    """One matrix of a stack in global memory. Offsets are relative to a thread's first element.

    ``place`` is the batch, row and column of the thread's first element. ``unit`` is the axis of unit stride, if known.
    """

    def __init__(self, builder: Any, stack: Array, place: Sequence[Any], unit: int | None) -> None:
        super().__init__(builder, stack)
        batch, row, column = place
        _, rows, columns = (stack.shape(axis) for axis in range(3))
        between, *self.strides = (stack.stride(axis) for axis in range(3))
        if unit is not None:
            self.strides[unit] = I64(self.itemsize)
        start = builder.mul(batch, between)
        self.left = []  # elements from here to the end of each axis; the offset of any vector is far below 2^31
        most = I64(2**31 - 1)
        for index, stride, size in zip((row, column), self.strides, (rows, columns), strict=True):
            start = builder.add(start, builder.mul(index, stride))
            left = builder.sub(size, index)
            left = builder.select(builder.icmp_signed("<", left, most), left, most)
            self.left.append(builder.trunc(left, I32))
        data = builder.addrspacecast(stack.data, stack.data.type.pointee.as_pointer(GLOBAL))
        self.first = builder.gep(builder.bitcast(data, I8.as_pointer(GLOBAL)), [start])

    def address(self) -> Any:
        """Return the address of the thread's first element."""
        return self.builder.ptrtoint(self.first, I64)

    def pointer(self, offset: tuple[int, int]) -> Any:
        """Return the address of the element at this offset."""
        steps = [self.builder.mul(I64(step), stride) for step, stride in zip(offset, self.strides, strict=True)]
        return self.builder.gep(self.first, [self.builder.add(*steps)])

    def contains(self, offset: tuple[int, int]) -> Any:
        """Whether the element at this offset is inside of the matrix. Indices are never negative."""
        tests = [self.builder.icmp_signed("<", I32(step), left) for step, left in zip(offset, self.left, strict=True)]
        return self.builder.and_(*tests)
