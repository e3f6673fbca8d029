"""Jobs on disks that are full, or gone. Run by `test_mounts.py` in a mount namespace of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import InputError
from tests.distmm.job.disturbed import marked, mend, multiply, operands, values


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file system of four megabytes with A and B."""
    folder = tmp_path_factory.mktemp("disk")
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
    operands(folder / "in")
    return folder


@pytest.fixture(scope="module")
def whole(disk: Path, client: Client) -> np.ndarray:
    """C of a job that nothing happened to."""
    multiply(client, f"{disk}/whole.zarr", f"{disk}/in")
    return values(f"{disk}/whole.zarr")


@pytest.fixture
def seen(disk: Path, tmp_path: Path) -> Iterator[Path]:
    """The same file system under another name, which can go and come again."""
    mount("--bind", disk, tmp_path)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=False, capture_output=True)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("name", ["full.zarr", "full.npy"])
def test_a_full_disk(name: str, disk: Path, client: Client, whole: np.ndarray) -> None:
    filler, out = disk / "filler", f"{disk}/{name}"

    def fill() -> None:
        with open(filler, "ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))

    def make_room() -> None:
        fill()  # what the job has given back: a block might just fit in
        before = marked(out)
        with pytest.raises(InputError, match=rf"No space left on device; {len(before)} of 16 blocks of C are finished"):
            job.resume(out, client=client)
        assert marked(out) == before
        filler.unlink()

    c = mend(client, fill, make_room, "No space left on device", out, f"{disk}/in", "stopped")
    np.testing.assert_array_equal(c, whole)


def test_inputs_whose_mount_has_gone(disk: Path, seen: Path, client: Client, whole: np.ndarray) -> None:
    c = mend(
        client, lambda: unmount(seen), lambda: mount("--bind", disk, seen), "cannot read", f"{disk}/inputs.zarr",
        f"{seen}/in",
    )  # fmt: skip
    np.testing.assert_array_equal(c, whole)


@pytest.mark.parametrize("name", ["gone.zarr", "gone.npy"])
def test_an_output_whose_mount_has_gone(name: str, disk: Path, seen: Path, client: Client, whole: np.ndarray) -> None:
    def come_again() -> None:
        assert os.listdir(seen) == []  # nothing was written to the disk below
        with pytest.raises(InputError, match="there is no unfinished job"):
            job.resume(f"{seen}/{name}", client=client)
        mount("--bind", disk, seen)

    where = f"{seen}/{name}"
    c = mend(client, lambda: unmount(seen), come_again, "No such file or directory", where, f"{disk}/in", "stopped")
    np.testing.assert_array_equal(c, whole)
