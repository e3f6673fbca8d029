"""Stamps: hashes of what a file system or a store says of files, which differ after any write. They need no NumPy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from distmm.storage.object_store import OBJECTS, is_url


def stamp_of(path: str) -> str:
    """Return the stamp of a file, of a folder, or of an array in an object store.

    It is a hash of the inodes, sizes and times of files, or of the tags of objects, or their sizes and times.
    """
    if not is_url(path):
        return of_files(_files(path) if os.path.isdir(path) else [("", os.stat(path))])
    found = OBJECTS.everything(path)
    facts = ("size", "ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created")
    described = [[name, *(str(found[name].get(fact)) for fact in facts)] for name in sorted(found)]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def of_files(files: Iterable[tuple[str, os.stat_result]]) -> str:
    """Return a hash of inode, size and times of files.

    A program can set the time of modification (mtime), but not the time of change (ctime). A file that replaces another
    file has another inode.
    """
    found = hashlib.sha256()
    for name, facts in files:
        line = f"{name} {facts.st_ino} {facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}\n"
        found.update(os.fsencode(line))
    return found.hexdigest()


def entries(folder: str, inside: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all files of a folder and its subfolders, sorted by name.

    Their sizes are not read. Each size costs a round trip on a network file system.
    """
    with os.scandir(folder) as found:
        for entry in sorted(found, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from entries(entry.path, f"{inside}{entry.name}/")
            else:
                yield f"{inside}{entry.name}", entry


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the same files with their sizes and times."""
    for inside, entry in entries(folder):
        with suppress(FileNotFoundError):  # removed in the meantime, or a dangling link
            yield inside, entry.stat()
