"""A job: what the caller wants, and the runs that it takes. A second run follows if the memory of a worker was full.

`preflight` makes the checks that need no cluster, for example before a batch job is submitted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypedDict

from distributed import Client

from distmm import clusters, config
from distmm.clusters import cluster
from distmm.clusters.waiting import seceded, watched
from distmm.errors import DeviceMemoryError, InputError
from distmm.job import planning
from distmm.job.commit import complete_result, end_complete, refuse_stale, refuse_twice, same_call
from distmm.job.folder import Folder, Json
from distmm.job.inputs import stamps, written
from distmm.job.lock import holder
from distmm.job.manifest import refuse_changes
from distmm.job.records import read_manifest
from distmm.job.run import Run
from distmm.job.spec import Check, Spec
from distmm.job.stop import Stop
from distmm.job.summary import Summary
from distmm.planning.plan import Plan
from distmm.planning.schedule import parse
from distmm.product.choices import BlockKeywords, Choices
from distmm.product.context import computing
from distmm.product.request import plan_for
from distmm.product.scalars import check_flags, checked_seed
from distmm.product.verification import check_possible
from distmm.storage import check_output, is_url, output_type
from distmm.storage.output import check_folder
from distmm.telemetry.figures import Figures
from distmm.worker.tasks.kernel_choice import check_named

Path = str | os.PathLike[str]
Connect = Callable[[], AbstractContextManager[Client]]
Announce = Callable[[Plan, float], None]
Progress = Callable[[Figures], None]


class _Common(TypedDict, total=False):
    """The keywords that both kinds of functions have."""

    connect: Connect | None
    stop: Stop | None
    announce: Announce | None
    progress: Progress | None


class RunKeywords(_Common, total=False):
    """The keywords of functions that run a job. See `distmm.multiply`."""

    client: Client | None
    device: cluster.DeviceChoice | None


class JobKeywords(BlockKeywords, _Common, total=False):
    """The keywords of functions that begin a job. See `distmm.multiply`."""

    overwrite: bool | None
    check: Check | None
    seed: int | None


def begin(
    a: Any, b: Any, c0: Any, out: Path, keywords: JobKeywords, *, adds: bool = False, most: int | None = None,
    **product: Any,
) -> Summary:  # fmt: skip
    """Begin or continue the job of a call. `product` has the other arguments of `Spec.of`.

    With `adds`, C0 is the existing result, which is replaced.
    """
    if (seed := keywords.get("seed")) is not None:
        checked_seed(seed)
    client, overwrite = keywords.get("client"), keywords.get("overwrite") or False
    check_flags(overwrite=overwrite)
    # The cluster is chosen when work begins.
    given = {name: keywords.get(name) for name in ("precision", "kernel", "reproducible", "device", "blocks", "plan")}
    choices, check = Choices.of(**given), config.chosen("check", keywords.get("check"))  # type: ignore[arg-type]
    ended = end_complete(folder := Folder.of(out), overwrite)  # the certificate of a job that was just ended
    spec = Spec.of(a, b, c0, choices, check=check, **product)
    job, asked = Job(os.fspath(out), spec, overwrite, overwrite or adds, keywords, most), spec.files()
    if ended is not None and same_call(folder, ended, spec):
        if not overwrite:
            refuse_stale(folder, ended, spec, client)
            return Summary.of_complete(folder, ended)
        if spec.reads(folder.target):
            refuse_twice(folder)
    if (content := complete_result(folder, spec, overwrite, client)) is not None:
        return Summary.of_complete(folder, content)
    return job.run(asked)


@dataclass(frozen=True)
class Job:
    """A job: its output, its specification, and the caller's options.

    Attributes
    ----------
    out : str
        The caller's name of the result.
    spec : Spec
    overwrite : bool
        Whether an existing result, or an unfinished job of it, is discarded.
    replaces : bool
        Whether the result may replace an existing one at the end. It also does if it is added to that one (beta).
    keywords : mapping
        The keywords of the call: those of `JobKeywords` that the other attributes do not have.
    most : int, optional
        The limit of a threshold. A resumed job may have another limit.
    """

    out: str
    spec: Spec
    overwrite: bool
    replaces: bool
    keywords: Mapping[str, Any]
    most: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.stop, Stop):
            raise InputError(f"stop is {self.stop!r}: give an object, such as distmm.job.Stop(seconds)")

    @property
    def stop(self) -> Stop:
        """The caller's request to stop, or one that nobody makes."""
        return Stop() if (given := self.keywords.get("stop")) is None else given

    @property
    def folder(self) -> Folder:
        """The folder that all jobs of the output share."""
        return Folder.of(self.out)

    def refuse(self) -> None:
        """Refuse what needs no cluster to be found: a wrong check, plan or output, and another unfinished job.

        Raises
        ------
        InputError
            With the reason, and what to give instead.
        """
        choices, problem = self.spec.choices, self.spec.problem
        check_possible(self.spec.check, problem)
        check_named(choices.kernel, choices.device, problem.multiplied)
        self.spec.refuse(self.out, self.replaces)
        if isinstance(choices.plan, str):
            parse(choices.plan, problem)
        _refuse_folder(self.folder)
        if self.folder.exists() and not self.overwrite:
            refuse_changes(self.folder, self.spec)
        else:
            self.check_room()

    def check_room(self) -> None:
        """Raise `InputError` if the output of a new job exists, is in a read-only folder, or has too little space."""
        path = self.folder.target
        output_type(path).reserve(path, self.spec.contents.nbytes, self.replaces)

    def run(self, asked: Json) -> Summary:
        """Plan, and compute the missing units. After a full memory, repeat with a smaller plan.

        Parameters
        ----------
        asked : dict
            Description of the files of A, B and C0 when the call began.
        """
        folder, spec = self.folder, self.spec
        self.refuse()
        with ExitStack() as stack:
            client = computing(self.keywords.get("client"))
            if client is None:
                connect = self.keywords.get("connect") or partial(clusters.local, spec.choices.device)
                client = stack.enter_context(connect())
            stack.enter_context(seceded())
            stack.enter_context(client.as_current())
            stack.enter_context(watched(client))  # for the waits for workers before and after the waves
            job, plan, note, attempt = self, None, "", 0
            while True:
                begun = read_manifest(folder) if folder.exists() and not job.overwrite else None
                plan = plan or self._plan(client, begun)
                try:
                    return Run(job, client, plan, begun, asked, note).complete()
                except DeviceMemoryError as error:
                    manifest = read_manifest(folder)
                    plan, note = planning.smaller(spec, manifest, client, plan, error, attempt)
                job, attempt = replace(job, overwrite=False), attempt + 1

    def _plan(self, client: Client, manifest: Json | None) -> Plan:
        """Plan for the current cluster. A resumed job keeps its blocks, and therefore its bits."""
        asked = planning.request(self.spec, manifest, self.stop.seconds or None)
        # A store answers requests of several tasks at the same time.
        plan = planning.plan(self.spec, asked, client, joins=manifest is None and not is_url(self.out))
        device = plan.cluster.device
        if manifest is not None and manifest["runs"][0]["device"] != device:
            raise InputError(
                f"{self.folder.path}: this job was begun on {manifest['runs'][0]['device']}, the workers here compute "
                f"on {device}, whose bits differ: use the same kind, or start over with --overwrite"
            )
        return plan


def preflight(
    a: str, b: str, out: str, *, choices: Choices, overwrite: bool = False, check: Check = "freivalds",
    run_seconds: float | None = None, **product: Any,
) -> Iterator[str]:  # fmt: skip
    """Check a call of `distmm.multiply` before the job is submitted. Nothing is written.

    URLs are not opened, because this machine may not have access to them.

    Parameters
    ----------
    a, b, out, overwrite, check
        As in `distmm.multiply`. Paths must be valid on this machine, too.
    choices : Choices
        Blocks, plan, precision and kernel. Without `hardware`, the workers that will be requested, the fit in memory is
        not checked.
    run_seconds : float, optional
        Seconds after which a run is stopped.
    **product
        transa and transb, as in `distmm.multiply`.

    Yields
    ------
    str
        A check that was skipped, and why.

    Raises
    ------
    InputError, DoesNotFitError
        As in `distmm.multiply`. Also if C is already complete, or if another process works on it.
    """
    remote = [f"{name} ({path})" for name, path in (("A", a), ("B", b), ("C", out)) if is_url(path)]
    if remote:
        yield f"{' and '.join(remote)}: behind a URL"
    folder = None if is_url(out) else Folder.of(out)
    if is_url(a) or is_url(b):
        if folder is not None:
            check_output(out, overwrite)
            _refuse_folder(folder)
        return
    spec = Spec.of(a, b, None, choices, check=check, **product)
    job, manifest = Job(out, spec, overwrite, overwrite, {}), None
    if folder is not None:
        if complete_result(folder, spec, overwrite, None) is not None:
            raise InputError(
                f"{folder.target}: is already the complete result of the same product: there is nothing to do; "
                f"overwrite (product.overwrite = true) computes it again"
            )
        job.refuse()
        if folder.exists() and not overwrite:
            manifest = read_manifest(folder)
            if names := written(manifest["stamps"], stamps(spec)):
                paths = " and ".join(spec.operands[name].source.path for name in names)
                yield f"{paths}: written since the job began; the run compares it with finished blocks"
    if choices.hardware is None:
        yield "whether it fits: the machines are not known"
        return
    made = plan_for(planning.request(spec, manifest, run_seconds), None)
    made.validate()
    made.validate_run()


def _refuse_folder(folder: Folder) -> None:
    """Refuse an output if its folder is missing or read-only, or if another process works on it."""
    if not is_url(folder.target):
        check_folder(folder.target, os.path.dirname(folder.target))
        if not os.path.isdir(folder.path):
            return
        check_folder(folder.target, folder.path)
    if (owner := holder(folder.path)) is not None:
        owner.refuse(folder.path)
