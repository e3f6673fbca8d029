"""The measured rate of each kernel by GPU model, and the expected time of a product.

The figures are in `rates.toml`, which also says how they were measured.
"""

from __future__ import annotations

import functools
import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType

from distmm_kernels.candidate import Candidate
from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.device import Device
from distmm_kernels.tiles.tiling import VECTOR_BYTES

CPU = "CPU"  # the name of any CPU in the file
MANY_WAVES = 4  # from so many tiles for each multiprocessor on, the last wave hardly counts
SCALED = frozenset({"float64", "complex128", "int32", "int64"})  # types to whose rates `relative` of the file applies


@dataclass(frozen=True)
class ModelRates:
    """Measured rates of one GPU model, or of a CPU.

    Attributes
    ----------
    model
        As the driver names it.
    capability
        Compute capability of a GPU.
    measured
        Day of the measurement.
    copy
        Bytes per second that a copy within its memory reads and writes.
    host_copy
        Seconds in which the host copies an operand: its part of the work.
    kernels
        Operations per second by kernel and type, for each of `SIZES`.
    """

    model: str
    capability: tuple[int, int] | None
    measured: date
    copy: float
    host_copy: float
    kernels: Mapping[str, Mapping[str, tuple[float, ...]]]


def _read() -> tuple[tuple[int, ...], dict[str, Mapping[str, float]], dict[str, ModelRates]]:
    content = tomllib.loads(Path(__file__).with_name("rates.toml").read_text(encoding="utf-8"))
    sizes, factors = tuple(content.pop("sizes")), content.pop("relative")

    def at_all_sizes(tflops: float | list[float]) -> tuple[float, ...]:
        each = tflops if isinstance(tflops, list) else [tflops] * len(sizes)
        return tuple(1e12 * one for one in each)

    models = {}
    for model, facts in content.items():
        kernels = {
            kernel: MappingProxyType({dtype: at_all_sizes(tflops) for dtype, tflops in types.items()})
            for kernel, types in facts["kernels"].items()
        }
        capability = tuple(facts["capability"]) if "capability" in facts else None
        copy = 1e12 * facts.get("copy", math.inf)
        models[model] = ModelRates(
            model, capability, facts["date"], copy, 1e-6 * facts.get("host_copy", 0), MappingProxyType(kernels)
        )
    return sizes, factors, models


SIZES, _RELATIVE, _MODELS = _read()


def shipped(device: Device) -> ModelRates | None:
    """Return the rates of this model; None if the file does not have it."""
    return _MODELS.get(CPU if device.kind == "cpu" else device.name)


@functools.cache
def rates_of(device: Device) -> ModelRates:
    """Return the rates of the device's model. For a model that is not in the file, those of a similar model."""
    measured = [each for each in _MODELS.values() if each.capability is not None]
    alike = [each for each in measured if each.capability == device.compute_capability]
    return shipped(device) or (alike or measured)[0]


def seconds(candidate: Candidate, problem: Problem, device: Device) -> float:
    """Return the expected seconds of a product of matrices in C order, the preparation of both included.

    The host and the device work at the same time, so the longer of their times counts.
    """
    return max(expected(candidate, problem, device))


def expected(candidate: Candidate, problem: Problem, device: Device) -> tuple[float, float]:
    """Return the expected seconds of the host and of the device, for `seconds`.

    The host's time is that of the smallest measured cube, and `ModelRates.host_copy` for each operand that must be
    copied since its rows do not begin at multiples of 16 bytes. The device's is the sum of two terms:

    - the number of operations over the fastest measured rate. Whole tiles at the edges of C count, and multiprocessors
      without a tile, if no slices of k give them one. Or the time to read and write each matrix once, if that is
      longer: tiles reach 0.7 of a copy's bytes per second;
    - the time of passes over operands and C, which the measured rate includes for a cube.
    """
    m, k, n, batch = (max(1, size) for size in (problem.m, problem.k, problem.n, math.prod(problem.batch)))
    model, dtype = rates_of(device), problem.dtype
    measured, per_step = _measured(candidate, problem, device), 8 if problem.accumulator.kind == "c" else 2
    best = max(measured)
    host = per_step * SIZES[0] ** 3 / measured[0] * relative(candidate, problem, device)
    size = SIZES[measured.index(best)]
    odd = {"A": k * dtype.itemsize % VECTOR_BYTES != 0, "B": n * dtype.itemsize % VECTOR_BYTES != 0}
    copied = [each for each in candidate.in_place_of(dtype.name) if odd[each]]
    if candidate.slow_if_odd and (k % 2 or n % 2):
        best *= candidate.slow_if_odd.get(dtype.name, 1.0)
    rows, columns = candidate.tile
    processors = device.multiprocessors or 1  # 0 if the GPU is not here: no multiprocessor counts as idle
    tiles = -(-m // rows) * -(-n // columns) * candidate.products * (batch if candidate.side_by_side else 1)
    slices = max(1, min(k // (candidate.slice or k + 1), 2 * processors // tiles))
    waves = tiles * slices / processors
    whole = math.ceil(waves) if waves < MANY_WAVES else waves
    steps = whole * processors * -(-k // slices) * rows * columns / candidate.products
    of_operands, of_c = candidate.passes
    in_cube = (2 * of_operands + of_c) * size**2 / model.copy
    of_cube = per_step * size**3 / best
    compute = per_step * steps / best * max(0.5, 1 - in_cube / of_cube)
    read = sum(2 * dtype.itemsize * (m * k if each == "A" else k * n) for each in copied)
    passes = of_operands * (m * k + k * n) + of_c * m * n + read
    own = dtype.itemsize * (m * k + k * n) + problem.accumulator.itemsize * m * n
    turns = 1 if candidate.side_by_side else batch
    on_device = max(turns * compute, batch * own / (0.7 * model.copy)) + batch * passes / model.copy
    return host + model.host_copy * len(copied), on_device


def rate(candidate: Candidate, problem: Problem, device: Device, edge: float) -> float:
    """Operations per second. A product has ``2 m k n`` operations, or ``8 m k n`` of complex numbers.

    Parameters
    ----------
    edge
        Edge of a cube with as many multiply-adds. Between measured sizes the logarithm of the rate is interpolated.
        Below the smallest size the time is constant, and above the largest size the rate is constant.
    """
    measured = _measured(candidate, problem, device)
    if edge <= SIZES[0]:
        return measured[0] * (edge / SIZES[0]) ** 3
    for (low, below), (high, above) in itertools.pairwise(zip(SIZES, measured, strict=True)):
        if edge <= high:
            share = math.log(edge / low) / math.log(high / low)
            return below * math.exp(share * math.log(above / below))
    return measured[-1]


def _measured(candidate: Candidate, problem: Problem, device: Device) -> list[float]:
    """Return the measured rates for `SIZES`, in operations per second."""
    of_kernel = rates_of(device).kernels[candidate.name]
    instead = ("float16",) if problem.dtype in FLOAT8 else ()  # most kernels convert 8-bit floats to that
    names = (problem.dtype.name, *instead, problem.accumulator.name)
    kept = next(of_kernel[x] for x in names if x in of_kernel)
    factor = relative(candidate, problem, device)
    return [factor * each for each in kept]


def edge_of(problem: Problem) -> float:
    """Return the edge of a cube with as many multiply-adds as one matrix of a batch."""
    return (problem.m * problem.k * problem.n) ** (1 / 3)


def relative(candidate: Candidate, problem: Problem, device: Device) -> float:
    """Return the factor by which `rate` multiplies the rates of a model of another compute capability; 1 otherwise."""
    capability, dtype = device.compute_capability, problem.dtype
    if capability is None or capability == rates_of(device).capability or dtype.name not in SCALED:
        return 1.0
    of_units = _RELATIVE.get("{}.{}".format(*capability), _RELATIVE["others"])
    unit: str = candidate.unit_of(dtype.name)
    return of_units.get("float64" if unit == "plain" and dtype.kind in "fc" else unit, 1.0)
