"""The kernel that finds the elements of a matrix that are at least as large as a number, in the order of rows.

It runs twice. The first run counts the elements found in each row. From the counts follows the position of each row's
first element among the results. The second run writes the elements there. A warp handles one row, in stretches. The
lanes vote on a stretch, and the warp examines its elements only if a lane has found one.
"""

from __future__ import annotations

from distmm_kernels.device_code.emit import cuda, f64, i32, i64, types, u32, u64
from distmm_kernels.launch.compiler import Source


def above(dtype: str, picks: bool, held: int, lanes: int, warps: int) -> Source:
    """Make the kernel. The grid has a warp for each row, `warps` in a block.

    Parameters
    ----------
    dtype
        Name of a Numba number: float32, float64, int32 or int64.
    picks
        Whether the kernel writes the elements (second run) or counts them (first run).
    held
        Elements of a stretch that a lane compares at a time.
    lanes, warps
        Lanes of a warp; warps of a block.

    Notes
    -----
    The kernel has these parameters:

    elements
        A vector of all elements in memory, from the matrix's first to its last.
    starts
        ``(rows,)``. The first run sets it to the number of elements found in each row. The second run reads from it
        the position of each row's first element among the results.
    found_rows, columns, values
        The results.
    least
        Elements at least as large are found. It is float64 for real numbers, int64 for integers.
    pitch
        Elements from one row to the next.
    rows, n
        Sizes of the matrix.
    top
        Number of the first row.
    """
    number = getattr(types, dtype)
    every, stretch = u32((1 << lanes) - 1), held * lanes

    def kernel(elements, starts, found_rows, columns, values, least, pitch, rows, n, top):
        lane = i32(cuda.threadIdx.x) % i32(lanes)
        row = u64(cuda.blockIdx.x) * u64(warps) + u64(i32(cuda.threadIdx.x) // i32(lanes))
        if row >= rows:
            return
        limit, before = number(least), u32((u64(1) << u64(lane)) - u64(1))
        first, start, slot = u64(0), row * pitch, u64(0)
        if picks:
            slot = u64(starts[row])
        while first < n:
            left = i32(min(n - first, u64(stretch)))
            reaches = True
            if left == i32(stretch):
                reaches = False
                for i in range(held):
                    if elements[start + first + u64(i * lanes) + u64(lane)] >= limit:
                        reaches = True
            if cuda.ballot_sync(every, reaches) != u32(0):
                for i in range(i32(0), left, i32(lanes)):
                    column = first + u64(i) + u64(lane)
                    x = elements[start + column] if i + lane < left else number(0)
                    mine = i + lane < left and x >= limit
                    votes = u32(cuda.ballot_sync(every, mine))
                    if picks and mine:
                        at = slot + u64(cuda.popc(u32(votes & before)))
                        found_rows[at], columns[at], values[at] = i64(top + row), i64(column), x
                    slot += u64(cuda.popc(votes))
            first += u64(stretch)
        if not picks and lane == i32(0):
            starts[row] = i64(slot)

    numbers, places = types.Array(number, 1, "C"), types.Array(i64, 1, "C")
    wide = f64 if dtype.startswith("float") else i64
    signature = types.void(numbers, places, places, places, numbers, wide, u64, u64, u64, u64)
    return Source(kernel, signature, warps * lanes, 1024 // (warps * lanes))
