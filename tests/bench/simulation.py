"""Simulate products on clusters that are not there: the real Scheduler and workers' state machines in virtual time.

What is real: Dask's scheduler with distmm's plugin, Dask's worker state machines (which task next, what to fetch from
whom), the plan and its graph. What is virtual: time, the links and the kernels, whose figures are those of a `Machine`.

    python tests/bench/simulation.py                      # the table of tests/bench/README.md
    python tests/bench/simulation.py --gpus 64 --size 200000 --dtype float16
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask._expr import HLGExpr
from dask.core import flatten
from distributed import worker_state_machine as machine
from distributed.protocol import Serialized, serialize, to_serialize
from distributed.scheduler import ClientState
from rich.console import Console

from distmm import matmul
from distmm.clusters.local_cluster import SCHEDULER_CONFIG
from distmm.graph.dask_tasks import ProductTask
from distmm.graph.product_graph import ProductLayer
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem, accumulator_dtype
from distmm.planning.search import make_plan
from tests.virtual_cluster import Sized, VirtualCluster, VirtualWorker


@dataclass(frozen=True)
class Machine:
    """Times of the parts that are virtual; seconds and bytes/s.

    Attributes
    ----------
    rate : float
        FLOP/s of one GPU.
    link : float
        Bytes/s out of, and into, each GPU.
    load : float
        Bytes/s at which a worker loads blocks of A and B from its host.
    memory : int
        Bytes of each GPU.
    message : float
        From a worker's event to the scheduler hearing of it, and back: half of the 6 ms that separate the steps of one
        chain on an idle cluster.
    fetch : float
        From asking a peer for a block to its first byte.
    gap : float
        Idle GPU around each task.
    threads : int
        Tasks that a worker runs at a time: products wait for one another on the GPU, loads go beside them.
    scheduler : float
        The scheduler's CPU time for a task, which it does one after another.
    """

    rate: float = 2e14
    link: float = 5e10
    load: float = 5e10
    memory: int = 110 * 10**9
    message: float = 3e-3
    fetch: float = 2e-3
    gap: float = 0.5e-3
    threads: int = 3
    scheduler: float = 0.35e-3


@dataclass
class Result:
    """What one simulated product took.

    `seconds` from the graph's arrival to the last block of C; `ideal`: operations / (GPUs x rate); `fetched` bytes
    between workers; `peak` bytes on a worker; `live` tasks that the scheduler knew at once; `first_task` real
    seconds of a CPU from the call to the first task that is sent to a worker.
    """

    seconds: float
    ideal: float
    fetched: int
    peak: int
    live: int
    first_task: float


class Matrix:
    """An operand that is a shape."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def __getitem__(self, index: object) -> None: ...


@dataclass
class Server:
    """What does one thing after another: a GPU, a link; `free` is the time at which it has done all it was given."""

    free: float = 0.0


class MeasuredWorker(VirtualWorker):
    """A worker whose tasks and transfers take the time of a `Machine`."""

    cluster: Simulation

    def __init__(self, cluster: Simulation, address: str) -> None:
        super().__init__(cluster, address, cluster.machine.threads)
        self.gpu, self.host_link, self.inward, self.outward = Server(), Server(), Server(), Server()

    def execute(self, key: Any) -> None:
        ts = self.state.tasks[key]
        product, seconds, nbytes, others = self.cluster.task(ts.run_spec.data)
        server = self.gpu if product else self.host_link
        server.free = max(server.free, self.cluster.now) + seconds
        done = machine.ExecuteSuccessEvent(
            key=key, run_id=ts.run_id, value=Sized(nbytes), start=0, stop=seconds, nbytes=nbytes, type=None,
            stimulus_id=f"done-{key}",
        )  # fmt: skip
        self.writing += nbytes
        self.hold(others)  # until the product that adds to them is queued

        def finish() -> None:
            self.writing -= nbytes
            self.handle(done)

        self.cluster.later(server.free - self.cluster.now, finish)
        if not product:  # see `distmm.worker.worker_slots`
            self.handle(machine.SecedeEvent(key=key, compute_duration=0.0, stimulus_id=f"beside-{key}"))

    def gather(self, instruction: machine.GatherDep) -> None:
        sim, peer = self.cluster, self.cluster.workers[instruction.worker]
        data = {key: peer.state.data[key] for key in instruction.to_gather if key in peer.state.data}
        nbytes = sum(block.nbytes for block in data.values())
        seconds = nbytes / sim.machine.link
        for link in (self.inward, peer.outward):
            link.free = max(link.free, sim.now + sim.machine.fetch) + seconds
        self.fetched += nbytes
        done = machine.GatherDepSuccessEvent(
            worker=peer.address, total_nbytes=instruction.total_nbytes, data=data, stimulus_id=instruction.stimulus_id
        )
        sim.later(max(self.inward.free, peer.outward.free) - sim.now, lambda: self.handle(done))


class Simulation(VirtualCluster):
    """A cluster of `Machine`s."""

    def __init__(self, virtual: Machine) -> None:
        super().__init__()
        self.machine, self.scheduler_free = virtual, 0.0
        self.live = 0
        self.first_task: float | None = None

    def message_seconds(self, worker: Any, message: dict[str, Any]) -> float:
        if self.first_task is None and message["op"] == "compute-task":
            self.first_task = time.process_time()
        return self.machine.message

    def tell_scheduler(self, worker: VirtualWorker, message: dict[str, Any]) -> None:
        """Deliver a message after its way and after what the scheduler still has to do."""
        handler = self.scheduler.stream_handlers[message.pop("op")]
        work = self.machine.scheduler if handler == self.scheduler.handle_task_finished else 0.0
        self.scheduler_free = max(self.scheduler_free, self.now + self.machine.message) + work
        self.later(self.scheduler_free - self.now, lambda: handler(worker=worker.address, **message))

    def happened(self) -> None:
        self.live = max(self.live, len(self.scheduler.tasks))

    def task(self, spec: Any) -> tuple[bool, float, int, int]:
        """Whether a task is a product, its virtual seconds, the bytes of its result, and others that it needs."""
        blocking, item = self.plan.blocking, self.plan.problem.dtype.itemsize
        if isinstance(spec, ProductTask):
            where = spec.placement
            area = blocking.m[where.i] * blocking.n[where.j]
            steps = blocking.parts()[0]
            depth = sum(blocking.k[p] for p in steps[where.step])
            last = where.step == len(steps) - 1
            accumulator = accumulator_dtype(self.plan.problem.dtype).itemsize
            size = item if last else accumulator
            sums = area * accumulator if len(steps[where.step]) > 1 else 0  # of all its panels but the last
            return True, 2 * area * depth / self.machine.rate + self.machine.gap, area * size, sums
        name, row, column = spec.key
        edges = (blocking.m[row], blocking.k[column]) if name == self.a else (blocking.k[row], blocking.n[column])
        nbytes = edges[0] * edges[1] * item
        return False, nbytes / self.machine.load, nbytes, 0

    async def run(self, plan: Plan) -> Result:
        """Multiply once, by `plan`."""
        self.plan, problem = plan, plan.problem
        for rank in range(plan.cluster.workers):
            worker = MeasuredWorker(self, f"tcp://10.0.{rank >> 8}.{rank & 255}:1")
            await self.add(worker, rank, self.machine.threads)
        await self.start()
        self.scheduler.clients["sim"] = ClientState("sim")
        started = time.process_time()
        c = product(plan)
        layer = c.dask.layers[c.name]
        assert isinstance(layer, ProductLayer)
        self.a = layer.operands[0]
        left = await self._submit(c)
        await self.drain()
        missing = [key for key in left if self.scheduler.tasks[key].state != "memory"]
        if missing:
            states = Counter(ts.state for ts in self.scheduler.tasks.values())
            raise RuntimeError(f"{len(missing)} blocks of C are missing, tasks: {states}")
        assert self.first_task is not None
        return Result(
            seconds=self.now - 2 * self.machine.message,
            ideal=problem.flops / len(self.workers) / self.machine.rate,
            fetched=sum(worker.fetched for worker in self.workers.values()),
            peak=max(worker.peak for worker in self.workers.values()),
            live=self.live,
            first_task=self.first_task - started,
        )

    async def _submit(self, c: da.Array) -> set[Any]:
        keys = set(flatten(c.__dask_keys__()))
        expr = Serialized(*serialize(to_serialize(HLGExpr.from_collection(c)), on_error="raise"))
        await self.scheduler.update_graph(
            client="sim", expr_ser=expr, keys=keys, span_metadata={"collections": []}, internal_priority=None,
            submitting_task=None,
        )  # fmt: skip
        return keys


def product(plan: Plan) -> da.Array:
    """Return the lazy product that a plan describes, of matrices that are shapes."""
    problem = plan.problem
    a, b = (Matrix(shape, problem.dtype) for shape in ((problem.m, problem.k), (problem.k, problem.n)))
    return matmul(a, b, plan=plan)


def simulate(plan: Plan, virtual: Machine) -> Result:
    """Run `plan` on virtual workers."""

    async def run() -> Result:
        simulation = Simulation(virtual)
        try:
            return await simulation.run(plan)
        finally:
            simulation.close()

    # The memory manager reads the workers' real memory, of which there is none.
    config = {**SCHEDULER_CONFIG, "distributed.scheduler.active-memory-manager.start": False}
    with dask.config.set(config):
        return asyncio.run(run())


def planned(size: int, gpus: int, dtype: str, virtual: Machine) -> Plan:
    """Plan a square product for virtual GPUs."""
    spec = ClusterSpec(gpus, virtual.memory, "cuda", virtual.rate, virtual.link, virtual.load, threads=virtual.threads)
    return make_plan(Problem(size, size, size, np.dtype(dtype)), spec)


HEADER = """\
| GPUs | n | plan | tasks | task | seconds | of the ideal | moved / bound | peak / plan | live | first task | wall |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    """Print a line for each number of GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--size", type=int, nargs="+", help="n of each product; 51 GB of matrices a GPU by default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rate", type=float, default=Machine.rate)
    options = parser.parse_args()
    logging.getLogger("distributed").setLevel(logging.WARNING)
    virtual = Machine(rate=options.rate)
    console = Console(soft_wrap=True)
    console.print(HEADER, markup=False)
    for gpus, size in zip(options.gpus, options.size or [int(65536 * g**0.5) for g in options.gpus], strict=True):
        started = time.perf_counter()
        plan = planned(size, gpus, options.dtype, virtual)
        r = simulate(plan, virtual)
        task = plan.problem.flops / plan.schedule.tasks / virtual.rate
        cells = (
            gpus, size, plan, plan.schedule.tasks, f"{task * 1e3:.0f} ms", f"{r.seconds:.2f}",
            f"{r.ideal / r.seconds:.1%}",
            f"{r.fetched / plan.cost.bytes_bound:.4f}", f"{r.peak / plan.peak.worker:.2f}", r.live,
            f"{r.first_task:.2f} s", f"{time.perf_counter() - started:.0f} s",
        )  # fmt: skip
        console.print(f"| {' | '.join(map(str, cells))} |", markup=False)


if __name__ == "__main__":
    main()
