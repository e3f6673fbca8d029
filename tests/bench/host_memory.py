"""From host memory, where `scaling.py` does not go: ``python tests/bench/host_memory.py``.

Pageable memory (plain NumPy arrays) on all GPUs of the machine, next to cuBLASXt; and one GPU with matrices larger than
its memory. float32 N(0, 1) unless said, checked on samples. Peak memory is that of RMM. Each step is said as it begins
and ends, and its figures are in the file of ``--json`` then; after ``--deadline`` seconds none begins.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from distributed import Client
from experiment import matrices
from experiment.cases import element
from experiment.moved_bytes import moved_bytes
from experiment.products import count_allocations, kernel_alone, peak_bytes, start_counting
from peers.cublasxt import Xt
from peers.samples import sampled
from rich.console import Console
from rich.table import Table
from steps import Steps

import distmm
from distmm import clusters
from distmm.transfer import shared_memory

ROWS: list[dict[str, Any]] = []

KERNEL_EDGE = 16384  # of the product that says how fast the kernel alone is


def measure(steps: Steps, case: str, size: int, work: Callable[[], dict[str, Any]]) -> None:
    """Do a step, and keep its figures."""
    found = steps.run(f"{case}, n = {size}", work)
    if found is not None:
        ROWS.append({"case": case, "n": size, **found})
        steps.say(f"{found['seconds']:.3f} s, {2 * size**3 / found['seconds'] / 1e12:.4g} TFLOP/s")
        steps.write()


def product(client: Client, a: np.ndarray, b: np.ndarray, c: np.ndarray, **how: Any) -> dict[str, Any]:
    """Measure one product from host memory to host memory."""
    before = moved_bytes(client)
    client.run(start_counting)
    start = time.perf_counter()
    distmm.matmul(a, b, out=c, client=client, device="gpu", **how)
    seconds = time.perf_counter() - start
    peak = max(client.run(peak_bytes).values())
    moved = moved_bytes(client) - before
    return {"seconds": seconds, "moved": moved, "peak": peak, **sampled(a, b, c, "highest", 9), **how}


@contextmanager
def pageable() -> Iterator[None]:
    """Let memory of `distmm.empty` count as any other."""
    ours = dict(shared_memory._ours)
    shared_memory._ours.clear()
    try:
        yield
    finally:
        shared_memory._ours.update(ours)


def cluster(steps: Steps, held: ExitStack, **how: Any) -> Client | None:
    """Start a cluster that ends with `held`, and count what it allocates."""
    client = steps.run("starting a cluster", lambda: held.enter_context(clusters.local("gpu", dashboard=None, **how)))
    if client is not None:
        client.run(count_allocations)
    return client


def fill(steps: Steps, *operands: np.ndarray) -> bool:
    """Draw operands."""

    def draw() -> bool:
        for seed, operand in enumerate(operands):
            matrices.fill(operand, seed)
        return True

    return steps.run(f"drawing {sum(x.nbytes for x in operands) / 1e9:.3g} GB", draw) is not None


def run_pageable(steps: Steps, arena: matrices.Arena, size: int) -> None:
    """Measure plain NumPy arrays: ours first, as planned (the first product loads the kernels) and in quarters."""
    a, b, c = arena.matrices(size, element("float32"))
    if not fill(steps, a, b):
        return
    with ExitStack() as held:
        client = cluster(steps, held)
        held.enter_context(pageable())
        for how in ({}, {}, {"blocks": (size // 4,) * 3}) if client is not None else ():
            c[:] = 0
            measure(steps, "distmm, pageable", size, partial(product, client, a, b, c, **how))
    with ExitStack() as held:
        xt = steps.run("starting cuBLASXt", lambda: held.enter_context(Xt(clusters.gpu_count())))
        for block in (8192, 4096) if xt is not None else ():
            work = partial(lambda xt, block: {"seconds": xt.seconds(a, b, c, block)}, xt, block)
            measure(steps, f"cuBLASXt, pageable, blocks {block}", size, work)


def run_large(steps: Steps, arena: matrices.Arena, size: int) -> None:
    """Measure matrices larger than the GPU's memory: A and B are the same array, to spare host memory."""
    a, c = arena.matrices(size, element("bfloat16"), count=2)
    if not fill(steps, a):
        return
    with ExitStack() as held:
        client = cluster(steps, held, workers=1)
        if client is None:
            return
        segment = shared_memory.behind(arena.memory)
        steps.run(f"pinning {arena.memory.nbytes / 1e9:.3g} GB", lambda: client.run(shared_memory._pin, segment))
        alone = client.submit(kernel_alone, None, KERNEL_EDGE, a.dtype, "highest", True, pure=False)
        measure(steps, "its kernel alone", KERNEL_EDGE, lambda: {"seconds": alone.result()[1]})
        for _ in range(2):  # the first one loads the kernels
            c[:] = 0
            measure(steps, "distmm, one GPU, bfloat16, pinned", size, partial(product, client, a, a, c))


def table() -> Table:
    """Return all figures as a table."""
    out = Table(title="float32 N(0, 1) unless said")
    for column in ("case", "n", "seconds", "TFLOP/s", "GB moved", "GB peak", "check"):
        out.add_column(column, justify="left" if column == "case" else "right")
    for r in ROWS:
        out.add_row(
            r["case"],
            str(r["n"]),
            f"{r['seconds']:.3f}",
            f"{2 * r['n'] ** 3 / r['seconds'] / 1e12:.4g}",
            f"{r['moved'] / 1e9:.3g}" if "moved" in r else "",
            f"{r['peak'] / 1e9:.3g}" if "peak" in r else "",
            ("right" if r["ok"] else "WRONG") if "ok" in r else "",
        )
    return out


def main() -> int:
    """Run what is asked for, and print a table; 1 where a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32768)
    parser.add_argument("--large", type=int, default=131072, help="bfloat16 on one GPU")
    parser.add_argument("--parts", nargs="+", choices=["pageable", "large"], default=["pageable", "large"])
    parser.add_argument("--deadline", type=float, help="seconds after which no step begins")
    parser.add_argument("--json", help="file for all figures, written after each step")
    options = parser.parse_args()
    steps = Steps(options.deadline, options.json, rows=ROWS)
    bytes_of = {"pageable": 3 * 4 * options.size**2, "large": 2 * 2 * options.large**2}
    nbytes = max(bytes_of[part] for part in options.parts)
    arena = steps.run(f"taking {nbytes / 1e9:.3g} GB of host memory", lambda: matrices.Arena(nbytes))
    if arena is not None:
        if "pageable" in options.parts:
            run_pageable(steps, arena, options.size)
        if "large" in options.parts:
            run_large(steps, arena, options.large)
    Console(width=10_000).print(table())  # never cut
    return int(steps.failed)


if __name__ == "__main__":
    sys.exit(main())
