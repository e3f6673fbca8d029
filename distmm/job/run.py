"""One run of a job: lock, manifest, missing units, certificate, and C's final name."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from distributed import Client

from distmm.checking.verdict import Verdict
from distmm.clusters import view
from distmm.errors import DistmmError, InputError, Stopped, UndecidedError, WrongResultError
from distmm.job.certificate import certificate
from distmm.job.commit import complete_units, drop_markers, finish, refuse_another_draft, trusted_units
from distmm.job.computation import Computation, tell_failure
from distmm.job.folder import Json
from distmm.job.inputs import Inputs, orders
from distmm.job.judge import Judge
from distmm.job.lock import Lock, locked
from distmm.job.manifest import add_run, new_manifest, recorded_end, refuse_changes, run_of, write_manifest
from distmm.job.records import read_manifest
from distmm.job.reduction import Entries
from distmm.job.sampled_rows import check_sample
from distmm.job.summary import Made, Summary, save_report, write_report
from distmm.job.target import Target
from distmm.job.unfinished import explained, past_deadline
from distmm.job.writer import Writer
from distmm.planning.plan import Plan
from distmm.storage import is_url, open_matrix, output_type, replaced
from distmm.telemetry import client as telemetry
from distmm.transfer.counted_writes import CountedRun
from distmm_kernels.tolerance import Tolerance

if TYPE_CHECKING:
    from distmm.job.job import Job


class Run:
    """One run.

    Parameters
    ----------
    job : Job
    client : distributed.Client
    plan : Plan
    begun : dict or None
        The manifest of an unfinished job.
    asked : dict
        Description of the files of A, B and C0 when the call began.
    note : str
        The reason for a second plan in the same call.
    """

    def __init__(self, job: Job, client: Client, plan: Plan, begun: Json | None, asked: Json, note: str) -> None:
        self.job, self.client, self.plan, self.begun, self.asked, self.note = job, client, plan, begun, asked, note
        self.spec, self.contents, self.stop = job.spec, job.spec.contents, job.stop
        self.folder = job.folder if begun is None else job.folder.of_job(begun["id"])
        self.units = self.contents.units(plan.block_shape)
        types = self.spec.a.dtype, self.spec.b.dtype, self.spec.dtype
        rounding = Tolerance.of(*types, self.spec.problem.k, self.spec.choices.precision)
        self.tolerance = rounding if self.spec.check == "freivalds" else None  # None: blocks are not checked
        self.inputs = Inputs(client, self.spec, plan.blocking, plan.cluster.device)

    def complete(self) -> Summary:
        """Compute the missing units, and end the job."""
        self.plan.validate()
        self.plan.validate_run()
        if self.begun is None:
            self.job.check_room()  # again: the cluster may have started for hours
        with ExitStack() as stack:
            lock: Lock | None = None
            try:
                lock = stack.enter_context(locked(self.folder.path))
                self.lock, self.folder = lock, self.folder.owned(lock.token)
                self._refuse_changes()
                self._begin()
                with recorded_end(self.folder, lock, self.stop):
                    return self._complete()
            except (InputError, OSError) as error:
                if lock is not None:
                    lock.refuse_if_lost()  # another job may be the reason why files are missing or changed
                if isinstance(error, OSError):
                    raise self._explained(error) from error
                raise

    def _refuse_changes(self) -> None:
        """Raise `InputError` if job or inputs changed before this run had the lock."""
        folder, job, begun = self.folder, self.job, self.begun
        if not job.overwrite:
            now = read_manifest(folder) if folder.exists() else None
            if (begun and begun["id"]) != (now and now["id"]):
                raise InputError(f"{folder.path}: another call has just begun or ended this job: call again")
            if now is not None:
                refuse_changes(folder, self.spec)
                if folder.store.exists(folder.of_job(now["id"]).pending_certificate):
                    raise InputError(f"{folder.path}: another call has just completed this job: call again")
        now = self.spec.files(again=True)
        if changed := [facts["path"] for name, facts in self.asked.items() if facts != now[name]]:
            raise InputError(f"{' and '.join(changed)} changed during this call: call again when they are complete")

    def _begin(self) -> None:
        """Write the manifest and the empty draft of a new job, or add a run to the manifest of an unfinished job."""
        folder, plan, job = self.folder, self.plan, self.job
        if self.begun is not None:
            manifest = self.begun
            folder.rename_draft()
            markers = folder.markers().values()
            misread = self.inputs.misread(manifest["stamps"], markers)
            drop_markers(self.client, folder, [(one["i"], one["j"]) for one in misread])
            manifest["rejected"] += len(misread)
            manifest["stamps"] = self.inputs.unchanged(manifest["stamps"], folder.markers().values())
        else:
            folder.clear()
            self.folder = folder = folder.of_job(secrets.token_hex(8))
            try:
                folder.make()
                given = None if (edges := self.spec.choices.blocks) is None else list(map(int, edges))
                out = replaced(job.out) if job.replaces else job.out
                target = self.contents.create(out, folder, plan.block_shape, job.replaces, given)
            except BaseException:
                with suppress(OSError):  # the next job removes it, too
                    folder.store.discard(folder.work, os.path.dirname(folder.work))
                raise
            description = target.description()
            manifest = new_manifest(
                folder.id, self.spec, out, job.replaces, plan, job.keywords.get("seed"), description
            )
            if given is not None:
                manifest["blocks_given"] = given
        manifest["most"] = manifest.get("most") if job.most is None else job.most
        add_run(manifest, run_of(plan, self.client, self.stop.seconds), folder.markers().values())
        write_manifest(folder, manifest)
        self.manifest, self.folder = manifest, folder.of_job(manifest["id"])

    def _complete(self) -> Summary:
        """Compute the missing units. Check that the result is complete, certify it, and give it its final name."""
        job, client = self.job, self.client
        target = self.contents.reopen(job.out, self.folder, self.plan.block_shape, job.replaces)
        refuse_another_draft(self.folder, self.manifest, target)
        target.detach()
        made = self._compute(target)
        try:
            try:
                markers = complete_units(self.folder, self.units, self.manifest, target)
                target.finish(markers)
                sample = self._check(markers)
            except InputError as error:
                raise self._explained(error) from error
            self.manifest["runs"][-1]["ended"] = time.time()
            content = certificate(self.manifest, markers, self.tolerance, made.seconds, sample)
            self.spec.refuse(job.out, job.replaces)  # other files may have been created in the meantime
            finish(self.folder, content, self.lock)
            return Summary.of(self.folder, content, self.plan, made)
        except (DistmmError, OSError) as error:
            tell_failure(client, self.lock.token, error)
            if isinstance(error, WrongResultError):  # after other errors another job may have taken over the output
                save_report(client, self.folder, self.lock.token, self.manifest["runs"])
            raise

    def _compute(self, target: Target) -> Made:
        """Compute the missing units."""
        client, folder, spec, plan, manifest = self.client, self.folder, self.spec, self.plan, self.manifest
        view.ask(client)
        done = trusted_units(client, folder, self.units, target)
        Lock.check(folder.path, self.lock.token)
        if is_url(folder.target) and folder.store.exists(folder.certificate):
            folder.store.remove(folder.certificate)  # of a C that `keep_only` removes: an object store has no rename
        target.keep_only(done)
        judge = Judge(
            folder.id, self.contents, plan, self.tolerance, manifest["seed"], spec.alpha, spec.beta,
            orders(spec, plan.cluster.device),
        )  # fmt: skip
        writer = Writer(folder, CountedRun(self.lock.token), target, judge)
        entries = Entries.of(spec.reduction, spec.dtype, plan, folder, manifest["most"])
        progress = self.job.keywords.get("progress")
        computation = Computation(client, spec, plan, writer, self.stop, progress, entries, self.note)
        for marker in done.values():
            computation.seen.add(marker)
        missing = self.units - done.keys()

        def flops(count: int) -> float:
            return plan.problem.flops * count / max(1, len(self.units))

        if (announce := self.job.keywords.get("announce")) is not None:
            announce(plan, flops(len(missing)))
        started = time.perf_counter()
        try:
            for marker in done.values():
                entries.take(marker)
            computation.run(missing)
            manifest["stamps"] = self.inputs.unchanged(manifest["stamps"], folder.markers().values())
        except BaseException as error:
            raise self._ended_early(error) from (error if isinstance(error, DistmmError) else None)
        finally:
            if computation.rejected:
                manifest["rejected"] += len(computation.rejected)
                Lock.check(folder.path, self.lock.token)
                write_manifest(folder, manifest)
            write_report(client, folder, computation, manifest)
        seconds = time.perf_counter() - started
        figures = telemetry.figures(client, computation.job)  # after the report, for which all workers were asked
        moved = 0 if figures is None else figures.moved
        return Made(len(done), len(computation.rejected), seconds, flops(computation.written), moved)

    def _ended_early(self, error: BaseException) -> BaseException:
        """Return the error of a run that has ended before all units were written."""
        if isinstance(error, DistmmError):
            if isinstance(error, Stopped) and self.stop.seconds is not None:
                error = past_deadline(error, self.folder, self.manifest, self.spec, self.plan)
            return self._explained(error)
        if self.stop.at_once:
            return self._explained(Stopped(f"{self.stop.reason}, twice"))
        if self.client.status != "running" and not isinstance(error, (KeyboardInterrupt, SystemExit)):
            # A lost scheduler causes various errors: cancelled futures, closed connections. Their text has the keys of
            # all tasks. scancel ends the scheduler and this process at once.
            return self._explained(Stopped(self.stop.reason or f"the scheduler is lost ({type(error).__name__})"))
        return error

    def _explained(self, error: DistmmError | OSError) -> Exception:
        return explained(error, self.folder, self.spec, self.job.out, len(self.units))

    def _check(self, markers: list[Json]) -> Verdict | None:
        """Check the whole result before it gets its name: all of C, or sampled rows of a reduced product.

        A result that is not right is kept under another name.

        Returns
        -------
        Verdict or None
            The verdict on the sampled rows.

        Raises
        ------
        WrongResultError, UndecidedError
        """
        folder, spec, manifest = self.folder, self.spec, self.manifest
        if spec.check == "full":
            verdict = spec.verify(open_matrix(folder.draft), check="full")
        elif spec.reduction is not None and spec.check != "none":
            content = {**manifest, "done": markers}
            verdict = check_sample(self.client, spec, folder.draft, content, manifest["seed"])
        else:
            return None
        if verdict or (spec.reduction is not None and verdict.outcome != "wrong"):
            return None if spec.reduction is None else verdict
        Lock.check(folder.path, self.lock.token)
        kept = output_type(folder.target)(folder.target, folder.draft, self.job.replaces).set_aside()
        folder.clear()
        error = WrongResultError if verdict.outcome == "wrong" else UndecidedError
        raise error(f"{verdict.message}; the result is kept as {kept}")
