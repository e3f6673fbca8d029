"""The kernel that finds the k largest elements of each row of a matrix in one read of it.

A thread block owns a row, and walks along it. In each stretch of the row a thread holds `held` elements in registers.
It compares them with a bound that at least k elements of the row reach. What is beyond the bound becomes a candidate,
in shared memory; when there are many candidates, the k best are kept, and the last of these is the new bound.

The first bound comes from the first stretch: elements are in `groups` groups, and the bound is the k-th best of the
groups' best elements. Then k groups at most have elements that reach it. The same is done where more elements reach the
bound than there is room for. So the memory that a row takes is bounded, whatever the elements are.

The order is by value, descending, then by column, ascending; NaN is larger than any number. It is a total order, so
that the result depends neither on the threads that are first nor on the bounds.
"""

from __future__ import annotations

from typing import Literal

from distmm_kernels.device_code.emit import cuda, inlined, types
from distmm_kernels.launch.compiler import Source

__all__ = ["Weighing", "largest"]

Weighing = Literal["", "plain", "times", "minus"]

i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64

NOWHERE = u32(0xFFFFFFFF)


def largest(dtype: str, weighing: Weighing, most: int, threads: int, held: int) -> Source:
    """Make the kernel. Its grid: one block for each row.

    The parameters of the kernel: elements, in memory from the first to the last one; ``weights (n,)``; the results
    ``values`` and ``columns``, ``(rows, k)``, as vectors; elements from a row to the next; n; k.

    Parameters
    ----------
    dtype
        Name of a Numba number: float32, float64, int32 or int64.
    weighing
        What is compared: ``x`` ("" and "plain"), ``x * weights[column]`` or ``x - weights[column]``. But for "", NaN
        counts as minus infinity.
    most
        Greatest k: a power of two, at most half of `threads`.
    threads, held
        Threads of a block; elements of a stretch in the registers of a thread.
    """
    number = getattr(types, dtype)
    real = dtype.startswith("float")
    weighted = weighing in ("times", "minus")
    zero, lowest = number(0), number(float("-inf")) if real else number(0)
    stretch, groups, kept = threads * held, 2 * most, 2 * most
    # Elements of k groups. Of threads that reach a bound, more than this many are in k groups at least.
    many = most * (threads // groups)
    room = kept + many * held

    @inlined
    def ahead(x, at, y, other):
        """Whether x, in column `at`, comes before y."""
        if real and x != x:
            return y == y or at < other
        return x > y or (x == y and at < other)

    @inlined
    def beyond(x, bound):
        """Whether x comes before a bound that lies to the left of it."""
        if real and weighing == "":
            return not x <= bound
        return x > bound

    @inlined
    def weighed(x, weight):
        if weighing == "times":
            x *= weight
        if weighing == "minus":
            x -= weight
        if weighing != "" and x != x:
            x = lowest
        return x

    def kernel(elements, weights, values, columns, pitch, n, k):
        candidates = cuda.shared.array(room, number)
        places = cuda.shared.array(room, u32)
        tops = cuda.shared.array(threads, number)
        tops_at = cuda.shared.array(threads, u32)
        bounds = cuda.shared.array(1, number)
        bounds_at = cuda.shared.array(1, u32)
        count = cuda.shared.array(1, i32)
        own = cuda.local.array(held, number)
        thread, wanted, there = i32(cuda.threadIdx.x), i32(k), i32(0)
        start = u64(cuda.blockIdx.x) * pitch
        bound, bound_at, bounded = zero, NOWHERE, False
        if thread == i32(0):
            count[0] = i32(0)
        first = u64(0)
        while first < n:
            length = i32(min(n - first, u64(stretch)))
            left = length - thread
            base = first + u64(thread)
            for i in range(held):
                own[i] = elements[start + base + u64(i * threads)] if i32(i * threads) < left else zero
            if weighing != "":
                for i in range(held):
                    if i32(i * threads) < left:
                        own[i] = weighed(own[i], weights[base + u64(i * threads)] if weighted else zero)
            reaches = not bounded
            for i in range(held):
                if i32(i * threads) < left and beyond(own[i], bound):
                    reaches = True
            reached = i32(cuda.syncthreads_count(i32(1) if reaches else i32(0)))
            if length >= i32(groups) and (not bounded or reached > i32(many)):
                best, best_at = zero, NOWHERE
                for i in range(held):
                    at = u32(base) + u32(i * threads)
                    if i32(i * threads) < left and (best_at == NOWHERE or ahead(own[i], at, best, best_at)):
                        best, best_at = own[i], at
                tops[thread], tops_at[thread] = best, best_at
                cuda.syncthreads()
                if thread < i32(groups):
                    for i in range(1, threads // groups):
                        other = thread + i32(i * groups)
                        if tops_at[other] != NOWHERE and ahead(tops[other], tops_at[other], best, best_at):
                            best, best_at = tops[other], tops_at[other]
                    tops[thread], tops_at[thread] = best, best_at
                cuda.syncthreads()
                if thread < i32(groups):
                    rank = i32(0)
                    for i in range(groups):
                        if ahead(tops[i], tops_at[i], best, best_at):
                            rank += i32(1)
                    if rank == wanted - i32(1):
                        bounds[0], bounds_at[0] = best, best_at
                cuda.syncthreads()
                bound, bound_at, bounded = bounds[0], bounds_at[0], True
            if reached > i32(0):
                if reaches:
                    for i in range(held):
                        at = u32(base) + u32(i * threads)
                        if i32(i * threads) < left and not (bounded and ahead(bound, bound_at, own[i], at)):
                            slot = cuda.atomic.add(count, 0, i32(1))
                            candidates[slot], places[slot] = own[i], at
                cuda.syncthreads()
                there = count[0]
            first += u64(stretch)
            if there > i32(kept) or first >= n:
                each = thread
                while each < there:
                    x, at = candidates[each], places[each]
                    rank = i32(0)
                    for i in range(there):
                        if ahead(candidates[i], places[i], x, at):
                            rank += i32(1)
                    if rank < wanted:
                        tops[rank], tops_at[rank] = x, at
                    each += i32(threads)
                cuda.syncthreads()
                if thread < wanted:
                    candidates[thread], places[thread] = tops[thread], tops_at[thread]
                if thread == i32(0):
                    count[0] = wanted
                bound, bound_at, bounded = tops[wanted - i32(1)], tops_at[wanted - i32(1)], True
                there = wanted
                cuda.syncthreads()
        if thread < wanted:
            out = u64(cuda.blockIdx.x) * k + u64(thread)
            values[out], columns[out] = tops[thread], i64(tops_at[thread])

    vector = types.Array(number, 1, "C")
    signature = types.void(vector, vector, vector, types.Array(i64, 1, "C"), u64, u64, u64)
    return Source(kernel, signature, threads, 512 // threads)
