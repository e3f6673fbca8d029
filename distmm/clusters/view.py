"""What a client knows of its cluster: one message asks for all that a call needs, and its answer is kept.

The scheduler installs distmm's plugins, asks all workers at the same time, and then tells the client of the first
change: of the workers, or of their memory, which changes when any task does. Until then nothing is asked again. A
worker that does not answer, such as a stopped process, holds nobody up for longer than `ANSWER_SECONDS`: what it said
last counts, and a worker that has never answered is left out.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from distmm.clusters.results import take_tickets
from distmm.errors import InputError
from distmm.scheduler.dask_extensions import CHANGES_TOPIC
from distmm.telemetry.faults import tolerated
from distmm.transfer import lending, process_memory

if TYPE_CHECKING:
    from distributed import Client, Scheduler

# Seconds in which a worker answers. Longer than a task that holds the interpreter's lock, shorter than patience.
ANSWER_SECONDS = 10.0

# Seconds in which the scheduler answers, its workers included.
SCHEDULER_SECONDS = 60.0

# Seconds after which answers are old, though no change was told of: workers free some memory when no task runs.
FRESH_SECONDS = 10.0

# A function of a worker, and its arguments; the worker is its last argument.
Question = tuple[Callable[..., Any], tuple[Hashable, ...]]


@dataclass
class _View:
    """Answers of a cluster.

    Attributes
    ----------
    hosts : dict
        Hosts of the workers by address; None if the workers have changed.
    connection : object
        The client's connection to the scheduler when it was last asked. After a lost one another scheduler may be
        there, which has no plugins and has told of no change.
    reads : dict
        Whether a worker reads this process's memory, by address.
    answers : dict
        For each question: time, `changes` at that time, and the scheduler's answer, or those of the workers by address.
    changes : int
        Changes that the scheduler has told of.
    """

    hosts: dict[str, str] | None = None
    connection: object = None
    since: float = 0.0
    reads: dict[str, bool] = field(default_factory=dict)
    answers: dict[Question, tuple[float, int, Any]] = field(default_factory=dict)
    changes: int = 0

    def known(self, question: Question, old: bool) -> Any:
        """Return the answer that was kept; None if it is older than `FRESH_SECONDS`, or than a change, if not `old`."""
        when, changes, answer = self.answers.get(question, (-math.inf, 0, None))
        return answer if when > time.monotonic() - FRESH_SECONDS and (old or changes == self.changes) else None

    def keep(self, question: Question, answer: Any, changes: int) -> None:
        """Keep an answer with the time, and the number of changes before the question. Forget what is old."""
        now = time.monotonic()
        for key, (asked, *_) in list(self.answers.items()):  # a copy: the event loop may clear the answers meanwhile
            if asked <= now - FRESH_SECONDS:
                self.answers.pop(key, None)
        self.answers[question] = now, changes, answer


_views: weakref.WeakKeyDictionary[Client, _View] = weakref.WeakKeyDictionary()


def ask(client: Client, question: Question | None = None, old: bool = False) -> dict[str, Any]:
    """Return the answers of all workers to a question, by address. Plugins of distmm are installed then.

    Costs one message to the scheduler; none if nothing has changed since the question was last asked. With `old`, none
    if these workers have answered within `FRESH_SECONDS`, though tasks have changed their memory since.

    Raises
    ------
    InputError
        If the scheduler, or every worker, does not answer.
    Exception
        The error of the question on a worker, or of a worker's plugin.
    """
    view = _views.get(client)
    if view is None:
        view = _views[client] = _View()
        client.subscribe_topic(CHANGES_TOPIC, partial(_changed, weakref.ref(client)))  # which the client holds
        take_tickets(client, lambda address: view.reads.get(address, False))  # who reads it runs on its host
    if view.connection is not client.scheduler_comm:
        view.connection = client.scheduler_comm
        _forget_workers(client, view)
    if view.hosts is not None and view.since > time.monotonic() - FRESH_SECONDS:
        if question is None:
            return {}
        if answers := view.known(question, old):
            return dict(answers)
    return _asked(client, view, question)


def _asked(client: Client, view: _View, question: Question | None) -> dict[str, Any]:
    from distributed.protocol.pickle import dumps

    from distmm.worker.dask_internals import send_soon  # late, as the plugins below: only a cluster needs them
    from distmm.worker.plugin import DevicePlugin

    process_memory.allow()
    proof = process_memory.proof()
    changes = view.changes
    asked = client.id, dumps(DevicePlugin()), dumps(question) if question else None, proof, ANSWER_SECONDS
    hosts, reads, answers = _run(client, _answer, *asked)
    send_soon(client)
    if question is not None and hosts and not answers:
        raise InputError(
            f"none of the {len(hosts)} workers, such as {next(iter(hosts))}, has answered for {ANSWER_SECONDS:.0f} s: "
            "are their processes stopped, or do their tasks hold Python's interpreter lock? Try again when they answer"
        )
    if view.changes == changes:
        view.hosts, view.since = hosts, time.monotonic()
        view.reads = {address: read for address, read in {**view.reads, **reads}.items() if address in hosts}
        lending.note_reach(client, bool(view.reads) and all(view.reads.values()))
        if question is not None:
            view.keep(question, answers, changes)
    return answers


def on_scheduler(client: Client, function: Callable[..., Any], argument: Hashable, old: bool = False) -> Any:
    """Return ``await function(argument, dask_scheduler=...)``; the answer is kept until a task or worker changes.

    With `old`, a change of a task does not matter, and the answer is kept for `FRESH_SECONDS`.
    """
    from distributed.protocol.pickle import loads

    ask(client)
    view, question = _views[client], (function, (argument,))
    if (answer := view.known(question, old)) is None:
        changes, answer = view.changes, loads(_run(client, _told, client.id, function, argument))
        if view.changes == changes:
            view.keep(question, answer, changes)
    return answer


async def _told(client: str, function: Callable[..., Any], argument: Hashable, dask_scheduler: Scheduler) -> bytes:
    """Answer a question to the scheduler, in bytes: Dask looks at each item of a list, which takes 40 us.

    The scheduler then tells the client of the next change.
    """
    from distributed.protocol.pickle import dumps

    from distmm.scheduler.plugin import PlacementPlugin

    if (placement := dask_scheduler.plugins.get(PlacementPlugin.name)) is not None:  # None: a new scheduler
        placement.changes.tell(client)
    return dumps(await function(argument, dask_scheduler=dask_scheduler))


def _run(client: Client, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on the scheduler."""
    try:
        return client.run_on_scheduler(function, *args, callback_timeout=SCHEDULER_SECONDS)
    except TimeoutError:
        raise InputError(
            f"the scheduler at {client.scheduler.address} has not answered for {SCHEDULER_SECONDS:.0f} s: is its "
            "process stopped, or its host overloaded? Connect to one that runs, with distributed.Client(address)"
        ) from None


def forget(client: Client) -> bool:
    """Ask again at the next call. Returns whether anything was known."""
    view = _views.get(client)
    if view is None or not view.answers:
        return False
    view.answers.clear()
    return True


def hosts_of(client: Client) -> dict[str, str]:
    """Return the host of each worker, by address."""
    ask(client)
    return _views[client].hosts or {}


def _changed(reference: weakref.ref[Client], event: tuple[float, str]) -> None:
    """Handle the scheduler's message that something has changed."""
    if (client := reference()) is None:
        return
    view = _views[client]
    view.changes += 1
    if event[1] == "workers":
        _forget_workers(client, view)


def _forget_workers(client: Client, view: _View) -> None:
    """Forget what workers have said: there may be others."""
    view.hosts = None
    view.answers.clear()
    lending.forget_reach(client)


async def _answer(
    client: str,
    plugin: bytes,
    question: bytes | None,
    proof: Any,
    seconds: float,
    dask_scheduler: Scheduler,
) -> tuple[dict[str, str], dict[str, bool], dict[str, Any]]:
    """Install plugins, and ask all workers; return hosts, who reads the client's memory, and answers.

    Runs on the scheduler.
    """
    from distmm.scheduler.plugin import PlacementPlugin
    from distmm.scheduler.worker_answers import ask_workers, send
    from distmm.telemetry.scheduler import Telemetry
    from distmm.transfer import loan_readers
    from distmm.worker.dask_internals import send_soon
    from distmm.worker.plugin import DevicePlugin

    send_soon(dask_scheduler)
    loan_readers.install(dask_scheduler)
    await dask_scheduler.register_scheduler_plugin(PlacementPlugin(), idempotent=True)
    with tolerated("telemetry"):
        await dask_scheduler.register_scheduler_plugin(Telemetry(), idempotent=True)
    placement = dask_scheduler.plugins[PlacementPlugin.name]
    placement.changes.tell(client)  # of changes from now on
    if DevicePlugin.name not in dask_scheduler.worker_plugins:
        dask_scheduler.worker_plugins[DevicePlugin.name] = plugin  # the scheduler sends it to new workers
        await send(dask_scheduler, {"op": "plugin-add", "plugin": plugin, "name": DevicePlugin.name}, seconds)
    while True:
        hosts = {address: worker.host for address, worker in dask_scheduler.workers.items()}
        found = await ask_workers(dask_scheduler, placement.said, question, proof, seconds)
        if not hosts or hosts.keys() & dask_scheduler.workers.keys():
            return hosts, *found  # otherwise all have left meanwhile, as in a restart: others may be there
