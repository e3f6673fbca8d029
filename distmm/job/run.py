"""A job from its first check to C's name: begin or go on, compute what is missing, certify, and name C."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import Client

from distmm import clusters
from distmm.array import _plan
from distmm.errors import DistmmError, InputError, Stopped, WrongResultError
from distmm.job.certificate import FORMAT, certificate, damaged, described, versions
from distmm.job.folder import Folder, Json, read_json, write_json
from distmm.job.lock import Lock
from distmm.job.loop import Loop
from distmm.job.spec import Check, Spec, differences
from distmm.job.stop import Stop
from distmm.job.wave import Writer
from distmm.plan import Plan
from distmm.runtime import cluster
from distmm.storage import create_output, locate, open_matrix, reopen_output
from distmm.storage.output import Output
from distmm.telemetry import client as telemetry
from distmm.telemetry import report, units
from distmm.telemetry.events import TOPIC
from distmm.telemetry.record import Figures
from distmm.tolerance import Tolerance
from distmm.verify import check_possible, verify

__all__ = ["Summary", "multiply", "resume"]

Path = str | os.PathLike[str]
Announce = Callable[[Plan, float], None]
Progress = Callable[[Figures], None]


@dataclass(frozen=True)
class Summary:
    """What a finished product was, took and is worth.

    Attributes
    ----------
    path : str
        Where C is.
    shape, dtype
        Of C.
    plan : Plan or None
        None where C was complete already.
    seconds : float
        Of this run, from the first task to the last block on disk.
    flops : float
        Operations of this run.
    bytes_moved : int
        Bytes that workers received from one another meanwhile.
    blocks, kept : int
        Blocks of C in all, and those that an earlier run had finished.
    recomputed : int
        Blocks that failed their test in this run and were made again.
    residual : float or None
        Largest error of a block over its bound; None where nothing was checked.
    certificate : str or None
        Where the certificate is; None where nothing was checked.
    report : str or None
        Where the report of this run is; None where it had nothing to do.
    """

    path: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    plan: Plan | None
    seconds: float
    flops: float
    bytes_moved: int
    blocks: int
    kept: int
    recomputed: int
    residual: float | None
    certificate: str | None
    report: str | None

    @property
    def flops_per_second(self) -> float:
        """Operations per second, reading and writing included."""
        return self.flops / max(self.seconds, 1e-9)

    def rows(self) -> list[tuple[str, str]]:
        """Return the summary as a table of label and value."""
        planned = "" if self.plan is None else f", {units.size(self.plan.bytes_moved)} planned for all of C"
        again = f", {self.recomputed} made again" if self.recomputed else ""
        return [
            ("time", f"{units.duration(self.seconds)}, reading and writing included"),
            ("rate", units.scaled(self.flops_per_second, "FLOP/s")),
            ("moved", f"{units.size(self.bytes_moved)} between workers{planned}"),
            ("blocks", f"{self.blocks}, {self.kept} of them finished before{again}"),
            ("error", "not checked" if self.residual is None else f"{self.residual:.2g} of its bound at most"),
            ("C", f"{self.path} ({self.shape[0]} x {self.shape[1]}, {self.dtype})"),
            *([] if self.certificate is None else [("certificate", self.certificate)]),
            *([] if self.report is None else [("report", self.report)]),
        ]


def multiply(
    a: Any,
    b: Any,
    out: Path,
    c: Any = None,
    *,
    client: Client | None = None,
    transa: bool = False,
    transb: bool = False,
    alpha: complex = 1,
    beta: complex = 0,
    dtype: Any = None,
    precision: str = "highest",
    kernel: str | None = None,
    device: cluster.Device = "auto",
    blocks: tuple[int, int, int] | None = None,
    overwrite: bool = False,
    check: Check = "freivalds",
    seed: int | None = None,
    stop: Stop | None = None,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Multiply matrices on disk into a third: ``C = alpha * op(A) @ op(B) + beta * C``, and go on where a job stopped.

    All that can be refused is refused before any work. Blocks of C are written as they are made, each with a marker,
    into a folder beside C (``C.zarr.job``); C gets its name when it is complete and right. A job that was stopped or
    killed goes on with the missing blocks when the same call is made again, or `resume` is.

    Parameters
    ----------
    a, b : str, path, or array
        Matrices of shape (m, k) and (k, n): what `distmm.storage.open_matrix` opens, or arrays as in `distmm.matmul`.
    out : str or path
        Where C (m, n) goes; see `distmm.storage.create_output`.
    c : str, path, or array, optional
        The C that is added, times beta; by default the one that `out` is, which the result then replaces.
    client : distributed.Client, optional
        The workers must see the same paths. By default Dask's current client, else a local cluster for this call.
    transa, transb : bool
        Use the transpose of A or B, without a copy.
    alpha, beta : scalars
    dtype : dtype, optional
        Of C; by default NumPy's result type. The product is computed in the wider of the two types, and cast once.
    precision, kernel, device, blocks
        As in `distmm.matmul`.
    overwrite : bool
        Replace an existing C, and an unfinished job on it.
    check : {"freivalds", "full", "none"}
        "freivalds": each block is compared with sketches of A and B as it is made, and made again on another worker
        where they disagree; "full": all elements at the end, for small sizes.
    seed : int, optional
        Of the random vectors of the check; chosen at random by default, and kept in the certificate.
    stop : Stop, optional
        Asks the job to stop before its end.
    announce : callable, optional
        Called with the plan, and the operations that are left to do, before work starts.
    progress : callable, optional
        Called with how far the job is (`distmm.telemetry.record.Figures`), a few times a second.

    Returns
    -------
    Summary

    Raises
    ------
    InputError, DoesNotFitError
        Before any work; also for data that turn out to be unreadable, and a full disk: finished blocks are kept.
    Stopped
        Where `stop` asked for it, or the cluster was lost; finished blocks are kept.
    WrongResultError
        If a block stays wrong on several workers.

    Examples
    --------
    >>> distmm.multiply("A.zarr", "B.zarr", "C.zarr", precision="high")  # doctest: +SKIP
    """
    spec = Spec.of(
        a, b, out if beta != 0 and c is None else c, transa=transa, transb=transb, alpha=alpha, beta=beta, dtype=dtype,
        precision=precision, kernel=kernel, check=check,
    )  # fmt: skip
    check_possible(check, spec.problem)
    if check == "full" and beta != 0:
        raise InputError("a full check knows no beta: use check freivalds, or none")
    folder = Folder.of(out)
    replaces = overwrite or (beta != 0 and c is None)
    if not overwrite and not folder.exists():
        finished = _finished(folder, spec)
        if finished is not None:
            return finished
    job = _Job(folder, os.fspath(out), spec, replaces, blocks, seed)
    return job.run(client, device, stop or Stop(), announce, progress or _unseen, anew=overwrite)


def resume(
    out: Path,
    *,
    client: Client | None = None,
    device: cluster.Device = "auto",
    stop: Stop | None = None,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Go on with an unfinished job, from what stands beside C alone.

    Parameters are those of `multiply`.

    Raises
    ------
    InputError
        If there is no job, or A or B has changed since; else as `multiply`.
    """
    folder = Folder.of(out)
    if not folder.exists():
        if os.path.exists(folder.certificate) and os.path.lexists(folder.target):
            return _complete(folder, read_json(folder.certificate))
        raise InputError(f"{folder.path}: there is no unfinished job for this output; begin one with distmm multiply")
    manifest = _manifest(folder)
    spec = Spec.from_json(manifest["spec"])
    job = _Job(folder, manifest["output"]["name"], spec, manifest["output"]["overwrite"], None, None)
    return job.run(client, device, stop or Stop(), announce, progress or _unseen, anew=False)


@dataclass(frozen=True)
class _Job:
    """One output and what it shall be."""

    folder: Folder
    out: str
    spec: Spec
    overwrite: bool
    blocks: tuple[int, int, int] | None
    seed: int | None

    def run(
        self, client: Client | None, device: cluster.Device, stop: Stop, announce: Announce | None, progress: Progress,
        anew: bool,
    ) -> Summary:  # fmt: skip
        """Take the lock and do what is missing."""
        folder = self.folder
        with ExitStack() as held:
            if folder.exists() and not anew:
                _same(folder, self.spec, self.blocks)
            if client is None:
                client = cluster.current_client() or held.enter_context(clusters.local(device))
            held.enter_context(client.as_current())
            begun = folder.exists() and not anew
            plan = self._plan(client, device, _manifest(folder) if begun else None)
            plan.validate()
            if not begun:
                Output.reserve(folder.target, _bytes(self.spec), self.overwrite)
            folder.make()
            lock = Lock.take(folder.path)
            held.callback(lock.release)
            manifest = self._begin(plan, client, lock, anew)
            return self._finish(*self._compute(client, plan, manifest, lock, stop, announce, progress))

    def _plan(self, client: Client, device: cluster.Device, manifest: Json | None) -> Plan:
        """Plan for the cluster that is there; a job that goes on keeps its blocks, and with them its bits."""
        spec = self.spec
        blocks = self.blocks if manifest is None else tuple(manifest["blocks"])
        plan = _plan(spec.problem, spec.a, spec.b, client, device, blocks, spec.precision, spec.kernel)
        if manifest is None:
            return plan
        before = manifest["runs"][0]["device"]
        if plan.cluster.device != before:
            raise InputError(
                f"{self.folder.path}: this job was begun on {before}, the workers here compute on {plan.cluster.device}, "
                f"whose bits differ: use the same kind, or begin anew with --overwrite"
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
            manifest = _manifest(folder)
            manifest["runs"].append(run)
        else:
            _clear(folder, lock)
            m, _, n = plan.block_shape
            problem = plan.problem
            target = create_output(self.out, (problem.m, problem.n), self.spec.dtype, (m, n), self.overwrite, folder.draft)
            manifest = {
                "format": FORMAT,
                "spec": self.spec.json(),
                "output": {
                    "name": _absolute(self.out), "shape": list(target.shape), "dtype": self.spec.dtype.name,
                    "overwrite": self.overwrite,
                },
                "blocks": list(plan.block_shape),
                "seed": secrets.randbits(32) if self.seed is None else self.seed,
                "rejected": 0,
                "runs": [run],
            }  # fmt: skip
        write_json(folder.manifest, manifest)
        return manifest

    def _compute(
        self, client: Client, plan: Plan, manifest: Json, lock: Lock, stop: Stop, announce: Announce | None, progress: Progress
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
        moved, started = cluster.bytes_moved(client), time.perf_counter()
        try:
            loop.run(missing)
        except (DistmmError, OSError) as error:
            raise self._explained(error, len(done) + len(loop.records), len(blocks)) from error
        finally:
            if loop.rejected:
                write_json(folder.manifest, {**manifest, "rejected": manifest["rejected"] + len(loop.rejected)})
            _report(client, folder, loop)
        manifest["rejected"] += len(loop.rejected)
        seconds = time.perf_counter() - started
        return plan, manifest, tolerance, loop, len(done), seconds, cluster.bytes_moved(client) - moved

    def _trusted(self, client: Client, plan: Plan) -> set[tuple[int, int]]:
        """Blocks that are finished: marked, and still what was written. Markers of others are removed."""
        folder, markers = self.folder, self.folder.markers()
        draft = open_matrix(folder.draft) if markers else None
        bad = {} if draft is None else damaged(client, draft, (plan.blocking.m, plan.blocking.n), markers.values())
        for i, j in bad:
            client.log_event(TOPIC, {"event": "certificate-failure", "job": "", "i": i, "j": j})
            os.unlink(folder.marker(i, j))
        return set(markers) - set(bad)

    def _explained(self, error: DistmmError | OSError, done: int, total: int) -> Exception:
        """Add to an error what is kept, and how to go on."""
        kept = (
            f"{done} of {total} blocks of C are finished and kept in {self.folder.path}; go on with: "
            f"distmm resume {self.out}"
        )
        if isinstance(error, (Stopped, WrongResultError)):
            return type(error)(f"{error}; {kept}")
        where = (
            f"{error.filename or self.folder.path}: {error.strerror or error}" if isinstance(error, OSError) else error
        )
        return InputError(f"{where}; {kept}, once the cause is gone")

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
            os.replace(folder.pending_certificate, folder.certificate)
        folder.remove()
        done = 0 if loop is None else len(loop.records)
        share = done / max(1, plan.blocking.c_blocks)
        return _summary(
            folder, content, plan=plan, seconds=seconds, flops=plan.problem.flops * share, bytes_moved=moved,
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
    if client.status != "running":
        return
    with suppress(OSError, TimeoutError):
        record = telemetry.read(client, loop.job)
        if record is not None:
            residuals = [block["residual"] for block in loop.records.values() if block["residual"] is not None]
            rows = [
                ("blocks", f"{len(loop.records)} written in this run, {len(loop.rejected)} rejected and made again"),
                ("largest error", f"{max(residuals):.2g} of its bound" if residuals else "not measured"),
                ("in full", folder.certificate if loop.writer.tolerance is not None else "blocks were not checked"),
            ]
            report.write(folder.report, record, title=folder.target, certificate=rows)


def _summary(folder: Folder, content: Json, **figures: Any) -> Summary:
    c = open_matrix(content["output"]["name"])
    checked = content["spec"]["check"] != "none"
    residual = content["largest_residual"] or 0.0
    return Summary(
        path=folder.target, shape=c.shape, dtype=c.dtype, blocks=len(content["done"]),
        residual=residual if checked else None, certificate=folder.certificate if checked else None,
        report=folder.report if figures["plan"] is not None and os.path.exists(folder.report) else None, **figures,
    )  # fmt: skip


def _complete(folder: Folder, content: Json) -> Summary:
    """Return the summary of a C that was complete before this run."""
    kept = len(content["done"])
    return _summary(folder, content, plan=None, seconds=0.0, flops=0.0, bytes_moved=0, kept=kept, recomputed=0)


def _finished(folder: Folder, spec: Spec) -> Summary | None:
    """Return the summary if C is there, complete, and of just this product: a job that was sent again has no more to do."""
    if spec.beta != 0 or not (os.path.exists(folder.certificate) and os.path.lexists(folder.target)):
        return None
    content = read_json(folder.certificate)
    return None if any(differences(content["spec"], spec.json())) else _complete(folder, content)


def _same(folder: Folder, spec: Spec, blocks: tuple[int, int, int] | None) -> None:
    """Refuse to go on with a job whose inputs or options have changed."""
    manifest = _manifest(folder)
    changed = list(differences(manifest["spec"], spec.json()))
    if blocks is not None and list(blocks) != manifest["blocks"]:
        changed.append(f"blocks were {manifest['blocks']}, are {list(blocks)}")
    if changed:
        raise InputError(
            f"{folder.path}: holds an unfinished job that differs: {'; '.join(changed)}; give what was given then, or "
            f"begin anew with --overwrite (overwrite=True), which discards its finished blocks"
        )


def _manifest(folder: Folder) -> Json:
    manifest = read_json(folder.manifest)
    if manifest.get("format") != FORMAT:
        raise InputError(
            f"{folder.manifest}: has format {manifest.get('format')}, this distmm knows {FORMAT}: finish the job with the "
            f"version that began it, or begin anew with --overwrite"
        )
    return manifest


def _clear(folder: Folder, lock: Lock) -> None:
    """Remove what an earlier job has left, but not the lock: its manifest first, so that half of it is none."""
    for path in (folder.manifest, folder.pending_certificate, *(folder.marker(*at) for at in folder.markers())):
        if os.path.exists(path):
            os.unlink(path)
    Output(folder.target, folder.draft, True).discard()


def _bytes(spec: Spec) -> int:
    return spec.problem.m * spec.problem.n * spec.dtype.itemsize


def _absolute(out: str) -> str:
    file, dataset = locate(out)
    return file if dataset is None else f"{file}:{dataset}"


def _unseen(figures: Figures) -> None:
    """Report to nobody."""
