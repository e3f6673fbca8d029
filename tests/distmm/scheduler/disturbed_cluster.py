"""One schedule of `disturbed_schedules.py`: a cluster in virtual time, where everything goes wrong, and what must hold.

Workers die, unseen for a while, and join; messages come late; loads and products fail, and are retried by the scheduler
or by the client; clients cancel, leave, ask again, restart the cluster; workers pause. At the end every task that is
wanted has a result or a reason, nothing is held, Dask's own invariants hold, and when the clients let go nothing is
left. Without faults no block travels or is written twice, and no worker holds more than the plan says.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from distributed import worker_state_machine as machine
from distributed.scheduler import ClientState, TaskState

from distmm.scheduler import dask_internals
from tests.distmm.scheduler.disturbed_faults import Faults
from tests.distmm.scheduler.disturbed_requests import Request, request
from tests.distmm.scheduler.drawn_products import BLOCK, Drawn, draw, is_operand, nbytes
from tests.virtual_cluster import Comm, Sized, VirtualCluster, VirtualWorker

__all__ = ["DisturbedCluster"]


class DisturbedWorker(VirtualWorker):
    """A worker whose tasks and messages take random time, that may fail tasks, and may be dead."""

    cluster: DisturbedCluster

    def __init__(self, cluster: DisturbedCluster, address: str) -> None:
        super().__init__(cluster, address, threads=2, validate=True)
        self.dead = False
        self.heard = self.said = 0.0  # when the last message arrives: connections keep the order of messages

    def handle(self, event: machine.StateMachineEvent) -> None:
        if not self.dead:
            super().handle(event)

    def receive(self, message: dict[str, Any]) -> None:
        if not self.dead:
            super().receive(message)

    def execute(self, key: Any) -> None:
        cluster, ts = self.cluster, self.state.tasks[key]
        size = nbytes(ts.run_spec.data)
        self.writing += size
        fails = cluster.fails(key)
        common = {"key": key, "run_id": ts.run_id, "start": 0.0, "stop": 1.0, "stimulus_id": f"ended-{key}"}
        event: machine.StateMachineEvent
        if fails:
            event = machine.ExecuteFailureEvent.from_exception(OSError(f"{key} fails"), **common)
        else:
            event = machine.ExecuteSuccessEvent(**common, value=Sized(size), nbytes=size, type=None)

        def end() -> None:
            if not self.dead:
                self.writing -= size
                if not fails:
                    cluster.made[key] += 1
                self.handle(event)

        cluster.later(cluster.random.expovariate(1.0), end)

    def gather(self, instruction: machine.GatherDep) -> None:
        cluster, common = self.cluster, {"worker": instruction.worker, "stimulus_id": instruction.stimulus_id}
        common["total_nbytes"] = instruction.total_nbytes

        def arrive() -> None:
            peer = cluster.workers.get(instruction.worker)
            if peer is None or peer.dead:
                self.handle(machine.GatherDepNetworkFailureEvent(**common))
            elif cluster.faults.late and cluster.random.random() < 0.1:
                self.handle(machine.GatherDepBusyEvent(**common))
            else:
                data = {key: peer.state.data[key] for key in instruction.to_gather if key in peer.state.data}
                for key in data:
                    cluster.fetched[key, self.address] += 1
                self.handle(machine.GatherDepSuccessEvent(**common, data=data))

        cluster.later(cluster.random.expovariate(4.0), arrive)


class DisturbedCluster(VirtualCluster):
    """One schedule."""

    def __init__(self, seed: int, log: Callable[[str], None], faults: Faults | None = None) -> None:
        # One schedule in three lets Dask check each transition: held tasks are then in "no-worker". Its checks (2026.7)
        # do not hold after a retry of tasks that need other failed ones.
        self.random = random.Random(seed)
        checked = self.random.random() < 1 / 3
        self.faults = Faults.draw(self.random) if faults is None else faults
        super().__init__(validate=checked and not self.faults.retry)
        self.log = log
        self.made: Counter[Any] = Counter()
        self.fetched: Counter[Any] = Counter()
        self.joined = 0
        self.size = self.random.choice([1, 2, 2, 3, 4])
        self.asked: list[Drawn] = []  # what is asked for
        self.requests: dict[str, list[Request]] = {}  # by client
        self.retries = self.random.choice([None, None, 2])
        self.broken: list[str] = []  # what the plugin said when it failed

    # What takes time, and what fails

    def message_seconds(self, worker: Any, message: dict[str, Any]) -> float:
        heard: float = max(self.now + self._delay(), worker.heard + 1e-6)
        worker.heard = heard
        return heard - self.now

    def tell_scheduler(self, worker: Any, message: dict[str, Any]) -> None:
        handler = self.scheduler.stream_handlers[message.pop("op")]
        worker.said = max(self.now + self._delay(), worker.said + 1e-6)

        def arrive() -> None:
            if worker.address in self.scheduler.workers:
                handler(worker=worker.address, **message)

        self.later(worker.said - self.now, arrive)

    def _delay(self) -> float:
        if self.faults.late and self.random.random() < 0.1:
            return self.random.uniform(1, 10)
        return self.random.uniform(0.01, 0.1)

    def fails(self, key: Any) -> bool:
        """Whether a task fails this time."""
        return self.random.random() < self.faults.fail

    # What happens

    async def run(self) -> None:
        """Play one schedule, and check it."""
        await self.start()
        give_up = self.plugin.give_up

        def noted(error: Exception) -> None:
            self.broken.append(repr(error))
            give_up(error)

        self.plugin.give_up = noted  # type: ignore[method-assign]
        self.scheduler.clients["fire-and-forget"] = ClientState("fire-and-forget")
        for _ in range(self.size):
            await self.join()
        self.draw()
        await self.drain()
        await self._settle()
        self._check_ended()
        for client in list(self.scheduler.clients):
            self.scheduler.remove_client(client)
        await self._settle()
        self._check_nothing_is_left()

    def draw(self) -> None:
        """Say what clients ask for, and when what goes wrong."""
        for number in range((rng := self.random).choice([1, 1, 2, 3])):
            client = rng.choice(["first", "second"]) if number else "first"
            names = ("A", rng.choice("BD") if number else "B")
            workers = self.size if rng.random() < 0.9 else self.size + 1
            self.asked.append(draw(rng, number, workers, names, most=4))
            self.later(rng.uniform(0, 6) if number else 0.0, partial(self.ask, client, number))
        for kind in ("kill", "join", "pause", "cancel", "leave", "again", "retry", "restart"):
            for _ in range(getattr(self.faults, kind)):
                self.later(rng.uniform(0, 25), getattr(self, kind if kind == "join" else f"_{kind}"))

    async def drain(self) -> None:
        before, idle = -1, 0
        while idle < 3:
            await super().drain()
            idle = idle + 1 if before == self.scheduler.transition_counter else 0
            before = self.scheduler.transition_counter
            for worker in self._living():  # Dask's own timer
                if any(ts.state == "missing" for ts in worker.state.tasks.values()):
                    worker.handle(machine.FindMissingEvent(stimulus_id="find-missing"))

    async def _settle(self) -> None:
        """Let everything end that can: on one worker at least, which runs."""
        if not self.scheduler.workers:
            await self.join()
        for address in self.scheduler.workers:
            self._status(address, "running")
        await self.drain()

    def _connect(self, client: str) -> None:
        if client not in self.scheduler.clients:
            self.scheduler.clients[client] = ClientState(client)
            self.requests.setdefault(client, [])
            self.scheduler.client_comms[client] = Comm(
                lambda message: self.later(self._delay(), partial(self._hear, client, message))
            )

    async def ask(self, client: str, number: int) -> None:
        self._connect(client)
        asked = request(self.asked[number])
        self.requests[client].append(asked)
        self.log(f"{self.now:.2f} {client} asks for {asked.drawn}")
        await self._send(client, asked)

    async def _send(self, client: str, asked: Request) -> None:
        """Send the next graph of a request."""
        if client not in self.scheduler.clients or not asked.graphs:
            return
        graph = asked.graphs.pop(0)
        asked.waits.append(set(graph.keys))
        self.log(f"{self.now:.2f} {client} sends {graph.keys[0][0]}")
        await self.scheduler.update_graph(
            client=client, expr_ser=graph.expr, keys=set(graph.keys), span_metadata={"collections": []},
            internal_priority=None, submitting_task=None, annotations=self.retries and {"retries": self.retries},
        )  # fmt: skip

    async def _hear(self, client: str, message: dict[str, Any]) -> None:
        """Take what the scheduler tells a client."""
        if client not in self.scheduler.clients or message["op"] not in ("key-in-memory", "task-erred"):
            return
        key = message["key"]
        for asked in self.requests[client]:
            for waits in asked.waits:
                if key not in waits:
                    continue
                waits.discard(key)
                if asked.drawn.leaves and message["op"] == "key-in-memory":
                    self.scheduler.client_releases_keys([key], client)
            if sum(map(bool, asked.waits)) <= 1:
                await self._send(client, asked)

    # Faults

    async def join(self) -> None:
        self.joined += 1
        worker = DisturbedWorker(self, f"tcp://10.0.{self.joined >> 8}.{self.joined & 255}:1")
        names = set(range(self.size)) - set(self.scheduler.aliases)
        name = min(names) if names and self.random.random() < 0.8 else f"worker-{self.joined}"
        self.log(f"{self.now:.2f} {worker.address} joins as {name}")
        await self.add(worker, name, 2)

    def _living(self) -> list[DisturbedWorker]:
        return [one for address in self.scheduler.workers if not (one := self.workers[address]).dead]

    def _kill(self) -> None:
        if living := self._living():
            worker = self.random.choice(living)
            self.log(f"{self.now:.2f} {worker.address} dies")
            worker.dead = True
            seen = self.random.choice([0.0, 0.05, 3.0])
            self.later(seen, partial(self.scheduler.remove_worker, worker.address, stimulus_id="dead", close=False))
            if self.random.random() < 0.8 or len(living) == 1:
                self.later(seen + self.random.choice([0.01, 1.0, 5.0]), self.join)

    def _pause(self) -> None:
        if living := self._living():
            address = self.random.choice(living).address
            self._status(address, "paused")
            self.later(self.random.uniform(0, 5), partial(self._status, address, "running"))

    def _status(self, address: str, status: str) -> None:
        if address in self.scheduler.workers and not (worker := self.workers[address]).dead:
            event = machine.PauseEvent if status == "paused" else machine.UnpauseEvent
            worker.handle(event(stimulus_id=status))
            self.scheduler.handle_worker_status_change(status, address, status)

    def _some(self) -> tuple[str, list[Any]]:
        """A client, and some or all of the keys that it wants."""
        client = self.random.choice(sorted(self.requests))
        state = self.scheduler.clients.get(client)
        keys = sorted((ts.key for ts in state.wants_what), key=str) if state is not None else []
        return client, keys if self.random.random() < 0.5 else [key for key in keys if self.random.random() < 0.5]

    def _cancel(self) -> None:
        client, keys = self._some()
        self.log(f"{self.now:.2f} {client} gives up {len(keys)} keys")
        if client not in self.scheduler.clients:
            return
        if self.random.random() < 0.5:
            self.scheduler.client_releases_keys(keys, client)
        else:
            with suppress(AssertionError):  # Dask's own: a dependent that nobody wants
                self.scheduler.stimulus_cancel(keys, client, force=False, reason="", msg="")

    def _leave(self) -> None:
        client = self.random.choice(sorted(self.requests))
        self.log(f"{self.now:.2f} {client} leaves")
        if client in self.scheduler.clients:
            self.scheduler.remove_client(client)

    async def _again(self) -> None:
        """Ask again for something that was asked for, perhaps cancelled."""
        if self.requests:
            await self.ask(self.random.choice(sorted(self.requests)), self.random.randrange(len(self.asked)))

    def _retry(self) -> None:
        """Retry all that has failed: Dask lets tasks wait for ever that need something else which has failed."""
        tasks = self.scheduler.tasks.values()
        keys = sorted((ts.key for ts in tasks if ts.state == "erred" and ts.who_wants), key=str)
        self.log(f"{self.now:.2f} {len(keys)} keys are retried")
        self.scheduler.stimulus_retry(keys)

    def _restart(self) -> None:
        """Do what `Client.restart` does: all clients lose their keys, all workers are replaced."""
        self.log(f"{self.now:.2f} restart")
        for client in list(self.scheduler.clients):
            keys = [ts.key for ts in self.scheduler.clients[client].wants_what]
            self.scheduler.client_releases_keys(keys, client)
        self.scheduler._clear_task_state()
        assert not self.scheduler.tasks
        for asked in [one for requests in self.requests.values() for one in requests]:
            asked.graphs.clear()
        for worker in self._living():
            worker.dead = True
            self.later(0.0, partial(self.scheduler.remove_worker, worker.address, stimulus_id="restart", close=False))
            self.later(1.0, self.join)

    # Checks

    def _check_ended(self) -> None:
        scheduler = self.scheduler
        assert not self.broken, f"the plugin failed: {self.broken}"
        tasks: list[TaskState] = list(scheduler.tasks.values())
        open_ = [ts for ts in tasks if ts.state not in ("memory", "erred", "released")]
        assert not open_, (
            f"nothing can go on, and {len(open_)} tasks do not end, {sum(map(dask_internals.is_held, open_))} of them "
            f"held: {sorted((str(ts.key), ts.state) for ts in open_)[:6]}"
        )
        assert not [ts.key for ts in tasks if ts.state == "released" and ts.who_wants]
        assert not [ts.key for ts in tasks if ts.state == "erred" and ts.exception_blame is None]
        scheduler.validate_state()
        failed = [ts.key for ts in tasks if ts.state == "erred"]
        refuses = any(drawn.spare is not None for drawn in self.asked)  # what needs more blocks of C at a time than fit
        assert not failed or refuses or self.faults.fail, f"{failed[0]} has failed, and nothing made it fail"
        if self.faults == Faults(late=self.faults.late):
            self._check_calm()

    def _check_calm(self) -> None:
        """Nothing went wrong: the bounds of the plan hold."""
        requests = [one for requests in self.requests.values() for one in requests]
        assert not any(keys for one in requests for keys in one.waits)
        assert not any(one.graphs for one in requests)
        written = [number for key, number in self.made.items() if key[0].startswith("write-")]
        assert all(number == 1 for number in written), "a block was written twice"
        if len(requests) > 1 or len(self.workers) != requests[0].plan.cluster.workers:
            return
        plan, drawn = requests[0].plan, requests[0].drawn
        kind = drawn.kind
        if kind == "factor" or drawn.added:
            return  # the plan of one product knows nothing of another one, and takes the user's C for resident
        again = [key for key, number in self.fetched.items() if number > 1 and is_operand(key[0])]
        assert not again or kind in ("written", "job"), f"{again[0]} was sent twice to the same worker"
        peak = max(worker.peak for worker in self.workers.values())
        # Tasks that read blocks of two waves at a time get more slots than the plan has, if these fit.
        bound = plan.cluster.memory if kind == "transposed" else plan.peak.worker
        assert kind == "job" or peak <= bound, f"{peak / BLOCK} blocks on a worker, and {bound / BLOCK} are the bound"
        if len(plan.waves) == 1 and kind != "transposed" and drawn.grid.layers == 1:
            moved = BLOCK * sum(number for (key, _), number in self.fetched.items() if is_operand(key))
            assert moved == plan.cost.bytes_moved, f"{moved / BLOCK} blocks moved, not {plan.cost.bytes_moved / BLOCK}"

    def _check_nothing_is_left(self) -> None:
        plugin = self.plugin
        assert not self.scheduler.tasks, f"tasks are left that nobody wants: {list(self.scheduler.tasks)[:4]}"
        assert not self.scheduler.unrunnable
        left = {**vars(plugin.products), **vars(plugin.products.replicas)}
        names = [name for name, table in left.items() if name not in ("ranks", "replicas") and list(table)]
        assert not names, f"the plugin still has {names}"
        for worker in self._living():
            assert not worker.state.tasks, f"{worker.address} still has {list(worker.state.tasks)[:4]}"
