"""The client's loop of a job: it sends waves, collects the records of their tasks, and sends rejected blocks again."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dask.array as da
from distributed import Client, Future, Scheduler

from distmm.errors import DistmmError, Stopped, WrongResultError
from distmm.job.folder import Json
from distmm.job.inputs import Seen
from distmm.job.reduction import Entries
from distmm.job.spec import Spec
from distmm.job.stop import Stop
from distmm.job.target import Unit
from distmm.job.unfinished import rejected_text, wrong_text
from distmm.job.wave_graph import graph_of
from distmm.job.writer import Writer
from distmm.planning.blocks import Wave
from distmm.planning.owners import Grid
from distmm.planning.plan import Plan
from distmm.product.smaller_plan import memory_full
from distmm.product.waves import SendWave, Waves
from distmm.telemetry import client as telemetry
from distmm.telemetry.figures import Figures
from distmm.telemetry.job_events import JOB_TOPIC

logger = logging.getLogger("distmm.job")

# Seconds between two queries to the scheduler. Each costs a round trip and a line in the scheduler's log.
LOOK_SECONDS = 0.5

# Seconds to wait for the writes of computed blocks when the job stops.
GRACE_SECONDS = 60.0

# Seconds without any worker after which the job stops. A nanny restarts a worker within a few seconds.
LONELY_SECONDS = 60.0

# Number of attempts to compute a block before the job fails.
ATTEMPTS = 3


@dataclass(eq=False)
class Computation:
    """Computes and writes the missing blocks of C.

    Parameters
    ----------
    client : distributed.Client
    spec : Spec
    plan : Plan
    writer : Writer
    stop : Stop
    progress : callable or None
        Called twice a second with the progress of the job.
    entries : Entries
        Counts the elements that a threshold keeps, and ends a job that keeps too many.
    note : str
        An incident before the first task, for the report.

    Attributes
    ----------
    job : str
        Telemetry's name for this run.
    seen : Seen
        The checksums of the inputs of all blocks, including those of earlier runs.
    written : int
        Number of blocks that this run has written.
    residual : float or None
        The largest residual of these blocks.
    rejected : list of dict
        Records of blocks that failed their check.
    """

    client: Client
    spec: Spec
    plan: Plan
    writer: Writer
    stop: Stop
    progress: Callable[[Figures], None] | None
    entries: Entries
    note: str = ""

    def __post_init__(self) -> None:
        self.job, self.seen = self.writer.run.id, Seen()
        self.written, self.residual = 0, None
        self.rejected: list[Json] = []
        grace = lambda: None if self.stop.at_once else GRACE_SECONDS  # noqa: E731
        self.waves = Waves(self.client, self._take, beat=self._beat, run=self.writer.run, grace=grace)
        self._lonely_since: float | None = None
        self._looked = 0.0

    def run(self, missing: Iterable[Unit]) -> None:
        """Compute and write the missing blocks, or block rows.

        Raises
        ------
        Stopped
            If a stop was requested, or the cluster is lost. Finished blocks are on the disk.
        WrongResultError
            If a block is wrong in all attempts.
        DeviceMemoryError
            If the memory of a worker is full.
        InputError, OSError
            For errors of files and disks on workers.
        """
        missing = set(missing)
        unit = self.spec.contents.unit
        kept = [[i, j] for _, i, j in self.plan.blocking.c_indices() if unit(i, j) not in missing]
        how = self.spec.reduction
        verb = "" if how is None else "nearest" if how.kind == "topk" and how.metric else how.kind
        self._event("begin", path=self.writer.folder.target, kept=kept, note=self.note, verb=verb)
        try:
            self.waves.run(self._graphs(missing))
            self._look()
        except (DistmmError, OSError) as error:
            tell_failure(self.client, self.job, error)
            raise
        except MemoryError as error:  # raised by NumPy, or by Dask when it receives blocks
            full = memory_full(error)
            tell_failure(self.client, self.job, full)
            raise full from error
        finally:
            # Breaks a reference cycle, which would keep operands in memory until the next garbage collection.
            del self.waves

    def _graphs(self, missing: set[Unit]) -> Iterator[SendWave]:
        """Yield functions that send each wave with its missing blocks. Complete waves are left out."""
        contents = self.spec.contents
        for waves in contents.together(self.plan):
            units = missing & {contents.unit(i, j) for _, i, j in self.plan.blocking.c_indices(waves[0])}
            if units:
                yield partial(self._send, waves, units, self.plan, self.writer)

    def _send(
        self, waves: tuple[Wave, ...], units: set[Unit], plan: Plan, writer: Writer
    ) -> tuple[list[Future], float]:
        """Send the graph of some blocks of a wave, or of some block rows of a group of waves, to the scheduler.

        The next wave is sent at once. On the scheduler both waves share the steps of the lookahead, and the slots for
        blocks of C. So they use the memory that is planned for one, and the next one's first blocks are read while the
        last products of this one run. The parts of reduced blocks have no slots: then few rows of this wave may remain.
        """
        product = f"distmm-matmul-{uuid.uuid4().hex}"
        graph, keys = graph_of(product, self.spec, plan, waves, units, writer, self.client)
        self._event("wave", product=product)
        futures = self.client.get(graph, keys, sync=False)
        # Blocks may come from tasks of the user's graph, whose keys are the same in every wave. Dask keeps their
        # results as long as any wave on the scheduler needs them. So a wave has to be complete before the next one.
        if any(isinstance(x.source, da.Array) and not x.resident for x in self.spec.operands.values()):
            return futures, 0
        return futures, math.inf if self.spec.reduction is None else min(plan.cluster.workers, len(futures) // 2)

    def _take(self, future: Future) -> None:
        """Process the record of an ended task."""
        try:
            record = future.result()
            if "changed" not in record:
                self.seen.add(record)
            if not record["written"]:
                self._compute_again(record)
                return
            self.written += 1
            if record.get("residual") is not None:
                self.residual = max(record["residual"], self.residual or 0.0)
            if self.writer.judge.tolerance is not None:
                columns = self.spec.contents.columns(record["j"], len(self.plan.blocking.n))
                self._event("accepted", blocks=[(record["i"], column) for column in columns])
            self.entries.take(record)
        except (DistmmError, OSError) as error:
            tell_failure(self.client, self.job, error)  # at once, because running tasks get some time to end
            raise

    def _compute_again(self, record: Json) -> None:
        """Send a rejected block again, to another worker if there is one."""
        i, j, contents = record["i"], record["j"], self.spec.contents
        unit = contents.unit(i, j)
        if "too_many" in record:
            self.entries.take(record)
        self._event("rejected", blocks=[(i, j)])
        for bad in record["bad"]:
            logger.warning("%s. It is computed again", rejected_text(bad))
        # The previous attempt; of a block row, that of its first wrong block.
        before = next((r for r in reversed(self.rejected) if contents.unit(r["i"], r["j"]) == unit), None)
        self.rejected.append(record)
        attempt = record["attempt"] + 1
        same = before is not None and before["crc32c"] == record["crc32c"]
        systematic = same and "changed" not in record and (record["residual"] is None or record["residual"] > 1)
        if attempt == ATTEMPTS or systematic:
            raise WrongResultError(wrong_text(record, before if systematic else None))
        shift = attempt if self.plan.cluster.workers > 1 else 0
        schedule, grid = self.plan.schedule, self.plan.grid
        assert isinstance(grid, Grid)  # blocks of A and B are in files
        plan = replace(self.plan, schedule=replace(schedule, grid=replace(grid, shift=shift)))
        waves = next(
            waves for waves in contents.together(self.plan) if any(i in w.rows and j in w.columns for w in waves)
        )
        judge = replace(self.writer.judge, plan=plan, attempt=attempt, rejected=tuple(record["bad"]))
        writer = replace(self.writer, judge=judge)
        self.waves.send(*self._send(waves, {unit}, plan, writer))

    def _event(self, event: str, **facts: Any) -> None:
        """Send telemetry an event that the scheduler does not see (`distmm.telemetry.job_events.JOB_TOPIC`)."""
        _log(self.client, {"event": event, "job": self.job, **facts})

    def _beat(self) -> None:
        """Raise Stopped if a stop was requested. Query the scheduler every `LOOK_SECONDS`."""
        if self.stop.reason is not None:
            raise Stopped(self.stop.reason)
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._look()
            self._looked = time.monotonic()

    def _look(self) -> None:
        """Report the progress. Raise Stopped if the scheduler, or all workers, are lost."""
        if self.client.status != "running":
            raise Stopped(f"the scheduler at {self.client.scheduler.address} is lost")
        try:
            workers, figures = self.client.run_on_scheduler(_progress, self.job)
        except (OSError, TimeoutError) as error:
            raise Stopped(f"the scheduler is lost ({type(error).__name__}: {error})") from error
        now = time.monotonic()
        self._lonely_since = None if workers else self._lonely_since or now
        if self._lonely_since is not None and now - self._lonely_since > LONELY_SECONDS:
            raise Stopped(f"the cluster has had no workers for {LONELY_SECONDS:.0f} s")
        if figures is not None and self.progress is not None:
            self.progress(figures)


def _progress(job: str, dask_scheduler: Scheduler) -> tuple[int, Figures | None]:
    """Return the number of workers, and the progress of a job. Runs on the scheduler."""
    return len(dask_scheduler.workers), telemetry.figures_on(dask_scheduler, job)


def tell_failure(client: Client, job: str, error: DistmmError | OSError) -> None:
    """Report to telemetry that a job has failed. An error that telemetry has already seen is not counted twice.

    A job that was stopped, or has lost its scheduler, has not failed.
    """
    if isinstance(error, (Stopped, ConnectionError)) or client.status != "running":
        return
    with suppress(OSError, TimeoutError):  # the scheduler was lost in the meantime
        _log(client, {"event": "failed", "job": job, "error": str(error)})


def _log(client: Client, message: Json) -> None:
    """Send an event. Dask sends only Unicode, and the name of a file may have bytes that are not: they are escaped."""
    escaped = {k: v.encode(errors="backslashreplace").decode() for k, v in message.items() if isinstance(v, str)}
    client.log_event(JOB_TOPIC, {**message, **escaped})
