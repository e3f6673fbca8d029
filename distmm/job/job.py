"""One run of a job: lock, manifest, missing blocks, certificate, and C's name."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from distributed import Client

from distmm import clusters
from distmm.candidates import parse
from distmm.errors import DistmmError, InputError, Stopped, WrongResultError
from distmm.everywhere import everywhere
from distmm.job.certificate import FORMAT, certificate, damaged, described, versions
from distmm.job.folder import Folder, Json, read_json, write_json
from distmm.job.lock import Lock
from distmm.job.loop import Loop
from distmm.job.spec import Spec, differences
from distmm.job.stop import Stop
from distmm.job.summary import Summary
from distmm.job.wave import Writer
from distmm.plan import Plan, make_plan
from distmm.planning import storage_multiples, users_blocking
from distmm.runtime import cluster
from distmm.storage import create_output, locate, open_matrix, reopen_output
from distmm.storage.output import Output
from distmm.tasks import KernelChoice, kernel_facts
from distmm.telemetry import client as telemetry
from distmm.telemetry import report
from distmm.telemetry.events import TOPIC
from distmm.telemetry.record import Figures
from distmm.tolerance import Tolerance
from distmm.verify import verify

__all__ = ["Announce", "Job", "Progress", "manifest_of"]

# Part of the free memory that is left for blocks on the wire and on their way to the disk, which the plan does not
# count: 0.13 measured on CPU workers with large blocks.
SPARE = 0.2

# Bytes/s at which a thread of a CPU worker brings blocks of A and B: it reads them from files that are in memory, and
# makes their sketches. 3.8 and 3 ms for 8 MB were measured.
CPU_LOAD = 1.2e9

# The same of a GPU worker, whose threads read pieces into pinned memory: a core reads 3 GB/s of files that are in
# memory, and up to 16 do. Reckoned low: the plan for a slow disk has smaller blocks, and less is left to write when the
# last product is done.
GPU_LOAD = 1e10

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
                _same(folder, self.spec, self.blocks, self.plan)
            if client is None:
                client = cluster.current_client() or held.enter_context(clusters.local(device))
            held.enter_context(client.as_current())
            begun = folder.exists() and not anew
            plan = self._plan(client, device, manifest_of(folder) if begun else None)
            plan.validate()
            if not begun:
                Output.reserve(folder.target, _bytes(self.spec), self.overwrite)
            folder.make()
            try:
                lock = Lock.take(folder.path)
                held.callback(lock.release)
                manifest = self._begin(plan, client, lock, anew)
                return self._finish(*self._compute(client, plan, manifest, lock, stop, announce, progress))
            except OSError as error:
                raise self._explained(error, plan.blocking.c_blocks) from error

    def _plan(self, client: Client, device: cluster.Device, manifest: Json | None) -> Plan:
        """Plan for the cluster that is there; a job that goes on keeps its blocks, and with them its bits."""
        plan = planned(self.spec, client, device, self.blocks, manifest, self.plan)
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
        folder = self.folder
        run = {
            "started": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "versions": versions(),
            "device": plan.cluster.device, "workers": plan.cluster.workers, **described(plan, client),
        }  # fmt: skip
        if folder.exists() and not anew:
            manifest = manifest_of(folder)
            manifest["runs"].append(run)
        else:
            _clear(folder, lock)
            m, _, n = plan.block_shape
            problem = plan.problem
            target = create_output(
                self.out, (problem.m, problem.n), self.spec.dtype, (m, n), self.overwrite, folder.draft
            )
            manifest = {
                "format": FORMAT,
                "spec": self.spec.json(),
                "output": {
                    "name": _absolute(self.out), "shape": list(target.shape), "dtype": self.spec.dtype.name,
                    "overwrite": self.overwrite,
                },
                "blocks": list(plan.block_shape),
                "layers": plan.grid.layers,
                "plan": str(plan),
                "seed": secrets.randbits(32) if self.seed is None else self.seed,
                "rejected": 0,
                "runs": [run],
            }  # fmt: skip
        write_json(folder.manifest, manifest)
        return manifest

    def _compute(
        self,
        client: Client,
        plan: Plan,
        manifest: Json,
        lock: Lock,
        stop: Stop,
        announce: Announce | None,
        progress: Progress,
    ) -> tuple[Plan, Json, Tolerance | None, Loop | None, int, float, int]:
        """Make the missing blocks."""
        folder, spec = self.folder, self.spec
        tolerance = None
        if spec.check == "freivalds":
            tolerance = Tolerance.of(spec.a.dtype, spec.b.dtype, spec.dtype, spec.problem.k, spec.precision)
        blocks = {(i, j) for _, i, j in plan.blocking.c_indices()}
        if os.path.exists(folder.pending_certificate):  # killed while C was getting its name
            return plan, manifest, tolerance, None, len(blocks), 0.0, 0
        target = reopen_output(self.out, folder.draft, self.overwrite)
        cluster.install(client)
        telemetry.install(client)
        done = self._trusted(client, plan)
        writer = Writer(folder, lock.number, target, plan, tolerance, manifest["seed"], spec.alpha, spec.beta)
        loop = Loop(client, spec, plan, writer, stop, progress)
        missing = blocks - done
        if announce is not None:
            announce(plan, plan.problem.flops * len(missing) / max(1, len(blocks)))
        moved, started = telemetry.bytes_moved(client), time.perf_counter()
        try:
            loop.run(missing)
        except DistmmError as error:
            raise self._explained(error, len(blocks)) from error
        except BaseException:
            if not stop.at_once:
                raise
            raise self._explained(Stopped(f"{stop.reason}, twice"), len(blocks)) from None
        finally:
            if loop.rejected:
                write_json(folder.manifest, {**manifest, "rejected": manifest["rejected"] + len(loop.rejected)})
            _report(client, folder, loop)
        manifest["rejected"] += len(loop.rejected)
        seconds = time.perf_counter() - started
        return plan, manifest, tolerance, loop, len(done), seconds, telemetry.bytes_moved(client) - moved

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
        if error.errno is None:  # not from a file: Dask's word for a connection that is gone
            return Stopped(f"the scheduler is lost ({type(error).__name__}: {error}); {kept}")
        return InputError(f"{error.filename or self.folder.path}: {error.strerror}; {kept}, once the cause is gone")

    def _finish(
        self,
        plan: Plan,
        manifest: Json,
        tolerance: Tolerance | None,
        loop: Loop | None,
        kept: int,
        seconds: float,
        moved: int,
    ) -> Summary:
        """Certify C and give it its name; each step can be repeated after a kill."""
        folder, spec = self.folder, self.spec
        if not os.path.exists(folder.pending_certificate):
            if spec.check == "full":
                self._check_fully()
            markers = folder.markers().values()
            content = certificate(manifest, markers, tolerance, manifest["rejected"], seconds)
            write_json(folder.pending_certificate, content)
        content = read_json(folder.pending_certificate)
        if os.path.lexists(folder.draft):
            Output(folder.target, folder.draft, self.overwrite).commit()
        if spec.check == "none":
            if os.path.exists(folder.certificate):  # of the C that has been replaced
                os.unlink(folder.certificate)
        else:
            write_json(folder.certificate, content)
        if os.path.exists(folder.pending_report):
            os.replace(folder.pending_report, folder.report)
        folder.remove()
        done = 0 if loop is None else len(loop.records)
        share = done / max(1, plan.blocking.c_blocks)
        return Summary.of(
            folder,
            content, plan=plan, seconds=seconds, flops=plan.problem.flops * share, bytes_moved=moved,
            kept=kept, recomputed=0 if loop is None else len(loop.rejected),
        )  # fmt: skip

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


def planned(
    spec: Spec, client: Client, device: cluster.Device, blocks: tuple[int, int, int] | None, manifest: Json | None,
    text: str | None,
) -> Plan:  # fmt: skip
    """Plan a job: waves of C that go to the disk, A and B read step by step.

    Where k is split into layers, the bits of C depend on that, and a job that goes on keeps the whole plan.
    """
    a, b, problem = spec.a, spec.b, spec.problem
    asked: dict[str, Any] = {"kernel": spec.kernel, "precision": spec.precision}
    found = cluster.describe(client, problem.dtype, device, **asked)
    # What the libraries take is not free for blocks: they are loaded before the memory is looked at.
    everywhere(client, _load, KernelChoice(found.device, problem.dtype, spec.precision, spec.kernel))
    found = cluster.describe(client, problem.dtype, device, **asked)
    load = CPU_LOAD * found.threads if found.device == "cpu" else GPU_LOAD
    found = replace(found, memory=int(found.memory * (1 - SPARE)), load=load)
    if manifest is not None:
        blocks, text = tuple(manifest["blocks"]), manifest["plan"] if manifest["layers"] > 1 else text
    given = users_blocking(problem, a, b) if blocks is None else None
    return make_plan(
        problem,
        found,
        edges=given.largest if given is not None else blocks,
        text=text,
        multiples=storage_multiples(a, b),
        precision=spec.precision,
        kernel=spec.kernel,
        operands=("resident" if a.resident else "streamed", "resident" if b.resident else "streamed"),
        result="out",
    )


def _load(choice: KernelChoice) -> None:
    """Import what tasks of a job need, and have BLAS take its buffers. Runs on workers."""
    from distmm.job import wave  # noqa: F401

    kernel_facts(choice)
    np.ones((64, 64)) @ np.ones((64, 64))


def _same(folder: Folder, spec: Spec, blocks: tuple[int, int, int] | None, plan: str | None) -> None:
    """Refuse to go on with a job whose inputs or options have changed."""
    manifest = manifest_of(folder)
    changed = list(differences(manifest["spec"], spec.json()))
    if blocks is not None and list(blocks) != manifest["blocks"]:
        changed.append(f"blocks were {manifest['blocks']}, are {list(blocks)}")
    # Grid, waves and lookahead are for the cluster that is there; the cuts, and the sums of a split k, make the bits.
    shape = None if plan is None else parse(plan, spec.problem)
    kept = [*manifest["blocks"], manifest["layers"]]
    if shape and (
        [*shape.blocking.largest, shape.grid.layers] != kept or (kept[3] > 1 and str(shape) != manifest["plan"])
    ):
        changed.append(f"plan was {manifest['plan']}, is {shape}")
    if changed:
        raise InputError(
            f"{folder.path}: holds an unfinished job that differs: {'; '.join(changed)}; give what was given then, or "
            f"begin anew with --overwrite (overwrite=True), which discards its finished blocks"
        )


def manifest_of(folder: Folder) -> Json:
    """Read the manifest of a job; raise `InputError` for one of another format."""
    manifest = read_json(folder.manifest)
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{folder.manifest}: has format {manifest.get('format')}, this distmm knows {FORMAT}: finish the job with "
            f"the version that began it, or begin anew with --overwrite"
        )
    return manifest


def _clear(folder: Folder, lock: Lock) -> None:
    """Remove what an earlier job has left, but not the lock: its manifest first, so that half of it is none."""
    for path in (
        folder.manifest,
        folder.pending_certificate,
        folder.pending_report,
        *(folder.marker(*at) for at in folder.markers()),
    ):
        if os.path.exists(path):
            os.unlink(path)
    Output(folder.target, folder.draft, True).discard()


def _bytes(spec: Spec) -> int:
    return spec.problem.m * spec.problem.n * spec.dtype.itemsize


def _absolute(out: str) -> str:
    file, dataset = locate(out)
    return file if dataset is None else f"{file}:{dataset}"
