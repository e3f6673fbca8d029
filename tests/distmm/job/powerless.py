"""What a disk holds after power was lost, by a model of unsynced writes.

While something runs in this process, each `os.fsync` is noted, and what it brings to the disk: of a file its content,
of a folder its names. A loss of power then leaves one of two states for each moment:

- *strict*: nothing but what was synced. A name whose folder was not synced is missing, or still there.
- *names first*: all names as they were seen, but of files the content that was synced last; one that never was is
  empty, or holds zeros.

Real file systems lie between the two.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# A folder is a dictionary of names, a file its content and the time of its last change.
File = tuple[bytes, int]
Tree = dict[str, Any]


@dataclass
class Disk:
    """The model of one folder.

    Attributes
    ----------
    root : Path
    states : list of (str, Tree)
        What each moment can leave, with its number and kind; no state twice.
    """

    root: Path
    states: list[tuple[str, Tree]] = field(default_factory=list)
    _content: dict[int, File] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.RLock)
    _moments: int = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what reaches the disk meanwhile; what is there at the beginning has reached it."""
        self._content, self._names = self._seen()
        sync, unlink = os.fsync, os.unlink

        def synced(descriptor: int) -> None:
            sync(descriptor)
            self._moment(os.fstat(descriptor).st_ino)

        def unlinked(*arguments: Any, **named: Any) -> None:
            unlink(*arguments, **named)
            self._moment(None)

        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "fsync", synced)
                patch.setattr(os, "unlink", unlinked)
                yield
        finally:
            for descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def become(self, state: Tree) -> None:
        """Put a state in the place of what is there; locks are a minute old by then."""
        shutil.rmtree(self.root)
        _write(self.root, state)

    def _moment(self, synced: int | None) -> None:
        with self._lock:
            content, names = self._seen()
            if synced in names:
                self._names[synced] = names[synced]
            elif synced in content:
                self._content[synced] = content[synced]
            self._moments += 1
            zeros = self._moments % 2
            lost = {number: (bytes(len(data) * zeros), time) for number, (data, time) in content.items()}
            folders = {number: self._names.get(number, {}) for number in self._names.keys() | names.keys()}
            gone = {number: (b"", 0) for one in folders.values() for number in one.values()}
            root = os.stat(self.root).st_ino
            self._add("strict", _tree(root, folders, {**gone, **lost, **self._content}))
            self._add("names first", _tree(root, names, {**lost, **self._content}))

    def _add(self, kind: str, state: Tree) -> None:
        if state not in (other for _, other in self.states):
            self.states.append((f"{kind} at moment {self._moments}", state))

    def _seen(self) -> tuple[dict[int, File], dict[int, dict[str, int]]]:
        """Files and folders as they are now, by their inodes, which are held open so that no number is used twice."""
        while True:
            content: dict[int, File] = {}
            names: dict[int, dict[str, int]] = {}
            try:
                for folder, folders, files in os.walk(self.root, onerror=_raise):
                    inside = {name: self._held(os.path.join(folder, name)) for name in (*folders, *files)}
                    names[os.stat(folder).st_ino] = inside
                    for name in files:
                        path = Path(folder, name)
                        content[inside[name]] = path.read_bytes(), path.stat().st_mtime_ns
            except FileNotFoundError:  # another thread has removed it: look again
                continue
            return content, names

    def _held(self, path: str) -> int:
        number = os.stat(path).st_ino
        if number not in self._open:
            self._open[number] = os.open(path, os.O_RDONLY)
        return number


def _raise(error: OSError) -> None:
    raise error


def _tree(number: int, names: dict[int, dict[str, int]], content: dict[int, File]) -> Tree:
    return {
        name: _tree(inside, names, content) if inside in names else content[inside]
        for name, inside in sorted(names[number].items())
    }


def _write(folder: Path, state: Tree) -> None:
    folder.mkdir()
    for name, inside in state.items():
        path = folder / name
        if isinstance(inside, dict):
            _write(path, inside)
            continue
        data, time = inside
        path.write_bytes(data)
        os.utime(path, ns=(0, 0) if name.startswith("lock.") else (time, time))
