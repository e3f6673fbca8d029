"""Checks of a job that need no cluster, for example before a batch job is submitted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from distmm.clusters.hardware import Hardware
from distmm.errors import InputError
from distmm.job.commit import complete_result
from distmm.job.folder import Folder
from distmm.job.lock import holder
from distmm.job.manifest import refuse_changes
from distmm.job.planning import request
from distmm.job.records import read_manifest
from distmm.job.spec import Check, Spec
from distmm.product.request import plan_for
from distmm.product.verification import check_possible
from distmm.storage import check_output
from distmm.storage.output import Output, check_folder


def preflight(
    a: str,
    b: str,
    out: str,
    *,
    blocks: tuple[int, int, int] | None = None,
    plan: str | None = None,
    overwrite: bool = False,
    check: Check = "freivalds",
    machines: Hardware | None = None,
    run_seconds: float | None = None,
    **how: Any,
) -> Iterator[str]:
    """Check a call of `distmm.multiply` before the job is submitted. Nothing is written.

    URLs are not opened, because this machine may not have access to them.

    Parameters
    ----------
    a, b, out, blocks, plan, overwrite, check
        As in `distmm.multiply`. Paths must be valid on this machine, too.
    machines : Hardware, optional
        The workers that will be requested. Without them the fit in memory is not checked.
    run_seconds : float, optional
        Seconds after which a run is stopped.
    **how
        transa, transb, precision and kernel, as in `distmm.multiply`.

    Yields
    ------
    str
        A check that was skipped, and why.

    Raises
    ------
    InputError, DoesNotFitError
        As in `distmm.multiply`. Also if C is already complete, or if another process works on it.
    """
    remote = [f"{name} ({path})" for name, path in (("A", a), ("B", b), ("C", out)) if "://" in path]
    if remote:
        yield f"{' and '.join(remote)}: behind a URL"
    folder = None if "://" in out else Folder.of(out)
    if folder is not None:
        check_output(out, overwrite)
        _refuse_folder(folder)
    if "://" in a or "://" in b:
        return
    spec = Spec.of(a, b, None, check=check, **how)
    if folder is not None:
        spec.refuse(out, overwrite)
    check_possible(check, spec.problem)
    manifest = None
    if folder is not None and not overwrite:
        if folder.exists():
            refuse_changes(folder, spec, blocks, plan)
            manifest = read_manifest(folder)
        elif complete_result(folder, spec) is not None:
            raise InputError(
                f"{folder.target}: is already the complete result of the same product: there is nothing to do; "
                f"overwrite (product.overwrite = true) computes it again"
            )
    if folder is not None and manifest is None:
        Output.reserve(folder.target, spec.contents.nbytes, overwrite)
    if machines is None:
        yield "whether it fits: the machines are not known"
        return
    made = plan_for(request(spec, "auto", blocks, manifest, plan, run_seconds, machines), None)
    made.validate()
    made.validate_run()


def _refuse_folder(folder: Folder) -> None:
    """Refuse an output if its folder is missing or read-only, or if another process works on it."""
    check_folder(folder.target, os.path.dirname(folder.target))
    if os.path.isdir(folder.path):
        check_folder(folder.target, folder.path)
        if (owner := holder(folder.path)) is not None:
            owner.refuse(folder.path)
