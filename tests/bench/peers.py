"""`distmm.matmul` beside its peers on one cluster: ``python tests/bench/peers.py --size 32768 --device gpu``.

Every case multiplies new N(0,1) float32 matrices that are in the workers' memory (cold: never used before in the run),
in blocks of `--block`, and reports the seconds from the call to the last block of C, the rate, the bytes moved between
workers and the check. The rates of the kernels alone on one worker (on GPUs our tiled kernel, and cuBLAS through CuPy)
are measured in the same run: times the number of workers they are the ceiling.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, wait
from rich.console import Console
from rich.table import Table

import distmm
from distmm import clusters
from distmm.runtime import cluster
from distmm.telemetry import client as telemetry


def matrices(size: int, block: int, gpu: bool, seed: int) -> list[da.Array]:
    """Two new matrices of N(0,1) float32 in the workers' memory."""
    if gpu:
        import cupy

        rs = da.random.default_rng(cupy.random.default_rng(seed))
    else:
        rs = da.random.default_rng(seed)
    arrays = [rs.standard_normal((size, size), chunks=block, dtype="f4") for _ in range(2)]
    arrays = dask.persist(*arrays)
    wait(arrays)
    return list(arrays)


def kernel_rate(name: str, edge: int) -> float:
    """FLOP/s of one kernel on one worker's device, on blocks of the given edge, median of 3 after a warm-up."""
    from distmm_kernels import config, device, select

    here = device.current()
    problem = config.Problem(edge, edge, edge, np.dtype("f4"))
    kernel = select.select(problem, here, name=name)
    rng = np.random.default_rng(0)
    a, b = (kernel.prepare_a(rng.standard_normal((edge, edge), dtype="f4")) for _ in range(2))
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        kernel.multiply(a, b, None)
        seconds.append(time.perf_counter() - start)
    return float(2 * edge**3 / np.median(seconds[1:]))


def run(
    client: Client,
    label: str,
    product: Callable[[da.Array, da.Array], da.Array],
    size: int,
    block: int,
    gpu: bool,
    seed: int,
) -> dict[str, Any]:
    A, B = matrices(size, block, gpu, seed)
    before = telemetry.bytes_moved(client)
    start = time.perf_counter()
    C = product(A, B).persist()
    wait(C)
    seconds = time.perf_counter() - start
    moved = telemetry.bytes_moved(client) - before
    verdict = distmm.verify(A, B, C)
    return {
        "case": label,
        "seconds": seconds,
        "rate": 2 * size**3 / seconds,
        "moved": moved,
        "ok": verdict.ok,
        "message": verdict.message,
    }


def numpy_alone(size: int, seed: int) -> dict[str, Any]:
    """One `numpy.matmul` of the same size in this process, which takes all cores while the workers wait."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((size, size), dtype="f4") for _ in range(2))
    start = time.perf_counter()
    np.matmul(a, b)
    seconds = time.perf_counter() - start
    return {"case": "numpy.matmul in one process", "seconds": seconds, "rate": 2 * size**3 / seconds}


def medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case the row of median rate, in the order of first appearance."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], []).append(row)
    return [sorted(same, key=lambda row: row["rate"])[len(same) // 2] for same in found.values()]


def main() -> None:
    """Run all cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--block", type=int, default=None, help="edge of the chunks; by default a quarter of the size")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto")
    parser.add_argument("--repeat", type=int, default=3, help="rounds after the first, of which the median is shown")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    block = options.block or -(-options.size // 4)
    rows = []
    with clusters.local(device=options.device, workers=options.workers) as client:
        gpu = cluster.describe(client, np.dtype("f4")).device == "cuda"
        workers = len(client.scheduler_info()["workers"])
        alone = next(iter(client.scheduler_info()["workers"]))
        kernels = ("tiled", "cublas") if gpu else ("cpu",)
        for name in kernels:
            rate = client.submit(kernel_rate, name, block, workers=[alone]).result()
            rows.append({"case": f"one {name} kernel alone, n = {block}", "rate": rate})
        if gpu:
            rate = client.submit(kernel_rate, "cublas", options.size, workers=[alone]).result()
            rows.append({"case": f"CuPy (cuBLAS) on one GPU, n = {options.size}", "rate": rate})
        cases: dict[str, Callable[[da.Array, da.Array], da.Array]] = {
            f"distmm.matmul, kernel={name!r}": lambda A, B, k=name: distmm.matmul(A, B, kernel=k, client=client)
            for name in kernels
        } | {"dask.array.matmul": da.matmul}
        seed = 0
        for turn in range(options.repeat + 1):  # cases take turns: the machine may be slower at one time than another
            for label, product in cases.items():
                seed += 1
                label = f"{label}, first" if turn == 0 else label
                rows.append(run(client, label, product, options.size, block, gpu, seed))
            if not gpu:
                rows.append(numpy_alone(options.size, seed))
    table = Table(
        title=f"n = {options.size}, blocks {block}, float32 N(0,1), {workers} {'GPU' if gpu else 'CPU'} worker(s)"
    )
    for column in ("case", "seconds", "TFLOP/s", "GB moved", "check"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in medians(rows):
        table.add_row(
            row["case"],
            f"{row['seconds']:.3f}" if "seconds" in row else "",
            f"{row['rate'] / 1e12:.3g}",
            f"{row['moved'] / 1e9:.3g}" if "moved" in row else "",
            ("right" if row["ok"] else row["message"]) if "ok" in row else "",
        )
    Console(width=140).print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
