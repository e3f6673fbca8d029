"""One run of a job: lock, manifest, missing blocks, certificate, and C's name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from distributed import Client

from distmm import clusters
from distmm.errors import DistmmError, InputError, Stopped, WrongResultError
from distmm.job import planning
from distmm.job.certificate import certificate, damaged
from distmm.job.folder import Folder, Json, read_json, write_json
from distmm.job.lock import Lock
from distmm.job.loop import Loop
from distmm.job.manifest import new_manifest, read_manifest, refuse_changes, run_of
from distmm.job.spec import Spec
from distmm.job.stop import Stop
from distmm.job.summary import Made, Summary
from distmm.job.wave import Writer
from distmm.plan import Plan
from distmm.runtime import cluster
from distmm.storage import check_output, create_output, open_matrix, reopen_output
from distmm.storage.output import Output
from distmm.telemetry import client as telemetry
from distmm.telemetry import report
from distmm.telemetry.events import TOPIC
from distmm.telemetry.record import Figures
from distmm.tolerance import Tolerance
from distmm.verify import verify

__all__ = ["Announce", "Job", "Progress"]

Announce = Callable[[Plan, float], None]
Progress = Callable[[Figures], None]


@dataclass(frozen=True)
class Job:
    """One output and what it shall be."""

    folder: Folder
    out: str
    spec: Spec
    overwrite: bool
    blocks: tuple[int, int, int] | None
    seed: int | None
    plan: str | None = None

    def run(
        self, client: Client | None, device: cluster.Device, stop: Stop, announce: Announce | None, progress: Progress,
        anew: bool,
    ) -> Summary:  # fmt: skip
        """Take the lock and do what is missing."""
        folder = self.folder
        with ExitStack() as held:
            if folder.exists() and not anew:
                refuse_changes(folder, self.spec, self.blocks, self.plan)
            if client is None:
                client = cluster.current_client() or held.enter_context(clusters.local(device))
            held.enter_context(client.as_current())
            begun = folder.exists() and not anew
            plan = self._plan(client, device, read_manifest(folder) if begun else None)
            plan.validate()
            if not begun:
                Output.reserve(folder.target, _bytes(self.spec), self.overwrite)
            folder.make()
            try:
                lock = Lock.take(folder.path)
                held.callback(lock.release)
                manifest = self._begin(plan, client, lock, anew)
                made = self._compute(client, plan, manifest, lock, stop, announce, progress)
                return self._finish(plan, manifest, made)
            except OSError as error:
                raise self._explained(error, plan.blocking.c_blocks) from error

    def _plan(self, client: Client, device: cluster.Device, manifest: Json | None) -> Plan:
        """Plan for the cluster that is there; a job that goes on keeps its blocks, and with them its bits."""
        plan = planning.plan_job(self.spec, client, device, self.blocks, manifest, self.plan)
        if manifest is None:
            return plan
        before = manifest["runs"][0]["device"]
        if plan.cluster.device != before:
            raise InputError(
                f"{self.folder.path}: this job was begun on {before}, the workers here compute on "
                f"{plan.cluster.device}, whose bits differ: use the same kind, or begin anew with --overwrite"
            )
        return plan

    def _begin(self, plan: Plan, client: Client, lock: Lock, anew: bool) -> Json:
        """Write the manifest and the empty draft of a new job, or note one more run of an old one."""
        folder, problem = self.folder, plan.problem
        if folder.exists() and not anew:
            manifest = read_manifest(folder)
        else:
            _clear(folder, lock)
            m, _, n = plan.block_shape
            try:
                create_output(self.out, (problem.m, problem.n), self.spec.dtype, (m, n), self.overwrite, folder.draft)
            except InputError:
                folder.remove()  # a refused job leaves nothing behind
                raise
            manifest = new_manifest(self.spec, self.out, self.overwrite, plan, self.seed)
        manifest["runs"].append(run_of(plan, client))
        write_json(folder.manifest, manifest)
        return manifest

    @property
    def _tolerance(self) -> Tolerance | None:
        """By how much each block may differ from its sketches; None where they are not compared."""
        spec = self.spec
        if spec.check != "freivalds":
            return None
        return Tolerance.of(spec.a.dtype, spec.b.dtype, spec.dtype, spec.problem.k, spec.precision)

    def _compute(
        self, client: Client, plan: Plan, manifest: Json, lock: Lock, stop: Stop, announce: Announce | None,
        progress: Progress,
    ) -> Made:  # fmt: skip
        """Make the missing blocks."""
        folder, spec = self.folder, self.spec
        blocks = {(i, j) for _, i, j in plan.blocking.c_indices()}
        if os.path.exists(folder.pending_certificate):  # killed while C was getting its name
            return Made(kept=len(blocks))
        target = reopen_output(self.out, folder.draft, self.overwrite)
        cluster.install(client)
        telemetry.install(client)
        done = self._trusted(client, plan)
        writer = Writer(folder, lock.number, target, plan, self._tolerance, manifest["seed"], spec.alpha, spec.beta)
        loop = Loop(client, spec, plan, writer, stop, progress)
        missing = blocks - done

        def flops(count: int) -> float:
            return plan.problem.flops * count / max(1, len(blocks))

        if announce is not None:
            announce(plan, flops(len(missing)))
        moved, started = telemetry.bytes_moved(client), time.perf_counter()
        try:
            loop.run(missing)
        except DistmmError as error:
            raise self._explained(error, len(blocks)) from error
        except BaseException as error:
            if stop.at_once:
                reason = f"{stop.reason}, twice"
            elif client.status != "running" and not isinstance(error, (KeyboardInterrupt, SystemExit)):
                # Whatever was waited for has ended in an error of its own kind: cancelled futures, a closed comm.
                reason = f"the scheduler is lost ({type(error).__name__}: {error})"
            else:
                raise
            raise self._explained(Stopped(reason), len(blocks)) from None
        finally:
            if loop.rejected:
                manifest["rejected"] += len(loop.rejected)
                write_json(folder.manifest, manifest)
            _report(client, folder, loop)
        seconds = time.perf_counter() - started
        moved = telemetry.bytes_moved(client) - moved
        return Made(len(done), len(loop.rejected), seconds, flops(len(loop.records)), moved)

    def _trusted(self, client: Client, plan: Plan) -> set[tuple[int, int]]:
        """Blocks that are finished: marked, and still what was written. Markers of others are removed."""
        folder, markers = self.folder, self.folder.markers()
        draft = open_matrix(folder.draft) if markers else None
        bad = {} if draft is None else damaged(client, draft, (plan.blocking.m, plan.blocking.n), markers.values())
        for i, j in bad:
            client.log_event(TOPIC, {"event": "certificate-failure", "job": "", "i": i, "j": j})
            os.unlink(folder.marker(i, j))
        return set(markers) - set(bad)

    def _explained(self, error: DistmmError | OSError, total: int) -> Exception:
        """Add to an error what is kept, and how to go on."""
        try:
            done = f"{len(self.folder.markers())} of {total} blocks of C are finished and kept"
        except (OSError, InputError):  # a mount that is gone; the markers are on it
            done = "the finished blocks of C are kept"
        kept = f"{done} in {self.folder.path}; go on with: distmm resume {self.out}"
        if isinstance(error, (Stopped, WrongResultError)):
            return type(error)(f"{error}; {kept}")
        if not isinstance(error, OSError):
            return InputError(f"{error}; {kept}, once the cause is gone")
        if error.errno is None or isinstance(
            error, ConnectionError
        ):  # not from a file: Dask's word for a connection that is gone
            return Stopped(f"the scheduler is lost ({type(error).__name__}: {error}); {kept}")
        return InputError(f"{error.filename or self.folder.path}: {error.strerror}; {kept}, once the cause is gone")

    def _finish(self, plan: Plan, manifest: Json, made: Made) -> Summary:
        """Certify C and give it its name; each step can be repeated after a kill."""
        folder, spec = self.folder, self.spec
        if not os.path.exists(folder.pending_certificate):
            if spec.check == "full":
                self._check_fully()
            markers = folder.markers().values()
            content = certificate(manifest, markers, self._tolerance, manifest["rejected"], made.seconds)
            write_json(folder.pending_certificate, content)
        content = read_json(folder.pending_certificate)
        if os.path.lexists(folder.draft):
            check_output(self.out, spec.inputs, self.overwrite)  # somebody may have put something else there meanwhile
            Output(folder.target, folder.draft, self.overwrite).commit()
        if spec.check == "none":
            if os.path.exists(folder.certificate):  # of the C that has been replaced
                os.unlink(folder.certificate)
        else:
            write_json(folder.certificate, content)
        folder.sweep()
        if os.path.exists(folder.pending_report):
            os.replace(folder.pending_report, folder.report)
        folder.remove()
        return Summary.of(folder, content, plan, made)

    def _check_fully(self) -> None:
        spec, folder = self.spec, self.folder
        verdict = verify(
            spec.a.source, spec.b.source, open_matrix(folder.draft), check="full", transa=spec.a.transposed,
            transb=spec.b.transposed, alpha=spec.alpha, precision=spec.precision,
        )  # fmt: skip
        if not verdict.ok:
            kept = Output(folder.target, folder.draft, self.overwrite).set_aside()
            folder.remove()
            raise WrongResultError(f"{verdict.message}; the result is kept as {kept}")


def _report(client: Client, folder: Folder, loop: Loop) -> None:
    """Write what was seen of this run beside C, whether it came to its end or not.

    Where the scheduler is lost there is nobody to ask; where the disk is full the job says so itself.
    """
    if client.status != "running" or loop.stop.at_once:
        return
    with suppress(OSError, TimeoutError):
        record = telemetry.read(client, loop.job)
        if record is not None:
            residuals = [r for block in loop.records.values() if (r := block.get("residual")) is not None]
            rows = [
                ("blocks", f"{len(loop.records)} written in this run, {len(loop.rejected)} rejected and made again"),
                ("largest error", f"{max(residuals):.2g} of its bound" if residuals else "not measured"),
                ("in full", folder.certificate if loop.writer.tolerance is not None else "blocks were not checked"),
            ]
            report.write(folder.pending_report, record, title=folder.target, certificate=rows)


def _clear(folder: Folder, lock: Lock) -> None:
    """Remove what an earlier job has left, but not the lock: its manifest first, so that half of it is none."""
    for path in (
        folder.manifest,
        folder.pending_certificate,
        folder.pending_report,
        *(entry.path for entry in os.scandir(folder.done)),
    ):
        if os.path.exists(path):
            os.unlink(path)
    Output(folder.target, folder.draft, True).discard()


def _bytes(spec: Spec) -> int:
    return spec.problem.m * spec.problem.n * spec.dtype.itemsize
