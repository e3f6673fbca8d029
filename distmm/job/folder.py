"""The files of a job next to C: ``C.zarr.job/`` has manifest, lock, draft, and a marker for each finished block.

    C.zarr.job/manifest.json                specification, inputs, blocks; one entry for each run
    C.zarr.job/lock.3                       the lock (see `distmm.job.lock`)
    C.zarr.job/OWNER/ID/C.zarr              the draft of C
    C.zarr.job/OWNER/ID/rows/2.values       of a threshold: one vector of block row 2
    C.zarr.job/OWNER/ID/done/2.5.json       marker: block C[2, 5] (block row 2: 2.0) is right, written and on the disk
    C.zarr.job/OWNER/ID/certificate.json    the certificate of a complete C that does not have its final name yet
    C.zarr.certificate.json                 the certificate of a C with its final name
    C.zarr.report.html                      the report of the last run: rates, and the work of each worker over time

ID is chosen at random when a job begins. The manifest, each marker and the certificate contain it. OWNER is the token
of the lock of the current run, or of the last one. A process that takes over the job renames this folder, so that a
suspended process cannot write to it any more (`distmm.storage.records`).

The files of the job itself are JSON, so reading them cannot run code. Each file gets its name when it is complete and
on the disk.

In an object store the names are the same, without OWNER, and the files are objects. There is no draft: blocks are put
under C's final name, and ``ID/C.zarr`` has only the metadata of the array (`distmm.storage.zarr_objects`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from pydantic import ValidationError

from distmm.errors import InputError
from distmm.job.forms import Form, Marker
from distmm.storage import is_there, is_url, locate
from distmm.storage.records import OWNER, records

Json = dict[str, Any]

# What a job that was killed leaves in its folder without a manifest: owners, ids, locks and probes of the clock.
LEFTOVER = re.compile(r"[0-9a-f]{32}|[0-9a-f]{16}|lock\.\d+(\.beat)?|clock\.[0-9a-f]{32}")

# Outputs whose files may have the same names: g.zarr/C.zarr and g.zarr.C.zarr.
AMBIGUOUS = re.compile(r"\.zarr\.(?!job$)", re.IGNORECASE)


@dataclass
class Folder:
    """The names of one job.

    Attributes
    ----------
    target : str
        Absolute path, or URL, of C.
    id : str
        Id of the job. Empty if it is not known; then only the names that all jobs of an output share are available.
    owner : str
        The owner's subfolder of the current run, or of the last one.
    dataset : str or None
        Name of the dataset in an HDF5 file, if the user gave one.
    store : Disk or Objects
        Store of all these files: a disk, or an object store.
    path, manifest : str
        The folder that all jobs of the output share, and the manifest in it.
    certificate, report : str
        The certificate of a C with its final name, and the report of the last run.
    work : str
        This job's own folder, in which are:
    draft, pending_certificate : str
        C and its certificate, until C has its final name.
    rows, done : str
        The folders of the files of finished block rows, of a threshold, and of the markers.
    """

    target: str
    id: str = ""
    owner: str = ""
    dataset: str | None = None

    def __post_init__(self) -> None:
        self.store = records(self.target)
        # Next to the outermost Zarr group: inside it, Zarr would read the job's folder as a damaged member.
        parts = self.target.split(os.sep)
        first = 3 if is_url(self.target) else 0  # a bucket may have any name
        zarrs = (n for n, part in enumerate(parts) if n >= first and part.lower().endswith(".zarr"))
        outer = next(zarrs, len(parts) - 1)
        stem = os.sep.join([*parts[:outer], ".".join(parts[outer:])])
        self.path, self.certificate, self.report = f"{stem}.job", f"{stem}.certificate.json", f"{stem}.report.html"
        self.manifest = os.path.join(self.path, "manifest.json")
        if self.id:
            self.work = os.path.join(self.path, self.owner, self.id)
            self.pending_certificate = os.path.join(self.work, "certificate.json")
            self.draft = os.path.join(self.work, os.path.basename(self.target))
            self.rows, self.done = os.path.join(self.work, "rows"), os.path.join(self.work, "done")

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self:
        """Return the folder of an output, by the user's name of the output.

        Raises
        ------
        InputError
            If the files with these names are of another output.
        """
        target, dataset = locate(path)
        folder = cls(target, dataset=dataset)
        if AMBIGUOUS.search(folder.path):
            folder._refuse_another()
        return folder

    def _refuse_another(self) -> None:
        for path in (self.manifest, self.certificate):
            try:
                other = replace(self, target=locate(read_json(path)["output"]["name"])[0])
            except (InputError, LookupError, TypeError):
                continue  # there is none, or what reads its content says what is wrong
            kept = path == self.manifest or is_there(other.target)  # else it may have been renamed
            if other.path == self.path and other.target != self.target and kept:
                raise InputError(
                    f"{self.target}: the files of its job would have the names of those of {other.target}, such as "
                    f"{path}: give another name"
                )

    def of_job(self, id: str) -> Self:  # noqa: A002
        """Return the names of a job of this output. Without an owner, the job's folder is searched."""
        found = self.owner or is_url(self.target)
        return replace(self, id=id, owner=self.owner if found else _owner(self.path, id) or "")

    def owned(self, token: str) -> Self:
        """Return the names of the job for the owner of the lock with this token."""
        return replace(self, owner="" if is_url(self.target) else token)

    def check_names(self) -> None:
        """Raise `InputError` if a name of one of these files would be too long for the disk."""
        above, name = os.path.split(self.certificate)  # the longest name
        if is_url(above) or not os.path.isdir(above):
            return
        most, length = os.pathconf(above, "PC_NAME_MAX"), len(os.fsencode(name))
        if length > most:
            raise InputError(
                f"{self.target}: this name is too long: that of the certificate, {name}, would have {length} bytes, "
                f"and {above} takes {most}: give a name that is {length - most} bytes shorter"
            )

    def check_leftovers(self) -> None:
        """Raise `InputError` if a folder without a job has files that no job has left, and that would be removed."""
        other = next((name for name in sorted(self.store.names(self.path)) if not LEFTOVER.fullmatch(name)), None)
        if other is not None:
            raise InputError(
                f"{self.path}: is the folder for the job of {self.target}, but contains {other}, which no job has left "
                f"there, and which would be removed: move it, or give another name for the result"
            )

    def exists(self) -> bool:
        """Whether there is an unfinished job: it has a manifest."""
        return self.store.exists(self.manifest)

    def make(self) -> None:
        """Create and sync the folders of a new job. The caller has the lock."""
        self.store.make_folder(self.work)
        self.store.make_folder(self.done)
        self.store.sync(self.path)

    def rename_draft(self) -> None:
        """Give the draft of a job whose folder was renamed, as C is named now, the name that belongs to it."""
        if is_url(self.path) or os.path.lexists(self.draft):
            return
        suffix, mine = os.path.splitext(self.target)[1], {"done", "rows", os.path.basename(self.pending_certificate)}
        for name in set(self.store.names(self.work)) - mine:
            if os.path.splitext(name)[1] == suffix:
                os.rename(os.path.join(self.work, name), self.draft)

    def clear(self) -> None:
        """Remove all files of jobs except the lock, which the caller has. The manifest, which makes a job, is first."""
        owner = os.path.join(self.path, self.owner)
        if self.exists():
            self.store.discard(self.manifest, owner)
            self.store.sync(self.path)
        names = [name for name in self.store.names(self.path) if not re.fullmatch(r"lock\.\d+(\.beat)?", name)]
        inside = [os.path.join(self.owner, name) for name in self.store.names(owner)] if self.owner else []
        for name in {*names, *inside} - {self.owner}:
            self.store.discard(os.path.join(self.path, name), owner)

    def marker(self, i: int, j: int) -> str:
        """Return the path of the marker of a block."""
        return os.path.join(self.done, f"{i}.{j}.json")

    def markers(self) -> dict[tuple[int, int], Json]:
        """Read the markers of all finished blocks. Empty without a job."""
        return self.read_markers()[0] if self.id else {}

    def read_markers(self) -> tuple[dict[tuple[int, int], Json], list[str]]:
        """Return the markers of all finished blocks, and the paths of files that are not markers of this job."""
        markers, strays = {}, []
        for name, found in self.store.read_all(self.done):
            at = re.fullmatch(r"(\d+)\.(\d+)\.json", name)
            if at is None:
                continue  # a draft of a process that was killed
            path, block = os.path.join(self.done, name), (int(at[1]), int(at[2]))
            if isinstance(found, Exception):  # an error of the disk, and not of the contents
                raise _unreadable(path, found) from found
            try:
                content = _parsed(path, found, Marker)
            except InputError:
                content = {}
            if content.pop("job", None) == self.id and (content["i"], content["j"]) == block:
                # Parsing makes new strings for each file. The keys of 40,000 markers would take 30 MB.
                markers[block] = {sys.intern(key): value for key, value in content.items()}
            else:
                strays.append(path)
        return markers, strays


def _owner(folder: str, job: str) -> str | None:
    """Return the owner's subfolder of `folder` that contains a job. None if there is none.

    If an owner was killed while it took over, the job may be in the former owner's subfolder, inside the new owner's.
    """
    with suppress(FileNotFoundError):
        names = os.listdir(folder)
        if job in names:
            return ""
        for name in filter(OWNER.fullmatch, names):
            if (inside := _owner(os.path.join(folder, name), job)) is not None:
                return os.path.join(name, inside) if inside else name
    return None


def write_json(path: str, content: Json, drafts: str | None = None) -> None:
    """Write a file, which gets its name when it is complete and on the disk. Its draft is in the folder `drafts`."""
    records(path).write(path, json.dumps(content, indent=1).encode(), drafts)


def read_json(path: str, form: type[Form] = Form) -> Json:
    """Read a file that `write_json` has written.

    Parameters
    ----------
    path : str
    form : type, optional
        The required form (`distmm.job.forms`). By default any JSON object.

    Returns
    -------
    dict

    Raises
    ------
    InputError
        If it cannot be read, is not a JSON object, or does not have that form.
    """
    try:
        content = records(path).read(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    return _parsed(path, content, form)


def _parsed(path: str, content: bytes, form: type[Form]) -> Json:
    try:
        parsed: Json = json.loads(content)
        form.model_validate(parsed)
    except ValueError as error:
        what = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            what = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise InputError(
            f"{path}: is damaged, or of another version: {what}; compute C again with --overwrite"
        ) from None
    return parsed


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(
        f"{path}: cannot be read: {error}; check that the disk is mounted; if the file is damaged, start over with "
        f"--overwrite"
    )
