"""The stores of a tile of D: from registers to shared memory, and from there by the TMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code.elements import Registers
from distmm_kernels.device_code.emit import ANY, F32, I32, I64, PTX_NAMES, assembly, i32, intrinsic, types, u32, u64
from distmm_kernels.device_code.hopper.epilogue import fence, hand_over, quads_of, together
from distmm_kernels.tiles.hopper_tiles import SPAN, WARP_ROWS, HopperTile, Output, box_columns


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
    slots, columns = tile.slots, box_columns(tile.output)
    put = {32: _put_words, 64: _put_halves, 128: _put_bytes}[columns]
    first_lane = "{ .reg .pred p; setp.eq.u32 p, $0, 0; @p %s }"
    free = assembly(first_lane % f"cp.async.bulk.wait_group.read {slots - 1};", [], [I32])
    # commit a group even without a store, so that there is one group for each box
    send = assembly(
        "{ .reg .pred p, q; setp.eq.u32 p, $0, 0; setp.gt.and.s32 q, $6, 0, p; "
        "@q cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$1, {$3, $4, $5}], [$2]; "
        "@p cp.async.bulk.commit_group; }",
        [],
        [I32, I64, I32, I32, I32, I32, I32],
    )
    mirrored = _mirror(tile, free, send) if tile.mirrors else None

    def write(builder, array, buffers, row, permuted, lane, tensor_map, x, y, z, left, image):
        acc = Registers(builder, array)
        for box in range(tile.columns // columns):
            along, number = I32(box * columns), box
            column, inside = builder.add(x, along), builder.sub(left, along)
            if mirrored is not None:
                number = 2 * box + 1
                mirrored(builder, acc, box, buffers, row, permuted, lane, tensor_map, column, y, z, inside, image)
                inside = builder.select(builder.icmp_signed(">=", y, column), inside, I32(0))
            buffer = builder.add(buffers, I32(number % slots * WARP_ROWS * SPAN))
            free(builder, [lane])
            together(builder, [])
            put(builder, acc, box, tile.output, builder.add(buffer, row), permuted)
            hand_over(builder)
            send(builder, [lane, tensor_map, buffer, column, y, z, inside])

    return intrinsic(write, (ANY, u32, u32, u32, u32, u64, i32, i32, i32, i32, types.UniTuple(u32, 4)))


def _mirror(tile: HopperTile, free: Callable[..., Any], send: Callable[..., Any]) -> Callable[..., None]:
    """Make the function that stores mirror images of a warpgroup's boxes below the diagonal, one of each warp.

    Three products are added in an order that is another one in the mirror image. So where the diagonal crosses a box,
    elements of D above it are replaced by their mirror images, before the box itself is stored.
    """
    all_warps = assembly("bar.sync $0, 128;", [], [I32])  # of the warpgroup
    words = box_columns(tile.output) == 32
    warp_bytes, put = tile.slots * WARP_ROWS * SPAN, _put_mirrored_words if words else _put_mirrored_halves

    def write(builder, acc, box, buffers, row, permuted, lane, tensor_map, column, y, z, inside, image):
        warp, half, at, swizzled = (builder.extract_value(image, i) for i in range(4))
        slot, barrier = 2 * box % tile.slots * WARP_ROWS * SPAN, builder.add(half, I32(3))  # 1 and 2 are turns
        all_buffers = builder.add(builder.sub(buffers, builder.mul(warp, I32(warp_bytes))), I32(slot))
        to = builder.add(all_buffers, at)
        free(builder, [lane])
        all_warps(builder, [barrier])
        put(builder, acc, box, tile.output, to, swizzled, warp_bytes)
        fence(builder, [])
        all_warps(builder, [barrier])
        group = builder.sub(y, builder.mul(warp, I32(WARP_ROWS)))
        down, across = (builder.lshr(warp, I32(1)), builder.and_(warp, I32(1))) if words else (warp, I32(0))
        to_row = builder.add(column, builder.mul(down, I32(WARP_ROWS)))
        to_column = builder.add(group, builder.mul(across, I32(box_columns(tile.output))))
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
            for at_quad, quad in quads_of("float32")(builder, 0, 1, of, permuted):
                own = acc.values(16 * box + at_quad, 4)
                columns = [builder.add(my_column, I32(2 * at_quad + i)) for i in (0, 1)]
                rows = my_row, builder.add(my_row, I32(8))
                chosen = [
                    builder.select(builder.icmp_signed(">", columns[i % 2], rows[i // 2]), quad[i], own[i])
                    for i in range(4)
                ]
                acc.set_values(16 * box + at_quad, chosen)

    return write


def _put_mirrored_words(
    builder: Any, acc: Registers, box: int, output: Output, to: Any, swizzled: Any, warp_bytes: int
) -> None:
    """Words one by one: 32 columns become rows of two pairs of boxes."""
    number = F32 if output == "float32" else I32
    put = assembly("st.shared.b32 [$0], $1;", [], [I32, number])
    for j in range(4):
        for i, element in enumerate(acc.values(4 * (4 * box + j), 4)):
            lower, second = divmod(i, 2)
            rows = j // 2 * 2 * warp_bytes + (j % 2 * 8 + second) * SPAN
            place = builder.add(to, builder.xor(swizzled, I32(16 * second + 32 * lower)))
            put(builder, [builder.add(place, I32(rows)), element])


def _put_mirrored_halves(
    builder: Any, acc: Registers, box: int, output: Output, to: Any, swizzled: Any, warp_bytes: int
) -> None:
    """Matrices of `_put_halves`, transposed by stmatrix: 16 columns become the rows of one box."""
    put = assembly("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};", [], [I32] * 5)
    for j in range(4):
        place = builder.add(builder.add(to, swizzled), I32(j * warp_bytes))
        put(builder, [place, *_narrowed(builder, acc, 8 * (4 * box + j), output)])


def _narrowed(builder: Any, acc: Registers, first: int, output: Output) -> list[Any]:
    """Return eight accumulators as four pairs of 16-bit numbers."""
    narrow = assembly(f"cvt.rn.{PTX_NAMES[output]}x2.f32 $0, $2, $1;", [I32], [F32, F32], pure=True)
    part = acc.values(first, 8)
    return [narrow(builder, part[i : i + 2])[0] for i in range(0, 8, 2)]


def _put_words(builder: Any, acc: Registers, box: int, output: Output, row: Any, permuted: Any) -> None:
    """Pairs of 32-bit words: 8 columns are two units, and a thread's pair is one half of a unit."""
    number = F32 if output == "float32" else I32
    put = assembly("st.shared.v2.b32 [$0], {$1, $2};", [], [I32, number, number])
    for j in range(4):
        quad = acc.values(4 * (4 * box + j), 4)
        place = builder.add(row, builder.xor(permuted, I32(32 * j)))
        put(builder, [place, *quad[:2]])
        put(builder, [builder.add(place, I32(8 * SPAN)), *quad[2:]])


def _put_halves(builder: Any, acc: Registers, box: int, output: Output, row: Any, permuted: Any) -> None:
    """Four 8 x 8 matrices of 16-bit numbers, 16 columns of 16 rows, with each stmatrix."""
    put = assembly("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", [], [I32] * 5)
    for j in range(4):
        words = _narrowed(builder, acc, 8 * (4 * box + j), output)
        put(builder, [builder.add(row, builder.xor(permuted, I32(32 * j))), *words])


def _put_bytes(builder: Any, acc: Registers, box: int, output: Output, row: Any, permuted: Any) -> None:
    """Pairs of bytes: 16 columns are a unit; four threads hold 8 of them. 128 is subtracted from residues."""
    put = assembly("{ .reg .b16 pair; cvt.u16.u32 pair, $1; st.shared.b16 [$0], pair; }", [], [I32] * 2)
    last_bytes = assembly("prmt.b32 $0, $1, $2, 0x0040;", [I32], [I32] * 2, pure=True)
    for j in range(16):
        quad = acc.values(4 * (16 * box + j), 4)
        place = builder.add(builder.add(row, builder.xor(permuted, I32(16 * (j // 2)))), I32(8 * (j % 2)))
        for upper, (first, second) in enumerate((quad[:2], quad[2:])):
            if output == "int8":
                pair = builder.xor(builder.or_(first, builder.shl(second, I32(8))), I32(0x8080))
            else:
                (pair,) = last_bytes(builder, [first, second])
            put(builder, [builder.add(place, I32(8 * SPAN * upper)), pair])
