"""The kernels that find the k largest elements of each line of a matrix, in one pass over memory.

A line is a row or a column. A warp handles one line, stretch by stretch. It keeps the largest elements so far, sorted:
register r of a lane has element ``32 r + lane``. It compares each stretch with the k-th largest element so far. Few
elements are larger: about ``k log(n / k)`` in a line of n random elements. Each of these is inserted at its position,
and the smaller elements are shifted by one position.

Elements are inserted in the order of the line. So of equal elements, the earlier one comes first, and the kernel does
not compare their columns. NaN is larger than any number. The result depends only on the elements.

If lines are rows, a warp reads them from global memory. If lines are columns, a block loads a tile into shared memory,
row by row, and each warp reads one column of the tile.
"""

from __future__ import annotations

from typing import Any, Literal

from distmm_kernels.device_code.emit import cuda, i32, i64, inlined, types, u32, u64
from distmm_kernels.launch.compiler import Source

Weighing = Literal["", "plain", "times", "minus"]

NOWHERE = i32(-1)  # the position of an element that is not set yet


def of_rows(dtype: str, weighing: Weighing, registers: int, held: int, lanes: int, warps: int) -> Source:
    """Make the kernel for lines that are rows. The grid has a warp for each row, `warps` in a block.

    Parameters
    ----------
    dtype
        Name of a Numba number: float32, float64, int32 or int64.
    weighing
        What is compared: ``x`` ("" and "plain"), ``x * weights[column]`` or ``x - weights[column]``. With "" NaN
        is larger than any number; otherwise NaN counts as minus infinity.
    registers
        Registers in which a lane keeps the largest elements: k divided by the lanes of a warp, rounded up.
    held
        Elements of a stretch that a lane compares at a time.
    lanes, warps
        Lanes of a warp; warps of a block.

    Notes
    -----
    The kernel has these parameters:

    elements
        A vector of all elements in memory, from the matrix's first to its last.
    weights
        ``(n,)``.
    values, places
        The results ``(rows, k)``, as vectors: the elements, and their positions in the line.
    pitch
        Elements from one row to the next.
    rows, n, k
        Number of lines; elements of a line; number of largest elements.
    """
    number, every, weighed, beyond, begin, insert, write = _parts(dtype, weighing, registers, lanes)
    stretch = held * lanes

    def kernel(elements, weights, values, places, pitch, rows, n, k):
        best, at = cuda.local.array(registers, number), cuda.local.array(registers, i32)
        lane = i32(cuda.threadIdx.x) % i32(lanes)
        row = u64(cuda.blockIdx.x) * u64(warps) + u64(i32(cuda.threadIdx.x) // i32(lanes))
        if row >= rows:
            return
        bound, full = begin(best, at)
        first, start = u64(0), row * pitch
        while first < n:
            left = i32(min(n - first, u64(stretch)))
            reaches = True
            if full and left == i32(stretch):
                reaches = False
                for i in range(held):
                    column = first + u64(i * lanes) + u64(lane)
                    if beyond(weighed(elements[start + column], weights, column), bound):
                        reaches = True
            if cuda.ballot_sync(every, reaches) != u32(0):
                for i in range(i32(0), left, i32(lanes)):
                    column = first + u64(i) + u64(lane)
                    there = i + lane < left
                    x = weighed(elements[start + column], weights, column) if there else number(0)
                    votes = u32(cuda.ballot_sync(every, there and (not full or beyond(x, bound))))
                    bound, full = insert(best, at, x, i32(first) + i, votes, bound, full, lane, k)
            first += u64(stretch)
        write(best, at, values, places, row, lane, k)

    return Source(kernel, _signature(number), warps * lanes, 1024 // (warps * lanes))


def of_columns(dtype: str, weighing: Weighing, registers: int, held: int, lanes: int, warps: int) -> Source:
    """Make the kernel for lines that are columns in memory. The grid has a block for each `warps` lines.

    The parameters, and those of the kernel, are the same as for `of_rows`. `rows` is the number of lines, and `pitch`
    the distance from one element of a line to the next. Adjacent lines are contiguous in memory. `warps` divides
    `lanes`.
    """
    number, every, weighed, beyond, begin, insert, write = _parts(dtype, weighing, registers, lanes)
    stretch = held * lanes
    width = stretch + lanes // warps  # so that a warp's stores use different banks
    room = warps * width

    def kernel(elements, weights, values, places, pitch, rows, n, k):
        tile = cuda.shared.array(room, number)
        own = cuda.local.array(held, number)
        best, at = cuda.local.array(registers, number), cuda.local.array(registers, i32)
        thread, block = i32(cuda.threadIdx.x), u64(cuda.blockIdx.x) * u64(warps)
        lane, line = thread % i32(lanes), thread // i32(lanes)
        place, step = thread % i32(warps), thread // i32(warps)  # this thread loads from this line, at this step
        row, loaded = block + u64(line), block + u64(place)
        mine = line * i32(width) + lane
        bound, full = begin(best, at)
        first = u64(0)
        for i in range(held):
            j = u64(i * lanes) + u64(step)
            own[i] = weighed(elements[j * pitch + loaded], weights, j) if j < n and loaded < rows else number(0)
        while first < n:
            left = i32(min(n - first, u64(stretch)))
            for i in range(held):
                tile[place * i32(width) + i32(i * lanes) + step] = own[i]
            cuda.syncthreads()
            for i in range(held):
                j = first + u64(stretch + i * lanes) + u64(step)
                own[i] = weighed(elements[j * pitch + loaded], weights, j) if j < n and loaded < rows else number(0)
            reaches = True
            if full and left == i32(stretch):
                reaches = False
                for i in range(held):
                    if beyond(tile[mine + i32(i * lanes)], bound):
                        reaches = True
            if cuda.ballot_sync(every, reaches) != u32(0):
                for i in range(i32(0), left, i32(lanes)):
                    there = i + lane < left
                    x = tile[mine + i] if there else number(0)
                    votes = u32(cuda.ballot_sync(every, there and (not full or beyond(x, bound))))
                    bound, full = insert(best, at, x, i32(first) + i, votes, bound, full, lane, k)
            cuda.syncthreads()
            first += u64(stretch)
        if row < rows:
            write(best, at, values, places, row, lane, k)

    return Source(kernel, _signature(number), warps * lanes, 1024 // (warps * lanes))


def _signature(number: Any) -> Any:
    vector = types.Array(number, 1, "C")
    return types.void(vector, vector, vector, types.Array(i64, 1, "C"), u64, u64, u64, u64)


def _parts(dtype: str, weighing: Weighing, registers: int, lanes: int):  # type: ignore[no-untyped-def]
    """Return the type, the mask of all lanes, and the functions of both kernels."""
    number = getattr(types, dtype)
    real = dtype.startswith("float")
    lowest = number(float("-inf")) if real else number(0)
    every = u32((1 << lanes) - 1)

    @inlined
    def weighed(x, weights, column):
        if weighing == "times":
            x *= weights[column]
        if weighing == "minus":
            x -= weights[column]
        if weighing != "" and x != x:
            x = lowest
        return x

    @inlined
    def beyond(x, y):
        """Whether x is before y in the results, if y is to the left of x in the line."""
        if real and weighing == "":
            return not x <= y and y == y
        return x > y

    @inlined
    def begin(best, at):
        """Clear the results. Return the k-th largest element, and whether there is one: there is none yet."""
        for r in range(registers):
            best[r], at[r] = number(0), NOWHERE
        return number(0), False

    @inlined
    def insert(best, at, x, first, votes, bound, full, lane, k):
        """Insert the x of lanes with a vote, in order. Return the k-th largest element, and whether there is one."""
        left = max(lane - i32(1), i32(0))
        while votes != u32(0):
            source = i32(cuda.ffs(votes)) - i32(1)
            votes = u32(votes & (votes - u32(1)))
            new = cuda.shfl_sync(every, x, source)
            if not full or beyond(new, bound):
                rank = i32(0)
                for r in range(registers):
                    rank += i32(cuda.popc(cuda.ballot_sync(every, at[r] != NOWHERE and not beyond(new, best[r]))))
                for i in range(registers):
                    r = registers - 1 - i
                    mine = i32(r * lanes) + lane
                    before, before_at = cuda.shfl_sync(every, best[r], left), cuda.shfl_sync(every, at[r], left)
                    if r > 0:
                        end, end_at = (
                            cuda.shfl_sync(every, best[r - 1], i32(lanes - 1)),
                            cuda.shfl_sync(every, at[r - 1], i32(lanes - 1)),
                        )
                        if lane == i32(0):
                            before, before_at = end, end_at
                    if mine > rank:
                        best[r], at[r] = before, before_at
                    if mine == rank:
                        best[r], at[r] = new, first + source
                last = i32(k - u64(1)) % i32(lanes)
                bound = cuda.shfl_sync(every, best[registers - 1], last)
                full = cuda.shfl_sync(every, at[registers - 1], last) != NOWHERE
        return bound, full

    @inlined
    def write(best, at, values, places, row, lane, k):
        for r in range(registers):
            mine = u64(r * lanes) + u64(lane)
            if mine < k:
                values[row * k + mine], places[row * k + mine] = best[r], i64(at[r])

    return number, every, weighed, beyond, begin, insert, write
