"""Pace: all thread blocks load the same steps of k at about the same time.

Blocks that run at the same time share rows of A and columns of B. The first block that needs a line reads it from
memory. The others find it in the L2 cache if they need it soon. Without a common pace, blocks drift apart over many
tiles, until each of them reads from memory.

A producer counts the stages that it has loaded. After the first `UNPACED` ones it adds 1 to a counter in global memory
after every `PACE` stages. Then it waits until all blocks have added theirs for the `PACE` stages before. So no block is
far ahead of the others.

Nothing hangs if some blocks have not started, because another kernel still runs on their multiprocessors: a producer
that has waited for `PATIENCE` tries does not wait any more in this launch. The bits of D do not depend on the pace.
"""

from __future__ import annotations

from distmm_kernels.device_code.emit import cuda, inlined, instruction, u32, u64
from distmm_kernels.tiles.hopper_tiles import PACE, UNPACED

PATIENCE = 40  # tries of one wait, each of about 0.8 us

_UNPACED, _SHIFT, _MASK = u32(UNPACED), u32(PACE.bit_length() - 1), u32(PACE - 1)

_add_and_wait = instruction(
    "{ .reg .pred p; .reg .u32 seen, tries, left; red.relaxed.gpu.global.add.u32 [$1], 1; mov.u32 left, $3; "
    "mov.u32 tries, $3; setp.eq.u32 p, $2, 0; @p bra DONE_${:uid}; "
    "AGAIN_${:uid}: mov.u32 left, tries; setp.eq.u32 p, tries, 0; @p bra DONE_${:uid}; mov.u32 left, $3; "
    "ld.relaxed.gpu.global.u32 seen, [$1]; setp.ge.u32 p, seen, $2; @p bra DONE_${:uid}; "
    "nanosleep.u32 100; sub.u32 tries, tries, 1; bra AGAIN_${:uid}; DONE_${:uid}: mov.u32 $0, left; }",
    (u64, u32, u32),
    u32,
)
"""Add 1 to the counter, and wait until it is at least ``count``. Return ``tries``, or 0 if so many were in vain."""

end = instruction(
    "{ .reg .pred p; .reg .u32 old; atom.relaxed.gpu.global.inc.u32 old, [$0 + 4], $1; setp.eq.u32 p, old, $1; "
    "@p st.relaxed.gpu.global.u32 [$0], 0; }",
    (u64, u32),
)
"""end(counter, others): this block has multiplied its tiles; the last one sets the counter to 0 for the next launch."""


@inlined
def keep(counter, loaded, patience):
    """Wait for the other blocks, if ``loaded``, the number of stages, says that it is time; return the patience."""
    if loaded > _UNPACED and loaded & _MASK == u32(0):
        before = u32((u32(loaded - _UNPACED) >> _SHIFT) - u32(1))
        patience = _add_and_wait(counter, u32(before * u32(cuda.gridDim.x)), patience)
    return patience
