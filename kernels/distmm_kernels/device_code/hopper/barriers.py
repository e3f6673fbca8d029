"""Instructions: mbarriers in shared memory, named barriers, fences, and the number of registers of a warpgroup."""

from __future__ import annotations

from collections.abc import Callable

from distmm_kernels.device_code.emit import instruction, types
from distmm_kernels.tiles.hopper_tiles import CONSUMERS

u32 = types.uint32

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


def set_registers(registers: int, more: bool) -> Callable[[], None]:
    """Make a function that sets the registers of each thread of a warpgroup, a multiple of 8, to more or fewer."""
    return instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {registers};")
