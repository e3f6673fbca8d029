"""The producer of the Hopper kernel: one thread keeps the ring's stages filled with A, B and C, by TMA.

The TMA also loads C, in separate stages. If warps read C from global memory, tensor cores wait 5.6 us for each tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distmm_kernels.device_code.emit import cuda, i32, inlined, u32, u64
from distmm_kernels.device_code.hopper import instructions, pace
from distmm_kernels.device_code.hopper.ring import following, locate, slice_of
from distmm_kernels.tiles.hopper_tiles import C_BOX_BYTES, MAP_BYTES, ROWS, SPAN, HopperTile, Output, box_columns


def load_tiles(tile: HopperTile) -> Callable[..., None]:
    """Make ``(ring, grid, t, k, maps, steps, counter)``: load the operands of every tile of this block.

    ``maps`` are the addresses of the tensor maps of A, B, C and C0; ``steps`` say whether these
    have a matrix for each matrix of the batch (1) or one for all (0). ``k`` is the same as for
    the consumers. For panels it is a triple: the k of each panel but the last, the number of panels, the k of the last.
    """
    # plain names: Numba's closures take numbers and functions, not the fields of a dataclass
    add_c, add_c0 = tile.adds and not tile.adds_early, tile.c0 is not None
    rows, columns = u32(ROWS), u32(tile.columns)
    load_c, own = _load_boxes(tile, tile.accumulator), slice_of(tile)
    find = locate(tile)
    load_one = _load_with_c(tile, load_c) if tile.adds_early else _load_k(tile)
    load_k = _load_panels(tile, load_one) if tile.panels else load_one
    load_c0 = _load_boxes(tile, tile.c0 or "float32")

    def load(ring, grid, t, last, maps, steps, counter):
        stage, parity = u32(0), u32(1)
        loaded, patience = u32(0), u32(pace.PATIENCE)
        while t < grid.total:
            # the last wave may have fewer tiles than there are blocks, and is not paced
            paced = grid.total - t >= u32(cuda.gridDim.x) - u32(cuda.blockIdx.x)
            z, i, j = find(grid, t)
            m0, n0, c_matrix = i32(i * rows), i32(j * columns), i32(z * u32(steps[2]))
            matrix, first, steps_of_k = own(z, last)
            at, box = (stage, parity, loaded, patience), (m0, n0, c_matrix)
            stage, parity, loaded, patience = load_k(
                ring, at, maps, box, first, steps_of_k, matrix, steps, counter, paced
            )
            if add_c:
                stage, parity = load_c(ring, stage, parity, maps[2], n0, m0, c_matrix)
            if add_c0:
                stage, parity = load_c0(ring, stage, parity, maps[3], n0, m0, i32(z * u32(steps[3])))
            t += u32(cuda.gridDim.x)

    return inlined(load)


def _load_k(tile: HopperTile) -> Callable[..., Any]:
    """Make ``(ring, at, maps, box, first, count, matrix, steps, counter, paced)``: load ``count`` steps of k of a tile.

    ``at`` is the next stage, its parity, the number of stages loaded, and the patience (`pace`); the function returns
    the next ``at``. ``box`` is the first row and column of the tile, and the matrix of C. ``counter`` is for the pace,
    which the block keeps if ``paced``.
    """
    depth, load_stage, after = u32(tile.depth), _load_stage(tile), following(tile)

    def load(ring, at, maps, box, first, count, matrix, steps, counter, paced):
        stage, parity, loaded, patience = at
        m0, n0, _ = box
        k = u32(0)
        while k < count:
            instructions.wait(ring.empty + stage * u32(8), parity)
            load_stage(ring, stage, maps, m0, n0, i32(first + k), matrix, steps)
            k += depth
            stage, parity = after(stage, parity)
            loaded += u32(1)
            if paced:
                patience = pace.keep(counter, loaded, patience)
        return stage, parity, loaded, patience

    return inlined(load)


def _load_with_c(tile: HopperTile, load_c: Callable[..., Any]) -> Callable[..., Any]:
    """Make the same function as `_load_k`, which also loads the tile of C: after the first stretch of k."""
    load_k, stretch = _load_k(tile), u32(tile.stretch)

    def load(ring, at, maps, box, first, count, matrix, steps, counter, paced):
        head = u32(min(stretch, count))
        stage, parity, loaded, patience = load_k(ring, at, maps, box, first, head, matrix, steps, counter, paced)
        m0, n0, c_matrix = box
        stage, parity = load_c(ring, stage, parity, maps[2], n0, m0, c_matrix)
        at, rest = (stage, parity, loaded, patience), u32(count - head)
        return load_k(ring, at, maps, box, u32(first + head), rest, matrix, steps, counter, paced)

    return inlined(load)


def _load_panels(tile: HopperTile, load_first: Callable[..., Any]) -> Callable[..., Any]:
    """Make the same function as `_load_k`, for two or more panels, in order. ``load_first`` loads the first one."""
    load_k, map_bytes = _load_k(tile), u64(MAP_BYTES)

    def load(ring, at, maps, box, first, count, matrix, steps, counter, paced):
        k, panels, last_k = count
        at = load_first(ring, at, maps, box, first, k, matrix, steps, counter, paced)
        a, b = maps[0], maps[1]
        panel = u32(2)
        while panel <= panels:
            a, b = a + map_bytes, b + map_bytes
            here = last_k if panel == panels else k
            at = load_k(ring, at, (a, b), box, first, here, matrix, steps, counter, paced)
            panel += u32(1)
        return at

    return inlined(load)


def _load_stage(tile: HopperTile) -> Callable[..., None]:
    """Make ``(ring, stage, maps, m0, n0, k0, z, steps)``: start the loads of one step of A and B, both parts if two."""
    two_parts, map_bytes = tile.parts == 2, u64(MAP_BYTES)
    stage_bytes, a_bytes, b_bytes = u32(tile.stage_bytes), u32(tile.a_bytes), u32(tile.b_bytes)
    b_offset = u32(tile.parts * tile.a_bytes)
    load_a = _load_operand(tile, tile.a_major == "k", ROWS)
    load_b = _load_operand(tile, tile.b_major == "k", tile.columns)

    def load(ring, stage, maps, m0, n0, k0, z, steps):
        here, barrier = ring.stages + stage * stage_bytes, ring.full + stage * u32(8)
        instructions.expect_bytes(barrier, stage_bytes)
        load_a(here, maps[0], barrier, m0, k0, i32(z * u32(steps[0])))
        load_b(here + b_offset, maps[1], barrier, n0, k0, i32(z * u32(steps[1])))
        if two_parts:
            load_a(here + a_bytes, maps[0] + map_bytes, barrier, m0, k0, i32(z * u32(steps[0])))
            load_b(here + b_offset + b_bytes, maps[1] + map_bytes, barrier, n0, k0, i32(z * u32(steps[1])))

    return inlined(load)


def _load_operand(tile: HopperTile, along_k: bool, lines: int) -> Callable[..., None]:
    """Make ``(at, map, full, i, k, z)``: start the load of one step of an operand.

    ``lines`` are its rows of A, or columns of B, in a tile.

    A k-major operand is one box. Otherwise there is a box for each 64 lines; its rows in shared memory have 128 bytes.
    """
    if along_k:
        return inlined(lambda at, matrix, full, i, k, z: instructions.load_box(at, matrix, full, k, i, z))
    boxes, box_lines, box_bytes = lines // 64, u32(64), u32(tile.depth * SPAN)

    def load(at, matrix, full, i, k, z):
        for box in range(boxes):
            line = i + i32(u32(box) * box_lines)
            instructions.load_box(at + u32(box) * box_bytes, matrix, full, line, k, z)

    return inlined(load)


def _load_boxes(tile: HopperTile, kind: Output) -> Callable[..., Any]:
    """Make ``(ring, stage, parity, c, x, y, z)``: load a tile of a C of this type, several boxes in each stage.

    Returns the next stage and parity.
    """
    boxes, together = map(u32, tile.boxes(kind))
    stage_bytes, after = u32(tile.stage_bytes), following(tile)
    box_bytes, columns = u32(C_BOX_BYTES), u32(box_columns(kind))

    def load(ring, stage, parity, c, x, y, z):
        box = u32(0)
        while box < boxes:
            instructions.wait(ring.empty + stage * u32(8), parity)
            here, barrier = ring.stages + stage * stage_bytes, ring.full + stage * u32(8)
            count = u32(min(together, boxes - box))
            instructions.expect_bytes(barrier, count * box_bytes)
            for _ in range(count):
                instructions.load_box(here, c, barrier, x + i32(box * columns), y, z)
                here += box_bytes
                box += u32(1)
            stage, parity = after(stage, parity)
        return stage, parity

    return inlined(load)
