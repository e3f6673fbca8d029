"""Numba's arrays as LLVM code sees them: addresses, vector loads and stores, one multiply-add.

An element is a tuple of real components: one, or the two of a complex number. Vectors are loaded as LLVM vectors, which
become single instructions of up to 16 bytes that the compiler may still move.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types

__all__ = ["I32", "I64", "Matrix", "Registers", "Shared", "assembly", "copy_part", "copy_vector", "intrinsic"]

Elements: TypeAlias = list[tuple[Any, ...]]

I32, I64 = ir.IntType(32), ir.IntType(64)
GLOBAL, SHARED = 1, 3  # address spaces of NVVM


def intrinsic(code: Callable[..., Any], signature: Callable[..., Any]) -> Callable[..., None]:
    """Make a function for Numba's kernels from an LLVM code generator and its signature as a function of types."""
    from numba.cuda.extending import intrinsic as numba_intrinsic  # the simulator has none

    def typed(typing_context, *arguments):
        return signature(*arguments), code

    # Numba reads the number of arguments off the function's signature
    parameters = [inspect.Parameter("typing_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters + list(inspect.signature(signature).parameters.values())
    )
    made: Callable[..., None] = numba_intrinsic(typed)
    return made


def assembly(builder: Any, text: str, arguments: Sequence[Any] = ()) -> None:
    """Write PTX with effects on memory, its arguments integers."""
    letters = ["r" if argument.type == I32 else "l" for argument in arguments]
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    code = ir.InlineAsm(kind, text, ",".join([*letters, "~{memory}"]), side_effect=True)
    builder.call(code, arguments)


def copy_vector(builder: Any, target: Any, source: Any, valid: Any) -> None:
    """Start an asynchronous copy of 16 bytes, or of zeros if not valid, from a global address to shared memory."""
    text = "{ .reg .pred none; setp.eq.u32 none, $2, 0; cp.async.cg.shared.global [$0], [$1], 16, none; }"
    assembly(builder, text, [builder.ptrtoint(target, I32), source, builder.zext(valid, I32)])


def copy_part(builder: Any, target: Any, source: Any, count: Any) -> None:
    """Start an asynchronous copy of so many of 16 bytes, filled up with zeros, from global to shared memory."""
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    assembly(builder, text, [builder.ptrtoint(target, I32), source, count])


class _Elements:
    """Elements in memory: loads and stores of vectors in any address space."""

    def __init__(self, context: Any, builder: Any, array: Any) -> None:
        self.builder = builder
        self.components = 2 if isinstance(array.dtype, types.Complex) else 1
        real = array.dtype.underlying_float if self.components == 2 else array.dtype
        self.real = context.get_value_type(real)
        self.itemsize = real.bitwidth // 8 * self.components

    def load_from(self, pointer: Any, count: int) -> Elements:
        reals, builder = count * self.components, self.builder
        kind = self.real if reals == 1 else ir.VectorType(self.real, reals)
        value = builder.load(builder.bitcast(pointer, kind.as_pointer(pointer.type.addrspace)))
        _align(value, count * self.itemsize)
        parts = [value] if reals == 1 else [builder.extract_element(value, I32(i)) for i in range(reals)]
        return [tuple(parts[i : i + self.components]) for i in range(0, reals, self.components)]

    def store_to(self, pointer: Any, elements: Elements) -> None:
        builder, parts = self.builder, [part for element in elements for part in element]
        if len(parts) == 1:
            kind, value = self.real, parts[0]
        else:
            kind = ir.VectorType(self.real, len(parts))
            value = ir.Constant(kind, ir.Undefined)
            for i, part in enumerate(parts):
                value = builder.insert_element(value, part, I32(i))
        stored = builder.store(value, builder.bitcast(pointer, kind.as_pointer(pointer.type.addrspace)))
        _align(stored, len(elements) * self.itemsize)

    def zeros(self, count: int) -> Elements:
        return [(ir.Constant(self.real, 0),) * self.components] * count

    def disguised(self, element: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the element in registers of its own, which the compiler must not take for the old ones.

        It is xored with the block's number along the grid's third axis, which is 0: there is one. The compiler does not
        know that.
        """
        builder, integer = self.builder, ir.IntType(self.itemsize // self.components * 8)
        kind = ir.FunctionType(I32, [])
        third = builder.call(ir.InlineAsm(kind, "mov.u32 $0, %ctaid.z;", "=r"), [])
        zero = third if integer == I32 else builder.zext(third, integer)
        return tuple(builder.bitcast(builder.xor(builder.bitcast(part, integer), zero), self.real) for part in element)

    def multiply_add(self, acc: Sequence[Any], x: Sequence[Any], y: Sequence[Any]) -> tuple[Any, ...]:
        """Return ``acc + x * y``, as `device_code.arithmetic` does: fused, and a complex number in the same order."""
        builder = self.builder
        if isinstance(self.real, ir.IntType):
            return (builder.add(acc[0], builder.mul(x[0], y[0])),)
        if self.components == 1:
            return (builder.fma(x[0], y[0], acc[0]),)
        # -0.0 - x and not fneg, which the LLVM of NVVM does not know before sm_100
        minus = builder.fsub(ir.Constant(self.real, -0.0), x[1])
        re = builder.fma(minus, y[1], builder.fma(x[0], y[0], acc[0]))
        im = builder.fma(x[1], y[0], builder.fma(x[0], y[1], acc[1]))
        return re, im


def _align(instruction: Any, size: int) -> None:
    """Promise that a load or store of so many bytes is aligned to them, or to 16."""
    instruction.align = min(size, 16)


class Registers(_Elements):
    """A ``cuda.local.array`` that the compiler keeps in registers, since every index is a constant here."""

    def __init__(self, context: Any, builder: Any, array: Any, value: Any) -> None:
        super().__init__(context, builder, array)
        data = context.make_array(array)(context, builder, value).data
        self.first = builder.bitcast(data, self.real.as_pointer(data.type.addrspace))

    def _pointer(self, element: int, component: int) -> Any:
        return self.builder.gep(self.first, [I32(element * self.components + component)])

    def get(self, first: int, count: int) -> Elements:
        """Return ``count`` elements from the first on."""
        each = range(self.components)
        return [tuple(self.builder.load(self._pointer(i, c)) for c in each) for i in range(first, first + count)]

    def put(self, first: int, elements: Elements) -> None:
        """Set elements from the first on."""
        for i, element in enumerate(elements):
            for c, part in enumerate(element):
                self.builder.store(part, self._pointer(first + i, c))


class Shared(_Elements):
    """A flat array in shared memory, from element ``base`` on; places are constants, part of the instruction."""

    def __init__(self, context: Any, builder: Any, array: Any, value: Any, base: Any) -> None:
        super().__init__(context, builder, array)
        data = context.make_array(array)(context, builder, value).data
        data = builder.addrspacecast(data, data.type.pointee.as_pointer(SHARED))
        self.first = builder.gep(data, [base])

    def pointer(self, place: int) -> Any:
        """Return the address of an element."""
        return self.builder.gep(self.first, [I32(place)])

    def load(self, place: int, count: int) -> Elements:
        """Load ``count`` neighbours as one vector."""
        return self.load_from(self.pointer(place), count)


class Matrix(_Elements):
    """One matrix of a stack in global memory, seen from a thread's own element; 64-bit addresses.

    ``place`` is the stack, and the thread's batch, row and column; ``unit`` the axis of unit stride, if that is known.
    """

    def __init__(self, context: Any, builder: Any, array: Any, place: Sequence[Any], unit: int | None) -> None:
        super().__init__(context, builder, array)
        value, batch, row, column = place
        stack = context.make_array(array)(context, builder, value)
        _, rows, columns = (builder.extract_value(stack.shape, axis) for axis in range(3))
        between, *self.strides = (builder.extract_value(stack.strides, axis) for axis in range(3))
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
        self.first = builder.gep(builder.bitcast(data, ir.IntType(8).as_pointer(GLOBAL)), [start])

    def address(self) -> Any:
        """Return the address of the thread's own element."""
        return self.builder.ptrtoint(self.first, I64)

    def _pointer(self, offset: tuple[int, int]) -> Any:
        steps = [self.builder.mul(I64(step), stride) for step, stride in zip(offset, self.strides, strict=True)]
        return self.builder.gep(self.first, [self.builder.add(*steps)])

    def contains(self, offset: tuple[int, int]) -> Any:
        """Whether the element at this offset lies in the matrix (it never lies before it)."""
        tests = [self.builder.icmp_signed("<", I32(step), left) for step, left in zip(offset, self.left, strict=True)]
        return self.builder.and_(*tests)

    def load(self, offset: tuple[int, int], count: int) -> Elements:
        """Load ``count`` neighbours as one vector."""
        return self.load_from(self._pointer(offset), count)

    def store(self, offset: tuple[int, int], elements: Elements) -> None:
        """Store neighbours as one vector."""
        self.store_to(self._pointer(offset), elements)
