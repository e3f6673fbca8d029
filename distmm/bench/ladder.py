"""The ladder: NumPy, plain Python, the CPU kernel, and every CUDA kernel multiply the same matrices, one after another.

`run` measures times with and without transfers, residual norms, and the ratios to NumPy, cuBLAS and `naive`.
``distmm bench kernels --part ladder`` prints them.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from distmm.bench.ladder_report import Report, Row
from distmm.bench.teaching_kernels import TEACHING
from distmm_kernels import device as devices
from distmm_kernels.bench.race import rotation
from distmm_kernels.config import TILE, Problem, compute_dtype
from distmm_kernels.device import Device
from distmm_kernels.kernel import Kernel
from distmm_kernels.measured import event_seconds
from distmm_kernels.select import CANDIDATES, select, why_not
from distmm_kernels.tiles.tiling import TILINGS

Size = int | tuple[int, int, int]

GPU_SIZES: tuple[Size, ...] = (100, 1024, (1000, 1003, 997), 2048, 4096)
CPU_SIZES: tuple[Size, ...] = (100, 512, (500, 503, 497), 1024)

# A method is left out above this number of multiply-adds. Each limit is a few seconds of that method.
PYTHON_LIMIT = 5_000_000
NUMPY_INTEGER_LIMIT = 1_100_000_000
GUVECTORIZED_LIMIT = 1_100_000_000

# A call slower than this many seconds (plain Python, NumPy's integers) has no repetition and no warm-up.
BUDGET = 2.0

Returned = TypeVar("Returned")


def run(
    sizes: Sequence[Size] | None = None,
    dtypes: Sequence[DTypeLike] = ("float32", "float64", "int32"),
    device: Device | None = None,
    repeat: int = 5,
    seed: int = 0,
    orders: Sequence[str] = ("C", "F"),
) -> Report:
    """Multiply matrices of every size, type and order by every method, and measure times and errors.

    Parameters
    ----------
    sizes
        Each is ``n`` for a square product, or ``(m, k, n)``. By default 100 to 4096 on a GPU, 100 to 1024 without one.
    device
        A GPU, or the CPU; by default `device.current`. With a GPU, the kernels of both are measured.
    repeat
        Timed runs of each product, after a warm-up. The result is the median.
    seed
        Seed of the normally distributed matrices (integers: -9 to 9).
    orders
        ``"C"`` (rows contiguous) or ``"F"`` (columns contiguous), for both operands.

    Raises
    ------
    TypeError
        If no kernel supports a dtype.
    ValueError
        If a size is not positive, an order is unknown, or ``repeat`` is less than 1.
    """
    device = devices.current() if device is None else device
    if sizes is None:
        sizes = CPU_SIZES if device.kind == "cpu" else GPU_SIZES
    problems = [_problem(size, dtype) for dtype in dtypes for size in sizes]
    if repeat < 1 or not set(orders) <= {"C", "F"}:
        raise ValueError(f"repeat is {repeat} and orders {tuple(orders)}: repeat 1 or more, orders from C and F")
    report = Report.of(device, seed, repeat)
    for problem in problems:
        for order in orders:
            report.add(_rows(problem, order, device, repeat, seed))
    if device.kind == "cpu":
        report.notes.append(f"CPU only: {devices.why_no_gpu() or 'the CPU was asked for'}")
    return report


def _problem(size: Size, dtype: DTypeLike) -> Problem:
    m, k, n = (size, size, size) if isinstance(size, int) else size
    if min(m, k, n) < 1:
        raise ValueError(f"cannot time a product of size {size}: every size must be 1 or more")
    if compute_dtype(dtype) != np.dtype(dtype):
        raise TypeError(f"kernels compute {np.dtype(dtype)} in {compute_dtype(dtype)}: measure that type")
    return Problem(m, k, n, np.dtype(dtype))


def _matrix(shape: tuple[int, int], dtype: np.dtype[Any], seed: int, order: str) -> NDArray[Any]:
    """Draw normally distributed numbers, or integers from -9 to 9, in C or Fortran order."""
    rng = np.random.default_rng(seed)
    drawn: NDArray[Any] = rng.integers(-9, 10, shape) if dtype.kind == "i" else rng.standard_normal(shape)
    values = (drawn + 1j * rng.standard_normal(shape) if dtype.kind == "c" else drawn).astype(dtype)
    return np.ascontiguousarray(values) if order == "C" else np.asfortranarray(values)


def triple_loop(a: Sequence[Sequence[Any]], b: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Multiply ``(m, k)`` by ``(k, n)`` in plain Python, by the definition: each sum starts from 0, and k ascends."""
    depth, columns = len(b), len(b[0]) if b else 0
    c = [[0] * columns for _ in a]
    for i, row in enumerate(a):
        for j in range(columns):
            total = 0
            for k in range(depth):
                total += row[k] * b[k][j]
            c[i][j] = total
    return c


def _rows(problem: Problem, order: str, device: Device, repeat: int, seed: int) -> Iterator[Row]:
    """Time one product by every method. Residuals are relative to the first row."""
    a = _matrix((problem.m, problem.k), problem.dtype, seed, order)
    b = _matrix((problem.k, problem.n), problem.dtype, seed + 1, order)
    steps = problem.m * problem.k * problem.n
    row = functools.partial(Row.of, problem, order)

    if problem.dtype.kind != "i" or steps <= NUMPY_INTEGER_LIMIT:
        expected, seconds = wall_seconds(lambda: np.matmul(a, b), repeat)
        yield row("NumPy", seconds, residual=0.0)
    else:  # as exact as NumPy's products; the tests compare them
        kernel = select(problem, devices.cpu())
        expected = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)

    def residual(c: NDArray[Any]) -> float:
        wide = np.complex128 if problem.dtype.kind == "c" else np.float64
        return float(np.linalg.norm(expected.astype(wide) - c.astype(wide)))

    if steps <= PYTHON_LIMIT:
        lists = a.tolist(), b.tolist()
        values, seconds = wall_seconds(lambda: triple_loop(*lists), 1)
        yield row("plain Python", seconds, residual=residual(np.array(values).astype(problem.dtype)))

    for candidate in (*CANDIDATES, *TEACHING):
        where = devices.cpu() if candidate.device_kind == "cpu" else device
        too_slow = candidate.name == "guvectorized" and steps > GUVECTORIZED_LIMIT
        if why_not(candidate, problem, where) is None and not too_slow:
            kernel = candidate.kernel(problem, where)
            c = kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None)  # compiles; C is checked
            timed = _cpu_times if where.kind == "cpu" else _gpu_times
            seconds, with_transfers = timed(kernel, a, b, repeat)
            yield row(
                candidate.name,
                seconds,
                seconds_with_transfers=with_transfers,
                residual=residual(c if where.kind == "cpu" else c.get()),
                loads=loads(candidate.name, problem),
            )


def loads(name: str, problem: Problem) -> int | None:
    """Return the loads from global memory for one element of C; None for other kernels than those with plain loads."""
    if name in ("naive", "guvectorized"):
        return 2 * problem.k
    if name == "tiled":  # a thread loads one element of A and one of B for each tile along k
        return 2 * -(-problem.k // TILE)
    if name == "register_tiled":  # a thread block loads a tile of A and a tile of B in each stage
        tiling = TILINGS[problem.accumulator.name][0]
        steps = -(-problem.k // tiling.depth) * tiling.depth
        return -(-steps * (tiling.rows + tiling.columns) // (tiling.rows * tiling.columns))
    return None


def _cpu_times(kernel: Kernel, a: NDArray[Any], b: NDArray[Any], repeat: int) -> tuple[float, None]:
    left, right = kernel.prepare_a(a), kernel.prepare_b(b)
    return wall_seconds(lambda: kernel.multiply(left, right, None), repeat)[1], None


def _gpu_times(kernel: Kernel, a: NDArray[Any], b: NDArray[Any], repeat: int) -> tuple[float, float]:
    """Return seconds of the product alone, and of the product with copies from and to pageable host memory."""
    import cupy

    with cupy.cuda.Device(kernel.device.index) as chosen:
        copies = rotation(a.nbytes + b.nbytes, chosen.attributes["L2CacheSize"])
        operands = _copies(kernel, a, b, copies)
        alone = cuda_seconds(lambda i: kernel.multiply(*operands[i % copies], None), repeat)
        whole = cuda_seconds(lambda _: kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(b), None).get(), repeat)
    return alone, whole


def _copies(kernel: Kernel, a: NDArray[Any], b: NDArray[Any], number: int) -> list[tuple[Any, Any]]:
    """Prepare the operands several times: each copy from the host is a separate buffer, in the same order."""
    return [(kernel.prepare_a(a), kernel.prepare_b(b)) for _ in range(number)]


def wall_seconds(call: Callable[[], Returned], repeat: int) -> tuple[Returned, float]:
    """Return the result of the call, and the median wall-clock seconds of up to ``repeat`` calls after a warm-up."""

    def once() -> tuple[Returned, float]:
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start

    result, first = once()
    return result, _median(first, lambda: once()[1], repeat)


def cuda_seconds(call: Callable[[int], Any], repeat: int) -> float:
    """Return the median seconds between two CUDA events around ``call(i)`` on the current stream, after a warm-up."""
    numbers = itertools.count()

    def once() -> float:
        return event_seconds(call, [next(numbers)])

    return _median(once(), once, repeat)


def _median(first: float, once: Callable[[], float], repeat: int) -> float:
    """Return the median of up to ``repeat`` more runs; the first run counts only if it has used up the budget."""
    taken: list[float] = []
    while first < BUDGET and len(taken) < repeat and sum(taken) < BUDGET:
        taken.append(once())
    return statistics.median(taken or [first])
