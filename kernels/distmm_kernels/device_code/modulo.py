"""Sums of products of residues, reduced modulo the modulus of their matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distmm_kernels.device_code.emit import I32, I64, assembly
from distmm_kernels.emulation.moduli import OFFSET

_numbers = assembly("ld.global.nc.v2.u32 {$0, $1}, [$2];", [I32, I32], [I64], pure=True)
_high = assembly("mul.hi.u32 $0, $1, $2;", [I32], [I32] * 2, pure=True)


def reduced(builder: Any, sums: Sequence[Any], address: Any) -> list[Any]:
    """Write the residues of int32 sums below 2^27, plus `OFFSET`, so that none is negative.

    ``address`` is where the modulus, from 129 to 256, is in memory. The multiplier that replaces division by it follows
    (`distmm_kernels.emulation.moduli.epilogue_multiplier`).
    """
    modulus, multiplier = _numbers(builder, [address])
    # a multiple of the modulus that exceeds 2^27, so that no sum is negative
    start = builder.add(builder.shl(modulus, I32(20)), I32(OFFSET))
    found = []
    for each in sums:
        value = builder.add(each, start)
        quotient = builder.lshr(_high(builder, [value, multiplier])[0], I32(7))
        found.append(builder.sub(value, builder.mul(quotient, modulus)))
    return found
