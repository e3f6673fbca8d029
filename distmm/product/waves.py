"""The client's loop over the waves of a product, for `out=` and for jobs.

The client sends the graph of a wave, and passes each ended task to a callback. It sends the next wave when only one
wave is still running, and few enough tasks of that wave remain. The scheduler therefore has at most two waves at a
time, and the time of the loop grows linearly with the number of blocks.

The loop sleeps until a task ends. It also wakes every `BEAT_SECONDS`, so that the caller can check things that send no
message, such as a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from distributed import Client, Future

from distmm.clusters.waiting import seceded, watched
from distmm.transfer.counted_writes import CountedRun

BEAT_SECONDS = 0.5

# Sends a wave. Returns its futures and its tail: the next wave is sent when at most so many of its tasks remain.
SendWave = Callable[[], tuple[Sequence[Future], float]]


class Waves:
    """Sends waves to a cluster, and collects what their tasks return.

    Parameters
    ----------
    client : distributed.Client
    take : callable
        Called with each ended future, in the order in which they end. An exception ends the loop. The callable may use
        `send`, to compute a block again.
    beat : callable, optional
        Called before each wave is sent, after each task, and every `BEAT_SECONDS`. An exception ends the loop.
    run : CountedRun, optional
        The writes of the tasks. They are ended if the loop ends early.
    grace : callable, optional
        Called if the loop ends early. Returns the seconds that tasks on a worker may still run before they are
        cancelled, 0 by default. None: no task is cancelled.
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
        # Waves in flight, and blocks that are computed again, the earliest first: tail, and keys that have not ended.
        self.sent: list[tuple[float, set[Any]]] = []
        self._pending: dict[Any, Future] = {}  # by key: the tasks that have not ended
        self._ended: SimpleQueue[Future] = SimpleQueue()

    def run(self, waves: Iterable[SendWave]) -> None:
        """Send the waves one after another, and return when the callback has taken all their tasks.

        If the loop ends early, by an error, a stop or Ctrl-C, it cancels the tasks. No task writes any more when this
        method returns (`CountedRun.end`).
        """
        with watched(self.client), seceded():
            self._run(iter(waves))

    def _run(self, coming: Iterator[SendWave]) -> None:
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
                error.add_note("the scheduler is lost: workers may write to out until they have ended")
            raise
        finally:
            # A task stays on the cluster until its future is released. The traceback of an error and Dask's event loop
            # keep references to futures after this method has returned.
            for future in self._pending.values():
                future.release()
            self.sent.clear()
            self._pending.clear()
            self._ended = SimpleQueue()

    def send(self, futures: Sequence[Future], tail: float) -> None:
        """Add tasks to wait for: a wave, or a block that is computed again."""
        if not futures:
            return
        self.sent.append((tail, {future.key for future in futures}))
        for future in futures:
            self._pending[future.key] = future
            future.add_done_callback(self._ended.put)

    def may_send(self) -> bool:
        """Whether the next wave may be sent: one wave is running at most, and few enough of its tasks remain."""
        return not self.sent or (len(self.sent) == 1 and len(self.sent[0][1]) <= self.sent[0][0])

    def _take_next(self) -> None:
        """Wait for a task to end, and pass it to the callback."""
        future = None
        with suppress(Empty):
            future = self._ended.get(timeout=BEAT_SECONDS)
        # The futures of a closed client never end, or it has cancelled them. The callback would ask one of these for
        # its error, and wait for the client's event loop, which has stopped.
        if self.client.status in ("closing", "closed"):
            raise CancelledError("the client was closed while its tasks ran")
        if future is None:
            return
        self._forget(future)
        try:
            self.take(future)
        except BaseException:
            future.release()
            raise

    def _forget(self, future: Future) -> None:
        """Remove an ended task from the tasks to wait for."""
        del self._pending[future.key]
        for _, keys in self.sent:
            keys.discard(future.key)
        self.sent = [one for one in self.sent if one[1]]

    def _wind_up(self) -> bool:
        """End the tasks in flight. Return False if the scheduler could not be reached.

        Tasks that a worker has received may run for the seconds of `grace`. The others are cancelled at once. No task
        of the run writes afterwards, except those that take longer than the grace.
        """
        grace = self.grace()
        if grace is None:
            return True
        if self.client.status != "running":
            return False
        deadline = time.monotonic() + grace
        try:
            begun = self._begun() if grace else set()
            self._release(self._pending.keys() - begun)
            self._await(begun, deadline)
            self._release(begun)
            if self.writes is not None:
                self.writes.end(self.client, max(0.0, deadline - time.monotonic()) if grace else None)
        except (OSError, TimeoutError):
            return False  # the scheduler was lost in the meantime, and its tasks with it
        return True

    def _begun(self) -> set[Any]:
        """Return the keys of the tasks that the scheduler has sent to a worker: their inputs are computed."""
        return self._pending.keys() & {key for keys in self.client.processing().values() for key in keys}

    def _await(self, keys: Iterable[Any], deadline: float) -> None:
        """Wait until these tasks have ended, or until the deadline (a time of `time.monotonic`)."""
        left = {key for key in keys if not self._pending[key].done()}
        while left and (seconds := deadline - time.monotonic()) > 0:
            try:
                left.discard(self._ended.get(timeout=seconds).key)
            except Empty:
                return

    def _release(self, keys: Iterable[Any]) -> None:
        """Let the scheduler forget tasks that nobody else wants. `Client.cancel` would also end those of others."""
        for key in keys:
            self._pending[key].release()
