"""The split-K reduction: add the sums of slices of k to C, in ascending k, as one multiprocessor would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code import emit
from distmm_kernels.device_code.elements import Registers
from distmm_kernels.device_code.emit import ANY, F32, I32, I64, PTX_NAMES, cuda, f32, i32, inlined, types, u32, u64
from distmm_kernels.launch.compiler import Source
from distmm_kernels.tiles.slices import COLUMNS, THREADS

AHEAD = 8  # sums that a thread loads before it adds the first


def add_slices(accumulator: str, output: str, adds: bool) -> Source:
    """Return the kernel ``D = C + first sum + second sum ...``, each sum rounded; C and D may be the same.

    Grid: enough threads, 1, matrices. A thread has `COLUMNS` neighbours of D.

    Parameters
    ----------
    accumulator
        Type of C and of the sums, ``float32`` or ``int32``.
    output
        Type of D. A narrower one is rounded to nearest even at the end.
    adds
        Whether there is a C. Otherwise the total begins with the first sum, not with +0: if all sums are -0, it is -0.

    Notes
    -----
    The kernel's parameters are unsigned integers of 64 bits, in this order:

    - the sums: their address; bytes from one sum to the next, from one matrix to the next and from one row to the
      next; number of sums of a matrix;
    - C: its address; bytes from one matrix to the next and from one row to the next;
    - D: the same as for C;
    - rows and columns of D.

    All addresses and distances are multiples of 16.
    """
    four, one = (_added(accumulator, output, adds, width) for width in (COLUMNS, 1))
    itemsize = u64(4 if output == accumulator else 2)

    def kernel(
        sums, step, matrix_step, pitch, count, c, c_step, c_pitch, d, d_step, d_pitch, rows, columns,
    ):  # fmt: skip
        fours = u32((columns + u64(COLUMNS - 1)) // u64(COLUMNS))
        place = u64(cuda.blockIdx.x) * u64(THREADS) + u64(cuda.threadIdx.x)
        if place < rows * u64(fours):
            row, z = u64(place // u64(fours)), u64(cuda.blockIdx.z)
            column = (place - row * u64(fours)) * u64(COLUMNS)
            left = i32(min(columns - column, u64(COLUMNS)))
            at = sums + z * matrix_step + row * pitch + column * u64(4)
            from_c = c + z * c_step + row * c_pitch + column * u64(4)
            to = d + z * d_step + row * d_pitch + column * itemsize
            if left == i32(COLUMNS):
                four(at, step, count, from_c, to)
            else:
                while left > i32(0):
                    one(at, step, count, from_c, to)
                    at, from_c, to, left = at + u64(4), from_c + u64(4), to + itemsize, left - i32(1)

    return Source(kernel, types.void(*[u64] * 13), THREADS, blocks=4)


def _added(accumulator: str, output: str, adds: bool, width: int) -> Callable[..., None]:
    """Make ``(at, step, count, c, d)``: ``width`` neighbours of D."""
    number = i32 if accumulator == "int32" else f32
    start, one, many = (_loads(accumulator, width, each) for each in (None, 1, AHEAD))
    store = _store(accumulator, output, width)

    def add(at, step, count, c, d):
        total = cuda.local.array(width, number)
        if adds:
            start(total, c, step)
        else:
            start(total, at, step)
            at, count = at + step, count - u64(1)
        while count >= u64(AHEAD):
            many(total, at, step)
            at, count = at + u64(AHEAD) * step, count - u64(AHEAD)
        while count > u64(0):
            one(total, at, step)
            at, count = at + step, count - u64(1)
        store(total, d)

    return inlined(add)


def _vector(name: str, width: int) -> str:
    return f"{name}.v{width}" if width > 1 else name


def _operands(count: int, first: int = 0) -> str:
    listed = ", ".join(f"${first + i}" for i in range(count))
    return f"{{{listed}}}" if count > 1 else listed


def _loads(accumulator: str, width: int, sums: int | None) -> Callable[..., None]:
    """Make ``(total, at, step)``: add ``sums`` sums in order. If ``sums`` is None, load the first value."""
    number = I32 if accumulator == "int32" else F32
    text = f"{_vector('ld.global', width)}.b32 {_operands(width)}, [${width}];"
    load = emit.assembly(text, [number] * width, [I64], clobbers_memory=False)

    def write(builder: Any, total: Any, at: Any, step: Any) -> None:
        registers, loaded = Registers(builder, total), []
        for _ in range(sums or 1):
            loaded.append(load(builder, [at]))
            at = builder.add(at, step)
        if sums is None:
            registers.set_values(0, loaded[0])
            return
        add = builder.add if accumulator == "int32" else builder.fadd
        values = registers.values(0, width)
        for each in loaded:
            values = [add(x, y) for x, y in zip(values, each, strict=True)]
        registers.set_values(0, values)

    return emit.intrinsic(write, (ANY, u64, u64))


def _store(accumulator: str, output: str, width: int) -> Callable[..., None]:
    """Make ``(total, d)``: store the total, rounded to D's type."""
    number = I32 if accumulator == "int32" else F32
    name = PTX_NAMES[output]
    if output == accumulator:
        text = f"{_vector('st.global', width)}.b32 [$0], {_operands(width, 1)};"
    elif width == 1:
        text = f"{{ .reg .b16 h; cvt.rn.{name}.f32 h, $1; st.global.b16 [$0], h; }}"
    else:
        text = (
            f"{{ .reg .b32 x, y; cvt.rn.{name}x2.f32 x, $2, $1; cvt.rn.{name}x2.f32 y, $4, $3; "
            "st.global.v2.b32 [$0], {x, y}; }"
        )
    store = emit.assembly(text, [], [I64, *[number] * width])

    def write(builder: Any, total: Any, d: Any) -> None:
        store(builder, [d, *Registers(builder, total).values(0, width)])

    return emit.intrinsic(write, (ANY, u64))
