"""Measure every kernel on this GPU, and print a section of `rates.toml`: what `select` needs to know of a GPU model.

``python tests/bench/kernel_rates.py > section.toml``
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from datetime import date

from distmm_kernels import device as devices
from distmm_kernels.bench.race import copy_rate, normal, seconds_of, turn
from distmm_kernels.candidate import Candidate
from distmm_kernels.config import NARROW, SUPPORTED, Problem
from distmm_kernels.device import Device
from distmm_kernels.rates import SIZES, rate, rates_of
from distmm_kernels.select import CANDIDATES, why_not

__all__ = ["entries", "of_this_gpu", "section"]

# A size is not measured if one product is expected to take longer: its rate is that of the size before.
LONGEST = 0.1

TYPES = {dtype.name: dtype for dtype in SUPPORTED + NARROW}

# Takes a kernel, a problem and a device; returns TFLOP/s.
Measure = Callable[[Candidate, Problem, Device], float]


def entries(device: Device, names: Iterable[str] = ()) -> Iterator[tuple[Candidate, str]]:
    """Yield each kernel that runs on a GPU with each type for which `rates.toml` has its rates.

    Parameters
    ----------
    device : Device
    names : iterable of str
        Only these kernels; all if empty.
    """
    wanted = set(names)
    for candidate in CANDIDATES:
        if candidate.device_kind != "cuda" or (wanted and candidate.name not in wanted):
            continue
        for dtype in rates_of(device).kernels[candidate.name]:
            if why_not(candidate, _cube(512, dtype), device) is None:
                yield candidate, dtype


def section(device: Device, measure: Measure, names: Iterable[str] = (), copy: float = 0.0) -> Iterator[str]:
    """Yield the lines of a GPU model's section, each as soon as it is measured.

    Parameters
    ----------
    device : Device
    measure : callable
        `of_this_gpu` gives one that measures the rate under load.
    names : iterable of str
        Only these kernels; all if empty.
    copy : float
        Bytes per second that a copy within the GPU's memory reads and writes.
    """
    yield f'["{device.name}"]'
    yield f"capability = {list(device.compute_capability or ())}"
    yield f"date = {date.today().isoformat()}"
    yield f"copy = {copy / 1e12:.2g}  # TB/s, read and written, by a copy within its memory"
    yield ""
    yield f'["{device.name}".kernels]'
    for candidate, dtype in entries(device, names):
        found: list[float] = []
        for size in SIZES:
            cube = _cube(size, dtype)
            slow = cube.operations / rate(candidate, cube, device, size) > LONGEST
            found.append(found[-1] if slow and found else measure(candidate, cube, device))
        yield f"{candidate.name}.{dtype} = [{', '.join(map(_three_digits, found))}]"


def _tflops(candidate: Candidate, cube: Problem, device: Device, rounds: int = 3) -> float:
    """Return TFLOP/s of a kernel under load: the preparation of both operands and the host's time included.

    The matrices are N(0, 1), and integers from -9 to 9. Products of floats have the operands' type, and those of
    integers the accumulator's. The current device is `device`.
    """
    kernel = candidate.kernel(cube, device)
    a, b = (normal((cube.m, cube.k), cube.dtype, seed) for seed in (1, 2))
    out = cube.accumulator if cube.dtype.kind in "iu" else cube.dtype

    def call(_: int) -> None:
        kernel.multiply(kernel.prepare_a(a, wait=False), kernel.prepare_b(b, wait=False), None, dtype=out, wait=False)

    once = seconds_of(call, 3)
    taken = statistics.median(turn(call, once)[1] for _ in range(rounds))
    return cube.operations / taken / 1e12


def of_this_gpu(device: Device, names: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines of the section of this machine's GPU."""
    import cupy

    with cupy.cuda.Device(device.index):
        yield from section(device, _tflops, names, copy_rate())


def _three_digits(number: float) -> str:
    return f"{float(f'{number:.3g}'):g}"  # no exponent


def _cube(size: int, dtype: str) -> Problem:
    return Problem(size, size, size, TYPES[dtype])


if __name__ == "__main__":
    known = [each.name for each in CANDIDATES if each.device_kind == "cuda"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kernel", action="append", default=[], choices=known, help="only this kernel; may be repeated"
    )
    asked = parser.parse_args()
    if missing := devices.why_no_gpu():
        parser.error(f"rates are measured on a GPU, and {missing}")
    for line in of_this_gpu(devices.current(), asked.kernel):
        print(line)  # noqa: T201
