"""A product of matrices larger than the memory of the cluster, from disk to disk: ``python tests/bench/jobs_disk.py``.

A and B of N(0,1) are written to Zarr, and multiplied by a job on a local cluster: on CPUs with a quarter of the bytes
of A, B and C as memory, or with one GPU (``--device gpu --dtype bfloat16 --size 100000``). In the same run, alone: the
disk, reading and writing the same bytes one after another as ``dd`` does (the first 8 GB of each); on CPUs
`numpy.matmul` of the same matrices; on GPUs the kernel (its rate on blocks in GPU memory) and the link between host and
GPU (A and B from pinned memory, C back at the same time). The seconds of CPU of all processes, without those of
starting them, can be compared where other work on the machine disturbs the clock. Then other programs do the same
product with the same memory, each in a process of its own (`disk_peers`): `dask.array` and cubed, on GPUs with CuPy. At
last the job is done again without and with a certificate, in turns (``--pairs``), which tells what that costs: two jobs
of the same kind differ by some per cent, so one of each says little.

Before each reading the files are written to the disk and the page cache is emptied of them. With ``--cached`` they stay
there, and nothing waits for the disk but what programs sync themselves: for disks that take longer than all the rest,
and for folders in memory. Each step is said as it begins and ends, and all that is known by then is in the file of
``--json``. After ``--deadline`` seconds no step begins, and a job or a peer that still runs is stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
from disk_peers import compare
from disk_peers.usage import Usage
from distributed import Client
from experiment.cases import KERNEL_EDGE, element
from experiment.matrices import draw
from experiment.products import kernel_alone
from rich.console import Console
from rich.table import Table
from steps import Steps

import distmm
from distmm import clusters
from distmm.job.stop import Stop
from distmm.storage import create_output, open_matrix
from distmm.telemetry.figures import Figures

PIECE = 2**26

# Bytes that the disk alone reads, and writes: of more, its seconds are a multiple.
DISK_SAMPLE = 8 * 10**9

SMALL_EDGE = 12288  # of the job that loads the kernels

SAY_SECONDS = 5.0  # between two words on how far a step is


Check = Literal["freivalds", "none"]
JOBS: dict[Check, str] = {"freivalds": "job", "none": "job, check none"}


class Turn(NamedTuple):
    """One job: seconds of the clock, and of the CPU."""

    check: Check
    seconds: float
    cpu: float


@dataclass(frozen=True)
class Run:
    """What is multiplied where, and the figures so far: seconds of the clock, and of the CPU; of all jobs in turn."""

    folder: Path
    size: int
    dtype: np.dtype[Any]
    device: Literal["cpu", "gpu"]
    limit: int | None
    forget: Callable[[Path], None]
    steps: Steps
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    jobs: list[Turn] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of one matrix."""
        return self.dtype.itemsize * self.size**2

    @property
    def operands(self) -> list[Path]:
        """A and B on the disk."""
        return [self.folder / f"{name}.zarr" for name in "AB"]

    def forget_operands(self) -> None:
        """Have the next reader of A and B read from the disk, unless they are to stay in the page cache."""

        def each() -> bool:
            for path in self.operands:
                self.forget(path)
            return True

        if self.forget is not leave:
            self.steps.run("emptying the page cache of A and B", each)


def forget(path: Path) -> None:
    """Have the next reader read from the disk: what is not there yet is written first."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def leave(path: Path) -> None:
    """Have the next reader find what it can in the page cache."""


def disk_alone(folder: Path, read: list[Path], nbytes: int) -> tuple[float, float]:
    """Seconds to read some files, and to write `nbytes` up to the fsync, with nothing else: of the first 8 GB each."""
    buffer, have, total = bytearray(PIECE), 0, sum(file.stat().st_size for path in read for file in path.rglob("*"))
    start = time.perf_counter()
    for file in (file for path in read for file in path.rglob("*") if file.is_file()):
        if have >= DISK_SAMPLE:
            break
        with open(file, "rb", buffering=0) as source:
            while count := source.readinto(buffer):
                have += count
    reading = (time.perf_counter() - start) * total / have
    part = min(nbytes, DISK_SAMPLE)
    start = time.perf_counter()
    with open(folder / "written", "wb", buffering=0) as target:
        for first in range(0, part, PIECE):
            target.write(memoryview(buffer)[: part - first])
        os.fsync(target.fileno())
    writing = (time.perf_counter() - start) * nbytes / part
    (folder / "written").unlink()
    return reading, writing


def make(folder: Path, size: int, chunk: int, dtype: np.dtype[Any], say: Callable[[str], None]) -> bool:
    """Write A and B: each core some of the chunks, all from one piece of memory."""
    outputs = {name: create_output(folder / f"{name}.zarr", (size, size), dtype, (chunk, chunk)) for name in "AB"}
    edges, cores = range(0, size, chunk), len(os.sched_getaffinity(0))
    places, done = list(itertools.product("AB", edges, edges)), itertools.count(1)

    def some(first: int) -> None:
        memory, said = np.empty(chunk * chunk, dtype), time.monotonic()
        for name, i, j in places[first::cores]:
            height, width = min(chunk, size - i), min(chunk, size - j)
            block = memory[: height * width].reshape(height, width)
            draw(block, [ord(name), i, j])
            outputs[name][i : i + height, j : j + width] = block
            count = next(done)
            if first == 0 and time.monotonic() - said > SAY_SECONDS:
                say(f"{count} of {len(places)} chunks")
                said = time.monotonic()

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(some, range(cores)))
    for output in outputs.values():
        output.output.commit()
    return True


def job(run: Run, client: Client, check: Check) -> tuple[Any, float]:
    """Run the job; return its summary, and the CPU seconds of scheduler, client and workers.

    How far it is, twice a second, is kept: when the last product was done, and what was left to write then.
    """
    spent: list[float] = []
    seen: list[tuple[float, int, int]] = []
    steps = run.steps
    steps.facts.setdefault("progress: seconds, products, blocks on disk", {})[check] = seen
    said = start = time.monotonic()

    def note(*_: Any) -> None:
        spent.append(time.process_time() + sum(client.run(time.process_time).values()))

    def look(figures: Figures) -> None:
        nonlocal said
        seen.append((time.monotonic() - start, figures.done, figures.blocks_done))
        if time.monotonic() - said > SAY_SECONDS:
            steps.say(f"{figures.done} of {figures.total} products, {figures.blocks_done} of {figures.blocks} blocks")
            said = time.monotonic()

    names = *run.operands, run.folder / "C.zarr"
    stop = Stop(steps.left if math.isfinite(steps.left) else None)
    summary = distmm.multiply(*names, client=client, check=check, stop=stop, announce=note, progress=look)
    note()
    return summary, spent[1] - spent[0]


def numpy_alone(operands: list[Path]) -> tuple[float, float]:
    """Seconds of the clock and of the CPU for one `numpy.matmul` of two stored matrices, in memory."""
    a, b = (open_matrix(path)[...] for path in operands)
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


def warm_up(run: Run, client: Client) -> bool:
    """Do a job of three blocks along k: once a machine kernels are compiled, ours and CuPy's, which takes 10 s."""
    folder, edge = run.folder / "small", min(SMALL_EDGE, run.size)
    folder.mkdir()
    make(folder, edge, edge // 3, run.dtype, run.steps.say)
    names = folder / "A.zarr", folder / "B.zarr", folder / "C.zarr"
    distmm.multiply(*names, client=client, blocks=(edge, edge // 3, edge))
    shutil.rmtree(folder)
    return True


def on_cluster(run: Run, check: Check) -> compare.Row | None:
    """Start a cluster and do the job on it; before that, on GPUs, measure what the job needs there."""
    label = JOBS[check]
    steps, limit = run.steps, None if run.limit is None else str(run.limit)
    with ExitStack() as held:
        local = clusters.local(run.device, workers=1, memory_limit=limit, dashboard=None, quiet=True)
        client = steps.run("starting a cluster", lambda: held.enter_context(local))
        if client is None:
            return None
        if run.device == "gpu":
            steps.run("a small job", lambda: warm_up(run, client))
            asked = None, KERNEL_EDGE, run.dtype, "highest", True
            alone = steps.run("kernel alone", lambda: client.submit(kernel_alone, *asked, pure=False).result())
            if alone is not None:
                run.seconds["kernel alone"] = alone[1] * (run.size / KERNEL_EDGE) ** 3
            if "link alone" not in run.seconds:
                link = steps.run("link alone", lambda: client.submit(link_alone, run.nbytes, pure=False).result())
                if link is not None:
                    run.seconds["link alone"] = link
        run.forget_operands()
        shutil.rmtree(run.folder / "C.zarr", ignore_errors=True)  # of the job before
        with Usage(os.getpid()) as usage:
            done = steps.run(label, lambda: job(run, client, check))
    if done is None:
        return None
    summary, cpu = done
    run.jobs.append(Turn(check, summary.seconds, cpu))
    run.seconds.setdefault(label, summary.seconds)
    run.cpu.setdefault(label, cpu)
    steps.facts["plan"] = str(summary.plan)
    checked = None if summary.residual is None else summary.residual <= 1
    return compare.Row("distmm", summary.seconds, usage.peak, usage.written, checked)


def measure(run: Run, options: argparse.Namespace) -> list[compare.Row]:
    """Do all steps, those that matter most first; return what there is of the job and of the peers."""
    steps, folder = run.steps, run.folder
    if not steps.run("making A and B", lambda: make(folder, run.size, options.chunk, run.dtype, steps.say)):
        return []
    own = on_cluster(run, "freivalds")
    rows = [] if own is None else [own]
    run.forget_operands()
    disk = steps.run("disk alone", lambda: disk_alone(folder, run.operands, run.nbytes))
    if disk is not None:
        run.seconds["disk alone"] = sum(disk)
        steps.facts["disk alone, GB/s"] = {"read": 2 * run.nbytes / disk[0] / 1e9, "write": run.nbytes / disk[1] / 1e9}
    if run.device == "cpu":
        found = steps.run("numpy.matmul", lambda: numpy_alone(run.operands))
        if found is not None:
            run.seconds["numpy.matmul"], run.cpu["numpy.matmul"] = found
    shutil.rmtree(folder / "C.zarr", ignore_errors=True)
    block = min(run.size, options.peer_block or (8192 if run.device == "gpu" else 2048))
    product = compare.Product(folder, run.device, 1, run.limit, -(-block // options.chunk) * options.chunk)

    def patience() -> float:
        return float(min(options.patience, steps.left))

    for name in options.peers:
        row = steps.run(f"peer {name}", partial(compare.measure, product, name, patience, run.forget, steps.say))
        rows += [] if row is None else [row]
    for pair in range(options.pairs):
        turns: list[Check] = ["none", "freivalds"]
        for check in turns if pair % 2 == 0 else reversed(turns):
            on_cluster(run, check)
    return rows


def main() -> int:
    """Measure, and print the tables; 1 where a step failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument(
        "--limit", type=int,
        help="memory of the worker, bytes; default: on CPUs a quarter of A, B and C, with GPUs the machine's",
    )  # fmt: skip
    parser.add_argument("--cached", action="store_true", help="leave files in the page cache, and those to read too")
    parser.add_argument("--deadline", type=float, help="seconds after which no step begins, and the job stops")
    parser.add_argument("--json", help="file for all figures, written after each step")
    parser.add_argument("--peers", nargs="*", choices=list(compare.PEERS["cpu"]), default=list(compare.PEERS["cpu"]))
    parser.add_argument("--peer-block", type=int, help="edge of the peers' blocks; default: 2048, on GPUs 8192")
    parser.add_argument("--pairs", type=int, default=1, help="jobs without and with a certificate, in turns, at last")
    parser.add_argument("--patience", type=float, default=600, help="seconds for a peer's product")
    parser.add_argument("--dir", help="where the matrices go; default: the system's temporary folder")
    options = parser.parse_args()
    size, dtype = options.size, element(options.dtype)
    nbytes = dtype.itemsize * size**2
    limit = options.limit or (None if options.device == "gpu" else 3 * nbytes // 4)
    steps = Steps(options.deadline, options.json, size=size, dtype=options.dtype, limit=limit, cached=options.cached)
    folder = Path(tempfile.mkdtemp(prefix="distmm-disk-", dir=options.dir))
    run = Run(folder, size, dtype, options.device, limit, leave if options.cached else forget, steps)
    steps.facts |= {"seconds": run.seconds, "cpu seconds": run.cpu, "jobs": run.jobs}  # they fill up
    free = shutil.disk_usage(folder).free
    try:
        if 3 * nbytes > free:
            parser.error(f"A, B and C take {3 * nbytes / 1e9:.3g} GB, {folder} has {free / 1e9:.3g}: use another --dir")
        rows = measure(run, options)
    finally:
        shutil.rmtree(folder)
    steps.facts["rows"] = [dataclasses.asdict(row) for row in rows]
    steps.write()
    where = "in the page cache" if options.cached else "on disk"
    report(run, f"n = {size} {dtype}, A, B and C {3 * nbytes / 1e9:.3g} GB, A and B {where}")
    if rows:
        Console().print(compare.table(rows, "from Zarr to Zarr with the same memory, workers and cores"))
    return int(steps.failed)


def report(run: Run, title: str) -> None:
    """Print the table, and what the job took over the largest of what it cannot do without."""
    seconds, cpu = run.seconds, run.cpu
    table = Table(title=title)
    for column in ("", "s", "CPU s", "TFLOP/s"):
        table.add_column(column, justify="right")
    for name, value in seconds.items():
        rate = "" if name in ("disk alone", "link alone") else f"{2 * run.size**3 / value / 1e12:.3g}"
        table.add_row(name, f"{value:.3g}", f"{cpu[name]:.3g}" if name in cpu else "", rate)
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(
        f"memory limit {run.limit}, plan {run.steps.facts.get('plan')}, load average {os.getloadavg()[0]:.1f}"
    )
    for name, rates in run.steps.facts.get("disk alone, GB/s", {}).items():
        console.print(f"disk alone, {name}: {rates:.2f} GB/s")
    alone = {name: value for name, value in seconds.items() if not name.startswith("job")}
    if alone and "job" in seconds:
        longest = max(alone, key=lambda name: alone[name])
        console.print(f"job over {longest}: {seconds['job'] / alone[longest]:.2f}")
    if {"numpy.matmul", "job"} <= cpu.keys():
        console.print(f"CPU seconds of the job over those of numpy.matmul: {cpu['job'] / cpu['numpy.matmul']:.2f}")
    # all but the first job, which has no partner
    of_kind: dict[Check, list[Turn]] = {check: [turn for turn in run.jobs[1:] if turn.check == check] for check in JOBS}
    for what in ("seconds", "cpu") if all(of_kind.values()) else ():
        ours, bare = ([getattr(turn, what) for turn in turns] for turns in of_kind.values())
        console.print(
            f"certificate: {100 * (median(ours) / median(bare) - 1):.1f} % of the {what}: with "
            f"{', '.join(f'{x:.4g}' for x in ours)}; without {', '.join(f'{x:.4g}' for x in bare)}"
        )


if __name__ == "__main__":
    sys.exit(main())
