"""The epilogue of a tile in registers: read C from shared memory, scale or reduce sums, store D by TMA.

Each warp handles its own 16 rows, so no warp waits for another. The layout of registers is that of
`distmm_kernels.device_code.hopper.wgmma`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from distmm_kernels.device_code.elements import Registers
from distmm_kernels.device_code.emit import ANY, F32, I32, I64, assembly, intrinsic, types
from distmm_kernels.device_code.modulo import reduced
from distmm_kernels.tiles.hopper_tiles import C_BOX_BYTES, SPAN, WARP_ROWS, HopperTile, Output

i32, u32, u64 = types.int32, types.uint32, types.uint64

_together = assembly("bar.warp.sync 0xffffffff;", [], [], [])  # all threads of a warp
_fence = assembly(
    "fence.proxy.async.shared::cta;", [], [], []
)  # orders the thread's accesses of shared memory before the TMA's


def read_c(first: int, boxes: int, accumulator: Output, added: bool) -> Callable[..., None]:
    """Make ``read_c(acc, row, permuted, factors)``: read boxes of 32-bit C, from a tile's ``first`` on.

    They replace the accumulators, or, if ``added``, are added to them; floats are rounded to nearest. ``row`` is the
    address of the thread's row of the first box in shared memory. ``permuted`` is its position in that row, from
    `distmm_kernels.tiles.hopper_places.box_place`. When the function returns, the TMA may overwrite the boxes that the
    warp has read. ``factors`` are not used; `finish_d` has the same signature.
    """
    quads = _quads(accumulator)

    def write(builder, array, row, permuted, _):
        acc, plus = Registers(builder, array), builder.add if accumulator == "int32" else builder.fadd
        for at, quad in quads(builder, first, boxes, row, permuted):
            if added:
                quad = [plus(x, y) for (x,), y in zip(acc.get(at, 4), quad, strict=True)]
            acc.put(at, [(element,) for element in quad])
        _fence(builder, [])
        _together(builder, [])

    return intrinsic(write, (ANY, u32, u32, ANY))


def finish_d(first: int, boxes: int, c0: Output | None) -> Callable[..., None]:
    """Make ``finish_d(acc, row, permuted, factors)``: ``alpha * acc + beta * C0``, with the parameters of `read_c`.

    ``factors`` are the bits of alpha and of beta. Each operation is rounded, as in `Kernel.finish`: none is
    fused with another. Without a C0 nothing is read or added.
    """
    times = assembly("mul.rn.f32 $0, $1, $2;", [F32], [F32] * 2, ["=f", "f", "f"], pure=True)
    plus = assembly("add.rn.f32 $0, $1, $2;", [F32], [F32] * 2, ["=f", "f", "f"], pure=True)
    number = assembly("mov.b32 $0, $1;", [F32], [I32], ["=f", "r"], pure=True)
    quads = _quads(c0) if c0 else _nothing

    def write(builder, array, row, permuted, factors):
        acc = Registers(builder, array)
        alpha, beta = (number(builder, [builder.trunc(builder.extract_value(factors, i), I32)])[0] for i in (0, 1))
        for at, quad in quads(builder, first, boxes, row, permuted):
            sums = [times(builder, [x, alpha])[0] for (x,) in acc.get(at, 4)]
            if quad:
                sums = [plus(builder, [x, times(builder, [y, beta])[0]])[0] for x, y in zip(sums, quad, strict=True)]
            acc.put(at, [(element,) for element in sums])
        if c0:
            _fence(builder, [])
            _together(builder, [])

    return intrinsic(write, (ANY, u32, u32, types.UniTuple(u64, 2)))


def _nothing(builder: Any, first: int, boxes: int, row: Any, permuted: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield the accumulator numbers that `_quads` yields, and read nothing."""
    for box in range(first, first + boxes):
        for j in range(4):
            yield 4 * (4 * box + j), []


def _quads(kind: Output) -> Callable[..., Iterator[tuple[int, list[Any]]]]:
    """Make ``(builder, first, boxes, row, permuted)``: read boxes; yield four elements and their accumulators' number.

    Elements of 16 bits are converted to float32.
    """
    number, letter = (I32, "r") if kind == "int32" else (F32, "f")
    text = {
        "float16": "{ .reg .b32 w; .reg .b16 x, y; ld.shared.b32 w, [$2]; mov.b32 {x, y}, w; "
        "cvt.f32.f16 $0, x; cvt.f32.f16 $1, y; }",
        "bfloat16": "{ .reg .b32 w, x; ld.shared.b32 w, [$2]; shl.b32 x, w, 16; mov.b32 $0, x; "
        "and.b32 x, w, 0xffff0000; mov.b32 $1, x; }",
    }.get(kind, "ld.shared.v2.b32 {$0, $1}, [$2];")
    pair = assembly(text, [number, number], [I32], [f"={letter}", f"={letter}", "r"], clobbers_memory=False)
    # 8 columns are two units of 16 bytes, or one
    groups, unit = (8, 16) if kind in ("float16", "bfloat16") else (4, 32)

    def read(builder: Any, first: int, boxes: int, row: Any, permuted: Any) -> Iterator[tuple[int, list[Any]]]:
        for box in range(boxes):
            for j in range(groups):
                place = builder.add(row, builder.xor(permuted, I32(unit * j)))
                upper = builder.add(place, I32(box * C_BOX_BYTES))
                quad = [*pair(builder, [upper]), *pair(builder, [builder.add(upper, I32(8 * SPAN))])]
                yield 4 * (groups * (first + box) + j), quad

    return read


def scale(columns: int) -> Callable[..., None]:
    """Make ``scale(acc, rows, columns)``: multiply by a factor of the row, then by one of the column.

    There are two steps, since the product of both factors may exceed float32's range although the result does not.
    ``rows`` and ``columns`` are the addresses of the factors of the thread's first element. Both lists are padded to
    whole tiles.
    """
    read = _read_factors(columns)

    def write(builder, array, row_factors, column_factors):
        acc, factors = Registers(builder, array), read(builder, row_factors, column_factors)
        acc.put(0, [(x,) for x in _scaled(builder, acc.get(0, columns // 2), factors)])

    return intrinsic(write, (ANY, u64, u64))


def load_factors(columns: int) -> Callable[..., None]:
    """Make ``load_factors(factors, rows, columns)``: read the factors of `scale` to ``columns // 4 + 2`` registers."""
    read = _read_factors(columns)

    def write(builder, array, row_factors, column_factors):
        Registers(builder, array).put(0, [(x,) for x in read(builder, row_factors, column_factors)])

    return intrinsic(write, (ANY, u64, u64))


def add_scaled(columns: int) -> Callable[..., None]:
    """Make ``add_scaled(totals, acc, factors)``: add accumulators, scaled as by `scale`, to totals."""

    def write(builder, *arrays):
        totals, acc, factors = (Registers(builder, array) for array in arrays)
        each = _scaled(builder, acc.get(0, columns // 2), [x for (x,) in factors.get(0, columns // 4 + 2)])
        before = totals.get(0, columns // 2)
        totals.put(0, [(builder.fadd(x, y),) for (x,), y in zip(before, each, strict=True)])

    return intrinsic(write, (ANY, ANY, ANY))


def _read_factors(columns: int) -> Callable[[Any, Any, Any], list[Any]]:
    """Make ``(builder, rows, columns)``: read the factors of a thread's two rows, then those of its columns."""
    one = assembly("ld.global.nc.f32 $0, [$1];", [F32], [I64], ["=f", "l"], pure=True)
    two = assembly("ld.global.nc.v2.f32 {$0, $1}, [$2];", [F32, F32], [I64], ["=f", "=f", "l"], pure=True)

    def read(builder: Any, rows: Any, by_column: Any) -> list[Any]:
        pairs = [two(builder, [builder.add(by_column, I64(32 * j))]) for j in range(columns // 8)]
        return [one(builder, [builder.add(rows, I64(4 * row))])[0] for row in (0, 8)] + [
            x for pair in pairs for x in pair
        ]

    return read


def _scaled(builder: Any, elements: Sequence[tuple[Any, ...]], factors: Sequence[Any]) -> list[Any]:
    """Return a thread's accumulators times the factors of their rows, then of their columns."""
    return [
        builder.fmul(builder.fmul(x, factors[i % 4 // 2]), factors[2 + i // 4 * 2 + i % 2])
        for i, (x,) in enumerate(elements)
    ]


def residue(columns: int) -> Callable[..., None]:
    """Make ``residue(acc, modulus)``: replace int32 sums below 2^27 by their residues plus 128.

    ``modulus`` is the address that `distmm_kernels.device_code.modulo.reduced` takes.
    """

    def write(builder, array, address):
        acc = Registers(builder, array)
        sums = [element for (element,) in acc.get(0, columns // 2)]
        acc.put(0, [(value,) for value in reduced(builder, sums, address)])

    return intrinsic(write, (ANY, u64))


def not_zero(columns: int) -> Callable[[Any], None]:
    """Make a function that replaces int32 sums by 1 if they are not 0."""
    truth = assembly("{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.b32 $0, 1, 0, p; }", [I32], [I32], ["=r", "r"], True)

    def write(builder, array):
        acc = Registers(builder, array)
        for i, (element,) in enumerate(acc.get(0, columns // 2)):
            acc.put(i, [(truth(builder, [element])[0],)])

    return intrinsic(write, (ANY,))


def store_d(tile: HopperTile) -> Callable[..., None]:
    """Make ``store_d(acc, buffers, row, permuted, lane, map, x, y, z, left, image)``: a warp stores 16 rows of D.

    The TMA stores them from shared memory.

    Each row of a box has 128 bytes. The warp writes boxes to its buffers in shared memory, at address ``buffers``.
    `distmm_kernels.tiles.hopper_places.box_place` returns the positions to which a lane writes. The first element of
    the first box is element ``x, y, z`` of D, and D has ``left`` columns from ``x`` on. The function returns before the
    stores are complete. The next call waits before it overwrites a buffer that a store still reads.

    If D is symmetric, a box above the diagonal is not stored, and one below it is stored a second time, as its mirror
    image. The four warps of a warpgroup do this together, each with its buffers. A box that the diagonal crosses is
    stored once. So each box of D is stored once, whatever the tile's width. ``image`` has the warp and its warpgroup,
    and where the lane writes: `distmm_kernels.tiles.hopper_places.mirrored_place`, its first box as an offset in bytes.
    """
    slots, put = tile.slots, {32: _put_words, 64: _put_halves, 128: _put_bytes}[tile.box_columns]
    first_lane = "{ .reg .pred p; setp.eq.u32 p, $0, 0; @p %s }"
    free = assembly(first_lane % f"cp.async.bulk.wait_group.read {slots - 1};", [], [I32], ["r"])
    # commit a group even without a store, so that there is one group for each box
    send = assembly(
        "{ .reg .pred p, q; setp.eq.u32 p, $0, 0; setp.gt.and.s32 q, $6, 0, p; "
        "@q cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$1, {$3, $4, $5}], [$2]; "
        "@p cp.async.bulk.commit_group; }",
        [],
        [I32, I64, I32, I32, I32, I32, I32],
        ["r", "l", "r", "r", "r", "r", "r"],
    )
    mirrored = _mirror(tile, free, send) if tile.mirrors else None

    def write(builder, array, buffers, row, permuted, lane, tensor_map, x, y, z, left, image):
        acc = Registers(builder, array)
        for box in range(tile.columns // tile.box_columns):
            along, number = I32(box * tile.box_columns), box
            column, inside = builder.add(x, along), builder.sub(left, along)
            if mirrored is not None:
                number = 2 * box + 1
                mirrored(builder, acc, box, buffers, row, permuted, lane, tensor_map, column, y, z, inside, image)
                inside = builder.select(builder.icmp_signed(">=", y, column), inside, I32(0))
            buffer = builder.add(buffers, I32(number % slots * WARP_ROWS * SPAN))
            free(builder, [lane])
            _together(builder, [])
            put(builder, acc, box, tile.output, builder.add(buffer, row), permuted)
            _fence(builder, [])
            _together(builder, [])
            send(builder, [lane, tensor_map, buffer, column, y, z, inside])

    return intrinsic(write, (ANY, u32, u32, u32, u32, u64, i32, i32, i32, i32, types.UniTuple(u32, 4)))


def _mirror(tile: HopperTile, free: Callable[..., Any], send: Callable[..., Any]) -> Callable[..., None]:
    """Make the function that stores mirror images of a warpgroup's boxes below the diagonal, one of each warp.

    Three products are added in an order that is another one in the mirror image. So where the diagonal crosses a box,
    elements of D above it are replaced by their mirror images, before the box itself is stored.
    """
    all_warps = assembly("bar.sync $0, 128;", [], [I32], ["r"])  # of the warpgroup
    words = tile.box_columns == 32
    warp_bytes, put = tile.slots * WARP_ROWS * SPAN, _put_mirrored_words if words else _put_mirrored_halves

    def write(builder, acc, box, buffers, row, permuted, lane, tensor_map, column, y, z, inside, image):
        warp, half, at, swizzled = (builder.extract_value(image, i) for i in range(4))
        slot, barrier = 2 * box % tile.slots * WARP_ROWS * SPAN, builder.add(half, I32(3))  # 1 and 2 are turns
        all_buffers = builder.add(builder.sub(buffers, builder.mul(warp, I32(warp_bytes))), I32(slot))
        to = builder.add(all_buffers, at)
        free(builder, [lane])
        all_warps(builder, [barrier])
        put(builder, acc, box, tile.output, to, swizzled, warp_bytes)
        _fence(builder, [])
        all_warps(builder, [barrier])
        group = builder.sub(y, builder.mul(warp, I32(WARP_ROWS)))
        down, across = (builder.lshr(warp, I32(1)), builder.and_(warp, I32(1))) if words else (warp, I32(0))
        to_row = builder.add(column, builder.mul(down, I32(WARP_ROWS)))
        to_column = builder.add(group, builder.mul(across, I32(tile.box_columns)))
        left = builder.sub(builder.add(inside, column), to_column)
        left = builder.select(builder.icmp_signed("<", to_row, to_column), left, I32(0))
        buffer = builder.add(buffers, I32(slot))
        send(builder, [lane, tensor_map, buffer, to_column, to_row, z, left])
        if tile.products == 3:
            # the boxes in shared memory that would be this warp's, if the diagonal crosses them
            beyond = builder.sub(column, group)
            pair = builder.and_(builder.sub(warp, builder.ashr(beyond, I32(4))), I32(1))
            number = builder.add(builder.mul(pair, I32(2)), builder.and_(builder.ashr(beyond, I32(5)), I32(1)))
            of = builder.add(all_buffers, builder.add(builder.mul(number, I32(warp_bytes)), row))
            my_row = builder.add(y, builder.lshr(lane, I32(2)))
            my_column = builder.add(column, builder.mul(builder.and_(lane, I32(3)), I32(2)))
            for at_quad, quad in _quads("float32")(builder, 0, 1, of, permuted):
                own = [element for (element,) in acc.get(16 * box + at_quad, 4)]
                columns = [builder.add(my_column, I32(2 * at_quad + i)) for i in (0, 1)]
                rows = my_row, builder.add(my_row, I32(8))
                chosen = [
                    builder.select(builder.icmp_signed(">", columns[i % 2], rows[i // 2]), quad[i], own[i])
                    for i in range(4)
                ]
                acc.put(16 * box + at_quad, [(element,) for element in chosen])

    return write


def _put_mirrored_words(
    builder: Any, acc: Registers, box: int, output: Output, to: Any, swizzled: Any, warp_bytes: int
) -> None:
    """Words one by one: 32 columns become rows of two pairs of boxes."""
    number, letter = (F32, "f") if output == "float32" else (I32, "r")
    put = assembly("st.shared.b32 [$0], $1;", [], [I32, number], ["r", letter])
    for j in range(4):
        for i, (element,) in enumerate(acc.get(4 * (4 * box + j), 4)):
            lower, second = divmod(i, 2)
            rows = j // 2 * 2 * warp_bytes + (j % 2 * 8 + second) * SPAN
            place = builder.add(to, builder.xor(swizzled, I32(16 * second + 32 * lower)))
            put(builder, [builder.add(place, I32(rows)), element])


def _put_mirrored_halves(
    builder: Any, acc: Registers, box: int, output: Output, to: Any, swizzled: Any, warp_bytes: int
) -> None:
    """Matrices of `_put_halves`, transposed by stmatrix: 16 columns become the rows of one box."""
    put = assembly("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};", [], [I32] * 5, ["r"] * 5)
    for j in range(4):
        place = builder.add(builder.add(to, swizzled), I32(j * warp_bytes))
        put(builder, [place, *_narrowed(builder, acc, 8 * (4 * box + j), output)])


def _narrowed(builder: Any, acc: Registers, first: int, output: Output) -> list[Any]:
    """Return eight accumulators as four pairs of 16-bit numbers."""
    name = "bf16" if output == "bfloat16" else "f16"
    narrow = assembly(f"cvt.rn.{name}x2.f32 $0, $2, $1;", [I32], [F32, F32], ["=r", "f", "f"], pure=True)
    part = [element for (element,) in acc.get(first, 8)]
    return [narrow(builder, part[i : i + 2])[0] for i in range(0, 8, 2)]


def _put_words(builder: Any, acc: Registers, box: int, output: Output, row: Any, permuted: Any) -> None:
    """Pairs of 32-bit words: 8 columns are two units, and a thread's pair is one half of a unit."""
    number, letter = (F32, "f") if output == "float32" else (I32, "r")
    put = assembly("st.shared.v2.b32 [$0], {$1, $2};", [], [I32, number, number], ["r", letter, letter])
    for j in range(4):
        quad = [element for (element,) in acc.get(4 * (4 * box + j), 4)]
        place = builder.add(row, builder.xor(permuted, I32(32 * j)))
        put(builder, [place, *quad[:2]])
        put(builder, [builder.add(place, I32(8 * SPAN)), *quad[2:]])


def _put_halves(builder: Any, acc: Registers, box: int, output: Output, row: Any, permuted: Any) -> None:
    """Four 8 x 8 matrices of 16-bit numbers, 16 columns of 16 rows, with each stmatrix."""
    put = assembly("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", [], [I32] * 5, ["r"] * 5)
    for j in range(4):
        words = _narrowed(builder, acc, 8 * (4 * box + j), output)
        put(builder, [builder.add(row, builder.xor(permuted, I32(32 * j))), *words])


def _put_bytes(builder: Any, acc: Registers, box: int, output: Output, row: Any, permuted: Any) -> None:
    """Pairs of bytes: 16 columns are a unit; four threads hold 8 of them. 128 is subtracted from residues."""
    put = assembly("{ .reg .b16 pair; cvt.u16.u32 pair, $1; st.shared.b16 [$0], pair; }", [], [I32] * 2, ["r", "r"])
    last_bytes = assembly("prmt.b32 $0, $1, $2, 0x0040;", [I32], [I32] * 2, ["=r", "r", "r"], pure=True)
    for j in range(16):
        quad = [element for (element,) in acc.get(4 * (16 * box + j), 4)]
        place = builder.add(builder.add(row, builder.xor(permuted, I32(16 * (j // 2)))), I32(8 * (j % 2)))
        for upper, (first, second) in enumerate((quad[:2], quad[2:])):
            if output == "int8":
                pair = builder.xor(builder.or_(first, builder.shl(second, I32(8))), I32(0x8080))
            else:
                (pair,) = last_bytes(builder, [first, second])
            put(builder, [builder.add(place, I32(8 * SPAN * upper)), pair])
