"""A cluster in virtual time: Dask's own scheduler with distmm's plugin, and Dask's own state machines of workers.

What is virtual: time, connections, and what tasks do and return. Subclasses say how long things take and what goes
wrong: `tests/bench/simulation.py` measures, `tests/bench/disturbed_schedules.py` disturbs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from distributed import Scheduler
from distributed import worker_state_machine as machine

from distmm.scheduler.plugin import PlacementPlugin

__all__ = ["Comm", "Sized", "VirtualCluster", "VirtualWorker"]


class Sized:
    """A block that is a number of bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Comm:
    """What the scheduler believes to be a connection."""

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        self.receive = receive

    def send(self, *messages: dict[str, Any]) -> None:
        for message in messages:
            self.receive(message)


class VirtualWorker:
    """Dask's own state machine of a worker. Subclasses say how it executes a task and gathers what it depends on."""

    EVENTS = {  # noqa: RUF012
        "compute-task": machine.ComputeTaskEvent,
        "free-keys": machine.FreeKeysEvent,
        "remove-replicas": machine.RemoveReplicasEvent,
        "acquire-replicas": machine.AcquireReplicasEvent,
        "cancel-compute": machine.CancelComputeEvent,
        "refresh-who-has": machine.RefreshWhoHasEvent,
        "remove-worker": machine.RemoveWorkerEvent,
    }

    def __init__(self, cluster: VirtualCluster, address: str, threads: int, validate: bool = False) -> None:
        self.cluster, self.address = cluster, address
        # Dask's default limits of what a worker fetches at once.
        self.state = machine.WorkerState(
            address=address,
            nthreads=threads,
            transfer_incoming_count_limit=10,
            transfer_message_bytes_limit=50e6,
            validate=validate,
        )
        self.writing = self.peak = self.fetched = 0

    def handle(self, event: machine.StateMachineEvent) -> None:
        for instruction in self.state.handle_stimulus(event):
            if isinstance(instruction, machine.SendMessageToScheduler):
                self.cluster.tell_scheduler(self, instruction.to_dict())
            elif isinstance(instruction, machine.Execute):
                self.execute(instruction.key)
            elif isinstance(instruction, machine.GatherDep):
                self.gather(instruction)
            elif isinstance(instruction, machine.RetryBusyWorkerLater):
                again = machine.RetryBusyWorkerEvent(worker=instruction.worker, stimulus_id="not-busy")
                self.cluster.later(1.0, partial(self.handle, again))
            else:
                raise NotImplementedError(instruction)
        self.state.stimulus_log.clear()
        self.hold()

    def hold(self, others: int = 0) -> None:
        """Note what is in memory now, and for a moment others beside it."""
        held = self.writing + sum(block.nbytes for block in self.state.data.values())
        self.peak = max(self.peak, held + others)

    def receive(self, message: dict[str, Any]) -> None:
        # The scheduler sends one dict to several workers, and takes a KeyError for a worker that has left.
        fields = dict(message)
        event = self.EVENTS[fields.pop("op")](**fields)
        self.cluster.later(self.cluster.message_seconds(self, message), lambda: self.handle(event))

    def execute(self, key: Any) -> None:
        raise NotImplementedError

    def gather(self, instruction: machine.GatherDep) -> None:
        raise NotImplementedError


class VirtualCluster:
    """A scheduler, its virtual workers, and the events to come."""

    def __init__(self, validate: bool = False) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], Any]]] = []
        self.order = itertools.count()
        self.scheduler = Scheduler(dashboard=False, dashboard_address=":0", validate=validate)
        self.plugin = PlacementPlugin()
        self.workers: dict[str, Any] = {}

    async def start(self) -> None:
        await self.plugin.start(self.scheduler)
        self.plugin.loop = VirtualLoop(self)  # type: ignore[assignment]
        self.scheduler.plugins[self.plugin.name] = self.plugin

    def close(self) -> None:
        self.scheduler.http_server.stop()  # opened by its making, though nobody starts it

    def later(self, seconds: float, do: Callable[[], Any]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), do))

    def happened(self) -> None:
        """Called after each event."""

    def message_seconds(self, worker: Any, message: dict[str, Any]) -> float:
        """How long a message takes from the scheduler to a worker."""
        raise NotImplementedError

    def tell_scheduler(self, worker: Any, message: dict[str, Any]) -> None:
        """Deliver what a worker says."""
        raise NotImplementedError

    async def add(self, worker: VirtualWorker, name: Any, threads: int) -> None:
        """Let a worker join, by the scheduler's own way."""
        scheduler, address = self.scheduler, worker.address

        async def connected(comm: object, address: str) -> None:
            early = scheduler.stream_comms[address].buffer
            scheduler.stream_comms[address] = comm = Comm(worker.receive)
            comm.send(*early)

        self.workers[address] = worker
        scheduler.handle_worker = connected
        no_metrics = {
            "bandwidth": {"total": 1e8, "workers": {}, "types": {}},
            "digests_total_since_heartbeat": {}, "memory": 0, "spilled_bytes": {"memory": 0, "disk": 0},
        }  # fmt: skip
        await scheduler.add_worker(
            Welcome(), address=address, status="running", server_id=address, nthreads=threads, name=name,
            resolve_address=False, now=0.0, resources={}, memory_limit=0, metrics=no_metrics, services={},
            local_directory="", versions={}, nanny="", extra={}, stimulus_id=f"join-{address}",
        )  # fmt: skip

    async def drain(self) -> None:
        """Let everything happen that is to come."""
        await asyncio.sleep(0)  # what the scheduler's plugin put off
        while self.events:
            self.now, _, do = heapq.heappop(self.events)
            if asyncio.iscoroutine(doing := do()):
                await doing
            await asyncio.sleep(0)
            self.happened()
        await asyncio.sleep(0)


class VirtualLoop:
    """The event loop of the scheduler's plugin, whose timers are virtual."""

    def __init__(self, cluster: VirtualCluster) -> None:
        self.call_soon = asyncio.get_running_loop().call_soon
        self.call_later = cluster.later


class Welcome:
    """The connection by which a worker is told that it has joined."""

    async def write(self, message: dict[str, Any]) -> None:
        if message["status"] != "OK":
            raise RuntimeError(message["message"])
