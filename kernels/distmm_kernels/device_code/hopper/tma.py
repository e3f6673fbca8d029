"""The tensor memory accelerator: boxes of matrices, copied between global and shared memory by one thread.

A *tensor map* describes a stack of matrices and the box. The host makes it (`distmm_kernels.launch.tensor_map`), and
the kernel receives it by value as a constant of the grid.
"""

from __future__ import annotations

from distmm_kernels.device_code.emit import instruction, types

i32, u32, u64 = types.int32, types.uint32, types.uint64

load_box = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5}], [$2];",
    (u32, u64, u32, i32, i32, i32),
)
"""load_box(to, map, barrier, x, y, z): start a load; elements outside of the matrix become zero."""

wait_stores = instruction("cp.async.bulk.wait_group 0;")
"""Waits until all of this thread's stores are done."""
