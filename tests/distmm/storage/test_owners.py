"""Who was the owner of a folder, or held a block, changes nothing after another one has taken over."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distmm.errors import InputError
from distmm.job.folder import Folder
from distmm.storage import create_output, flat, open_matrix, reopen_output
from distmm.storage.durability import published
from distmm.storage.records import DISK

FORMER, OWNER, LATER = "a" * 32, "b" * 32, "c" * 32
JOB = "0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder whose owner has begun a job, and in which something else lies."""
    names = Folder(str(tmp_path / "C.zarr"), JOB, FORMER)
    os.mkdir(names.path)
    DISK.own(names.path, FORMER)
    names.make()
    DISK.write(names.marker(0, 0), b"one")
    Path(names.manifest).write_text("{}")
    return names.path


def test_the_work_of_a_former_owner_is_found_and_kept(folder: str) -> None:
    assert Folder(folder.removesuffix(".job")).of_job(JOB).owner == FORMER
    DISK.own(folder, OWNER)
    DISK.take_over(folder, OWNER)
    found = Folder(folder.removesuffix(".job")).of_job(JOB)
    assert (found.owner, os.listdir(found.done)) == (OWNER, ["0.0.json"])
    assert sorted(os.listdir(folder)) == [OWNER, "manifest.json"]


def test_an_owner_who_was_killed_while_it_took_over_loses_no_work(folder: str) -> None:
    DISK.own(folder, OWNER)
    os.rename(f"{folder}/{FORMER}", f"{folder}/{OWNER}/{FORMER}")
    names = Folder(folder.removesuffix(".job"))
    assert names.of_job(JOB).owner == f"{OWNER}/{FORMER}"
    DISK.own(folder, LATER)
    DISK.take_over(folder, LATER)
    assert names.of_job(JOB).owner == LATER
    assert os.listdir(names.of_job(JOB).done) == ["0.0.json"]


CHANGES: dict[str, Callable[[Folder], object]] = {
    "a marker": lambda names: DISK.write(names.marker(0, 1), b"two"),
    "removal of a marker": lambda names: DISK.remove(names.marker(0, 0)),
    "the manifest": lambda names: DISK.write(names.manifest, b"{}", f"{names.path}/{FORMER}"),
    "removal of the manifest": lambda names: DISK.discard(names.manifest, f"{names.path}/{FORMER}"),
    "another job": lambda names: names.of_job("f" * 16).make(),
    "all that is there": lambda names: names.clear(),
    "a takeover": lambda names: DISK.take_over(names.path, FORMER),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_former_owner_changes_nothing(change: Callable[[Folder], object], folder: str) -> None:
    DISK.own(folder, OWNER)
    DISK.take_over(folder, OWNER)
    before = sorted(Path(folder).rglob("*"))
    with pytest.raises(FileNotFoundError):
        change(Folder(folder.removesuffix(".job"), JOB, FORMER))
    assert sorted(Path(folder).rglob("*")) == before


def test_what_is_not_there_any_more_needs_no_removal(folder: str) -> None:
    DISK.discard(f"{folder}/lock.7", f"{folder}/{FORMER}")


def test_the_first_who_is_ready_gives_a_file_its_name(tmp_path: Path) -> None:
    path = str(tmp_path / "chunk")
    with published([path], str(tmp_path)) as (file,):
        file.write(b"first")
        assert not os.path.exists(path)
    with published([path], str(tmp_path)) as (file,):
        file.write(b"first")

    def another() -> None:
        with published([path], str(tmp_path)) as (file,):
            file.write(b"other")

    with pytest.raises(InputError, match="has written other bits"):
        another()
    assert (os.listdir(tmp_path), Path(path).read_bytes()) == (["chunk"], b"first")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_gets_its_name_where_there_are_no_hard_links(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*names: str) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", none)
    with published([str(tmp_path / "chunk")], str(tmp_path)) as (file,):
        file.write(b"first")
    assert (os.listdir(tmp_path), (tmp_path / "chunk").read_bytes()) == (["chunk"], b"first")


@pytest.fixture(params=["C.npy", "C.h5"])
def target(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A file of four blocks; nobody waits for who sleeps."""
    monkeypatch.setattr(flat, "ENDING_SECONDS", 0)
    draft = str(tmp_path / f"draft{Path(request.param).suffix}")
    return create_output(tmp_path / request.param, (4, 6), "f8", (2, 3), draft=draft)


TOP, BELOW, LEFT = slice(0, 2), slice(2, 4), slice(0, 3)


def test_two_write_different_blocks_of_a_file_at_a_time_and_no_block_twice(target: Any) -> None:
    with target.writing(TOP, LEFT):
        with target.writing(BELOW, LEFT):
            pass
        with pytest.raises(InputError, match="is still locked, after"), target.writing(TOP, LEFT):
            pytest.fail("it is being written")
    with target.writing(TOP, LEFT):
        target[TOP, LEFT] = np.ones((2, 3))


def test_who_sleeps_in_the_middle_of_a_block_writes_into_no_file_that_another_goes_on_with(target: Any) -> None:
    target[BELOW, LEFT] = np.full((2, 3), 3.0)
    with target.writing(TOP, LEFT), open(target.output.draft, "r+b") as asleep:
        again = reopen_output(target.output.path, target.output.draft)
        again.detach()
        flat.write_rows(asleep, target.offset, 6, 0, 0, np.full((2, 3), 7.0))
    again.output.commit()
    c = open_matrix(target.output.path)[...]
    assert (c[TOP, LEFT].max(), c[BELOW, LEFT].min()) == (0, 3)


def test_who_wakes_up_after_a_file_was_copied_or_got_its_name_does_not_write(target: Any) -> None:
    draft, other = target.output.draft, f"{target.output.draft}.other"

    def late() -> None:
        with target.writing(TOP, LEFT):
            pytest.fail("the file is another one")

    open_file = open

    def replaced_meanwhile(*arguments: Any, **named: Any) -> Any:
        file = open_file(*arguments, **named)
        os.rename(draft, other)
        Path(draft).write_bytes(Path(other).read_bytes())
        return file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "open", replaced_meanwhile, raising=False)  # not every thread's open
        with pytest.raises(FileNotFoundError):
            late()
    os.unlink(draft)
    with pytest.raises(FileNotFoundError):
        late()


def test_a_file_that_nobody_writes_is_not_copied(target: Any) -> None:
    before = os.stat(target.output.draft).st_ino
    target.detach()
    assert os.stat(target.output.draft).st_ino == before


def test_a_copy_that_does_not_fit_says_what_to_do(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*names: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(flat.shutil, "copyfile", full)
    with target.writing(TOP, LEFT), pytest.raises(InputError, match="end that process, or free"):
        target.detach()


def test_where_there_are_no_locks_of_bytes_blocks_are_written_all_the_same(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(flat.fcntl, "fcntl", none)
    with target.writing(TOP, LEFT), target.writing(TOP, LEFT):
        target.detach()
