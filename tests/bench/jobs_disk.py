"""A product of matrices larger than the memory of the cluster, from disk to disk: ``python tests/bench/jobs_disk.py``.

A and B of N(0,1) float32 are written to Zarr, and multiplied by a job on a local CPU cluster whose workers together may
take a quarter of the bytes of A, B and C. In the same run: `numpy.matmul` of the same matrices, and the disk alone,
reading and writing the same bytes one after another as ``dd`` does. Before each reading the page cache is emptied of
the files. Prints a table, and what the certificate cost (the same job with ``check="none"``). The seconds of CPU of all
processes, without those of starting them, can be compared where other work on the machine disturbs the clock.
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
from rich.console import Console
from rich.table import Table

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


def matrix(path: Path, size: int, chunk: int, seed: int) -> None:
    """Write one matrix."""
    import zarr

    stored = zarr.create_array(path, shape=(size, size), chunks=(chunk, chunk), dtype="f4", compressors=None)
    rng = np.random.default_rng(seed)
    for i in range(0, size, chunk):
        stored[i : i + chunk] = rng.standard_normal((min(chunk, size - i), size), dtype="f4")


def job(folder: Path, limit: int, check: str) -> tuple[Any, float]:
    """Run the job; return its summary, and the CPU seconds of scheduler, client and workers."""
    import distmm
    from distmm import clusters

    with clusters.local("cpu", memory_limit=str(limit), dashboard=None, quiet=True) as client:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument(
        "--limit", type=int, help="memory of each worker, bytes; default: a quarter of A, B and C in all"
    )
    parser.add_argument("--dir", help="where the matrices go; default: the system's temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="distmm-disk-", dir=options.dir))
    size, nbytes = options.size, 4 * options.size**2
    workers = min(os.cpu_count() or 1, 4)
    limit = options.limit or 3 * nbytes // 4 // workers
    try:
        for name in "AB":
            matrix(folder / f"{name}.zarr", size, options.chunk, ord(name))
        cpu: dict[str, float] = {}
        seconds = {"disk alone": disk_alone(folder, [folder / "A.zarr", folder / "B.zarr"], nbytes)}
        summary, cpu["job"] = job(folder, limit, "freivalds")
        seconds["job"] = summary.seconds
        unchecked, cpu["job, check none"] = job(folder, limit, "none")
        seconds["job, check none"] = unchecked.seconds
        import zarr

        a, b = (zarr.open_array(folder / f"{name}.zarr", mode="r")[...] for name in "AB")
        start, cpu_start = time.perf_counter(), time.process_time()
        np.matmul(a, b)
        seconds["numpy.matmul"] = time.perf_counter() - start
        cpu["numpy.matmul"] = time.process_time() - cpu_start
    finally:
        shutil.rmtree(folder)
    table = Table(
        title=f"n = {size} float32, {workers} workers of {limit / 1e9:.3g} GB, A, B and C {3 * nbytes / 1e9:.3g} GB"
    )
    for column in ("", "s", "CPU s", "TFLOP/s"):
        table.add_column(column, justify="right")
    for name, value in seconds.items():
        rest = (f"{cpu[name]:.3g}", f"{2 * size**3 / value / 1e12:.3g}") if name in cpu else ("", "")
        table.add_row(name, f"{value:.3g}", *rest)
    console = Console()
    console.print(table)
    larger = max(seconds["disk alone"], seconds["numpy.matmul"])
    console.print(f"job over the larger of disk and numpy.matmul: {seconds['job'] / larger:.2f}")
    console.print(f"CPU seconds of the job over those of numpy.matmul: {cpu['job'] / cpu['numpy.matmul']:.2f}")
    console.print(f"certificate: {100 * (cpu['job'] / cpu['job, check none'] - 1):.1f} % of the CPU seconds")
    console.print(f"plan {summary.plan}, load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
