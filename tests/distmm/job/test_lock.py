"""One job on one output, and a dead job holds nothing for ever."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distmm.errors import InputError
from distmm.job import lock
from distmm.job.lock import Lock, LockHolder, holder
from tests.until import until


def test_a_lock_is_taken_once_and_given_up(tmp_path: Path) -> None:
    first = Lock.take(str(tmp_path))
    with pytest.raises(InputError, match=rf"process {os.getpid()} on .* last seen"):
        Lock.take(str(tmp_path))
    first.release()
    assert holder(str(tmp_path)) is None
    Lock.take(str(tmp_path)).release()
    assert os.listdir(tmp_path) == []


HANG = "import signal, sys; from distmm.job.lock import Lock; Lock.take(sys.argv[1]); signal.pause()"


def test_the_lock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", HANG, str(tmp_path)], env=environment)

    def told() -> LockHolder | None:
        assert process.poll() is None
        found = holder(str(tmp_path))
        return found if found is not None and found.token else None

    found = until(told)
    assert (found.pid, found.stale) == (process.pid, False)
    process.kill()
    process.wait()
    second = Lock.take(str(tmp_path))
    assert second.number == found.number + 1
    second.release()


def foreign(folder: Path, age: float, number: int = 3) -> None:
    """A lock of a process on another machine that was seen `age` seconds ago."""
    path = folder / f"lock.{number}"
    path.write_text(json.dumps({"host": "far", "pid": 7, "machine": "far away", "born": "1", "token": "x"}))
    os.utime(path, (time.time() - age,) * 2)


def test_a_lock_of_another_machine_is_free_when_nobody_has_touched_it_for_a_minute(tmp_path: Path) -> None:
    foreign(tmp_path, lock.STALE_SECONDS / 2)
    with pytest.raises(InputError, match="process 7 on far"):
        Lock.take(str(tmp_path))
    foreign(tmp_path, lock.STALE_SECONDS + 10)
    Lock.take(str(tmp_path)).release()


def test_an_owner_that_was_only_asleep_finds_that_it_has_lost_the_lock(tmp_path: Path) -> None:
    foreign(tmp_path, 1000, number=3)
    Lock.check(str(tmp_path), "x")
    taken = Lock.take(str(tmp_path))
    Lock.check(str(tmp_path), taken.token)
    with pytest.raises(InputError, match="taken over"):
        Lock.check(str(tmp_path), "x")
    taken.release()


def test_an_owner_that_sleeps_for_a_whole_job_does_not_take_the_next_one_for_its_own(tmp_path: Path) -> None:
    """Numbers begin at 0 again when a lock is released; tokens are never used again."""
    asleep = Lock.take(str(tmp_path))
    os.unlink(tmp_path / f"lock.{asleep.number}")  # taken over, and released
    other = Lock.take(str(tmp_path))
    assert other.number == asleep.number
    with pytest.raises(InputError, match="taken over"):
        Lock.check(str(tmp_path), asleep.token)
    asleep.release()
    Lock.check(str(tmp_path), other.token)
    other.release()


def test_a_locks_folder_is_made_and_goes_with_it_unless_something_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "C.job"
    with lock.locked(str(folder)) as held:
        assert sorted(os.listdir(folder)) == sorted(["lock.0", held.token])
    assert not folder.exists()
    with lock.locked(str(folder)):
        (folder / "manifest.json").touch()
    assert os.listdir(folder) == ["manifest.json"]
    with pytest.raises(InputError, match="cannot be created"), lock.locked(str(folder / "manifest.json" / "C.job")):
        pytest.fail("there is no folder")


def test_of_two_that_find_a_stale_lock_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(tmp_path, 1000)
    stale = holder(str(tmp_path))
    first = Lock.take(str(tmp_path))
    monkeypatch.setattr(lock, "holder", lambda folder: stale)  # the second one looked before the first one took it
    with pytest.raises(InputError, match="has just locked"):
        Lock.take(str(tmp_path))
    first.release()


def test_a_lock_is_kept_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    held = Lock.take(str(tmp_path))
    path = tmp_path / f"lock.{held.number}"
    os.utime(path, (0, 0))
    until(lambda: path.stat().st_mtime > 0)
    held.release()


def test_a_lock_that_cannot_be_written_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            Lock.take(str(tmp_path))
    Lock.take(str(tmp_path)).release()


def test_a_lock_that_this_process_could_not_remove_is_stale(tmp_path: Path) -> None:
    """The mount was gone when it was released."""
    taken = Lock.take(str(tmp_path))
    path = tmp_path / f"lock.{taken.number}"
    content = path.read_text()
    taken.release()
    path.write_text(content)
    Lock.take(str(tmp_path)).release()


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\x00", b'{"pid": "x"}', b'{"pid": [1], "token": {}}'])
def test_an_odd_lock_holds_the_output_for_a_minute_at_most(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lock.4"
    path.write_bytes(content)
    with pytest.raises(InputError, match="another job works on this output"):
        Lock.take(str(tmp_path))
    os.utime(path, (0, 0))
    Lock.take(str(tmp_path)).release()


def test_a_lock_that_cannot_be_removed_hides_no_other_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    taken = Lock.take(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", read_only)
        taken.release()
    Lock.take(str(tmp_path)).release()
