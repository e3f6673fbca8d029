"""Compare our kernels with cuBLAS on the same products, alternately, so that the GPU is in the same state for both.

The terms are:

heat
    A comparison for given types and precision: one peer, and some of our kernels.
peer
    cuBLAS, called through CuPy or PyTorch.
contestant
    What is timed in a heat: the peer, or one of our kernels with or without the preparation of its operands.
round, turn
    In a round each contestant has one turn, in shuffled order. In a turn it computes the product repeatedly.

A GPU under load lowers its clock to stay within its power limit. How far it does depends on the earlier load, so each
turn begins with a short pause. The first milliseconds after the pause give the burst rate, the rest of the turn gives
the sustained rate. The result is the median over rounds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distmm_kernels.bench.peers import peer
from distmm_kernels.bench.report import Results, Run, versions
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.measured import event_seconds
from distmm_kernels.rates import rate
from distmm_kernels.select import CANDIDATES, select, why_not

Size = tuple[int, int, int]

SIZES: tuple[Size, ...] = (
    *((n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384)),
    (8191, 8193, 8190),
    (65536, 512, 4096),
    (512, 512, 65536),
)


@dataclass(frozen=True)
class Heat:
    """A comparison of one peer with some of our kernels, for given types and precision.

    Attributes
    ----------
    dtype, out
        Types of operands and result.
    kernels
        Names of our kernels. Each is two contestants: one computes with prepared operands, and one prepares both
        operands for each product.
    tf32
        Whether the peer may round float32 to TF32.
    """

    dtype: str
    precision: str
    kernels: tuple[str, ...]
    out: str
    tf32: bool = False


# Kernels with less than this share of the fastest kernel's rate are left out of heats.
SLOW = 0.25
MEASURED = Device("cuda", "NVIDIA H200", 0, 0, (9, 0), 0)  # a kernel is slow by its rate on this device


def _heat_of(dtype: str, precision: str, out: str, tf32: bool = False) -> Heat:
    """Return the heat of all kernels of exactly this precision except slow ones, the fastest one first."""
    problem = Problem(1, 1, 1, np.dtype(dtype))
    rates = {
        each.name: rate(each, problem, MEASURED, 8192)
        for each in CANDIDATES
        if each.device_kind == "cuda"
        and dtype in each.dtypes
        and (problem.accumulator.kind == "i" or each.precision == precision)
    }
    names = [name for name in rates if rates[name] >= SLOW * max(rates.values())]
    return Heat(dtype, precision, tuple(sorted(names, key=lambda name: -rates[name])), out, tf32)


HEATS = (
    _heat_of("float32", "highest", "float32"),
    _heat_of("float32", "ieee", "float32"),
    _heat_of("float64", "ieee", "float64"),
    _heat_of("float32", "high", "float32", tf32=True),
    _heat_of("float32", "medium", "float32"),
    _heat_of("float64", "highest", "float64"),
    _heat_of("complex64", "ieee", "complex64"),
    _heat_of("complex64", "highest", "complex64"),
    _heat_of("complex128", "ieee", "complex128"),
    _heat_of("complex128", "highest", "complex128"),
    _heat_of("bfloat16", "highest", "bfloat16"),
    _heat_of("bfloat16", "highest", "float32"),
    _heat_of("float16", "highest", "float16"),
    _heat_of("float16", "highest", "float32"),
    _heat_of("int8", "ieee", "int32"),
)

PAUSE, BURST, SUSTAINED = 0.02, 0.003, 0.04  # seconds of one turn
SAMPLES = 64  # number of rows and of columns whose elements are checked for errors


@dataclass(frozen=True)
class _Contestant:
    name: str
    whole: bool  # whether the measured time includes the preparation of operands
    call: Callable[[int], Any]  # enqueue the product of the i-th pair of operands


def race(
    device: Device,
    sizes: Sequence[Size] = SIZES,
    heats: Sequence[Heat] = HEATS,
    rounds: int = 5,
    seed: int = 0,
) -> Results:
    """Run every heat at every size on one GPU.

    Operands are in its memory, and normally distributed (int8: uniformly from -9 to 9).

    Raises
    ------
    ValueError
        If the device is no GPU or ``rounds`` is less than 1.
    """
    if device.kind != "cuda" or rounds < 1:
        raise ValueError(f"cannot race on {device} in {rounds} rounds: it takes a GPU, and one round or more")
    import cupy

    results = Results(str(device), seed, rounds, versions())
    with cupy.cuda.Device(device.index):
        results.copy_rate = copy_rate()
        for heat in heats:
            for size in sizes:
                try:
                    found = _heat(heat, size, device, rounds, seed)
                except (LookupError, ValueError, RuntimeError) as error:
                    # no PyTorch, no such kernel on this GPU, or a size that the peer refuses
                    results.note(f"{heat.dtype} to {heat.out}, {'x'.join(map(str, size))}: {error}")
                    continue
                results.runs += found
                cupy.get_default_memory_pool().free_all_blocks()
    return results


def _heat(heat: Heat, size: Size, device: Device, rounds: int, seed: int) -> list[Run]:
    import cupy

    m, k, n = size
    dtype, out = np.dtype(heat.dtype), np.dtype(heat.out)
    peer_name, adopt, multiply = peer(dtype, out, heat.tf32)
    problem = Problem(m, k, n, dtype)
    here = {each.name for each in CANDIDATES if why_not(each, problem, device) is None}
    # if no kernel can run here, `select` raises an error that says why the first one cannot
    names = [name for name in heat.kernels if name in here] or heat.kernels[:1]
    kernels = [select(problem, device, name=name) for name in names]
    bytes_of_one = (m * k + k * n) * dtype.itemsize
    copies = rotation(bytes_of_one, int(cupy.cuda.Device().attributes["L2CacheSize"]))
    pairs = [(normal((m, k), dtype, seed + 2 * i), normal((k, n), dtype, seed + 2 * i + 1)) for i in range(copies)]
    adopted = [(adopt(a, "A"), adopt(b, "B")) for a, b in pairs]
    contestants = [_Contestant(peer_name, True, lambda i: multiply(*adopted[i % copies]))]
    for kernel in kernels:
        prepared = [(kernel.prepare_a(a), kernel.prepare_b(b)) for a, b in pairs]

        def whole(i: int, kernel: Any = kernel) -> Any:
            a, b = pairs[i % copies]
            left, right = kernel.prepare_a(a, wait=False), kernel.prepare_b(b, wait=False)
            return kernel.multiply(left, right, None, dtype=out, wait=False)

        def alone(i: int, kernel: Any = kernel, prepared: Any = prepared) -> Any:
            return kernel.multiply(*prepared[i % copies], None, dtype=out, wait=False)

        contestants += [_Contestant(kernel.name, True, whole), _Contestant(kernel.name, False, alone)]
    errors = [_errors(contestant.call(0), *pairs[0]) for contestant in contestants]
    seconds = {contestant: seconds_of(contestant.call, 3) for contestant in contestants}
    taken: dict[_Contestant, list[tuple[float, float]]] = {contestant: [] for contestant in contestants}
    order = random.Random(seed)
    for _ in range(rounds):
        for contestant in order.sample(contestants, len(contestants)):
            taken[contestant].append(turn(contestant.call, seconds[contestant]))
    medians = {c: [statistics.median(each[part] for each in turns) for part in (0, 1)] for c, turns in taken.items()}
    first = medians[contestants[0]]
    moved = bytes_of_one + m * n * out.itemsize
    cupy.cuda.Device().synchronize()
    return [
        Run(
            m, k, n, heat.dtype, heat.precision, heat.out, c.name, c.whole, peer_name,
            tflops=problem.operations / sustained / 1e12, burst=problem.operations / burst / 1e12,
            ratio=first[1] / sustained, burst_ratio=first[0] / burst,
            error=error, worst=worst, intensity=problem.operations / moved,
        )
        for (c, (burst, sustained)), (error, worst) in zip(medians.items(), errors, strict=True)
    ]  # fmt: skip


def turn(call: Callable[[int], Any], seconds: float) -> tuple[float, float]:
    """Return the seconds of one product in the burst after a pause, and in the sustained part after the burst."""
    import cupy

    first, then = (max(1, math.ceil(part / seconds)) for part in (BURST, SUSTAINED))
    start, middle, stop = (cupy.cuda.Event() for _ in range(3))
    time.sleep(PAUSE)
    start.record()
    for i in range(first):
        call(i)
    middle.record()
    for i in range(first, first + then):
        call(i)
    stop.record()
    stop.synchronize()
    elapsed = cupy.cuda.get_elapsed_time
    return elapsed(start, middle) / 1e3 / first, elapsed(middle, stop) / 1e3 / then


def seconds_of(call: Callable[[int], Any], number: int) -> float:
    """Return rough seconds of one product, from which `turn` computes the number of products in a turn."""
    call(0)
    return max(1e-6, event_seconds(call, range(number)))


def normal(shape: tuple[int, int], dtype: np.dtype[Any], seed: int) -> Any:
    """Return a matrix on the current GPU: N(0, 1), integers from -9 to 9, or truth values, of which half are true."""
    import cupy

    rng = cupy.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(-9, 10, shape).astype(dtype)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.standard_normal(shape, dtype=np.float64 if dtype == np.float64 else np.float32).astype(dtype)


def _errors(d: Any, a: Any, b: Any) -> tuple[float, float]:
    """Return two errors of sampled elements: ``norm(error) / norm(product)``, and the largest ``error / (|A| |B|)``."""
    import cupy

    rng = np.random.default_rng(0)
    rows, columns = (rng.choice(size, min(SAMPLES, size), replace=False) for size in (a.shape[0], b.shape[1]))
    if not isinstance(d, cupy.ndarray):
        d = cupy.from_dlpack(d.float() if "bfloat16" in str(d.dtype) else d)
    # float64 is compared on the host, in numbers of more bits, where the machine has them
    on_host = a.dtype in (np.float64, np.complex128)
    wide = np.dtype("f8") if a.dtype.kind != "c" else np.dtype("c16")
    wide = np.result_type(wide, np.longdouble) if on_host else wide
    left, right, found = _widened(a)[rows], _widened(b)[:, columns], _widened(d)[rows][:, columns]
    left, right, found = ((x.get() if on_host else x).astype(wide) for x in (left, right, found))
    exact, xp = left @ right, cupy.get_array_module(left)
    difference = abs(found - exact)
    norms = [xp.sqrt((abs(x) ** 2).sum()) for x in (difference, exact)]
    return float(norms[0] / norms[1]), float((difference / (abs(left) @ abs(right))).max())


def _widened(array: Any) -> Any:
    return array if array.dtype.kind == "i" or array.dtype.itemsize > 2 else array.astype(np.float32)


def copy_rate() -> float:
    """Return the bytes per second that a large copy reads and writes."""
    import cupy

    source = cupy.ones(1 << 28, np.float32)
    target = cupy.empty_like(source)
    return float(2 * source.nbytes / seconds_of(lambda _: cupy.copyto(target, source), 10))


def rotation(operand_bytes: int, l2_bytes: int) -> int:
    """Return how many copies of the operands to use in rotation, so that none is still in the L2 cache."""
    return max(1, min(32, -(-2 * l2_bytes // max(1, operand_bytes))))
