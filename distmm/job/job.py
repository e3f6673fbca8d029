"""One run of a job: lock, manifest, missing blocks, certificate, and C's final name."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from distributed import Client

from distmm import clusters
from distmm.checking.tolerance import Tolerance
from distmm.clusters import cluster
from distmm.clusters.waiting import seceded, unless_silent
from distmm.errors import DeviceMemoryError, DistmmError, InputError, Stopped, WrongResultError
from distmm.job import job_report, planning, runs
from distmm.job.block_rows import RowFolder, assemble
from distmm.job.certificate import certificate
from distmm.job.commit import finish
from distmm.job.completeness import complete_markers, refuse_another_draft
from distmm.job.computation import Computation, tell_failure
from distmm.job.entries import MOST, Entries
from distmm.job.final_checks import FinalChecks
from distmm.job.finished_blocks import FinishedBlocks
from distmm.job.folder import Folder, Json
from distmm.job.input_checksums import orders
from distmm.job.lock import Lock, locked
from distmm.job.manifest import new_manifest, refuse_changes, run_of, write_manifest
from distmm.job.records import read_manifest
from distmm.job.reduction import Threshold
from distmm.job.spec import Spec, differences
from distmm.job.stop import Stop
from distmm.job.summary import Made, Summary
from distmm.job.unfinished import explained, no_progress, without_progress
from distmm.planning.plan import Plan
from distmm.product.context import computing
from distmm.product.thresholds import bytes_of_entry
from distmm.storage import Target, is_url, reserve_output
from distmm.telemetry import client as telemetry
from distmm.telemetry.figures import Figures
from distmm.transfer.counted_writes import CountedRun

__all__ = ["Announce", "Job", "Progress"]

Announce = Callable[[Plan, float], None]
Progress = Callable[[Figures], None]


@dataclass(frozen=True)
class Job:
    """A job: its output, its specification, and the user's options.

    Attributes
    ----------
    folder : Folder
    out : str
        The user's name of C.
    spec : Spec
    asked : dict
        Description of the files of A, B and C0 when the call began.
    overwrite : bool
    blocks, seed, plan, most
        The user's arguments. `most` is the limit of a threshold. A resumed job may have another limit.
    note : str
        The reason for a second plan in the same call.
    """

    folder: Folder
    out: str
    spec: Spec
    asked: Json
    overwrite: bool
    blocks: tuple[int, int, int] | None
    seed: int | None
    plan: str | None = None
    most: int | None = None
    note: str = ""

    def run(
        self, client: Client | None, device: cluster.Device, stop: Stop, announce: Announce | None, progress: Progress,
        anew: bool,
    ) -> Summary:  # fmt: skip
        """Plan, take the lock, and compute the missing blocks. After a full memory, repeat with a smaller plan."""
        folder = self.folder
        self.spec.refuse(self.out, self.overwrite)
        with ExitStack() as stack:
            if folder.exists() and not anew:
                refuse_changes(folder, self.spec, self.blocks, self.plan)
            client = computing(client) or stack.enter_context(clusters.local(device))
            stack.enter_context(seceded())
            stack.enter_context(client.as_current())
            stack.enter_context(unless_silent(client))  # for the waits for workers before and after the waves
            job, plan = self, None
            for attempt in itertools.count():
                begun = read_manifest(folder) if folder.exists() and not anew else None
                plan = plan or self._plan(client, device, begun, stop.deadline or None)
                try:
                    return job._run(client, plan, begun, stop, announce, progress, anew)
                except DeviceMemoryError as error:
                    manifest = read_manifest(folder)
                    plan, note = planning.smaller(self.spec, device, manifest, client, plan, error, attempt)
                job, anew = replace(self, note=note), False
        raise AssertionError("an error ends the loop")

    def _run(
        self, client: Client, plan: Plan, begun: Json | None, stop: Stop, announce: Announce | None,
        progress: Progress, anew: bool,
    ) -> Summary:  # fmt: skip
        """Compute the missing blocks by a plan. `begun` is the manifest of an unfinished job."""
        folder = self.folder
        plan.validate()
        plan.validate_run()
        if begun is None:
            reserve_output(folder.target, self.spec.result.nbytes(self.spec.problem.shape), self.overwrite)
        job = self if begun is None else replace(self, folder=folder.of_job(begun["id"]))
        with ExitStack() as stack:
            lock: Lock | None = None
            try:
                lock = stack.enter_context(locked(folder.path))
                job = replace(job, folder=job.folder.owned(lock.token))
                self._refuse_changes_since(begun, anew)
                manifest = job._begin(plan, client, begun)
                job = replace(job, folder=job.folder.of_job(manifest["id"]))
                with runs.recorded_end(job.folder, lock, stop):
                    return job._compute_and_finish(client, plan, manifest, lock, stop, announce, progress)
            except (InputError, OSError) as error:
                if lock is not None:
                    lock.refuse_if_lost()  # another job may be the reason why files are missing or changed
                if isinstance(error, OSError):
                    raise job._explained(error, plan) from error
                raise

    def _refuse_changes_since(self, begun: Json | None, anew: bool) -> None:
        """Raise `InputError` if job or inputs changed before this call had the lock."""
        folder = self.folder
        if not anew:
            now = read_manifest(folder) if folder.exists() else None
            if (begun and begun["id"]) != (now and now["id"]):
                raise InputError(f"{folder.path}: another call has just begun or ended this job: call again")
            if now is not None:
                refuse_changes(folder, self.spec, self.blocks, self.plan)
                if folder.store.exists(folder.of_job(now["id"]).pending_certificate):
                    raise InputError(f"{folder.path}: another call has just completed this job: call again")
        changed = list(differences(self.asked, self.spec.files(again=True)))
        if changed:
            raise InputError(
                f"inputs changed during this call ({'; '.join(changed)}): call again when they are complete"
            )

    def _plan(self, client: Client, device: cluster.Device, manifest: Json | None, deadline: float | None) -> Plan:
        """Plan for the current cluster. A resumed job keeps its blocks, and therefore its bits."""
        asked = planning.request(self.spec, device, self.blocks, manifest, self.plan, deadline)
        plan = planning.plan(self.spec, asked, client)
        if manifest is None:
            return plan
        before = manifest["runs"][0]["device"]
        if plan.cluster.device != before:
            raise InputError(
                f"{self.folder.path}: this job was begun on {before}, the workers here compute on "
                f"{plan.cluster.device}, whose bits differ: use the same kind, or start over with --overwrite"
            )
        return plan

    def _begin(self, plan: Plan, client: Client, begun: Json | None) -> Json:
        """Write the manifest and the empty draft of a new job, or add a run to the manifest of an unfinished job."""
        folder = self.folder
        if begun is not None:
            manifest = begun
            folder.rename_draft()
            finished = FinishedBlocks(client, folder, self.spec, plan)
            manifest["rejected"] += finished.drop_misread(manifest["stamps"])
            manifest["stamps"] = finished.unchanged(manifest["stamps"])
        else:
            folder.clear()
            folder = folder.of_job(secrets.token_hex(8))
            try:
                folder.make()
                target = self.spec.result.create(self.out, folder, plan, self.overwrite)
            except BaseException:
                with suppress(OSError):  # the next job removes it, too
                    folder.store.discard(folder.work, os.path.dirname(folder.work))
                raise
            manifest = new_manifest(
                folder.id, self.spec, self.out, self.overwrite, plan, self.seed, target.description()
            )
        manifest["most"] = manifest.get("most") if self.most is None else self.most
        runs.add_run(manifest, run_of(plan, client), folder.markers().values())
        write_manifest(folder, manifest)
        return manifest

    def _compute_and_finish(
        self, client: Client, plan: Plan, manifest: Json, lock: Lock, stop: Stop, announce: Announce | None,
        progress: Progress,
    ) -> Summary:  # fmt: skip
        """Compute the missing blocks, and end the job."""
        target = self.spec.result.reopen(self.out, self.folder, self.overwrite)
        refuse_another_draft(self.folder, manifest, target)
        target.detach()
        made = self._compute(client, plan, manifest, lock, target, stop, announce, progress)
        try:
            return self._finish(client, plan, manifest, lock, target, made)
        except (DistmmError, OSError) as error:
            tell_failure(client, lock.token, error)
            if isinstance(error, WrongResultError):  # after other errors another job may have taken over the output
                job_report.of_failure(client, self.folder, lock.token, manifest["runs"])
            raise

    @property
    def _tolerance(self) -> Tolerance | None:
        """Tolerance of each block in the comparison with sketches. None if there is no such comparison."""
        spec = self.spec
        if spec.check != "freivalds":
            return None
        return Tolerance.of(spec.a.dtype, spec.b.dtype, spec.dtype, spec.problem.k, spec.precision)

    def _compute(
        self, client: Client, plan: Plan, manifest: Json, lock: Lock, target: Target | RowFolder, stop: Stop,
        announce: Announce | None, progress: Progress,
    ) -> Made:  # fmt: skip
        """Compute the missing blocks."""
        folder, spec = self.folder, self.spec
        blocks = self._units(plan)
        cluster.install(client)
        finished = FinishedBlocks(client, folder, spec, plan)
        done = finished.trusted(target)
        self._make_room(target, done, lock)
        writer = spec.result.writer(
            folder, CountedRun(lock.token), target, plan, self._tolerance, manifest["seed"], spec.alpha, spec.beta,
            orders(spec, plan.cluster.device),
        )  # fmt: skip
        kept = Entries(plan, self._most(manifest))
        computation = Computation(client, spec, plan, writer, stop, progress, kept, self.note)
        for marker in done.values():
            computation.seen.add(marker)
        missing = blocks - done.keys()

        def flops(count: int) -> float:
            return plan.problem.flops * count / max(1, len(blocks))

        if announce is not None:
            announce(plan, flops(len(missing)))
        started = time.perf_counter()
        try:
            for marker in done.values():
                kept.take(marker)
            computation.run(missing)
            finished.unchanged(manifest["stamps"])
        except DistmmError as error:
            if isinstance(error, Stopped) and stop.deadline is not None and without_progress(folder, manifest):
                error = no_progress(error, spec, plan)
            raise self._explained(error, plan) from error
        except BaseException as error:
            if stop.at_once:
                reason = f"{stop.reason}, twice"
            elif client.status != "running" and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                # A lost scheduler causes various errors: cancelled futures, closed connections.
                # Their text has the keys of all tasks. scancel ends the scheduler and this process at once.
                reason = stop.reason or f"the scheduler is lost ({type(error).__name__})"
            else:
                raise
            raise self._explained(Stopped(reason), plan) from None
        finally:
            if computation.rejected:
                manifest["rejected"] += len(computation.rejected)
                manifest.setdefault("retired", []).extend(computation.faulty.retired)
                Lock.check(folder.path, lock.token)
                write_manifest(folder, manifest)
            job_report.of_run(client, folder, computation, manifest)
        seconds = time.perf_counter() - started
        figures = telemetry.figures(client, computation.job)  # after the report, for which all workers were asked
        moved = 0 if figures is None else figures.moved
        return Made(len(done), len(computation.rejected), seconds, flops(computation.written), moved)

    def _make_room(self, target: Target | RowFolder, done: Collection[tuple[int, int]], lock: Lock) -> None:
        """Remove blocks without a marker from the output.

        Object stores have no rename, so blocks are written to C's final name. There this also removes the C that is
        replaced: first its certificate, then its metadata, then its chunks.
        """
        folder = self.folder
        Lock.check(folder.path, lock.token)
        if is_url(folder.target) and folder.store.exists(folder.certificate):
            folder.store.remove(folder.certificate)
        target.make_room(done)

    def _units(self, plan: Plan) -> set[tuple[int, int]]:
        """Return all units of the result: blocks of C, or block rows."""
        return {self.spec.result.unit(i, j) for _, i, j in plan.blocking.c_indices()}

    def _most(self, manifest: Json) -> float:
        """Return how many elements a threshold may keep: the user's limit, or as many as fit on the free disk."""
        reduction = self.spec.reduction
        if not isinstance(reduction, Threshold):
            return math.inf
        if manifest["most"] is not None:
            return int(manifest["most"])
        used = sum(entry.stat().st_size for entry in os.scandir(self.folder.block_rows))
        free = shutil.disk_usage(self.folder.path).free + used
        return int(free * MOST) // bytes_of_entry(reduction.dtype(self.spec.dtype))

    def _explained(self, error: DistmmError | OSError, plan: Plan) -> Exception:
        return explained(error, self.folder, self.spec, self.out, len(self._units(plan)))

    def _finish(
        self, client: Client, plan: Plan, manifest: Json, lock: Lock, target: Target | RowFolder, made: Made
    ) -> Summary:
        """Check that C is complete, write its certificate, and give C its final name."""
        checks, sample = FinalChecks(self.folder, self.spec, self.overwrite, lock), None
        try:
            markers = complete_markers(self.folder, manifest, target, self._units(plan))
            if isinstance(target, RowFolder):
                assemble(self.folder, target, markers, self._facts(manifest))
                sample = checks.sampled_rows(client, manifest, markers)
        except InputError as error:
            raise self._explained(error, plan) from error
        if self.spec.check == "full":
            checks.all_elements()
        manifest["runs"][-1]["ended"] = time.time()
        content = certificate(manifest, markers, self._tolerance, manifest["rejected"], made.seconds, sample)
        self.spec.refuse(self.out, self.overwrite)  # other files may have been created in the meantime
        finish(self.folder, content, lock)
        return Summary.of(self.folder, content, plan, made)

    def _facts(self, manifest: Json) -> Json:
        """Return the attribute ``distmm`` of the group of a reduced product."""
        output = {name: manifest["output"][name] for name in ("shape", "dtype")}
        return {"reduction": manifest["spec"]["reduction"], **output, "job": manifest["id"]}
