"""Jobs on an object store whose process is killed, or sleeps while another one takes over, end with the right C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from distributed import Client

from distmm import job
from distmm.errors import InputError
from distmm.job import lock
from tests.distmm.job.disturbed import operands, values
from tests.distmm.job.object_server import SERVER, marked, objects, tags, url
from tests.distmm.job.object_server import multiply as multiply_in
from tests.distmm.job.object_server import whole as whole_of
from tests.until import until

REFUSED = 3

# Four blocks of C, in waves of two.
multiply = partial(multiply_in, plan="g1x2x1 b60x60x60 p1 w2x1 l1")
whole = partial(whole_of, rows=2)


@pytest.fixture
def c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product."""
    monkeypatch.chdir(tmp_path)
    return operands(Path("in"))


def run(environment: dict[str, str], folder: str, stored: str, signalled: Callable[[str], int], options: Any) -> None:
    """A client and its workers in one process of another machine, which signals itself before, or after, a change."""
    import dask
    from distributed import LocalCluster

    from distmm.storage.object_store import Objects

    os.environ.update(environment)
    os.chdir(folder)
    lock.machine = lambda: "another machine"  # type: ignore[attr-defined]
    put, remove, one = Objects.put, Objects.remove_all, threading.Lock()

    def changing(what: str, change: Callable[[], None]) -> None:
        with one:
            number = signalled(what)
            if number and number > 0:
                os.kill(os.getpid(), number)
        change()
        if number < 0:
            os.kill(os.getpid(), -number)

    def putting(self: Any, url: str, content: bytes, is_new: bool = False) -> None:
        changing(f"put {url}", lambda: put(self, url, content, is_new))

    def removing(self: Any, folder: str, names: Any) -> None:
        changing("remove", lambda: remove(self, folder, names))

    Objects.put, Objects.remove_all = putting, removing  # type: ignore[method-assign]
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        try:
            multiply(client, stored, **options)
        except InputError as error:
            Path("refused.txt").write_text(str(error))
            os._exit(REFUSED)
    os._exit(0)


class Nth:
    """Says a signal at the n-th change that has a word in its name: below 0, after it."""

    def __init__(self, word: str, n: int, number: int) -> None:
        self.word, self.n, self.number = word, n, number

    def __call__(self, what: str) -> int:
        self.n -= self.word in what
        return self.number if self.n == 0 and self.word in what else 0


def begun(stored: str, signalled: Nth, **options: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=run, args=(dict(SERVER), os.getcwd(), stored, signalled, options))
    process.start()
    return process


def killed(client: Client, c: np.ndarray, stored: str, n: int) -> None:
    """Kill a job at its n-th change, two of four before it, and go on; every second one replaces a C."""
    replaces = n % 2 == 1
    number = signal.SIGKILL if n % 4 < 2 else -signal.SIGKILL
    if replaces:
        multiply(client, stored, alpha=3)
    process = begun(stored, Nth("", n, number), overwrite=replaces)
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    goes_on = bool(objects(f"{stored}.job/manifest.json"))  # or was killed before it had begun, or after its end
    before = marked(stored) if goes_on else {}
    chunks = {f"{stored}/c/{Path(key).name.removesuffix('.json').replace('.', '/')}" for key in before}
    there = {key: tag for key, tag in tags(f"{stored}/c/").items() if key in chunks}
    assert there.keys() == chunks  # no marker without its block
    if goes_on:
        job.resume(url(stored), client=client)
    else:
        multiply(client, stored, overwrite=replaces and process.exitcode != 0)
    np.testing.assert_array_equal(values(url(stored)), c, err_msg=f"change {n}")
    # A run that finds all blocks finished has nothing to report.
    assert objects(stored).keys() | {f"{stored}.report.html"} == whole(stored), f"change {n}"
    assert there.items() <= tags(stored).items()
    assert job.recheck(url(stored)).outcome == "right"


@pytest.fixture
def _others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits a minute until a process of another machine is known to be gone."""
    monkeypatch.setattr(lock, "STALE_SECONDS", -1)


@pytest.mark.minutes
@pytest.mark.usefixtures("_others_are_gone")
@pytest.mark.parametrize("n", [pytest.param(n, marks=[] if n == 10 else pytest.mark.minutes) for n in range(1, 35)])
def test_a_job_that_is_killed_at_any_change_goes_on_and_ends_with_the_right_c(
    client: Client, c: np.ndarray, stored: str, n: int
) -> None:
    killed(client, c, stored, n)


# Where it is dangerous to sleep: between the last look at the lock and a change.
MOMENTS = {"chunk": "/c/", "marker": "/done/", "certificate": "/certificate.json", "name": "C.zarr/zarr.json"}


@pytest.mark.minutes
@pytest.mark.usefixtures("_others_are_gone")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_that_sleeps_while_another_one_takes_over_changes_nothing_when_it_wakes(
    client: Client, c: np.ndarray, stored: str, moment: str
) -> None:
    word = f"{url(stored)}/zarr.json" if moment == "name" else MOMENTS[moment]
    process = begun(stored, Nth(word, 2 if moment in ("chunk", "marker") else 1, signal.SIGSTOP))
    try:
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        if moment == "chunk":  # the other one makes another product
            multiply(client, stored, alpha=2, overwrite=True)
        else:
            multiply(client, stored)
        before = {key: tag for key, tag in tags(stored).items() if ".job/" not in key}
        assert before.keys() == whole(stored)
    finally:
        os.kill(process.pid or 0, signal.SIGCONT)
    process.join()
    assert process.exitcode == REFUSED, Path("refused.txt").read_text()
    assert {key: tag for key, tag in tags(stored).items() if ".job/" not in key} == before
    np.testing.assert_array_equal(values(url(stored)), 2 * c if moment == "chunk" else c)
    assert job.recheck(url(stored)).outcome == "right"
    multiply(client, stored, alpha=2 if moment == "chunk" else 1)  # which has nothing to do but to clear up
    assert objects(stored).keys() == whole(stored)
