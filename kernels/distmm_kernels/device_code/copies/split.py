"""Instructions on float32: loads of four numbers, exponents, splits into parts for tensor cores, stores.

Addresses are 64-bit integers. Four numbers are loaded at once, 16 bytes where memory is aligned to that.
"""

from __future__ import annotations

from distmm_kernels.device_code.emit import f32, i32, instruction, u32, u64

load4 = instruction(
    "{ .reg .pred p<6>; setp.gt.s32 p0, $5, 3; setp.eq.s32 p1, $5, 3; setp.eq.s32 p2, $5, 2; setp.eq.s32 p3, $5, 1; "
    "or.pred p2, p2, p1; or.pred p3, p3, p2; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000; "
    "mov.f32 $3, 0f00000000; @p0 ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4]; @p3 ld.global.nc.f32 $0, [$4]; "
    "@p2 ld.global.nc.f32 $1, [$4+4]; @p1 ld.global.nc.f32 $2, [$4+8]; }",
    (u64, i32),
    (f32,) * 4,
    pure=True,
)
"""load4(address, left): four neighbours on 16 bytes, zero from the ``left``-th on, which are not read."""

load4_unaligned = instruction(
    "{ .reg .pred p<4>; setp.gt.s32 p0, $5, 0; setp.gt.s32 p1, $5, 1; setp.gt.s32 p2, $5, 2; setp.gt.s32 p3, $5, 3; "
    "mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000; "
    "@p0 ld.global.nc.f32 $0, [$4]; @p1 ld.global.nc.f32 $1, [$4+4]; @p2 ld.global.nc.f32 $2, [$4+8]; "
    "@p3 ld.global.nc.f32 $3, [$4+12]; }",
    (u64, i32),
    (f32,) * 4,
    pure=True,
)
"""The same on any 4 bytes."""

load_word = instruction("ld.global.u32 $0, [$1];", (u64,), u32)
store_word = instruction("st.global.b32 [$0], $1;", (u64, u32))
store2 = instruction("st.global.v2.b32 [$0], {$1, $2};", (u64, u32, u32))
store4 = instruction("st.global.v4.b32 [$0], {$1, $2, $3, $4};", (u64, u32, u32, u32, u32))

max_global = instruction("red.global.max.u32 [$0], $1;", (u64, u32))
add_global = instruction("atom.global.add.u32 $0, [$1], $2;", (u64, u32), u32)
"""add_global(address, x): returns the old value."""

warp_max = instruction("redux.sync.max.u32 $0, $1, 0xffffffff;", (u32,), u32)
warp_sum = instruction("redux.sync.add.u32 $0, $1, 0xffffffff;", (u32,), u32)

magnitude = instruction("{ .reg .f32 t; abs.f32 t, $1; mov.b32 $0, t; }", (f32,), u32, pure=True)
"""Bits of \\|x\\|: they have the order of the numbers; infinity and NaN are larger than all numbers."""

bits = instruction("mov.b32 $0, $1;", (f32,), u32, pure=True)
number = instruction("mov.b32 $0, $1;", (u32,), f32, pure=True)
power_of_two = instruction(
    "{ .reg .u32 e; add.s32 e, $1, 127; shl.b32 e, e, 23; mov.b32 $0, e; }", (i32,), f32, pure=True
)
"""power_of_two(exponent), from -126 to 127."""

split_half = instruction(
    "{ .reg .b16 h<4>; .reg .f32 r<4>; "
    "cvt.rn.f16x2.f32 $0, $5, $4; cvt.rn.f16x2.f32 $1, $7, $6; mov.b32 {h0, h1}, $0; mov.b32 {h2, h3}, $1; "
    "cvt.f32.f16 r0, h0; cvt.f32.f16 r1, h1; cvt.f32.f16 r2, h2; cvt.f32.f16 r3, h3; "
    "sub.f32 r0, $4, r0; sub.f32 r1, $5, r1; sub.f32 r2, $6, r2; sub.f32 r3, $7, r3; "
    "cvt.rn.f16x2.f32 $2, r1, r0; cvt.rn.f16x2.f32 $3, r3, r2; }",
    (f32,) * 4,
    (u32,) * 4,
    pure=True,
)
"""Split four numbers into float16: two words of hi, two words of lo."""

split_tf32 = instruction(
    "{ .reg .f32 r; cvt.rna.tf32.f32 $0, $2; mov.b32 r, $0; sub.f32 r, $2, r; cvt.rna.tf32.f32 $1, r; }",
    (f32,),
    (u32, u32),
    pure=True,
)
"""Split a number into TF32: hi, lo."""
