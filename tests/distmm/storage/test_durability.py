"""Threads that wait for the same folder share a sync, which begins after each of them has asked."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distmm.storage import durability
from distmm.storage.durability import fsync, published, together
from tests.until import until


class Slow:
    """A call that waits until it may go on, and notes how often it has begun."""

    def __init__(self) -> None:
        self.begun, self.go_on = 0, threading.Event()

    def __call__(self) -> None:
        self.begun += 1
        self.go_on.wait()


def waiting_for(key: str, count: int) -> Callable[[], bool]:
    """Return whether so many threads wait for the next call, apart from the one that will make it."""

    def wait() -> bool:
        found = durability._calls.get(key, [])[1:]
        return [len(one._condition._waiters) for one in found] == [count]  # type: ignore[attr-defined]

    return wait


def test_calls_that_were_asked_for_before_one_begins_are_one_call() -> None:
    call = Slow()
    with ThreadPoolExecutor(6) as pool:
        first = pool.submit(together, "key", call)
        until(lambda: call.begun == 1)
        later = [pool.submit(together, "key", call) for _ in range(5)]
        until(waiting_for("key", 4))
        call.go_on.set()
        for one in (first, *later):
            one.result()
    assert call.begun == 2
    assert not durability._calls


def test_a_call_that_hangs_holds_up_no_other_key() -> None:
    call, made = Slow(), list[int]()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(together, "key", call)
        until(lambda: call.begun == 1)
        others = pool.submit(lambda: [together(n, lambda n=n: made.append(n)) for n in range(200)])  # type: ignore[misc]
        try:
            others.result(60)
        finally:
            call.go_on.set()
        first.result()
    assert made == list(range(200))
    assert not durability._calls


def test_an_error_is_raised_in_all_threads_that_share_a_call_and_in_no_other() -> None:
    call = Slow()

    def lost() -> None:
        raise OSError("the disk is gone")

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(together, "key", call)
        until(lambda: call.begun == 1)
        later = [pool.submit(together, "key", lost) for _ in range(3)]
        until(waiting_for("key", 2))
        call.go_on.set()
        first.result()
        for one in later:
            with pytest.raises(OSError, match="the disk is gone"):
                one.result()
    together("key", call)
    assert not durability._calls


def test_a_folder_is_synced_for_those_who_wait_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, call = [], Slow()
    sync = os.fsync

    def slow(descriptor: int) -> None:
        call()
        synced.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(fsync, str(tmp_path))]
        until(lambda: call.begun == 1)
        done += [pool.submit(fsync, str(tmp_path)) for _ in range(3)]
        until(waiting_for(str(tmp_path), 2))
        call.go_on.set()
        for one in done:
            one.result()
    assert synced == [tmp_path.stat().st_ino] * 2


def _written(folder: Path, word: str) -> None:
    paths = [str(folder / f"{word}.{n}") for n in range(3)]
    with published(paths, str(folder)) as files:
        for file in files:
            file.write(word.encode())


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_process_syncs_files_with_threads_of_its_own(tmp_path: Path) -> None:
    _written(tmp_path, "parent")
    child = multiprocessing.get_context("fork").Process(target=_written, args=(tmp_path, "child"), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert sorted(os.listdir(tmp_path)) == [f"{word}.{n}" for word in ("child", "parent") for n in range(3)]
