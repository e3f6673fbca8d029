"""Names and files beside C while it is made: ``C.zarr.job/`` with manifest, lock, draft, and a marker a finished block.

    C.zarr.job/manifest.json          what is computed, from what, how it is cut; one entry for each run
    C.zarr.job/lock.3                 who works on it (see `distmm.job.lock`)
    C.zarr.job/OWNER/ID/C.zarr              C as far as it is written
    C.zarr.job/OWNER/ID/rows/2.values       where C is reduced: one array of block row 2
    C.zarr.job/OWNER/ID/done/2.5.json       block C[2, 5] (or block row 2, as 2.0) is written, on the disk, and right
    C.zarr.job/OWNER/ID/certificate.json    C is complete, and gets its name
    C.zarr.certificate.json           what is left when C has its name
    C.zarr.report.html                who worked when in the last run, at which rate

ID is random and made when a job is begun. The manifest, each marker and the certificate contain it. OWNER is the token
of the lock under which the job is worked on, or was last. Who takes the job over renames its folder, so a process that
was suspended meanwhile finds no folder to write to (`distmm.storage.records`).

All files are JSON, so reading them cannot run code. Each file appears under its name only when it is whole and on the
disk.

In an object store the names are the same, without OWNER, and the files are objects. Only the draft is none: blocks are
put under C's own name, and ``ID/C.zarr`` has the metadata that make an array of them (`distmm.storage.zarr_objects`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from distmm.errors import InputError
from distmm.job.json_forms import MARKER, wrong
from distmm.storage import is_url, locate
from distmm.storage.records import OWNER, Records, records

__all__ = ["Folder", "Json", "read_json", "write_json"]

Json = dict[str, Any]


@dataclass(frozen=True)
class Folder:
    """The names of one job.

    Attributes
    ----------
    target : str
        Absolute path of the file or folder that C will be.
    id : str
        Of the job; empty as long as it is not known, where only names that all jobs of an output share are asked for.
    owner : str
        Folder, inside that of the output, of the owner who works on the job or was the last to do so.
    """

    target: str
    id: str = ""
    owner: str = ""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self:
        """Return the folder of an output, as the user names it."""
        return cls(locate(path)[0])

    def of_job(self, id: str) -> Self:  # noqa: A002
        """Return the names of one job on this output, as its owner has them, or as they are found."""
        found = self.owner or is_url(self.target)
        return replace(self, id=id, owner=self.owner if found else _owner(self.path, id) or "")

    def owned(self, token: str) -> Self:
        """Return the names of the job for the owner of the lock with this token."""
        return replace(self, owner="" if is_url(self.target) else token)

    @property
    def _stem(self) -> str:
        # Beside the outermost Zarr group: inside it Zarr would take the job for a damaged member.
        parts = self.target.split(os.sep)
        first = 3 if is_url(self.target) else 0  # a bucket may have any name
        zarrs = (n for n, part in enumerate(parts) if n >= first and part.lower().endswith(".zarr"))
        outer = next(zarrs, len(parts) - 1)
        return os.sep.join([*parts[:outer], ".".join(parts[outer:])])

    @property
    def store(self) -> Records:
        """Where all of this is kept."""
        return records(self.target)

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
    def work(self) -> str:
        """The folder in which this job alone writes."""
        if not self.id:
            raise ValueError(f"{self.path}: the id of the job is not known yet")
        return os.path.join(self.path, self.owner, self.id)

    @property
    def pending_certificate(self) -> str:
        """Where it waits for C to get its name."""
        return os.path.join(self.work, "certificate.json")

    @property
    def manifest(self) -> str:
        """The manifest."""
        return os.path.join(self.path, "manifest.json")

    @property
    def draft(self) -> str:
        """Where C is written."""
        return os.path.join(self.work, os.path.basename(self.target))

    @property
    def block_rows(self) -> str:
        """The folder of finished block rows, where C is reduced."""
        return os.path.join(self.work, "rows")

    @property
    def done(self) -> str:
        """The folder of the markers."""
        return os.path.join(self.work, "done")

    def exists(self) -> bool:
        """Whether a job has been begun: without a manifest there is nothing to go on with."""
        return self.store.exists(self.manifest)

    def make(self) -> None:
        """Make the folders of a new job, under the lock, on the disk."""
        self.store.make_folder(self.work)
        self.store.make_folder(self.done)
        self.store.sync(self.path)

    def clear(self) -> None:
        """Remove all that jobs have left but the lock, under it; the manifest first, so that half of a job is none."""
        owner = os.path.join(self.path, self.owner)
        if self.exists():
            self.store.discard(self.manifest, owner)
            self.store.sync(self.path)
        names = [name for name in self.store.names(self.path) if not re.fullmatch(r"lock\.\d+(\.beat)?", name)]
        inside = [os.path.join(self.owner, name) for name in self.store.names(owner)] if self.owner else []
        for name in {*names, *inside} - {self.owner}:
            self.store.discard(os.path.join(self.path, name), owner)

    def marker(self, i: int, j: int) -> str:
        """Path of the marker of one block."""
        return os.path.join(self.done, f"{i}.{j}.json")

    def markers(self) -> dict[tuple[int, int], Json]:
        """Read the markers of all finished blocks; those of no job, where none has been begun."""
        return self.read_markers()[0] if self.id else {}

    def read_markers(self) -> tuple[dict[tuple[int, int], Json], list[str]]:
        """Read the markers of all finished blocks, and name the files that are no markers of this job."""
        markers, strays = {}, []
        for name, found in self.store.read_all(self.done):
            at = re.fullmatch(r"(\d+)\.(\d+)\.json", name)
            if at is None:
                continue  # a draft that a kill has left
            path, block = os.path.join(self.done, name), (int(at[1]), int(at[2]))
            if isinstance(found, Exception):  # the disk, and not what is on it
                raise _unreadable(path, found) from found
            try:
                content = _parsed(path, found, MARKER)
            except InputError:
                content = {}
            if content.pop("job", None) == self.id and (content["i"], content["j"]) == block:
                # Each parsed file has strings of its own: for 40,000 markers their names alone would take 30 MB.
                markers[block] = {sys.intern(key): value for key, value in content.items()}
            else:
                strays.append(path)
        return markers, strays


def _owner(folder: str, job: str) -> str | None:
    """Return the owner's folder, inside `folder`, in which a job is; None if it is in none.

    An owner who was killed while it took over may have left it in its predecessor's folder, inside its own.
    """
    with suppress(FileNotFoundError):
        names = os.listdir(folder)
        if job in names:
            return ""
        for name in filter(OWNER.fullmatch, names):
            if (inside := _owner(os.path.join(folder, name), job)) is not None:
                return os.path.join(name, inside) if inside else name
    return None


def write_json(path: str, content: Json, draft: str | None = None) -> None:
    """Write a file that is either whole and on the disk, or not there; `draft` is where it is written until then."""
    records(path).write(path, json.dumps(content, indent=1).encode(), draft)


def read_json(path: str, form: Json | None = None) -> Json:
    """Read what `write_json` has written.

    Parameters
    ----------
    path : str
    form : dict, optional
        What it must look like (`distmm.job.json_forms`).

    Raises
    ------
    InputError
        If it cannot be read, is no JSON object, or has not that form.
    """
    try:
        content = records(path).read(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _parsed(path, content, form)


def _parsed(path: str, content: bytes, form: Json | None) -> Json:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise _unreadable(path, error) from error
    if not isinstance(parsed, dict):
        raise InputError(f"{path}: holds no JSON object; it was not written by distmm")
    bad = next(wrong(parsed, form or {}), None)
    if bad is not None:
        raise InputError(f"{path}: is damaged, or of another version: {bad}; make C anew with --overwrite")
    return parsed


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(f"{path}: cannot be read: {error}; is the disk there, and the file whole?")
