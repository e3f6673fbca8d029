"""Kernels that convert float32 operands to tensor cores' formats. They read an operand once or twice and write it once.

A matrix is ``(rows, k)``: A as it is, B transposed. Each row has a scale and a guard. The contiguous axis and the
format decide which kernel is used:

========== ========= =========================================================================================
contiguous format    kernel
========== ========= =========================================================================================
k          any       `split_rows`: a block holds a row's granule in registers, so memory is read once
rows       float16   `find_maxima`, then `split_columns` backwards, since the cache holds what was read last;
                     rows stay contiguous, since tensor cores take 16-bit numbers in either order
rows       TF32      a copy whose k is contiguous, then `split_rows`: tensor cores take it along k only
========== ========= =========================================================================================

All kernels have the same parameters:

source, memory, flags
    Addresses of the operand, of the memory that receives its parts, and of the flags.
between, pitch
    Bytes from one matrix to the next, and from one element to the next along the axis that is not contiguous.
rows, k
    Sizes of a matrix.
lo
    Offset in memory of the low part.
scales, maxima, words
    Offsets in memory of these tables, ``(matrices, granules, table_pitch)`` words each.
table_pitch
    Words from one granule's part of a table to the next.
granule_step
    Elements from one granule to the next.
ld, last_ld
    Elements from one row of parts to the next: in all granules but the last, and in the last.
first_matrix
    The matrix that the grid begins with.

A row's word counts its small and its far numbers (`distmm_kernels.emulation.sparsity`), and determines its guards. The
word only grows, so any block that adds to it may raise a guard.
"""

from __future__ import annotations

from collections.abc import Callable

from distmm_kernels.device_code.copies import halves, split
from distmm_kernels.device_code.copies.split import magnitude
from distmm_kernels.device_code.emit import cuda, f32, i32, types, u32, u64
from distmm_kernels.emulation.formats import GRANULE, Format
from distmm_kernels.launch.compiler import Source

SIGNATURE = types.void(*[u64] * 16)
THREADS = 256
HELD = GRANULE // THREADS  # numbers of a row in the registers of a thread
STRETCH = 128  # k of one block, if rows are contiguous; divides the granule


def split_rows(form: Format, aligned: bool, warps: int) -> Source:
    """Split rows whose k is contiguous; ``warps`` (1, 2, 4, 8) share a row's granule, with `HELD` numbers per thread.

    Grid: blocks that cover ``table_pitch`` rows; granules; matrices.
    """
    load = split.load4 if aligned else split.load4_unaligned
    write = halves.writer4(form)
    together, blocks = 32 * warps, 8 // warps
    itemsize, scaled = form.dtype.itemsize, form.scaled
    small, far = halves.small_below(form), halves.far_below(form)
    too_small, sparse = (halves.RANGE, halves.SPARSE) if scaled else (halves.UNDERFLOW, u32(0))

    def kernel(
        source, memory, flags, between, pitch, rows, k, lo, scales, maxima, words, table_pitch, granule_step, ld,
        last_ld, first_matrix,
    ):  # fmt: skip
        reduced, counted = cuda.shared.array(8, u32), cuda.shared.array(8, u32)
        values = cuda.local.array(HELD, f32)
        thread = u32(cuda.threadIdx.x)
        warp, place = thread >> u32(5), thread & u32(together - 1)
        row = u64(cuda.blockIdx.x) * u64(blocks) + u64(warp // u32(warps))
        granule, matrix = u64(cuda.blockIdx.y), u64(cuda.blockIdx.z) + first_matrix
        first = granule * u64(GRANULE)
        length = i32(min(k - first, u64(GRANULE))) if row < rows else i32(0)
        start = source + matrix * between + row * pitch + first * u64(4)
        top, least = u32(0), u32(0xFFFFFFFF)
        for i in range(HELD // 4):
            at = (u32(i * together) + place) * u32(4)
            x = load(start + u64(at) * u64(4), length - i32(at))
            for j in range(4):
                values[4 * i + j] = x[j]
                size = magnitude(x[j])
                top, least = max(top, size), min(least, size)
        scale, guard = f32(1), u32(0)
        reduced[warp] = split.warp_max(top)
        cuda.syncthreads()
        home = warp // u32(warps) * u32(warps)
        for i in range(warps):
            top = max(top, reduced[home + u32(i)])
        if scaled:
            scale, guard = halves.inverse_scale_of(top), halves.guard_of(top)
        elif top >= halves.LARGE:
            guard = halves.OVERFLOW
        word, tiny = u32(0), u32(0)
        if magnitude(split.number(least) * scale) < far:
            for i in range(HELD):
                word += halves.word_of(values[i], values[i] * scale, small, far)
                if not scaled:
                    tiny |= halves.tiny_guard(values[i])
        if not scaled:
            halves.raise_guards(flags, granule, tiny)
        counted[warp] = split.warp_sum(word)
        cuda.syncthreads()
        if place == u32(0):
            own = (matrix * u64(cuda.gridDim.y) + granule) * table_pitch + row
            if row < rows:
                word = u32(0)
                for i in range(warps):
                    word += counted[home + u32(i)]
                word -= u32(HELD * together) - u32(length)  # numbers beyond the end, which were counted as zeros
                guard |= halves.guards_of_counts(word, u32(length), too_small, sparse)
                halves.raise_guards(flags, granule, guard)
                if scaled:
                    split.store_word(memory + words + own * u64(4), word)
            if scaled and row < table_pitch:  # also beyond the last row: tiles of the product read scales there
                split.store_word(memory + scales + own * u64(4), split.bits(halves.scale_of(top)))
        to = memory + halves.line_of(matrix, row, granule, rows, k, granule_step, ld, last_ld) * u64(itemsize)
        for i in range(HELD // 4):
            at = (u32(i * together) + place) * u32(4)
            if i32(at) < length:
                x0, x1 = values[4 * i] * scale, values[4 * i + 1] * scale
                x2, x3 = values[4 * i + 2] * scale, values[4 * i + 3] * scale
                write(to + u64(at) * u64(itemsize), lo, x0, x1, x2, x3)

    return _source(kernel)


def find_maxima(aligned: bool) -> Source:
    """Find the largest magnitude (bits) of each row and granule, if rows are contiguous. The table must be zero.

    Grid: 128 rows by `STRETCH` of k, 1, matrices.
    """
    load = split.load4 if aligned else split.load4_unaligned

    def kernel(
        source, memory, flags, between, pitch, rows, k, lo, scales, maxima, words, table_pitch, granule_step, ld,
        last_ld, first_matrix,
    ):  # fmt: skip
        reduced = cuda.shared.array((8, 128), u32)
        thread = u32(cuda.threadIdx.x)
        lane, warp = thread & u32(31), thread >> u32(5)
        wide = (u32(rows) + u32(127)) >> u32(7)
        stretch = u32(cuda.blockIdx.x) // wide
        base = (u32(cuda.blockIdx.x) - stretch * wide) * u32(128)
        row, matrix = base + lane * u32(4), u64(cuda.blockIdx.z) + first_matrix
        first = u64(stretch) * u64(STRETCH)
        steps = u32(min(k - first, u64(STRETCH)))
        start = source + matrix * between + first * pitch + u64(row) * u64(4)
        left = i32(u32(rows) - row)
        m0, m1, m2, m3 = u32(0), u32(0), u32(0), u32(0)
        step = warp
        while step < steps:
            for i in range(4):  # four loads in flight
                at = step + u32(8 * i)
                x = load(start + u64(at) * pitch, left if at < steps else i32(0))
                m0, m1 = max(m0, magnitude(x[0])), max(m1, magnitude(x[1]))
                m2, m3 = max(m2, magnitude(x[2])), max(m3, magnitude(x[3]))
            step += u32(32)
        at = lane * u32(4)
        reduced[warp, at], reduced[warp, at + u32(1)] = m0, m1
        reduced[warp, at + u32(2)], reduced[warp, at + u32(3)] = m2, m3
        cuda.syncthreads()
        if thread < u32(128) and base + thread < u32(rows):
            top = u32(0)
            for i in range(8):
                top = max(top, reduced[i, thread])
            granules = (k + u64(GRANULE - 1)) // u64(GRANULE)
            own = (matrix * granules + first // u64(GRANULE)) * table_pitch + u64(base + thread)
            split.max_global(memory + maxima + own * u64(4), top)

    return _source(kernel)


def split_columns(form: Format, aligned: bool) -> Source:
    """Split operands whose rows are contiguous, into parts ``(matrices, k, ld)`` whose rows are, too.

    The table of words must be zero. Grid: as for `find_maxima`.
    """
    load = split.load4 if aligned else split.load4_unaligned
    write = halves.writer4(form)
    itemsize, small, far = form.dtype.itemsize, halves.small_below(form), halves.far_below(form)

    def kernel(
        source, memory, flags, between, pitch, rows, k, lo, scales, maxima, words, table_pitch, granule_step, ld,
        last_ld, first_matrix,
    ):  # fmt: skip
        reduced = cuda.shared.array((8, 128), u32)
        held = cuda.local.array(16, f32)
        thread = u32(cuda.threadIdx.x)
        lane, warp = thread & u32(31), thread >> u32(5)
        wide = (u32(rows) + u32(127)) >> u32(7)
        block = u32(cuda.gridDim.x) - u32(1) - u32(cuda.blockIdx.x)  # backwards
        stretch = block // wide
        base = (block - stretch * wide) * u32(128)
        row, matrix = base + lane * u32(4), u64(cuda.gridDim.z) - u64(1) - u64(cuda.blockIdx.z) + first_matrix
        first = u64(stretch) * u64(STRETCH)
        steps = u32(min(k - first, u64(STRETCH)))
        start = source + matrix * between + first * pitch + u64(row) * u64(4)
        left = i32(u32(rows) - row)
        granule, granules = first // u64(GRANULE), (k + u64(GRANULE - 1)) // u64(GRANULE)
        table = (matrix * granules + granule) * table_pitch
        mine = memory + maxima + (table + u64(row)) * u64(4)
        t0 = split.load_word(mine) if left > i32(0) else u32(0)
        t1 = split.load_word(mine + u64(4)) if left > i32(1) else u32(0)
        t2 = split.load_word(mine + u64(8)) if left > i32(2) else u32(0)
        t3 = split.load_word(mine + u64(12)) if left > i32(3) else u32(0)
        s0, s1 = halves.inverse_scale_of(t0), halves.inverse_scale_of(t1)
        s2, s3 = halves.inverse_scale_of(t2), halves.inverse_scale_of(t3)
        w0, w1, w2, w3 = u32(0), u32(0), u32(0), u32(0)
        to = memory + ((matrix * k + first) * ld + u64(row)) * u64(itemsize)
        step = warp
        while step < steps:
            for i in range(4):  # four loads in flight
                at = step + u32(8 * i)
                x = load(start + u64(at) * pitch, left if at < steps else i32(0))
                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = x
            for i in range(4):
                at = step + u32(8 * i)
                if at < steps and left > i32(0):
                    x0, x1, x2, x3 = held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3]
                    y0, y1, y2, y3 = x0 * s0, x1 * s1, x2 * s2, x3 * s3
                    if min(min(magnitude(y0), magnitude(y1)), min(magnitude(y2), magnitude(y3))) < far:
                        w0, w1 = w0 + halves.word_of(x0, y0, small, far), w1 + halves.word_of(x1, y1, small, far)
                        w2, w3 = w2 + halves.word_of(x2, y2, small, far), w3 + halves.word_of(x3, y3, small, far)
                    write(to + u64(at) * ld * u64(itemsize), lo, y0, y1, y2, y3)
            step += u32(32)
        at = lane * u32(4)
        reduced[warp, at], reduced[warp, at + u32(1)] = w0, w1
        reduced[warp, at + u32(2)], reduced[warp, at + u32(3)] = w2, w3
        cuda.syncthreads()
        if thread < u32(128) and base + thread < u32(rows):
            word, guard = u32(0), u32(0)
            for i in range(8):
                word += reduced[i, thread]
            own = memory + (table + u64(base + thread)) * u64(4)
            if word != u32(0):
                length = u32(min(k - granule * u64(GRANULE), u64(GRANULE)))
                before = split.add_global(own + words, word)
                guard = halves.guards_of_counts(before + word, length, halves.RANGE, halves.SPARSE)
                guard ^= halves.guards_of_counts(before, length, halves.RANGE, halves.SPARSE)  # once for each row
            if first == granule * u64(GRANULE):  # one block of each granule
                top = split.load_word(own + maxima)
                guard |= halves.guard_of(top)
                split.store_word(own + scales, split.bits(halves.scale_of(top)))
            halves.raise_guards(flags, granule, guard)

    return _source(kernel)


def _source(kernel: Callable[..., None]) -> Source:
    # four blocks per multiprocessor: a thread's part of a row fits into registers, and enough loads are in flight
    return Source(kernel, SIGNATURE, THREADS, blocks=4)
