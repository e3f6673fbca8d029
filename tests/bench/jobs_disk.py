"""A product of matrices larger than the memory of the cluster, from disk to disk: ``python tests/bench/jobs_disk.py``.

A and B of N(0,1) are written to Zarr, and multiplied by a job on a local CPU cluster that may take a quarter of the
bytes of A, B and C. In the same run: `numpy.matmul` of the same matrices, and the disk alone, reading and writing the
same bytes one after another as ``dd`` does. Before each reading the page cache is emptied of the files.
Prints a table, and what the certificate cost (the same job with ``check="none"``). The seconds of CPU of all processes,
without those of starting them, can be compared where other work on the machine disturbs the clock.

Then other programs do the same product with the same memory, each in a process of its own (`disk_peers`): `dask.array`
and cubed, on GPUs with CuPy.

On GPUs, ``--device gpu --dtype bfloat16 --size 100000``, the job runs beside the kernel alone (its rate on blocks in
GPU memory) and the link between host and GPU alone (A and B from pinned memory, C back at the same time).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from disk_peers import compare
from disk_peers.usage import Usage
from distributed import Client
from rich.console import Console
from rich.table import Table

from distmm import clusters
from distmm.bench.cases import KERNEL_EDGE, element
from distmm.bench.matrices import fill
from distmm.bench.on_cluster import kernel_alone

PIECE = 2**26


def forget(path: Path) -> None:
    """Have the next reader read from the disk."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def disk_alone(folder: Path, read: list[Path], nbytes: int) -> float:
    """Seconds to read some files and then write `nbytes`, with nothing else."""
    for path in read:
        forget(path)
    start = time.perf_counter()
    buffer = bytearray(PIECE)
    for path in read:
        for file in path.rglob("*"):
            if file.is_file():
                with open(file, "rb", buffering=0) as source:
                    while source.readinto(buffer):
                        pass
    with open(folder / "written", "wb", buffering=0) as target:
        for _ in range(0, nbytes, PIECE):
            target.write(buffer)
        os.fsync(target.fileno())
    seconds = time.perf_counter() - start
    (folder / "written").unlink()
    return seconds


def matrix(path: Path, size: int, chunk: int, dtype: np.dtype[Any], seed: int) -> None:
    """Write one matrix."""
    from distmm.storage import create_output

    output = create_output(path, (size, size), dtype, (chunk, chunk))
    for i in range(0, size, chunk):
        rows = np.empty((min(chunk, size - i), size), dtype)
        fill(rows, seed + i)
        for j in range(0, size, chunk):
            output[i : i + len(rows), j : j + chunk] = rows[:, j : j + chunk]
    output.output.commit()


def job(folder: Path, client: Client, check: str) -> tuple[Any, float]:
    """Run the job; return its summary, and the CPU seconds of scheduler, client and workers."""
    import distmm

    for name in "AB":
        forget(folder / f"{name}.zarr")
    spent: list[float] = []

    def note(*_: Any) -> None:
        spent.append(time.process_time() + sum(client.run(time.process_time).values()))

    summary = distmm.multiply(
        folder / "A.zarr", folder / "B.zarr", folder / "C.zarr", client=client, check=check, overwrite=True,
        announce=note,
    )  # fmt: skip
    note()
    return summary, spent[1] - spent[0]


def numpy_alone(folder: Path) -> tuple[float, float]:
    """Seconds of the clock and of the CPU for one `numpy.matmul` of the matrices in memory."""
    from distmm.storage import open_matrix

    a, b = (open_matrix(folder / f"{name}.zarr")[...] for name in "AB")
    start, cpu_start = time.perf_counter(), time.process_time()
    np.matmul(a, b)
    return time.perf_counter() - start, time.process_time() - cpu_start


def link_alone(nbytes: int) -> float:
    """Seconds in which one GPU reads two matrices from pinned memory and writes one back, both ways at once."""
    import cupy
    import cupyx

    pieces = [(cupyx.empty_pinned(PIECE, "u1"), cupy.empty(PIECE, "u1"), cupy.cuda.Stream()) for _ in range(2)]
    for i in range(-1, 16):  # the first copies wake the link up
        if i == 0:
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
        (there, here, inward), (back, result, outward) = pieces
        here.set(there, stream=inward)
        if i % 2:
            result.get(out=back, stream=outward, blocking=False)
    cupy.cuda.Device().synchronize()
    return (time.perf_counter() - start) * 2 * nbytes / (16 * PIECE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument(
        "--limit", type=int,
        help="memory of the worker, bytes; default: on CPUs a quarter of A, B and C, with GPUs the machine's",
    )  # fmt: skip
    parser.add_argument("--peers", nargs="*", choices=list(compare.PEERS["cpu"]), default=list(compare.PEERS["cpu"]))
    parser.add_argument("--peer-block", type=int, help="edge of the peers' blocks; default: 2048, on GPUs 8192")
    parser.add_argument("--patience", type=float, default=600, help="seconds for a peer's product")
    parser.add_argument("--dir", help="where the matrices go; default: the system's temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="distmm-disk-", dir=options.dir))
    size, dtype, on_gpu = options.size, element(options.dtype), options.device == "gpu"
    nbytes = dtype.itemsize * size**2
    limit = options.limit or (None if on_gpu else 3 * nbytes // 4)
    cpu: dict[str, float] = {}
    try:
        for name in "AB":
            matrix(folder / f"{name}.zarr", size, options.chunk, dtype, ord(name))
        seconds = {"disk alone": disk_alone(folder, [folder / "A.zarr", folder / "B.zarr"], nbytes)}
        for check in ("freivalds", "none"):
            label = "job" if check == "freivalds" else "job, check none"
            with clusters.local(
                options.device, workers=1, memory_limit=str(limit) if limit else None, dashboard=None, quiet=True
            ) as client:
                if on_gpu and "kernel alone" not in seconds:
                    asked = None, KERNEL_EDGE, dtype, "highest", True
                    _, alone = client.submit(kernel_alone, *asked, pure=False).result()
                    seconds["kernel alone"] = alone * (size / KERNEL_EDGE) ** 3
                    seconds["link alone"] = client.submit(link_alone, nbytes, pure=False).result()
                with Usage(os.getpid()) as usage:
                    summary, cpu[label] = job(folder, client, check)
            seconds[label] = summary.seconds
            if check == "freivalds":
                rows = [compare.Row("distmm", summary.seconds, usage.peak, usage.written, summary.residual <= 1)]
        if not on_gpu:
            seconds["numpy.matmul"], cpu["numpy.matmul"] = numpy_alone(folder)
        block = min(size, options.peer_block or (8192 if on_gpu else 2048))
        product = compare.Product(folder, options.device, 1, limit, -(-block // options.chunk) * options.chunk)
        rows += compare.measure(product, options.peers, options.patience, forget)
    finally:
        shutil.rmtree(folder)
    report(seconds, cpu, f"n = {size} {dtype}, A, B and C {3 * nbytes / 1e9:.3g} GB", 2 * size**3)
    Console(soft_wrap=True).print(f"memory limit {limit}, plan {summary.plan}, load average {os.getloadavg()[0]:.1f}")
    Console().print(compare.table(rows, "from Zarr to Zarr with the same memory, workers and cores"))


def report(seconds: dict[str, float], cpu: dict[str, float], title: str, flops: int) -> None:
    """Print the table, and what the job took over the largest of what it cannot do without."""
    table = Table(title=title)
    for column in ("", "s", "CPU s", "TFLOP/s"):
        table.add_column(column, justify="right")
    for name, value in seconds.items():
        rate = "" if name in ("disk alone", "link alone") else f"{flops / value / 1e12:.3g}"
        table.add_row(name, f"{value:.3g}", f"{cpu[name]:.3g}" if name in cpu else "", rate)
    console = Console()
    console.print(table)
    alone = {name: value for name, value in seconds.items() if not name.startswith("job")}
    longest = max(alone, key=lambda name: alone[name])
    console.print(f"job over {longest}: {seconds['job'] / alone[longest]:.2f}")
    if "numpy.matmul" in cpu:
        console.print(f"CPU seconds of the job over those of numpy.matmul: {cpu['job'] / cpu['numpy.matmul']:.2f}")
    console.print(f"certificate: {100 * (cpu['job'] / cpu['job, check none'] - 1):.1f} % of the CPU seconds")


if __name__ == "__main__":
    main()
