"""Rates of a GPU model that `rates.toml` does not have: measured on first use, and kept on disk.

A measurement covers one type and precision, and the kernels that may be the fastest for them. It takes about a second,
and the time to compile these kernels. A file is complete or absent. Other versions of this package do not read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from distmm_kernels.candidate import Candidate
from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.config import Problem
from distmm_kernels.device import Device
from distmm_kernels.launch import cache
from distmm_kernels.rates import edge_of, rate, shipped
from distmm_kernels.select import promises_bits, ranked

EDGE = 4096  # edge of the cubes that are measured: enough work for any GPU of today; a second at 0.14 TFLOP/s
SECONDS = 0.1  # that each kernel multiplies
MOST_PRODUCTS = 50
# A kernel is not measured if it is expected to take more than this many times as long as the best one. The
# expectations come from the rates of another model, and are right within a factor of about two.
HOPELESS = 3.0


@dataclass(frozen=True)
class Measurement:
    """Measured rates of one GPU model, for one type and precision.

    Attributes
    ----------
    model
        As the driver names it.
    dtype, precision
        Type of the operands, and the precision that was asked for.
    measured
        The day, as ``2026-11-24``.
    rates
        Operations per second by kernel, the preparation of both operands included.
    """

    model: str
    dtype: str
    precision: str
    measured: str
    rates: dict[str, float]


def worth_measuring(problem: Problem, device: Device, precision: str) -> list[Candidate]:
    """Return the kernels that may be the fastest for a type, among those with and those without reproducible bits."""
    listed = ranked(problem, device, precision, everywhere=True)
    found = []
    for promise in (True, False):
        alike = [(candidate, time) for candidate, time in listed if promises_bits(candidate, problem) == promise]
        least = min((time for _, time in alike), default=math.inf)
        found += [candidate for candidate, time in alike if time <= HOPELESS * least]
    return found


def kept(problem: Problem, device: Device, precision: str) -> Measurement | None:
    """Return the measurement for a type on this GPU model, from this process or from disk; None if there is none."""
    path = _path(problem.dtype.name, device, precision)
    found = _of_this_process.get(path) or _read(path)
    if found is not None:
        _of_this_process[path] = found
    return found


def all_kept(device: Device) -> list[Measurement]:
    """Return all measurements on disk for this GPU model."""
    found = {path: _read(path) for path in sorted(cache.cache_folder().glob(f"{_slug(device)}-*.rates"))}
    return [x for path, x in found.items() if x is not None and path == _path(x.dtype, device, x.precision)]


def measure(problem: Problem, device: Device, precision: str) -> Measurement:
    """Measure the kernels of `worth_measuring` for a type on a GPU, and keep the result on disk.

    Parameters
    ----------
    problem
        Its type is measured. Its sizes are not used.
    device
        The GPU.
    precision
        One of ``PRECISIONS``.
    """
    import cupy

    cube = Problem(EDGE, EDGE, EDGE, problem.dtype)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream(non_blocking=True):
        rates = {
            candidate.name: _rate(candidate, cube, device) for candidate in worth_measuring(cube, device, precision)
        }
    found = Measurement(device.name, problem.dtype.name, precision, date.today().isoformat(), rates)
    path = _path(problem.dtype.name, device, precision)
    _of_this_process[path] = found
    cache.write(path, json.dumps(asdict(found)).encode(), "measured rates")
    return found


def rates_for(problem: Problem, device: Device, precision: str) -> dict[str, float] | None:
    """Return the operations per second of each measured kernel for a product of this size; None without a measurement.

    The measured rate is that of a cube of edge `EDGE`. For another size it is multiplied by the ratio of the rates for
    these two sizes on the model whose rates the device has. The ratio is taken at sizes whose products take as long
    there: if this GPU is slower by a factor f, the edges are larger by the cube root of f.
    """
    found = kept(problem, device, precision)
    if found is None:
        return None
    edge, rates = edge_of(problem), {}
    for candidate in CANDIDATES:
        if (measured := found.rates.get(candidate.name)) is not None:
            expected = partial(rate, candidate, problem, device)
            longer = (expected(EDGE) / measured) ** (1 / 3)
            rates[candidate.name] = measured * expected(edge * longer) / expected(EDGE * longer)
    return rates


def is_shipped(device: Device) -> bool:
    """Whether `rates.toml` has this GPU model; True for the CPU, which has one kernel only."""
    return device.kind == "cpu" or shipped(device) is not None


_of_this_process: dict[Path, Measurement] = {}


def _rate(candidate: Candidate, cube: Problem, device: Device) -> float:
    """Return the operations per second of one kernel, the preparation of both operands included."""
    kernel = candidate.kernel(cube, device)
    a, b = (_operand(cube, seed) for seed in (1, 2))

    def multiply(_: int) -> None:
        kernel.multiply(kernel.prepare_a(a, wait=False), kernel.prepare_b(b, wait=False), None, wait=False)

    multiply(0)  # the first product compiles and loads the kernel
    once = event_seconds(multiply, range(1))
    products = min(MOST_PRODUCTS, math.ceil(SECONDS / once))
    return cube.operations / (once if once > SECONDS else event_seconds(multiply, range(products)))


def event_seconds(call: Callable[[int], Any], numbers: Collection[int]) -> float:
    """Return the seconds of one call, from two CUDA events around the calls with these numbers."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for number in numbers:
        call(number)
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / len(numbers)


def _operand(cube: Problem, seed: int):  # type: ignore[no-untyped-def]  # CuPy ships no types
    """Return a matrix of numbers between -1 and 1 (integers: -9 and 9), computed on the GPU without cuRAND."""
    import cupy

    fractions = cupy.arange(seed, seed + EDGE * EDGE, dtype="f8") * ((math.sqrt(5) - 1) / 2) % 1
    values = cupy.floor(fractions * 19) - 9 if cube.dtype.kind in "iub" else 2 * fractions - 1
    return values.reshape(EDGE, EDGE).astype(cube.dtype)


def _slug(device: Device) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")


def _path(dtype: str, device: Device, precision: str) -> Path:
    """Return the file of a measurement, whose name changes with all that it depends on."""
    facts = "\0".join([cache.sources(), device.name, str(device.compute_capability), dtype, precision])
    key = hashlib.sha256(facts.encode()).hexdigest()[:16]
    return cache.cache_folder() / f"{_slug(device)}-{dtype}-{precision}-{key}.rates"


def _read(path: Path) -> Measurement | None:
    content = cache.read(path)
    return None if content is None else Measurement(**json.loads(content))
