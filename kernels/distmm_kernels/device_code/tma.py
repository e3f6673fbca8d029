"""The tensor memory accelerator: boxes of matrices, copied between global and shared memory by one thread.

A *tensor map* describes a stack of matrices and the box; the host makes it (`distmm_kernels.tensor_map`), and the
kernel receives it by value as a constant of the grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from distmm_kernels.device_code.llvm import intrinsic
from distmm_kernels.device_code.ptx import instruction, of_arity

__all__ = [
    "TENSOR_MAP",
    "load_box",
    "map_addresses",
    "shared_memory",
    "wait_stores",
]

i32, u32, u64 = types.int32, types.uint32, types.uint64
I32, I64 = ir.IntType(32), ir.IntType(64)
SHARED = 3  # NVVM's address space

TENSOR_MAP = types.CPointer(types.UniTuple(u64, 16))
"""Type of a tensor map in a kernel's signature."""


class _ByValue(ir.values.ArgumentAttributes):  # type: ignore[misc]
    """Attributes of a parameter whose ``byval`` names no type: so the LLVM of NVVM for sm_90 wants it."""

    _known = {**ir.values.ArgumentAttributes._known, "byval": False}  # noqa: RUF012 (as in llvmlite)


def map_addresses(count: int) -> Callable[..., Any]:
    """Make a function that takes a kernel's tensor maps, its first parameters, and returns their addresses.

    All in one call: the annotation that keeps them out of local memory counts once a kernel.
    """

    def code(context, builder, signature, values):
        function, module = builder.function, builder.module
        places = [next(i for i, argument in enumerate(function.args) if argument is value) for value in values]
        for i in places:
            function.args[i].attributes = _ByValue(["byval"])
            function.args[i].attributes.align = 64
        indices = module.add_metadata([I32(i) for i in places])
        annotations = module.namedmetadata.get("nvvm.annotations") or module.add_named_metadata("nvvm.annotations")
        annotations.add(module.add_metadata((function, ir.MetaDataString(module, "grid_constant"), indices)))
        addresses = [builder.ptrtoint(value, I64) for value in values]
        return context.make_tuple(builder, signature.return_type, addresses)

    return intrinsic(code, of_arity(count, lambda *maps: types.UniTuple(u64, count)(*maps)))


def _shared_memory(context, builder, signature, values):
    name = "distmm_shared"
    memory = builder.module.globals.get(name)
    if memory is None:
        memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=SHARED)
        memory.linkage, memory.align = "external", 1024
    return builder.ptrtoint(memory, I32)


shared_memory = intrinsic(_shared_memory, lambda: u32())
"""Address of the block's dynamic shared memory, a multiple of 1024 as the 128-byte swizzle wants it."""

load_box = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5}], [$2];",
    (u32, u64, u32, i32, i32, i32),
)
"""load_box(to, map, barrier, x, y, z): start a load; what lies outside the matrix arrives as zero."""

wait_stores = instruction("cp.async.bulk.wait_group 0;")
"""Waits until all of this thread's stores are done."""
