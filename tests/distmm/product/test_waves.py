"""The loop over waves: when the next one is sent, who is told what has ended, and what is left when it ends early."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client, Future, Scheduler

import distmm
from distmm.all_workers import workers_of
from distmm.product.waves import Waves
from distmm.transfer import counted_writes
from tests.until import until


class Task:
    """A future whose end the test decides."""

    def __init__(self, key: Any) -> None:
        self.key = key
        self.callbacks: list[Callable[[Any], None]] = []
        self.released = False

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        self.callbacks.append(call)

    def end(self) -> None:
        for call in self.callbacks:
            call(self)

    def release(self) -> None:
        self.released = True


def tasks(wave: str, count: int = 4) -> list[Any]:
    return [Task((wave, i)) for i in range(count)]


def test_a_wave_follows_once_few_tasks_of_the_last_one_remain_and_those_before_it_have_ended() -> None:
    unused: Any = SimpleNamespace(status="running")
    waves = Waves(unused, lambda future: None)
    assert waves.may_send()
    first, second = tasks("first"), tasks("second")
    for futures in (first, second):
        waves.send(futures, 1)
        for task in futures[:3]:
            assert not waves.may_send()
            task.end()
            waves._take_next()
        assert waves.may_send() == (futures is first)  # one is to come
    first[3].end()
    waves._take_next()
    assert waves.may_send()


@pytest.mark.parametrize(("tail", "most"), [(0, 1), (np.inf, 2)])
def test_no_more_waves_are_in_flight_than_their_tails_say(tail: float, most: int) -> None:
    sent: list[list[Task]] = []
    taken: list[Any] = []
    flying: list[int] = []

    def send(number: int) -> tuple[list[Any], float]:
        sent.append(tasks(str(number), 3))
        return list(sent[-1]), tail

    def beat() -> None:
        flying.append(len(waves.sent))
        if waves.sent and (len(sent) == 4 or not waves.may_send()):
            sent[-len(waves.sent)].pop().end()

    waves = Waves(SimpleNamespace(status="running", scheduler=None), lambda future: taken.append(future.key), beat=beat)  # type: ignore[arg-type]
    waves.run(partial(send, number) for number in range(4))
    assert max(flying) == most
    assert sorted(taken) == sorted((str(number), i) for number in range(4) for i in range(3))


def test_a_task_may_be_sent_again_and_is_waited_for(client: Client) -> None:
    taken: list[int] = []

    def take(future: Future) -> None:
        taken.append(future.result())
        if taken[-1] < 3:
            waves.send([client.submit(lambda x: x + 1, taken[-1], pure=False)], 0)

    waves = Waves(client, take)
    waves.run([lambda: ([client.submit(lambda: 0, pure=False)], 0.0)])
    assert taken == [0, 1, 2, 3]


def test_waves_of_nothing_are_over_at_once(client: Client) -> None:
    Waves(client, pytest.fail).run([lambda: ([], 0.0)] * 3)


@pytest.mark.parametrize("ends", [False, True], ids=["never ends", "is cancelled"])
def test_a_client_that_is_closed_meanwhile_ends_the_loop(client: Client, ends: bool) -> None:
    def beat() -> None:
        if waves.sent:
            other.close()
            if ends:
                task.end()

    other = Client(client.scheduler.address, set_as_default=False)
    (task,) = tasks("of a closed client", 1)
    waves = Waves(other, lambda future: pytest.fail("a closed client is asked for a result"), beat=beat)
    with pytest.raises(CancelledError, match="the client was closed"):
        waves.run([lambda: ([task], 0.0)])
    assert task.released


def write(folder: Path, run: counted_writes.CountedRun, number: int) -> int:
    """Write a file when a gate is there."""
    with run.writing():
        (folder / f"begun.{number}").touch()
        until((folder / "gate").exists)
        (folder / f"written.{number}").touch()
    return number


@pytest.mark.parametrize("grace", [0.0, 60.0])
def test_when_the_loop_has_ended_early_none_of_its_tasks_writes(client: Client, tmp_path: Path, grace: float) -> None:
    run = counted_writes.CountedRun()
    count = 4 * len(workers_of(client))

    def beat() -> None:
        if list(tmp_path.glob("begun.*")):
            raise KeyboardInterrupt

    def wait(self: counted_writes.CountedRun, *args: Any) -> None:
        (tmp_path / "gate").touch()
        end(self, *args)

    end = counted_writes.CountedRun.end
    waves = Waves(client, lambda future: None, beat=beat, run=run, grace=lambda: grace)
    begun = waves._begun
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counted_writes.CountedRun, "end", wait)
        patch.setattr(waves, "_begun", lambda: ((tmp_path / "gate").touch(), begun())[1])
        with pytest.raises(KeyboardInterrupt):
            waves.run([lambda: (client.map(partial(write, tmp_path, run), range(count), pure=False), 0.0)])
    written = {path.name.replace("begun", "written") for path in tmp_path.glob("begun.*")}
    assert {path.name for path in tmp_path.glob("written.*")} == written
    late = client.submit(write, tmp_path, run, 99, pure=False)
    assert "the call has ended" in str(late.exception())
    assert not (tmp_path / "begun.99").exists()


class Broken:
    """A file whose disk is gone."""

    chunks = (1, 1)
    ndim = 2

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape, self.dtype = shape, np.dtype("f8")

    def __setitem__(self, index: tuple[slice, ...], block: np.ndarray) -> None:
        raise OSError("the disk is gone")


def test_a_call_that_fails_leaves_no_tasks_on_the_cluster_although_its_error_is_kept(client: Client) -> None:
    def known() -> set[str]:
        return set(client.run_on_scheduler(lambda dask_scheduler: products(dask_scheduler)))

    distmm.plan(np.ones((2, 2)), np.ones((2, 2)), client=client)  # installs the plugin
    a, before = np.ones((64, 64)), known()  # garbage of other tests may keep products
    with pytest.raises(OSError, match="the disk is gone") as kept:
        distmm.matmul(a, a, out=Broken((64, 64)), plan="g2x2x1 b8x16x8 p1 w4x4 l2", client=client)
    until(lambda: known() <= before)
    assert kept.value.__traceback__ is not None


def products(scheduler: Scheduler) -> list[str]:
    """The products that the plugin knows."""
    return list(scheduler.plugins["distmm-placement"].products.products)
