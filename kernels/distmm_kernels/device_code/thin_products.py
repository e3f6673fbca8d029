"""The kernel of Freivalds' test: rows of a matrix times two vectors, and the rows' squared norms, in one pass.

A warp has some rows. Each lane loads 16 bytes of every row at a time, so the matrix is read once, at the rate of the
memory. Sums are of the accumulator's type. Squares are summed in float64, which no element overflows: those of 16 bytes
first in float32, if their sum is in its range, since conversions to float64 are slow.
"""

from __future__ import annotations

from collections.abc import Callable

from distmm_kernels.device_code import emit
from distmm_kernels.device_code.elements import Registers
from distmm_kernels.device_code.emit import ANY, F32, F64, I32, I64, cuda, f32, f64, i32, inlined, types, u32, u64
from distmm_kernels.launch.compiler import Source
from distmm_kernels.reductions.thin_products import LANES, ROWS, WARPS

VECTORS = 2
LEAST, MOST = 2.0**-100, 2.0**120  # float32 sums of squares in this range are accurate

_words = emit.assembly("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", [I32] * 4, [I64], pure=True)
_floats = emit.assembly("ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", [F32] * 4, [I64], pure=True)
_doubles = emit.assembly("ld.global.nc.v2.f64 {$0, $1}, [$2];", [F64] * 2, [I64], pure=True)
_halves = emit.assembly(
    "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $2; cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; }",
    [F32, F32], [I32], pure=True,
)  # fmt: skip
_store_f32 = emit.instruction("st.global.f32 [$0], $1;", (u64, f32))
_store_f64 = emit.instruction("st.global.f64 [$0], $1;", (u64, f64))


def times_vectors(dtype: str) -> Source:
    """Make the kernel for matrices of float16, bfloat16, float32 or float64.

    Grid: a warp for each `ROWS` rows, `WARPS` in a block; 1; matrices.

    Notes
    -----
    The kernel's parameters are unsigned integers of 64 bits, in this order:

    - the matrices: address; bytes from one to the next and from one row to the next; rows and columns. Rows begin at
      multiples of 16 bytes;
    - the vectors ``(columns, VECTORS)``, of float64 for float64 matrices, else of float32: address; bytes from those
      of one matrix to those of the next. Memory up to a multiple of 16 bytes of a row is read, but not used;
    - the products ``(matrices, rows, VECTORS)``, of the same type: address; bytes from one matrix to the next;
    - the squared norms of rows ``(matrices, rows)``, of float64: address.
    """
    wide, width, load = dtype == "float64", {"float64": 2, "float32": 4}.get(dtype, 8), _loads(dtype)
    real, store, real_bytes = (f64, _store_f64, 8) if wide else (f32, _store_f32, 4)
    held, factored = ROWS * VECTORS, width * VECTORS
    factor_bytes = factored * real_bytes
    load_factors = _loads("float64" if wide else "float32", factor_bytes // 16)

    @inlined
    def read(address, left, values):
        """Load a vector of a row; numbers from the ``left``-th on are zero."""
        load(address, values)
        if left < u64(width):
            for j in range(1, width):
                if u64(j) >= left:
                    values[j] = real(0)

    @inlined
    def add(at, pitch, first, last, of_x, left, sums, total):
        """Add what one vector of each row, with ``left`` numbers, adds to products and squared norms."""
        values, factors = cuda.local.array(width, real), cuda.local.array(factored, real)
        together, accurate = cuda.local.array(ROWS, real), True
        load_factors(of_x, factors)
        if left < u64(width):
            for j in range(1, width):
                if u64(j) >= left:
                    for v in range(VECTORS):
                        factors[j * VECTORS + v] = real(0)
        for i in range(ROWS):
            read(at + min(first + u64(i), last) * pitch, left, values)
            square = real(0)
            for j in range(width):
                square += values[j] * values[j]
                for v in range(VECTORS):
                    sums[i * VECTORS + v] += values[j] * factors[j * VECTORS + v]
            together[i] = square
            accurate = accurate and square > real(LEAST) and square < real(MOST)
        if wide or accurate:  # one branch for all rows, since conversions would take most of the time
            for i in range(ROWS):
                total[i] += f64(together[i])
        else:
            for i in range(ROWS):
                read(at + min(first + u64(i), last) * pitch, left, values)
                for j in range(width):
                    total[i] += f64(values[j]) * f64(values[j])

    def kernel(matrix, step, pitch, rows, columns, x, x_step, y, y_step, squares):
        lane = u64(cuda.threadIdx.x) % u64(LANES)
        warp = u64(cuda.blockIdx.x) * u64(WARPS) + u64(cuda.threadIdx.x) // u64(LANES)
        first, z = warp * u64(ROWS), u64(cuda.blockIdx.z)
        if first >= rows:
            return
        sums, total = cuda.local.array(held, real), cuda.local.array(ROWS, f64)
        for i in range(held):
            sums[i] = real(0)
        for i in range(ROWS):
            total[i] = f64(0)
        last, column = rows - u64(1), lane * u64(width)
        at, of_x = matrix + z * step + lane * u64(16), x + z * x_step + lane * u64(factor_bytes)
        while column + u64(width) <= columns:
            add(at, pitch, first, last, of_x, u64(width), sums, total)
            at, of_x = at + u64(LANES * 16), of_x + u64(LANES * factor_bytes)
            column += u64(LANES * width)
        if column < columns:
            add(at, pitch, first, last, of_x, columns - column, sums, total)
        for i in range(ROWS):
            norm = total[i]
            for turn in range(5):
                norm += cuda.shfl_xor_sync(u32(0xFFFFFFFF), norm, i32(16 >> turn))
            row = first + u64(i)
            there = row < rows and lane == u64(0)
            for v in range(VECTORS):
                value = sums[i * VECTORS + v]
                for turn in range(5):
                    value += cuda.shfl_xor_sync(u32(0xFFFFFFFF), value, i32(16 >> turn))
                if there:
                    store(y + z * y_step + (row * u64(VECTORS) + u64(v)) * u64(real_bytes), value)
            if there:
                _store_f64(squares + (z * rows + row) * u64(8), norm)

    return Source(kernel, types.void(*[u64] * 10), WARPS * LANES, blocks=4)


def _loads(dtype: str, vectors: int = 1) -> Callable[..., None]:
    """Make ``(address, values)``: load vectors of 16 bytes as numbers."""

    def pair(builder, word):
        if dtype == "float16":
            return _halves(builder, [word])
        return [builder.bitcast(half, F32) for half in (builder.shl(word, I32(16)), builder.and_(word, I32(-65536)))]

    def write(builder, address, values):
        found = []
        for i in range(vectors):
            at = [builder.add(address, I64(16 * i))]
            if dtype == "float64":
                found += _doubles(builder, at)
            elif dtype == "float32":
                found += _floats(builder, at)
            else:
                found += [half for word in _words(builder, at) for half in pair(builder, word)]
        Registers(builder, values).set_values(0, found)

    return emit.intrinsic(write, (u64, ANY))
