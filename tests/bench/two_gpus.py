"""Products on the GPUs of one machine beside their peers, in one run: ``python tests/bench/two_gpus.py``.

GPU-resident: matrices in the GPUs' memory, new for each case, next to JAX and `dask.array.matmul`. Host-resident:
NumPy arrays in pinned and in pageable memory, next to cuBLASXt with its best block. One GPU: matrices larger than its
memory. All float32 N(0, 1) unless said, checked by Freivalds' test or on rows; the rates of the kernels alone are taken
in the same run: times the number of GPUs they are the ceiling. Peak memory is that of RMM, beyond what was there.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

import distmm
from distmm import clusters
from distmm.host import segments
from distmm.telemetry import client as telemetry
from tests.bench import recipes

ROWS: list[dict[str, Any]] = []
START = time.perf_counter()
LOG: list[str] = []  # file that figures are written to as they come


def note(case: str, size: int, seconds: float | None = None, **more: Any) -> None:
    """Keep a figure, and print it: a run that is cut short has said what it knows."""
    row = {"case": case, "n": size, **({"seconds": seconds} if seconds else {}), **more}
    if seconds:
        row["tflops"] = 2 * size**3 / seconds / 1e12
    ROWS.append(row)
    line = json.dumps(row, default=float)
    print(f"{time.perf_counter() - START:6.1f}", line, flush=True)  # noqa: T201
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


def kernel_rate(name: str | None, edge: int, dtype: str = "float32") -> tuple[str, float]:
    """Name and FLOP/s of a kernel alone, operands prepared each time; median of 5 after a warm-up. Runs on a worker."""
    import cupy

    from distmm_kernels import config, device, select

    problem = config.Problem(edge, edge, edge, config.operand_dtype(np.dtype(dtype)))
    kernel = select.select(problem, device.current(), name=name)
    random = cupy.random.default_rng(0)
    x, y = (random.standard_normal((edge, edge), dtype="f4").astype(np.dtype(dtype)) for _ in range(2))
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        kernel.multiply(kernel.prepare_a(x), kernel.prepare_b(y), None, dtype=np.dtype(dtype))
        seconds.append(time.perf_counter() - start)
    return kernel.name, float(2 * edge**3 / np.median(seconds[1:]))


def count_allocations() -> None:
    """Let RMM count what is allocated. Runs on workers."""
    import rmm.statistics

    rmm.statistics.enable_statistics()


def start_counting() -> None:
    """Forget earlier peaks. Runs on workers."""
    import rmm.statistics

    rmm.statistics.push_statistics()


def peak_bytes() -> int:
    """Most bytes that were allocated at once beyond those at `start_counting`. Runs on workers."""
    import rmm.statistics

    counted = rmm.statistics.pop_statistics()
    return int(counted.peak_bytes) if counted else 0


def matrices(size: int, block: int, seed: int) -> list[da.Array]:
    """Two new matrices in the GPUs' memory."""
    import cupy

    random = da.random.default_rng(cupy.random.default_rng(seed))
    arrays = dask.persist(*(random.standard_normal((size, size), chunks=block, dtype="f4") for _ in range(2)))
    wait(arrays)
    return list(arrays)


def resident(client: Client, case: str, size: int, block: int, seed: int, product: Callable[..., da.Array]) -> None:
    A, B = matrices(size, block, seed)
    plan = distmm.plan(A, B, client=client)
    before = telemetry.bytes_moved(client)
    client.run(start_counting)
    start = time.perf_counter()
    C = product(A, B).persist()
    wait(C)
    seconds = time.perf_counter() - start
    peak = max(client.run(peak_bytes).values())
    more = {} if product is da.matmul else {"planned": plan.cost.peak_bytes, "planned_moved": plan.bytes_moved}
    verdict = distmm.verify(A, B, C)
    note(
        case, size, seconds, block=block, moved=telemetry.bytes_moved(client) - before, peak=peak,
        ok=verdict.ok, residual=verdict.residual, **more,
    )  # fmt: skip
    del A, B, C
    gc.collect()


def fill(array: np.ndarray, seed: int, rows: int = 1024) -> None:
    """Write N(0, 1) numbers: `rows` rows of them, each further time shifted by one column (new ones take minutes)."""
    made = np.random.default_rng(seed).standard_normal((rows, array.shape[1]), dtype="f4").astype(array.dtype)
    for turn, first in enumerate(range(0, array.shape[0], rows)):
        array[first : first + rows] = np.roll(made, turn, axis=1)


def error_on_rows(a: np.ndarray, b: np.ndarray, c: np.ndarray, count: int = 4) -> float:
    """Largest difference of some rows of C from float64, in units of sqrt(k): the size of an element."""
    rows = np.random.default_rng(9).integers(0, a.shape[0], count)
    columns = np.random.default_rng(8).integers(0, b.shape[1], 64)
    exact = a[rows].astype("f8") @ b[:, columns].astype("f8")
    return float(np.abs(c[np.ix_(rows, columns)].astype("f8") - exact).max() / np.sqrt(a.shape[1]))


def hosted(client: Client, case: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, **how: Any) -> None:
    """One product from host memory to host memory."""
    before = telemetry.bytes_moved(client)
    client.run(start_counting)
    start = time.perf_counter()
    distmm.matmul(a, b, out=c, client=client, device="gpu", **how)
    seconds = time.perf_counter() - start
    peak = max(client.run(peak_bytes).values())
    moved = telemetry.bytes_moved(client) - before
    note(case, a.shape[0], seconds, moved=moved, peak=peak, error=error_on_rows(a, b, c), **how)


class Pageable:
    """Within it, memory of `distmm.empty` counts as any other."""

    def __enter__(self) -> None:
        self.segments = dict(segments._ours)
        segments._ours.clear()

    def __exit__(self, *error: object) -> None:
        segments._ours.update(self.segments)


def carve(arena: np.ndarray, size: int, dtype: Any, count: int) -> list[np.ndarray]:
    """Square matrices one after the other in the arena."""
    elements = size * size
    flat = arena.view(dtype)
    return [flat[i * elements : (i + 1) * elements].reshape(size, size) for i in range(count)]


def table() -> Table:
    """Return all figures as a table."""
    out = Table(title="float32 N(0, 1) unless said")
    for column in ("case", "n", "seconds", "TFLOP/s", "GB moved", "GB peak (planned)", "check"):
        out.add_column(column, justify="left" if column == "case" else "right")
    for r in ROWS:
        planned = f" ({r['planned'] / 1e9:.3g})" if "planned" in r else ""
        out.add_row(
            r["case"],
            str(r["n"]),
            f"{r['seconds']:.3f}" if "seconds" in r else "",
            f"{r['tflops']:.4g}" if "tflops" in r else "",
            f"{r['moved'] / 1e9:.3g}" if "moved" in r else "",
            f"{r['peak'] / 1e9:.3g}{planned}" if "peak" in r else "",
            ("right" if r["ok"] else "WRONG") if "ok" in r else f"{r['error']:.1e}" if "error" in r else "",
        )
    return out


def main() -> None:
    """Run what is asked for, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32768, 65536])
    parser.add_argument("--large", type=int, default=131072, help="bfloat16 on one GPU")
    parser.add_argument("--parts", nargs="+", default=["jax", "xt", "resident", "host", "large"])
    parser.add_argument("--json", default=None)
    parser.add_argument("--jax-sizes", type=int, nargs="+", default=None, help="by default those of --sizes")
    parser.add_argument("--host-sizes", type=int, nargs="+", default=None, help="by default those of --sizes")
    options = parser.parse_args()
    parts, sizes = set(options.parts), options.sizes
    host_sizes = options.host_sizes or sizes
    LOG.extend([options.json] if options.json else [])
    gpus = clusters.gpu_count()
    if "jax" in parts:
        with going_on("JAX"):
            for row in recipes.jax_in_a_process(options.jax_sizes or sizes, ["highest", "default"]):
                note(row.pop("case"), row.pop("size", 0), row.pop("seconds", None), **row)
    largest = max(host_sizes)
    if parts & {"xt", "host", "large"}:
        nbytes = 3 * 4 * largest**2 if parts & {"xt", "host"} else 0
        nbytes = max(nbytes, 2 * 2 * options.large**2) if "large" in parts else nbytes
        arena = distmm.empty(nbytes, "u1")
        note("host memory made, bytes", nbytes)
    if parts & {"xt", "host"}:
        for array, seed in zip(carve(arena, largest, "f4", 2), (1, 2), strict=True):
            fill(array, seed)
        note("host memory filled", largest)
    if "xt" in parts:
        with going_on("cuBLASXt"):
            run_xt(gpus, arena, host_sizes)
    if parts & {"resident", "host"}:
        with going_on("cluster"), clusters.local(device="gpu", dashboard=None) as client:
            note("cluster and its warm-up", 0)
            client.run(count_allocations)
            if "host" in parts:
                run_host(client, arena, host_sizes)
            if "resident" in parts:
                run_resident(client, sizes)
    if "large" in parts:
        with going_on("large"), clusters.local(device="gpu", workers=1, dashboard=None) as client:
            client.run(count_allocations)
            run_large(client, arena, options.large)
    Console(width=150).print(table())


def run_xt(gpus: int, arena: np.ndarray, sizes: list[int]) -> None:
    """Measure cuBLASXt, pinned with several blocks, then pageable with the best of them."""
    xt = recipes.Xt(gpus)
    best: dict[int, tuple[float, int]] = {}
    with recipes.pinned([arena], gpus):
        for size in sizes:
            a, b, c = carve(arena, size, "f4", 3)
            for block in (4096, 8192, 16384) if size < 65536 else (8192,):
                seconds = xt.seconds(a, b, c, block)
                note(f"cuBLASXt, pinned, block {block}", size, seconds)
                best[size] = min(best.get(size, (seconds, block)), (seconds, block))
    for size in sizes:
        a, b, c = carve(arena, size, "f4", 3)
        note(f"cuBLASXt, pageable, block {best[size][1]}", size, xt.seconds(a, b, c, best[size][1]))
    xt.close()


def run_resident(client: Client, sizes: list[int]) -> None:
    """Measure products of matrices in GPU memory, after the kernels alone."""
    alone = [next(iter(client.scheduler_info(n_workers=-1)["workers"]))]
    for name, dtype in ((None, "float32"), ("cublas", "float32"), (None, "bfloat16")):
        with going_on(f"kernel {name} {dtype}"):
            kernel, rate = client.submit(kernel_rate, name, 16384, dtype, workers=alone).result()
            note(f"one GPU, kernel {kernel} alone, {dtype}", 16384, 2 * 16384**3 / rate)
    seed = 10
    for size in sizes:
        cases: list[tuple[str, int, Callable[..., da.Array]]] = [
            ("distmm, first", size // 4, lambda A, B: distmm.matmul(A, B, client=client)),
            ("distmm", size // 4, lambda A, B: distmm.matmul(A, B, client=client)),
            ("distmm, kernel='cublas'", size // 4, lambda A, B: distmm.matmul(A, B, client=client, kernel="cublas")),
        ]
        if size < 65536:  # beyond, the check of blocks of half the size does not fit beside them
            cases.append(("distmm", size // 2, lambda A, B: distmm.matmul(A, B, client=client)))
            cases.append(("dask.array.matmul, first", size // 4, da.matmul))
            cases.append(("dask.array.matmul", size // 4, da.matmul))
        for case, block, product in cases:
            seed += 2
            with going_on(case):
                resident(client, case, size, block, seed, product)


def run_host(client: Client, arena: np.ndarray, sizes: list[int]) -> None:
    """Measure products from host memory to host memory."""
    start = time.perf_counter()
    client.run(segments._pin, segments.behind(arena))
    note("host memory pinned by the workers, bytes", arena.nbytes, took=time.perf_counter() - start)
    for size in sizes:
        a, b, c = carve(arena, size, "f4", 3)
        for how in (
            {},
            {},
            {"blocks": (size // 4, size // 4, size // 4)},
            {"blocks": (size // 2, size // 4, size // 4)},
        ):
            c[:: size // 64] = 0
            with going_on("host memory, pinned"):
                hosted(client, "distmm, host memory, pinned", a, b, c, **how)
        for how in ({}, {"blocks": (size // 4, size // 4, size // 4)}):
            c[:: size // 64] = 0
            with going_on("host memory, pageable"), Pageable():
                hosted(client, "distmm, host memory, pageable", a, b, c, **how)


def run_large(client: Client, arena: np.ndarray, size: int) -> None:
    """Measure matrices larger than the GPU's memory: A and B are the same array, to spare host memory."""
    a, c = carve(arena, size, ml_dtypes.bfloat16, 2)
    fill(a, 3)
    client.run(segments._pin, segments.behind(arena))
    note("bfloat16 filled and pinned", size)
    hosted(client, "distmm, one GPU, bfloat16, host memory, pinned", a, a, c)


if __name__ == "__main__":
    main()
