"""A file system on a loop device whose writes are recorded, and what the device holds after a loss of power.

    mount of ext4, xfs or btrfs -> loop device -> file of FUSE -> qemu-storage-daemon -> image
                                                                        |-> record

QEMU's driver `blklogwrites` records each request that reaches the device: writes with their data, discards, and
flushes, one after the other, in the format of Linux' dm-log-writes. The page cache of the mounted file system lies
above the device, so nothing is in the record that the file system has not sent. A request is recorded after it is done
and before it is answered. So whatever the file system knows to be written when it sends a flush stands before that
flush.

A device keeps what was written before the last flush. Of later writes it keeps any part:

- *whole*: all of them, as in a copy of the device at one moment;
- *lost*: some of them;
- *torn*: some pages of 4096 bytes of some of them. btrfs takes for granted that a page is written as a whole.

A copy of a mounted image, made while requests arrive, mixes several moments, and no loss of power leaves that. A frozen
file system (fsfreeze) has written everything, which is the state that loses nothing.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.until import until

SECTOR, PAGE = 512, 4096
# xfs takes no device that is smaller.
SIZE = 320 << 20
MAKE = {
    # Else the kernel goes on with this for minutes, in the record of the job.
    "ext4": ["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q"],
    "btrfs": ["mkfs.btrfs", "-q"],
}
DAEMON = "qemu-storage-daemon"
# Programs, and the packages of Debian 12 that have them.
NEEDED = {DAEMON: "qemu-system-common", "mkfs.ext4": "e2fsprogs", "mkfs.xfs": "xfsprogs", "mkfs.btrfs": "btrfs-progs"}
LOSSES = ("whole", "lost", "torn")

# Of a record: flags of a request, and the first words of its header.
FLUSH, DISCARD = 1, 4
HEADER = struct.Struct("<QQQQ")


@dataclass(frozen=True)
class Request:
    """One request that the device has got.

    Attributes
    ----------
    start, length : int
        Bytes of the device that are written or discarded; length 0 where it only flushes.
    data : int
        Where the data lie in the record.
    end : int
        Where the request ends in the record.
    flush, discard : bool
        Whether all before it is on the disk then; whether it makes zeros.
    """

    start: int
    length: int
    data: int
    end: int
    flush: bool
    discard: bool


@dataclass(frozen=True)
class Parts:
    """What a state keeps of the writes after the last flush: ranges of bytes ``(start, stop)`` of requests."""

    flushed: int
    kept: tuple[tuple[int, int, int], ...]


@dataclass
class Device:
    """A device in a folder of its own.

    Attributes
    ----------
    folder : Path
        Absolute: the daemon unmounts by this name.
    system : str
        Kind of its file system.
    """

    folder: Path
    system: str

    @property
    def place(self) -> Path:
        """Where it is mounted, and its states later."""
        return self.folder / "disk"

    @property
    def _image(self) -> Path:
        return self.folder / "image"

    @property
    def _base(self) -> Path:
        return self.folder / "base"

    @property
    def _record(self) -> Path:
        return self.folder / "record"

    def make(self) -> None:
        """Make an empty file system."""
        assert self.folder.is_absolute()
        self.place.mkdir(parents=True)
        with open(self._image, "wb") as file:
            file.truncate(SIZE)
        make, *options = MAKE[self.system]
        subprocess.run([program(make), *options, self._image], check=True, capture_output=True)

    @contextmanager
    def mounted(self, image: Path | None = None) -> Iterator[None]:
        """Mount an image, by default the device's own before it is recorded."""
        subprocess.run(["mount", "-o", "loop", "-t", self.system, image or self._image, self.place], check=True)
        try:
            yield
        finally:
            until(self._unmounted, f"{self.place} is still in use")

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Mount the device, and record what it is asked to do from now on."""
        subprocess.run(["cp", "--sparse=always", self._image, self._base], check=True)
        file, ready = self.folder / "device", self.folder / "ready"
        file.touch()
        self._record.touch()
        # Without discard=unmap QEMU leaves the data of what the loop device wants to be zeros.
        disk = f"driver=file,node-name=image,filename={self._image},discard=unmap"
        log = f"driver=file,node-name=record,filename={self._record}"
        both = "driver=blklogwrites,node-name=both,file=image,log=record,discard=unmap"
        export = f"type=fuse,id=export,node-name=both,mountpoint={file},writable=on"
        blocks = [f"--blockdev={each}" for each in (disk, log, both)]
        with subprocess.Popen([program(DAEMON), *blocks, f"--export={export}", f"--pidfile={ready}"]) as daemon:
            try:
                until(lambda: ready.exists() or daemon.poll() is not None)
                if daemon.poll() is not None:
                    raise RuntimeError(f"{DAEMON} ended with {daemon.returncode}")
                with self.mounted(file):
                    yield
            finally:
                daemon.terminate()

    def moment(self) -> int:
        """Bytes of the record so far: what was answered by now stands in them."""
        return self._record.stat().st_size

    @cached_property
    def requests(self) -> list[Request]:
        """The record, once it is complete."""
        found, at = [], SECTOR  # after the first sector, which describes the record
        with open(self._record, "rb") as file:
            while at + HEADER.size <= self.moment():
                file.seek(at)
                sector, count, flags, _ = HEADER.unpack(file.read(HEADER.size))
                data, length = at + SECTOR, count * SECTOR
                at = data + (0 if flags & DISCARD else length)
                found.append(Request(sector * SECTOR, length, data, at, bool(flags & FLUSH), bool(flags & DISCARD)))
        return found

    def count(self, moment: int) -> int:
        """Return how many requests were recorded up to a moment."""
        return sum(request.end <= moment for request in self.requests)

    def parts(self, point: int, loss: str, rng: random.Random) -> Parts:
        """Draw what the device holds if power is lost after `point` requests."""
        flushed = max((n + 1 for n, request in enumerate(self.requests[:point]) if request.flush), default=0)
        kept, most = [], rng.choice((0.1, 0.5, 0.9))
        for n in range(flushed, point):
            length = self.requests[n].length
            if loss == "whole" or (loss == "lost" and rng.random() < most):
                kept.append((n, 0, length))
            elif loss == "torn" and rng.random() < most:
                places = [0, *range(-self.requests[n].start % PAGE, length, PAGE), length]
                first, second = sorted(rng.choices(places, k=2))
                kept += [(n, 0, first), (n, second, length)]
        return Parts(flushed, tuple(part for part in kept if part[1] < part[2]))

    def state(self, parts: Parts) -> Path:
        """Write an image of the device as it is then."""
        path = self.folder / "state"
        subprocess.run(["cp", "--sparse=always", self._base, path], check=True)
        whole = [(n, 0, self.requests[n].length) for n in range(parts.flushed)]
        with open(self._record, "rb") as record, open(path, "r+b") as file:
            for n, start, stop in (*whole, *parts.kept):
                request = self.requests[n]
                file.seek(request.start + start)
                record.seek(request.data + start)
                file.write(bytes(stop - start) if request.discard else record.read(stop - start))
        return path

    def remove(self) -> None:
        """Remove its files."""
        shutil.rmtree(self.folder)

    def _unmounted(self) -> bool:
        return subprocess.run(["umount", self.place], capture_output=True, check=False).returncode == 0


def namespace() -> list[str]:
    """Command that runs another one in namespaces of its own: with its end all mounts and processes end, too."""
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def program(name: str) -> str:
    """Return the path of a program of the administrator's."""
    found = shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
    if found is None:
        raise FileNotFoundError(f"there is no {name}: apt-get install {NEEDED[name]}")
    return found
