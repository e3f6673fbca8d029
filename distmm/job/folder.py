"""What lies beside C while it is made: ``C.zarr.job/`` with manifest, lock, draft, and one marker a finished block.

    C.zarr.job/manifest.json      what is computed, from what, how it is cut; one entry for each run
    C.zarr.job/lock.3             who works on it (see `distmm.job.lock`)
    C.zarr.job/C.zarr             C as far as it is written
    C.zarr.job/done/2.5.json      block C[2, 5] is written, on the disk, and right
    C.zarr.certificate.json       what is left when C is complete and has its name
    C.zarr.report.html            who worked when in the last run, at which rate

All of it is JSON: nothing that is read here can run code. Each file appears under its name only when it is whole and
on the disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from typing import Any

from distmm.errors import InputError
from distmm.job.forms import MARKER, wrong
from distmm.storage import fsync, locate

__all__ = ["Folder", "Json", "read_json", "write_json"]

Json = dict[str, Any]


@dataclass(frozen=True)
class Folder:
    """The names of one job. `target` is the absolute path of the file or folder that C will be."""

    target: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Folder:
        """Return the job of an output, as the user names it."""
        return cls(locate(path)[0])

    @property
    def _stem(self) -> str:
        # Beside the outermost Zarr group: inside it Zarr would take the job for a damaged member.
        parts = self.target.split(os.sep)
        outer = next((n for n, part in enumerate(parts) if part.lower().endswith(".zarr")), len(parts) - 1)
        return os.sep.join([*parts[:outer], ".".join(parts[outer:])])

    @property
    def path(self) -> str:
        """The folder itself."""
        return f"{self._stem}.job"

    @property
    def certificate(self) -> str:
        """Where the certificate stands at last."""
        return f"{self._stem}.certificate.json"

    @property
    def report(self) -> str:
        """Where the report of the last run stands."""
        return f"{self._stem}.report.html"

    @property
    def pending_report(self) -> str:
        """Where it stands while C is not complete."""
        return os.path.join(self.path, "report.html")

    @property
    def pending_certificate(self) -> str:
        """Where it waits for C to get its name."""
        return os.path.join(self.path, "certificate.json")

    @property
    def manifest(self) -> str:
        """The manifest."""
        return os.path.join(self.path, "manifest.json")

    @property
    def draft(self) -> str:
        """Where C is written."""
        return os.path.join(self.path, os.path.basename(self.target))

    @property
    def done(self) -> str:
        """The folder of the markers."""
        return os.path.join(self.path, "done")

    def exists(self) -> bool:
        """Whether a job has been begun: without a manifest there is nothing to go on with."""
        return os.path.exists(self.manifest)

    def make(self) -> None:
        """Make the folder, in one that must exist."""
        try:
            os.makedirs(self.done, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made: {error}; choose another place for C") from error

    def remove(self) -> None:
        """Remove the job with all that has been done; the manifest first, so that half of a job is none."""
        if self.exists():
            os.unlink(self.manifest)
        shutil.rmtree(self.path)

    def sweep(self) -> None:
        """Remove what killed jobs on this output have left beside C; called by the owner of the lock, once C is there.

        That is the matrix that C has replaced, and half-written certificates.
        """
        stem, suffix = os.path.splitext(os.path.basename(self.target))
        old = re.compile(rf"\.{re.escape(stem)}\.old-[0-9a-f]{{8}}{re.escape(suffix)}")
        draft = re.compile(rf"{re.escape(os.path.basename(self.certificate))}\.[0-9a-f]{{32}}\.draft")
        for place, ours in ((self.target, old), (self.certificate, draft)):
            for entry in list(os.scandir(os.path.dirname(place))):
                if ours.fullmatch(entry.name):
                    shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def marker(self, i: int, j: int) -> str:
        """Path of the marker of one block."""
        return os.path.join(self.done, f"{i}.{j}.json")

    def markers(self) -> dict[tuple[int, int], Json]:
        """Read the markers of all finished blocks; one that is damaged marks nothing, and its block is made again."""
        found = (re.fullmatch(r"(\d+)\.(\d+)\.json", name) for name in os.listdir(self.done))
        read = {(int(at[1]), int(at[2])): _marker(os.path.join(self.done, at[0])) for at in found if at}
        return {at: marker for at, marker in read.items() if marker and (marker["i"], marker["j"]) == at}


def write_json(path: str, content: Json) -> None:
    """Write a file that is either whole and on the disk, or not there."""
    draft = f"{path}.{uuid.uuid4().hex}.draft"
    try:
        with open(draft, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        if os.path.exists(draft):
            os.unlink(draft)
        raise
    fsync(os.path.dirname(path))


def _marker(path: str) -> Json | None:
    """Read a marker; None for what is none, such as the empty file that a loss of power may leave."""
    try:
        with open(path) as file:
            content = json.load(file)
    except ValueError:
        return None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}; is the disk there?") from error
    return None if any(wrong(content, MARKER)) else content


def read_json(path: str, form: Json | None = None) -> Json:
    """Read what `write_json` has written.

    Parameters
    ----------
    path : str
    form : dict, optional
        What it must look like (`distmm.job.forms`).

    Raises
    ------
    InputError
        If it cannot be read, is no JSON object, or has not that form.
    """
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {error}; is the disk there, and the file whole?") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object; it was not written by distmm")
    bad = next(wrong(content, form or {}), None)
    if bad is not None:
        raise InputError(f"{path}: is damaged, or of another version: {bad}; make C anew with --overwrite")
    return content
