"""The kernel of Freivalds' test: rows of a matrix times two vectors, and the rows' squared norms, in one pass.

A warp has some rows. Each lane loads 16 bytes of every row at a time, so the matrix is read once, at the rate of the
memory. Sums are of the accumulator's type. Squares are summed in float64, which no element overflows: those of 16 bytes
first in float32, if their sum is in its range, since conversions to float64 are slow.
"""

from __future__ import annotations

from typing import Any

from distmm_kernels.device_code.copies.split import number
from distmm_kernels.device_code.emit import cuda, inlined, instruction, types
from distmm_kernels.launch.compiler import Source
from distmm_kernels.reductions.thin_products import LANES, ROWS, WARPS

f32, f64, i32, u32, u64 = types.float32, types.float64, types.int32, types.uint32, types.uint64

VECTORS = 2
LEAST, MOST = 2.0**-100, 2.0**120  # float32 sums of squares in this range are accurate

_load = instruction("ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", (u64,), (u32,) * 4, pure=True)
_load_one = instruction("{ .reg .u16 h; ld.global.nc.u16 h, [$1]; cvt.u32.u16 $0, h; }", (u64,), u32, pure=True)
_load_word = instruction("ld.global.nc.u32 $0, [$1];", (u64,), u32, pure=True)
_load_f32 = instruction("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", (u64,), (f32,) * 4, pure=True)
_load_f64 = instruction("ld.global.nc.v2.f64 {$0, $1}, [$2];", (u64,), (f64,) * 2, pure=True)
_load_double = instruction("ld.global.nc.f64 $0, [$1];", (u64,), f64, pure=True)
_halves = instruction(
    "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $2; cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; }", (u32,), (f32, f32), pure=True
)
_store_f32 = instruction("st.global.f32 [$0], $1;", (u64, f32))
_store_f64 = instruction("st.global.f64 [$0], $1;", (u64, f64))


def times_vectors(dtype: str) -> Source:
    """Make the kernel for matrices of float16, bfloat16, float32 or float64.

    Grid: a warp for each `ROWS` rows, `WARPS` in a block; 1; matrices.

    Notes
    -----
    The kernel's parameters are unsigned integers of 64 bits, in this order:

    - the matrices: address; bytes from one to the next and from one row to the next; rows and columns. Rows begin at
      multiples of 16 bytes;
    - the vectors ``(columns, VECTORS)``, of float64 for float64 matrices, else of float32: address; bytes from those
      of one matrix to those of the next;
    - the products ``(matrices, rows, VECTORS)``, of the same type: address;
    - the squared norms of rows ``(matrices, rows)``, of float64: address.
    """
    width, load, load_single, sizes = _elements(dtype)
    wide = dtype == "float64"
    real = f64 if wide else f32
    load_vectors, vector_bytes = _vectors(dtype, width)
    itemsize = u64(sizes)
    held, factored = ROWS * VECTORS, width * VECTORS
    store = _store_f64 if dtype == "float64" else _store_f32

    def kernel(matrix, step, pitch, rows, columns, x, x_step, y, squares):
        lane = u64(cuda.threadIdx.x) % u64(LANES)
        warp = u64(cuda.blockIdx.x) * u64(WARPS) + u64(cuda.threadIdx.x) // u64(LANES)
        first, z = warp * u64(ROWS), u64(cuda.blockIdx.z)
        if first >= rows:
            return
        sums = cuda.local.array(held, real)
        total = cuda.local.array(ROWS, f64)
        values, factors = cuda.local.array(width, real), cuda.local.array(factored, real)
        for i in range(held):
            sums[i] = real(0)
        for i in range(ROWS):
            total[i] = f64(0)
        start, of_x = matrix + z * step, x + z * x_step
        whole = columns // u64(width)
        at = lane
        while at < whole:
            load_vectors(of_x + at * u64(vector_bytes), factors)
            for i in range(ROWS):
                row = min(first + u64(i), rows - u64(1))
                load(start + row * pitch + at * u64(16), values)
                together = real(0)
                for j in range(width):
                    together += values[j] * values[j]
                    for v in range(VECTORS):
                        sums[i * VECTORS + v] += values[j] * factors[j * VECTORS + v]
                if wide or (together > real(LEAST) and together < real(MOST)):
                    total[i] += f64(together)
                else:
                    for j in range(width):
                        total[i] += f64(values[j]) * f64(values[j])
            at += u64(LANES)
        at = whole * u64(width) + lane
        if at < columns:  # fewer elements than lanes are left
            for i in range(ROWS):
                row = min(first + u64(i), rows - u64(1))
                value = load_single(start + row * pitch + at * itemsize)
                total[i] += f64(value) * f64(value)
                for v in range(VECTORS):
                    sums[i * VECTORS + v] += value * single_factor(of_x, at, v)
        for i in range(ROWS):
            norm = total[i]
            for turn in range(5):
                norm += cuda.shfl_xor_sync(u32(0xFFFFFFFF), norm, i32(16 >> turn))
            row = z * rows + first + u64(i)
            there = first + u64(i) < rows and lane == u64(0)
            for v in range(VECTORS):
                value = sums[i * VECTORS + v]
                for turn in range(5):
                    value += cuda.shfl_xor_sync(u32(0xFFFFFFFF), value, i32(16 >> turn))
                if there:
                    store(y + (row * u64(VECTORS) + u64(v)) * u64(real_bytes), value)
            if there:
                _store_f64(squares + row * u64(8), norm)

    real_bytes = 8 if dtype == "float64" else 4
    load_factor = _load_double if dtype == "float64" else _load_single_float

    def single_factor(of_x, at, v):
        return load_factor(of_x + (at * u64(VECTORS) + u64(v)) * u64(real_bytes))

    single_factor = inlined(single_factor)
    return Source(kernel, types.void(*[u64] * 9), WARPS * LANES, blocks=4)


@inlined
def _load_single_float(address):
    return number(_load_word(address))


def _vectors(dtype: str, width: int) -> tuple[Any, int]:
    """Return the function that loads the factors of `width` columns, and their bytes."""
    if dtype == "float64":

        def load_doubles(address, factors):
            for j in range(width):
                factors[2 * j], factors[2 * j + 1] = _load_f64(address + u64(16 * j))

        return inlined(load_doubles), 8 * VECTORS * width

    def load_floats(address, factors):
        for j in range(0, 2 * width, 4):
            factors[j], factors[j + 1], factors[j + 2], factors[j + 3] = _load_f32(address + u64(4 * j))

    return inlined(load_floats), 4 * VECTORS * width


def _elements(dtype: str) -> tuple[int, Any, Any, int]:
    """Return the elements in 16 bytes, the functions that load them and a single one, and the bytes of one."""
    if dtype == "float64":

        def load_doubles(address, values):
            values[0], values[1] = _load_f64(address)

        return 2, inlined(load_doubles), _load_double, 8
    if dtype == "float32":

        def load_floats(address, values):
            values[0], values[1], values[2], values[3] = _load_f32(address)

        return 4, inlined(load_floats), _load_single_float, 4
    if dtype == "bfloat16":

        def pair(word):
            return number(word << u32(16)), number(word & u32(0xFFFF0000))
    else:

        def pair(word):
            return _halves(word)

    pair = inlined(pair)

    def load_pairs(address, values):
        a, b, c, d = _load(address)
        values[0], values[1] = pair(a)
        values[2], values[3] = pair(b)
        values[4], values[5] = pair(c)
        values[6], values[7] = pair(d)

    def load_single(address):
        value, _ = pair(_load_one(address))
        return value

    return 8, inlined(load_pairs), inlined(load_single), 2
