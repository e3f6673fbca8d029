"""Checks of the whole result, before it gets its name. A result that is not right is kept under another name."""

from __future__ import annotations

from typing import NoReturn

from distributed import Client

from distmm.checking.verdict import Verdict
from distmm.errors import UndecidedError, WrongResultError
from distmm.job.folder import Folder, Json
from distmm.job.lock import Lock
from distmm.job.sampled_rows import check_sample
from distmm.job.spec import Spec
from distmm.storage import open_matrix
from distmm.storage.output import Output

__all__ = ["FinalChecks"]


class FinalChecks:
    """Checks of one job's result.

    Parameters
    ----------
    folder : Folder
    spec : Spec
    overwrite : bool
        Whether the job replaces files.
    lock : Lock
        The job's lock, which it must still hold when it renames a result that is not right.
    """

    def __init__(self, folder: Folder, spec: Spec, overwrite: bool, lock: Lock) -> None:
        self.folder, self.spec, self.overwrite, self.lock = folder, spec, overwrite, lock

    def all_elements(self) -> None:
        """Compare all elements of C with a float64 product.

        Raises
        ------
        WrongResultError, UndecidedError
        """
        verdict = self.spec.verify(open_matrix(self.folder.draft), check="full")
        if not verdict:
            self._set_aside(verdict)

    def sampled_rows(self, client: Client, manifest: Json, markers: list[Json]) -> Verdict | None:
        """Compute sampled rows of a reduced product again, and compare them. Return None if the job checks nothing.

        Raises
        ------
        WrongResultError
        """
        if self.spec.check == "none":
            return None
        content = {"blocks": manifest["blocks"], "done": markers}
        verdict = check_sample(client, self.spec, self.folder.draft, content, manifest["seed"])
        if verdict.outcome == "wrong":
            self._set_aside(verdict)
        return verdict

    def _set_aside(self, verdict: Verdict) -> NoReturn:
        """End the job, and keep the result under another name."""
        folder = self.folder
        Lock.check(folder.path, self.lock.token)
        kept = Output(folder.target, folder.draft, self.overwrite).set_aside()
        folder.clear()
        error = WrongResultError if verdict.outcome == "wrong" else UndecidedError
        raise error(f"{verdict.message}; the result is kept as {kept}")
