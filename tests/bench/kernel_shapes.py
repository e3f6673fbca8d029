"""Measure `select` on random shapes: how long its kernel takes, relative to the best of all kernels and cuBLAS.

``python tests/bench/kernel_shapes.py --count 200 --seed 1 --compile 12`` prints the worst shapes. Edges are
log-uniform from 1 to 16384, k too, and types take turns. A time is that of a whole product: the preparation of both
operands and the host's time are included, and operands are N(0, 1) in C order. With ``--compile``, that many processes
first compile all kernels that are needed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distmm_kernels import device as devices
from distmm_kernels.bench.race import normal, seconds_of
from distmm_kernels.candidate import Candidate
from distmm_kernels.config import FLOAT8, NARROW, SUPPORTED, Problem
from distmm_kernels.device import Device
from distmm_kernels.select import ranked

__all__ = ["shapes"]

LONGEST_EDGE = 16384
# A kernel takes part if it is expected to take at most this many times as long as the first one, which may be wrong.
HOPELESS = 8.0
TURN = 1e-3  # seconds
ROUNDS = 5


def shapes(count: int, seed: int) -> Iterator[Problem]:
    """Yield products of random sizes."""
    rng = random.Random(seed)
    types = [each for each in SUPPORTED + NARROW if each not in FLOAT8]  # CuPy draws no 8-bit floats
    for number in range(count):
        m, k, n = (round(math.exp(rng.uniform(0, math.log(LONGEST_EDGE)))) for _ in range(3))
        yield Problem(m, k, n, types[number % len(types)])


def _contestants(problem: Problem, device: Device) -> list[Candidate]:
    """Return the kernels that take part; the first one is that of `select`."""
    chosen, first = ranked(problem, device, "highest")[0]
    others = ranked(problem, device, "highest", everywhere=True)
    rest = (each for each, time in others if time <= HOPELESS * first and each.name != "tiled")
    return [chosen, *(each for each in rest if each is not chosen)]


def _times(problem: Problem, device: Device, rounds: int) -> dict[str, float]:
    """Return the median seconds of a product by each kernel. The kernels take turns."""
    a, b = (normal(shape, problem.dtype, 1) for shape in ((problem.m, problem.k), (problem.k, problem.n)))
    out = problem.dtype if problem.dtype.kind in "fc" or problem.dtype in NARROW[:2] else problem.accumulator
    kernels = [each.kernel(problem, device) for each in _contestants(problem, device)]

    def product_by(kernel: Any) -> Callable[[int], Any]:
        def call(_: int) -> Any:
            left, right = kernel.prepare_a(a, wait=False), kernel.prepare_b(b, wait=False)
            return kernel.multiply(left, right, None, dtype=out, wait=False)

        return call

    calls = {kernel.name: product_by(kernel) for kernel in kernels}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    rough = {name: seconds_of(call, 1) for name, call in calls.items()}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(seconds_of(call, max(1, min(10, round(TURN / rough[name])))))
    return {name: statistics.median(times) for name, times in taken.items() if times}


def _compile(part: tuple[int, int, int, int]) -> None:
    """Compile the kernels for every ``step``-th shape from ``first`` on."""
    import cupy

    count, seed, first, step = part
    for problem in list(shapes(count, seed))[first::step]:
        _times(problem, devices.current(), 0)
        cupy.get_default_memory_pool().free_all_blocks()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table of the worst shapes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", type=int, default=0, help="processes that compile the kernels first")
    parser.add_argument("--worst", type=int, default=20, help="shapes in the table")
    parser.add_argument("--out", type=Path, help="a file for all times, one line of JSON for each shape")
    given = parser.parse_args(arguments)
    import cupy

    if given.compile:
        with multiprocessing.get_context("spawn").Pool(given.compile) as pool:
            pool.map(_compile, [(given.count, given.seed, first, given.compile) for first in range(given.compile)])
    device, found = devices.current(), []
    for problem in shapes(given.count, given.seed):
        times = _times(problem, device, ROUNDS)
        chosen = next(iter(times))
        best = min(times, key=times.__getitem__)
        found.append((times[chosen] / times[best], str(problem), chosen, times[chosen], best, times[best]))
        if given.out:
            row = {"m": problem.m, "k": problem.k, "n": problem.n, "dtype": problem.dtype.name, "times": times}
            with given.out.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
        cupy.get_default_memory_pool().free_all_blocks()
    for ratio, product, chosen, time, best, least in sorted(found, reverse=True)[: given.worst]:
        print(f"{ratio:5.2f} {product}: {chosen} {time * 1e6:,.0f} µs, {best} {least * 1e6:,.0f} µs")  # noqa: T201
    ratios = sorted(each[0] for each in found)
    within = sum(ratio <= 1.15 for ratio in ratios) / len(ratios)
    print(f"{device}: within 1.15 of the best in {within:.1%} of {len(ratios)} shapes, worst {ratios[-1]:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
