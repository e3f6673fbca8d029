"""A tile's sums, handed from the block that began it to the one that goes on, through global memory.

Warp by warp: a warp's sums are written and read by warps of the same place in their blocks, so no barrier is needed,
only a flag for each warp, which is 0 before the launch.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba import types

from distmm_kernels.device_code.llvm import Registers, intrinsic
from distmm_kernels.device_code.ptx import assembly, instruction, of_arity

__all__ = ["announce", "await_announcement", "resume", "save"]

i32, u32, u64 = types.int32, types.uint32, types.uint64
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

# The block before may still wait for a multiprocessor that other work occupies: ten seconds or more, not one.
TRIES = 10_000_000

announce = instruction(
    "{ .reg .pred p; fence.acq_rel.gpu; bar.warp.sync 0xffffffff; setp.eq.u32 p, $1, 0; "
    "@p st.release.gpu.global.u32 [$0], 1; }",
    (u64, u32),
)
"""announce(flag, lane): say that all this warp has written before can be read."""

await_announcement = instruction(
    "{ .reg .pred p; .reg .u32 seen, tries; mov.u32 tries, 0; setp.eq.u32 p, $1, 0; @p bra DONE_${:uid}; "
    "AGAIN_${:uid}: ld.acquire.gpu.global.u32 seen, [$0]; setp.ne.u32 p, seen, 0; @p bra DONE_${:uid}; "
    f"nanosleep.u32 1000; add.u32 tries, tries, 1; setp.lt.u32 p, tries, {TRIES}; @p bra AGAIN_${{:uid}}; trap; "
    "DONE_${:uid}: bar.warp.sync 0xffffffff; }",
    (u64, u32),
)
"""await_announcement(flag, needed): until the other warp has announced, unless ``needed`` is 0."""


def save(columns: int) -> Callable[..., None]:
    """Make ``save(acc, address)``: write a thread's sums to where its warp's 16 rows of ``columns`` lie, rows first.

    ``address`` is that of the thread's first element. `distmm_kernels.device_code.epilogue.load_c` can read them too.
    """

    def code(context, builder, signature, values):
        acc = Registers(context, builder, signature.args[0], values[0])
        number, letter = _kind(acc)
        for i, offset in enumerate(_offsets(columns)):
            text = f"st.global.v2.b32 [$0+{offset}], {{$1, $2}};"
            put = assembly(text, [], [I64, number, number], ["l", letter, letter])
            put(builder, [values[1], *(element for (element,) in acc.get(2 * i, 2))])
        return context.get_dummy_value()

    return intrinsic(code, of_arity(2, lambda acc, _: types.void(acc, u64)))


def resume(columns: int) -> Callable[..., None]:
    """Make ``resume(acc, address, saved)``: read what `save` wrote, unless ``saved`` is 0.

    Without a branch: where accumulators come together from two ways, ptxas would serialise the wgmma that follow.
    """

    def code(context, builder, signature, values):
        acc = Registers(context, builder, signature.args[0], values[0])
        number, letter = _kind(acc)
        for i, offset in enumerate(_offsets(columns)):
            get = assembly(
                f"{{ .reg .pred p; setp.ne.u32 p, $5, 0; @p ld.global.cg.v2.b32 {{$0, $1}}, [$4+{offset}]; }}",
                [number, number],
                [number, number, I64, I32],
                [f"={letter}", f"={letter}", "0", "1", "l", "r"],
            )
            before = [element for (element,) in acc.get(2 * i, 2)]
            acc.put(2 * i, [(element,) for element in get(builder, [*before, *values[1:]])])
        return context.get_dummy_value()

    return intrinsic(code, of_arity(3, lambda acc, *_: types.void(acc, u64, u32)))


def _offsets(columns: int) -> list[int]:
    """Bytes from a thread's first element to each of its pairs, in the order of accumulators."""
    return [32 * j + below * 8 * columns * 4 for j in range(columns // 8) for below in (0, 1)]


def _kind(acc: Registers) -> tuple[ir.Type, str]:
    return acc.real, "f" if acc.real == F32 else "r"
