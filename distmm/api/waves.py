"""One loop over the waves of a product, for `out=` and for jobs: what the client does while the cluster computes.

The client sends the graph of a wave, and hands each task of it to a callback when the task has ended. It sends the next
wave when all waves but the last are complete, and of the last one few enough blocks are still to be made. So the
cluster never knows of more than two waves, and the time of the loop grows linearly with the number of blocks.

The loop sleeps until a task ends or a worker tells that it has made a block (`Waves.note_made`). Once in `BEAT_SECONDS`
it wakes by itself: the caller then looks at what sends no message, such as a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from distributed import Client, Future, Scheduler

from distmm.clusters.silence import unless_silent
from distmm.transfer.counted_writes import CountedRun

__all__ = ["Graph", "Sent", "Waves"]

BEAT_SECONDS = 0.5

Graph = Callable[[], tuple[Sequence[Future], float]]  # sends a wave; returns its futures and its tail (see `Sent`)


@dataclass
class Sent:
    """A wave on the cluster, or one block that is made again.

    Attributes
    ----------
    tasks : int
        Tasks that write its blocks.
    tail : float
        The next wave is sent when at most so many blocks of this one are still to be made: 0 sends it when this one is
        complete (or where workers tell, when its blocks have only to be written), infinity sends it at once.
    pending : dict
        The tasks that have not ended, by key.
    made : set
        Keys of the tasks whose blocks are made, and have only to be written; empty where workers do not tell.
    """

    tasks: int
    tail: float
    pending: dict[Any, Future]
    made: set[Any] = field(default_factory=set)

    @property
    def may_be_followed(self) -> bool:
        """Whether the next wave may be sent, as far as this one is concerned."""
        return not self.pending or min(self.tasks - len(self.made), len(self.pending)) <= self.tail


class Waves:
    """Sends waves to a cluster, and collects what their tasks return.

    Parameters
    ----------
    client : distributed.Client
    take : callable
        Called with each future that has ended, in the order in which they end; what it raises ends the loop. It may
        call `send`, to have a block made again, and `others`, to take several at once.
    beat : callable, optional
        Called before each wave is sent, after each task, and every `BEAT_SECONDS`; what it raises ends the loop.
    run : CountedRun, optional
        The writes of the tasks, which are ended with the loop if it ends early.
    grace : callable, optional
        Seconds that tasks which a worker has begun get to end by themselves, if the loop ends early; None: the cluster
        is left as it is. 0 by default.
    """

    def __init__(
        self,
        client: Client,
        take: Callable[[Future], object],
        *,
        beat: Callable[[], object] = lambda: None,
        run: CountedRun | None = None,
        grace: Callable[[], float | None] = lambda: 0.0,
    ) -> None:
        self.client, self.take, self.beat, self.writes, self.grace = client, take, beat, run, grace
        self.sent: list[Sent] = []  # in flight, the earliest first
        self._sent_of: dict[Any, Sent] = {}  # by key of a task that has not ended
        self._made_early: set[Any] = set()  # keys of tasks that a worker told of before this process knew their futures
        self._news: SimpleQueue[Future | None] = SimpleQueue()  # tasks that have ended; None: a block is made
        self._taken: list[Future] = []  # with the callback

    def run(self, waves: Iterable[Graph]) -> None:
        """Send the waves one after another, and return when all their tasks have been taken.

        If it ends early, by an error, a stop or Ctrl-C, the tasks are cancelled, and none of them writes any more when
        this method returns (`CountedRun.end`).
        """
        with unless_silent(self.client):
            self._run(iter(waves))

    def _run(self, coming: Iterator[Graph]) -> None:
        graph = next(coming, None)
        try:
            while graph is not None or self.sent:
                self.beat()
                if graph is not None and self.may_send():
                    self.send(*graph())
                    graph = next(coming, None)
                    continue
                self._take_next()
        except BaseException as error:
            if not self._wind_up() and self.writes is not None:
                error.add_note("the scheduler is lost: out is at rest when its workers have ended")
            raise
        finally:
            # A task stays on the cluster as long as its future is not released. The traceback of an error and Dask's
            # loop refer to futures for longer than this method runs.
            for sent in self.sent:
                for future in sent.pending.values():
                    future.release()
            self.sent.clear()
            self._sent_of.clear()
            self._news = SimpleQueue()

    def send(self, futures: Sequence[Future], tail: float) -> None:
        """Wait for some more tasks, too, as for a wave."""
        if not futures:
            return
        sent = Sent(len(futures), tail, {future.key: future for future in futures})
        self.sent.append(sent)
        for future in futures:
            self._sent_of[future.key] = sent
            future.add_done_callback(self._news.put)
        sent.made |= self._made_early & sent.pending.keys()
        self._made_early -= sent.made

    def may_send(self) -> bool:
        """Whether the next wave may be sent."""
        return not self.sent or (len(self.sent) == 1 and self.sent[0].may_be_followed)

    def note_made(self, key: Any) -> None:
        """Note that the block which a task writes is made. Any thread may call it."""
        if (sent := self._sent_of.get(key)) is not None:
            sent.made.add(key)
            self._news.put(None)
        else:
            self._made_early.add(key)

    def _take_next(self) -> None:
        """Wait for news, and take a task that has ended."""
        try:
            future = self._news.get(timeout=BEAT_SECONDS)
        except Empty:
            if self.client.status in ("closing", "closed"):  # its futures never end
                raise CancelledError("the client was closed while its tasks ran") from None
            return
        if future is not None:
            self._forget(future)
            try:
                self.take(future)
            except BaseException:
                for one in self._taken:
                    one.release()
                raise
            finally:
                self._taken.clear()

    def others(self) -> list[Future]:
        """Return the tasks that have ended besides the one that `take` was called with; it takes these, too."""
        there = []
        while not self._news.empty():
            if (future := self._news.get()) is not None:
                self._forget(future)
                there.append(future)
        return there

    def _forget(self, future: Future) -> None:
        """Wait no more for a task, which has ended."""
        del self._sent_of.pop(future.key).pending[future.key]
        self.sent = [one for one in self.sent if one.pending]
        self._taken.append(future)

    def _wind_up(self) -> bool:
        """End the tasks in flight; return whether the cluster could be told so.

        Tasks that a worker has begun get their `grace`, the others are cancelled at once. Then no task of the run
        writes any more, but for those that take longer than their grace.
        """
        grace = self.grace()
        if grace is None:
            return True
        if self.client.status != "running":
            return False
        deadline = time.monotonic() + grace
        try:
            begun = self._begun() if grace else set()
            self._cancel(self._sent_of.keys() - begun)
            self._await(begun, deadline)
            self._cancel(begun)
            if self.writes is not None:
                self.writes.end(self.client, max(0.0, deadline - time.monotonic()) if grace else None)
        except (OSError, TimeoutError):
            return False  # the scheduler has gone meanwhile, and with it the tasks
        return True

    def _begun(self) -> set[Any]:
        """Keys of the tasks that are with a worker: all that they need is there."""
        keys = list(self._sent_of)

        def processing(dask_scheduler: Scheduler) -> list[Any]:
            tasks = dask_scheduler.tasks
            return [key for key in keys if key in tasks and tasks[key].state == "processing"]

        return set(self.client.run_on_scheduler(processing))

    def _await(self, keys: Iterable[Any], deadline: float) -> None:
        """Wait until some tasks have ended, or for the deadline."""
        left = {key for key in keys if not self._sent_of[key].pending[key].done()}
        while left and (seconds := deadline - time.monotonic()) > 0:
            try:
                future = self._news.get(timeout=seconds)
            except Empty:
                return
            if future is not None:
                left.discard(future.key)

    def _cancel(self, keys: Iterable[Any]) -> None:
        futures = [self._sent_of[key].pending[key] for key in keys]
        self.client.cancel(futures, force=True)
