"""What `unrolled`, `mma` and `fragments` make, as loops in Python: Numba's simulator runs no machine instructions.

They use the same offsets, so the simulator finds wrong ones. They also check the kernels' assumptions. The simulator
runs one thread at a time. If an instruction uses registers of the whole warp, a thread reads the other lanes' elements
from shared memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from distmm_kernels.emulation.moduli import OFFSET
from distmm_kernels.tiles.fragment_tiles import EDGE, FragmentTiling
from distmm_kernels.tiles.mma_tiles import LANES, MmaTiling, lane_place
from distmm_kernels.tiles.tiling import VECTOR_BYTES, Offsets, Tiling


def load(offsets: Offsets) -> Callable[..., None]:
    """Make what `unrolled.load` makes."""

    def run(registers, matrices, batch, row, column, inside):
        matrix = matrices[batch]
        for p, (i, j) in enumerate(offsets):
            valid = row + i < matrix.shape[0] and column + j < matrix.shape[1]
            assert valid or not inside
            registers[p] = matrix[row + i, column + j] if valid else 0

    return run


def add(offsets: Offsets, width: int) -> Callable[..., None]:
    """Make what `unrolled.add` makes."""

    def run(registers, matrices, batch, row, column, inside):
        matrix = matrices[batch]
        for p, (i, j) in enumerate(offsets):
            for e in range(width):
                if row + i < matrix.shape[0] and column + j + e < matrix.shape[1]:
                    registers[p * width + e] += matrix[row + i, column + j + e]

    return run


def reduce(count: int) -> Callable[..., None]:
    """Make what `unrolled.reduce` makes."""

    def run(registers, moduli, batch, row, column, inside):
        modulus, multiplier = (int(number) & 0xFFFFFFFF for number in moduli[batch][0])
        for i in range(count):
            value = int(registers[i]) + (modulus << 20) + OFFSET
            registers[i] = value - (value * multiplier >> 39) * modulus ^ 0x80

    return run


def scale(offsets: Offsets) -> Callable[..., None]:
    """Make what `unrolled.scale` makes."""

    def run(registers, matrices, batch, row, column, inside):
        matrix = matrices[batch]
        for p, (i, j) in enumerate(offsets):
            if row + i < matrix.shape[0] and column + j < matrix.shape[1]:
                registers[p] *= matrix[row + i, column + j]

    return run


def store(offsets: Offsets, width: int) -> Callable[..., None]:
    """Make what `unrolled.store` makes."""

    def run(registers, matrices, batch, row, column, inside):
        matrix = matrices[batch]
        for p, (i, j) in enumerate(offsets):
            for e in range(width):
                at = row + i, column + j + e
                valid = at[0] < matrix.shape[0] and at[1] < matrix.shape[1]
                assert valid or not inside
                if valid:
                    matrix[at] = registers[p * width + e]

    return run


def address(unit: int = 1) -> Callable[..., int]:
    """Make what `unrolled.address` makes. The simulator has no addresses, and `copy` needs none."""

    def run(matrices, batch, row, column):
        return 0

    return run


def copy(steps: Sequence[int], width: int, vector: int) -> Callable[..., None]:
    """Make what `unrolled.copy` makes. The copy is complete at once."""

    def run(tile, base, matrices, batch, k, column, first):
        matrix = matrices[batch]
        for step, e in itertools.product(steps, range(vector)):
            valid = k + step < matrix.shape[0] and column + e < matrix.shape[1]
            tile[base + step * width + e] = matrix[k + step, column + e] if valid else 0

    return run


def copy_along_k(steps: Sequence[int], width: int) -> Callable[..., None]:
    """Make what `unrolled.copy_along_k` makes. The copy is complete at once."""

    def run(tile, base, matrices, batch, k, column, first):
        matrix, vector = matrices[batch], VECTOR_BYTES // matrices.dtype.itemsize
        for step, e in itertools.product(steps, range(vector)):
            valid = k + e < matrix.shape[0] and column + step < matrix.shape[1]
            tile[base + step * width + e] = matrix[k + e, column + step] if valid else 0

    return run


def close_stage() -> Callable[[], None]:
    """Make what `unrolled.close_stage` makes: copies are complete at once."""
    return lambda: None


def wait_for_stages(open_stages: int) -> Callable[[], None]:
    """Make what `unrolled.wait_for_stages` makes: copies are complete at once."""
    return lambda: None


def multiply(tiling: Tiling, first: int, last: int) -> Callable[..., None]:
    """Make what `unrolled.multiply` makes."""
    rows, columns = tiling.thread_rows, tiling.thread_columns

    def run(acc, operands, tile_a, base_a, tile_b, base_b):
        for k in range(first, last):
            tiles = (tile_a, base_a), (tile_b, base_b)
            for (tile, base), vectors in zip(tiles, tiling.step_vectors((k + 1) % tiling.depth), strict=True):
                for (register, place), e in itertools.product(vectors, range(tiling.vector)):
                    operands[register + e] = tile[base + place + e]
            a, b = tiling.step_registers(k)
            for i, j in itertools.product(range(rows), range(columns)) if k >= 0 else ():
                acc[i * columns + j] += operands[a + i] * operands[b + j]

    return run


def multiply_by_warp(tiling: MmaTiling, first: int, last: int) -> Callable[..., None]:
    """Make what `mma.multiply` makes.

    A thread reads the elements that the lanes of its warp would load for each instruction, and computes its part of C.
    It adds a step at the time when the kernel would load it.
    """
    along = tiling.steps(0), tiling.steps(1)
    places = [
        {
            register + e: place + e * across
            for number in range(count)
            for register, place, vector in tiling.loads(operand, number)
            for e in range(vector)
        }
        for operand, (count, (across, _)) in enumerate(zip(tiling.fragments, along, strict=True))
    ]
    products = [each for i, j in np.ndindex(tiling.fragments) for each in tiling.products(i, j)]
    steps, height = tiling.depth // tiling.step, tiling.instruction[0] // 8

    def run(acc, operands, tile_a, base_a, tile_b, base_b):
        below, beside = _lane(base_a % tiling.stage_elements(0), tiling)

        def held(operand, lane_below, lane_beside, register):
            tile, base = ((tile_a, base_a), (tile_b, base_b))[operand]
            across, step_along = along[operand]
            lanes = (lane_below - below) * tiling.apart[operand] * across + (lane_beside - beside) * step_along
            return tile[base + lanes + step * step_along + places[operand][register]]

        for k in range(first, last):
            step = (k + 1) % steps * tiling.step
            for a, b, c in products:
                for row, e, four, q in np.ndindex(height, 2, len(b), 4):
                    left, right = held(0, below, q, a[four * height + row]), held(1, 2 * beside + e, q, b[four])
                    acc[c[2 * row + e]] += left * right

    return run


def _lane(start: int, tiling: MmaTiling) -> tuple[int, int]:
    """Return the lane of ``LANES`` whose first read of A is at this element of a tile."""
    row, column = divmod(start, tiling.pitch(0))
    i, k = (row, column) if tiling.along_k[0] else (column, row)
    return i % (2 * LANES[0]) // 2, k


def multiply_fragments(tiling: FragmentTiling, first: int, last: int) -> Callable[..., None]:
    """Make what `fragments.multiply` makes. As in `multiply_by_warp`, lanes' registers are read when needed."""
    steps, each = tiling.depth // tiling.step, 4 // tiling.itemsize  # elements of a register
    shape = tiling.thread_rows, tiling.thread_columns
    products = [product for number in range(tiling.part[1] // EDGE) for product in tiling.products(number)]
    begins = [_first_reads(tiling, operand) for operand in (0, 1)]
    whose = [{places[lane]: (edge, lane) for edge, places in each.items() for lane in range(32)} for each in begins]

    def held(operand, step, edge, lane, register):
        """Return positions in a stage of the elements that ldmatrix puts into a lane's register."""
        number, matrix = divmod(register, 4)
        _, flipped, offset = tiling.fragments(operand, step)[number]
        row, column = divmod(lane, 4)
        named = [(row, each * column + e) if tiling.along_k[operand] else (each * column + e, row) for e in range(each)]
        return [(begins[operand][edge][8 * matrix + line] ^ flipped) + offset + e for line, e in named]

    @functools.cache
    def read(operand, step, edge, lane):
        """Return positions of the operands of a lane's elements of C: rows of A, or columns of B."""
        group, quarter = lane_place(lane)
        lines: dict[int, dict[tuple[int, int], list[int]]] = {}
        for (a, b, c), two, half, q in itertools.product(products, (0, 1), (0, 1), range(4)):
            line = c[2 * two] // shape[1] if operand == 0 else c[two] % shape[1]
            source = (4 * group + q, a[2 * half + two]) if operand == 0 else (4 * (2 * quarter + two) + q, b[half])
            lines.setdefault(line, {})[half, q] = held(operand, step, edge, *source)
        return np.array([[at for key in sorted(lines[line]) for at in lines[line][key]] for line in sorted(lines)])

    def run(acc, operands, tile_a, base_a, tile_b, base_b):
        for k in range(first, last):
            high, low = [], []
            for operand, (tile, base) in enumerate(((tile_a, int(base_a)), (tile_b, int(base_b)))):
                place = base % tiling.stage_elements(operand)
                at = base - place + read(operand, (k + 1) % steps, *whose[operand][place])
                high.append(tile[at].astype(int))
                low.append(tile[at + tiling.part_elements(operand) * (tiling.parts - 1)].astype(int))
            added = high[0] @ high[1].T
            if tiling.halves:
                added += low[0] @ high[1].T + high[0] @ low[1].T
            acc += added.reshape(-1).astype(acc.dtype)

    return run


def _first_reads(tiling: FragmentTiling, operand: int) -> dict[int, list[int]]:
    """Return each lane's first read, for each first row or column of its warp."""
    begin, whole = tiling.first_read(operand), (tiling.rows, tiling.columns)[operand]
    edges = range(0, whole, tiling.part[operand])
    return {edge: [int(begin(edge, *lane_place(lane))) for lane in range(32)] for edge in edges}
