"""Loads and stores of elements in registers, in shared memory and in matrices, written with a builder.

Vectors are loaded as LLVM vectors: each becomes one instruction of up to 16 bytes, which the compiler may move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distmm_kernels.device_code.emit import (
    I8,
    I32,
    I64,
    Array,
    assembly,
    constant,
    integer,
    is_integer,
    undefined,
    vector,
)

GLOBAL, SHARED = 1, 3  # address spaces of NVVM

_copy_vector = assembly(
    "{ .reg .pred none; setp.eq.u32 none, $2, 0; cp.async.cg.shared.global [$0], [$1], 16, none; }",
    [],
    [I32, I64, I32],
    ["r", "l", "r"],
)
_copy_part = assembly("cp.async.cg.shared.global [$0], [$1], 16, $2;", [], [I32, I64, I32], ["r", "l", "r"])
_block_z = assembly("mov.u32 $0, %ctaid.z;", [I32], [], ["=r"], pure=True)


def copy_vector(builder: Any, target: Any, source: Any, valid: Any) -> None:
    """Start an asynchronous copy of 16 bytes, or of zeros if not valid, from a global address to shared memory."""
    _copy_vector(builder, [builder.ptrtoint(target, I32), source, builder.zext(valid, I32)])


def copy_part(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Start an asynchronous copy of ``count`` bytes, completed to 16 with zeros, from global to shared memory."""
    _copy_part(builder, [builder.ptrtoint(target, I32), source, count])


class _Elements:
    """Elements in memory: loads and stores of vectors in any address space."""

    def __init__(self, builder: Any, array: Array) -> None:
        self.builder, self.real, self.itemsize = builder, array.real, array.itemsize

    def load_from(self, pointer: Any, count: int) -> list[Any]:
        builder, kind = self.builder, self.real if count == 1 else vector(self.real, count)
        value = builder.load(builder.bitcast(pointer, kind.as_pointer(pointer.type.addrspace)))
        _align(value, count * self.itemsize)
        return [value] if count == 1 else [builder.extract_element(value, I32(i)) for i in range(count)]

    def store_to(self, pointer: Any, elements: Sequence[Any]) -> None:
        builder, kind, value = self.builder, self.real, elements[0]
        if len(elements) > 1:
            kind = vector(self.real, len(elements))
            value = undefined(kind)
            for i, element in enumerate(elements):
                value = builder.insert_element(value, element, I32(i))
        stored = builder.store(value, builder.bitcast(pointer, kind.as_pointer(pointer.type.addrspace)))
        _align(stored, len(elements) * self.itemsize)

    def zeros(self, count: int) -> list[Any]:
        return [constant(self.real, 0)] * count

    def disguised(self, element: Any) -> Any:
        """Return a copy of the element in a new register, which the compiler cannot merge with the old one.

        The copy is the element xor the block's number along the grid's third axis. That number is 0, since the axis has
        one block, but the compiler does not know this.
        """
        builder, kind = self.builder, integer(self.itemsize * 8)
        (third,) = _block_z(builder, [])
        zero = third if kind == I32 else builder.zext(third, kind)
        return builder.bitcast(builder.xor(builder.bitcast(element, kind), zero), self.real)

    def multiply_add(self, acc: Any, x: Any, y: Any) -> Any:
        """Return ``acc + x * y``; of floats fused."""
        builder = self.builder
        return builder.add(acc, builder.mul(x, y)) if is_integer(self.real) else builder.fma(x, y, acc)


def _align(instruction: Any, size: int) -> None:
    """Tell the compiler that a load or store of ``size`` bytes is aligned to ``size``, or to 16 if that is less."""
    instruction.align = min(size, 16)


class Registers(_Elements):
    """A ``cuda.local.array`` that the compiler keeps in registers, since every index is a constant here."""

    def __init__(self, builder: Any, array: Array) -> None:
        super().__init__(builder, array)
        data = array.data
        self.first = builder.bitcast(data, self.real.as_pointer(data.type.addrspace))

    def _pointer(self, element: int) -> Any:
        return self.builder.gep(self.first, [I32(element)])

    def values(self, first: int, count: int = 1) -> list[Any]:
        """Return ``count`` elements from the first on."""
        return [self.builder.load(self._pointer(i)) for i in range(first, first + count)]

    def set_values(self, first: int, values: Iterable[Any]) -> None:
        """Set elements from the first on."""
        for i, value in enumerate(values):
            self.builder.store(value, self._pointer(first + i))


class Shared(_Elements):
    """A flat array in shared memory, from element ``base`` on. Positions are constants in the instructions."""

    def __init__(self, builder: Any, array: Array, base: Any) -> None:
        super().__init__(builder, array)
        data = array.data
        data = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED))
        self.first = builder.gep(data, [base])

    def pointer(self, place: int) -> Any:
        """Return the address of an element."""
        return self.builder.gep(self.first, [I32(place)])

    def load(self, place: int, count: int) -> list[Any]:
        """Load ``count`` neighbours as one vector."""
        return self.load_from(self.pointer(place), count)


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

    def _pointer(self, offset: tuple[int, int]) -> Any:
        steps = [self.builder.mul(I64(step), stride) for step, stride in zip(offset, self.strides, strict=True)]
        return self.builder.gep(self.first, [self.builder.add(*steps)])

    def contains(self, offset: tuple[int, int]) -> Any:
        """Whether the element at this offset is inside of the matrix. Indices are never negative."""
        tests = [self.builder.icmp_signed("<", I32(step), left) for step, left in zip(offset, self.left, strict=True)]
        return self.builder.and_(*tests)

    def load(self, offset: tuple[int, int], count: int) -> list[Any]:
        """Load ``count`` neighbours as one vector."""
        return self.load_from(self._pointer(offset), count)

    def store(self, offset: tuple[int, int], elements: Sequence[Any]) -> None:
        """Store neighbours as one vector."""
        self.store_to(self._pointer(offset), elements)
