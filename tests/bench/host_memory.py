"""From host memory, where `distmm bench scaling` does not go: ``python tests/bench/host_memory.py``.

Pageable memory (plain NumPy arrays) on all GPUs of the machine, next to cuBLASXt; and one GPU with matrices larger than
its memory. float32 N(0, 1) unless said, checked on samples. Peak memory is that of RMM.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from distributed import Client
from rich.console import Console
from rich.table import Table

import distmm
from distmm import clusters
from distmm.bench import matrices
from distmm.bench.cases import element
from distmm.bench.cublasxt import Xt
from distmm.bench.on_cluster import count_allocations, peak_bytes, start_counting
from distmm.host import segments
from distmm.telemetry import client as telemetry

ROWS: list[dict[str, Any]] = []
LOG: list[str] = []  # file that figures are written to as they come


def note(case: str, size: int, seconds: float | None = None, **more: Any) -> None:
    """Keep a figure, and print it: a run that is cut short has said what it knows."""
    row = {"case": case, "n": size, **({"seconds": seconds} if seconds else {}), **more}
    ROWS.append(row)
    line = json.dumps(row, default=float)
    print(line, flush=True)  # noqa: T201
    for name in LOG:
        with open(name, "a") as file:
            file.write(line + "\n")


@contextmanager
def going_on(part: str) -> Iterator[None]:
    """Report what fails in a part, and go on with the next one: GPU time is scarce."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        note(f"{part} failed: {type(error).__name__}: {str(error)[:300]}", 0)


def product(client: Client, case: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, **how: Any) -> None:
    """Measure one product from host memory to host memory."""
    before = telemetry.bytes_moved(client)
    client.run(start_counting)
    start = time.perf_counter()
    distmm.matmul(a, b, out=c, client=client, device="gpu", **how)
    seconds = time.perf_counter() - start
    peak = max(client.run(peak_bytes).values())
    moved = telemetry.bytes_moved(client) - before
    note(case, len(a), seconds, moved=moved, peak=peak, **matrices.sampled(a, b, c, "highest", 9), **how)


@contextmanager
def pageable() -> Iterator[None]:
    """Let memory of `distmm.empty` count as any other."""
    ours = dict(segments._ours)
    segments._ours.clear()
    try:
        yield
    finally:
        segments._ours.update(ours)


def run_pageable(arena: matrices.Arena, size: int) -> None:
    a, b, c = arena.matrices(size, element("float32"))
    for seed, matrix in enumerate((a, b)):
        matrices.fill(matrix, seed)
    with going_on("cuBLASXt"), Xt(clusters.gpu_count()) as xt:
        for block in (4096, 8192):
            note(f"cuBLASXt, pageable, blocks {block}", size, xt.seconds(a, b, c, block))
    with going_on("distmm"), clusters.local(device="gpu", dashboard=None) as client, pageable():
        client.run(count_allocations)
        for how in ({}, {}, {"blocks": (size // 4, size // 4, size // 4)}):
            c[:] = 0
            product(client, "distmm, pageable", a, b, c, **how)


def run_large(arena: matrices.Arena, size: int) -> None:
    """Measure matrices larger than the GPU's memory: A and B are the same array, to spare host memory."""
    a, c = arena.matrices(size, element("bfloat16"), count=2)
    matrices.fill(a, 3)
    with going_on("large"), clusters.local(device="gpu", workers=1, dashboard=None) as client:
        client.run(count_allocations)
        client.run(segments._pin, segments.behind(arena.memory))
        product(client, "distmm, one GPU, bfloat16, pinned", a, a, c)


def table() -> Table:
    """Return all figures as a table."""
    out = Table(title="float32 N(0, 1) unless said")
    for column in ("case", "n", "seconds", "TFLOP/s", "GB moved", "GB peak", "check"):
        out.add_column(column, justify="left" if column == "case" else "right")
    for r in ROWS:
        out.add_row(
            r["case"],
            str(r["n"]),
            f"{r['seconds']:.3f}" if "seconds" in r else "",
            f"{2 * r['n'] ** 3 / r['seconds'] / 1e12:.4g}" if "seconds" in r else "",
            f"{r['moved'] / 1e9:.3g}" if "moved" in r else "",
            f"{r['peak'] / 1e9:.3g}" if "peak" in r else "",
            ("right" if r["ok"] else "WRONG") if "ok" in r else "",
        )
    return out


def main() -> None:
    """Run what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=32768)
    parser.add_argument("--large", type=int, default=131072, help="bfloat16 on one GPU")
    parser.add_argument("--parts", nargs="+", choices=["pageable", "large"], default=["pageable", "large"])
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    LOG.extend([options.json] if options.json else [])
    bytes_of = {"pageable": 3 * 4 * options.size**2, "large": 2 * 2 * options.large**2}
    arena = matrices.Arena(max(bytes_of[part] for part in options.parts))
    if "pageable" in options.parts:
        run_pageable(arena, options.size)
    if "large" in options.parts:
        run_large(arena, options.large)
    Console(width=150).print(table())


if __name__ == "__main__":
    main()
