"""Instructions: mbarriers in shared memory, named barriers, fences, copies, and the registers of a warpgroup.

The tensor memory accelerator (TMA) copies boxes of matrices between global and shared memory; one thread asks for them.
A *tensor map* describes a stack of matrices and the box. The host makes it (`distmm_kernels.launch.tensor_map`), and
the kernel receives it by value as a constant of the grid.
"""

from __future__ import annotations

from collections.abc import Callable

from distmm_kernels.device_code.emit import i32, instruction, u32, u64
from distmm_kernels.tiles.hopper_tiles import CONSUMERS

# A wait that never ends would hang the GPU. After this many tries, about a second, since each sleeps up to 4 us, the
# kernel traps: the launch fails, and the process can report it and end.
TRIES = 250_000

initialise = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", (u32, u32))
"""initialise(barrier, arrivals): barrier is an address in shared memory."""

fence_barrier_init = instruction("fence.mbarrier_init.release.cluster;")
"""Makes initialised barriers visible to the TMA."""

expect_bytes = instruction("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;", (u32, u32))
"""expect_bytes(barrier, bytes): arrive, and complete the phase only when this number of bytes has arrived too."""

arrive = instruction("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", (u32,))
"""arrive(barrier)."""

take_turn = instruction(f"bar.sync $0, {32 * CONSUMERS};", (u32,))
"""take_turn(number): wait until the other warpgroup has given the turn of this number, 1 to 15."""

give_turn = instruction(f"bar.arrive $0, {32 * CONSUMERS};", (u32,))
"""give_turn(number): let the other warpgroup continue; does not wait."""

wait = instruction(
    "{ .reg .pred p; .reg .u32 tries; mov.u32 tries, 0; "
    "AGAIN_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @p bra DONE_${:uid}; "
    f"add.u32 tries, tries, 1; setp.lt.u32 p, tries, {TRIES}; @p bra AGAIN_${{:uid}}; trap; "
    "DONE_${:uid}: }",
    (u32, u32),
)
"""wait(barrier, parity): until the phase of this parity is complete. A fresh barrier counts as past parity 1."""


load_box = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4, $5}], [$2];",
    (u32, u64, u32, i32, i32, i32),
)
"""load_box(to, map, barrier, x, y, z): start a load; elements outside of the matrix become zero."""

wait_stores = instruction("cp.async.bulk.wait_group 0;")
"""Waits until all of this thread's stores by the TMA are done."""


def set_registers(registers: int, more: bool) -> Callable[[], None]:
    """Make a function that sets the registers of each thread of a warpgroup, a multiple of 8, to more or fewer."""
    return instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {registers};")
