"""A product that is added to the C that was there is added once, whoever is killed, sent again or too late."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.checking.checksum import checksum
from distmm.errors import InputError, Stopped
from distmm.job import commit, planning, run
from distmm.job.commit import complete_units
from distmm.job.computation import Computation
from distmm.job.contents import Contents
from distmm.job.folder import Folder, read_json
from distmm.job.judge import Judge
from distmm.job.lock import Lock
from distmm.job.target import Target
from distmm.job.writer import Writer
from distmm.storage import create_output, open_matrix
from distmm.transfer import counted_writes
from tests.distmm.job.disturbed import SIZE, HalfWay, Meanwhile, marked, multiply, operands, values
from tests.distmm.storage.samples import save_matrix
from tests.tables import later

BEFORE = np.random.default_rng(3).standard_normal((SIZE, SIZE))
TWICE = "is already the result of the same call, which reads C0 from there; nothing was done"


class Killed(BaseException):
    pass


def die(*_: Any) -> None:
    raise Killed


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product."""
    monkeypatch.chdir(tmp_path)
    return operands(Path("in"))


def is_once(out: str, product: np.ndarray, times: int = 1) -> None:
    np.testing.assert_allclose(values(out), BEFORE + times * product, atol=1e-9)


@pytest.mark.parametrize(
    ("again", "out"),
    later(
        [
            *(("the same call", out) for out in ("C.npy", "C.zarr", "C.h5")),
            ("with overwrite", "C.zarr"),
            ("resume", "C.h5"),
        ]
    ),
)
def test_a_job_that_is_killed_once_c_has_its_name_is_ended_and_not_begun_again(
    again: str, out: str, client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_matrix(Path(out), BEFORE)
    with monkeypatch.context() as patch:
        patch.setattr(commit, "_clean", die)
        with pytest.raises(Killed):
            multiply(client, out, beta=1)
    is_once(out, product)
    if again == "with overwrite":
        with pytest.raises(InputError, match=TWICE):
            multiply(client, out, beta=1, overwrite=True)
    else:
        done = multiply(client, out, beta=1) if again == "the same call" else job.resume(out, client=client)
        assert (done.kept, done.plan) == (16, None)
    is_once(out, product)
    assert sorted(os.listdir(".")) == [out, f"{out}.certificate.json", f"{out}.report.html", "in"]
    assert "all 16 blocks are what was written" in job.recheck(out).message


@pytest.mark.minutes
def test_a_c_whose_job_died_before_its_certificate_came_is_not_called_wrong(
    client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_at(step: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(commit, step, die)
            with pytest.raises(Killed):
                multiply(client, alpha=2, overwrite=True)

    ended = "is the result of a job that .* distmm resume .*C.zarr"
    killed_at("_clean")
    with pytest.raises(InputError, match=ended):
        job.recheck("C.zarr")
    job.resume("C.zarr", client=client)
    assert job.recheck("C.zarr").outcome == "right"

    multiply(client, overwrite=True)
    killed_at("output_type")
    np.testing.assert_allclose(values(), product)
    assert job.recheck("C.zarr").outcome == "right"  # the C before, by its own certificate
    killed_at("_clean")
    with pytest.raises(InputError, match=ended):
        job.recheck("C.zarr")
    job.resume("C.zarr", client=client)
    np.testing.assert_allclose(values(), 2 * product)
    assert job.recheck("C.zarr").outcome == "right"


@pytest.mark.minutes
def test_a_complete_job_that_could_not_take_the_name_can_be_begun_anew(
    client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*arguments: Any) -> Any:
        save_matrix(Path("C.zarr"), BEFORE)
        return complete_units(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run, "complete_units", late)
        for call in (lambda: multiply(client), lambda: job.resume("C.zarr", client=client)):
            with pytest.raises(InputError, match="was created by another program while the product was computed"):
                call()
    np.testing.assert_array_equal(values(), BEFORE)
    multiply(client, overwrite=True)
    np.testing.assert_allclose(values(), product)


@pytest.mark.minutes
@pytest.mark.parametrize("check", ["freivalds", "none"])
def test_a_call_that_has_added_its_product_does_not_add_it_again_unless_it_is_told_to(
    check: str, client: Client, product: np.ndarray
) -> None:
    save_matrix(Path("C.zarr"), BEFORE)
    shutil.copytree("C.zarr", "before.zarr")
    assert multiply(client, beta=1, check=check).certificate is not None
    with pytest.raises(InputError, match=TWICE):
        multiply(client, beta=1, check=check)
    is_once("C.zarr", product)
    multiply(client, beta=1, check=check, overwrite=True)
    is_once("C.zarr", product, 2)
    shutil.rmtree("C.zarr")
    shutil.copytree("before.zarr", "C.zarr")  # another C: the certificate beside it is not its own
    multiply(client, beta=1, check=check)
    is_once("C.zarr", product)


@pytest.mark.minutes
@pytest.mark.parametrize("out", ["C.npy", "C.zarr"])
def test_of_two_calls_at_once_the_one_that_is_late_sees_that_c_has_changed(
    out: str, client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_matrix(Path(out), BEFORE)
    request = planning.request

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(planning, "request", request)
        multiply(client, out, beta=1)  # begins later, and is sooner at its end
        return request(*arguments)

    monkeypatch.setattr(planning, "request", slow)
    with pytest.raises(InputError, match=rf"{out} changed during this call: call again"):
        multiply(client, out, beta=1)
    is_once(out, product)


@pytest.mark.minutes
def test_of_two_calls_that_go_on_the_one_that_is_late_finds_no_job(
    client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    request = planning.request

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr(planning, "request", request)
        job.resume("C.zarr", client=client)
        return request(*arguments)

    monkeypatch.setattr(planning, "request", slow)
    with pytest.raises(InputError, match="another call has just begun or ended this job"):
        job.resume("C.zarr", client=client)
    np.testing.assert_allclose(values(), product)
    assert not os.path.exists("C.zarr.job")


def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """The writers of the jobs that will run."""
    found: list[Writer] = []
    begin = Computation.__init__

    def noted(self: Computation, client: Client, spec: Any, plan: Any, writer: Writer, *rest: Any) -> None:
        found.append(writer)
        begin(self, client, spec, plan, writer, *rest)

    monkeypatch.setattr(Computation, "__init__", noted)
    return found


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("out", "error"), [("C.zarr", "another job has taken over"), ("C.npy", "No such file or directory")]
)  # a file in place is first locked, and that of the old owner is not there any more
def test_a_worker_of_an_old_job_that_wakes_does_not_write_into_a_new_one(
    out: str, error: str, client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = writers(monkeypatch)
    with pytest.raises(Stopped):
        multiply(client, out, stop=HalfWay(out))
    (old,) = found
    late: list[str] = []
    client.run(
        lambda: counted_writes._ended.clear()
    )  # as on a worker that the client could not reach when the run ended

    def wake() -> None:
        task = client.submit(old._written, (0, 0), {"C": np.full((30, 30), -1.0)}, {}, pure=False)
        late.append(str(task.exception()))

    multiply(client, out, stop=Meanwhile(wake, out), overwrite=True)
    assert error in late[0]
    np.testing.assert_allclose(values(out), product)
    assert job.recheck(out).ok


def test_a_write_task_of_a_run_that_has_ended_writes_nothing_although_its_lock_is_there(
    client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = writers(monkeypatch)
    monkeypatch.setattr(Lock, "release", lambda lock: None)
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    (old,) = found
    Lock.check(old.folder.path, old.run.id)
    before = marked()
    i, j = next((i, j) for i in range(4) for j in range(4) if f"{i}.{j}.json" not in before)
    late = client.submit(old._written, (i, j), {"C": np.full((30, 30), -1.0)}, {}, pure=False)
    assert "the call has ended" in str(late.exception())
    assert marked() == before
    assert not os.path.exists(os.path.join(old.folder.draft, "c", str(i), str(j)))


def test_each_job_on_an_output_writes_into_a_folder_of_its_own(client: Client, product: np.ndarray) -> None:
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    (old,) = (path.parent for path in Path("C.zarr.job").glob("*/*/done"))
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay(), overwrite=True)
    (new,) = (path.parent for path in Path("C.zarr.job").glob("*/*/done"))
    assert new != old


def store(writer: Writer, block: np.ndarray, **about: str) -> dict[str, Any]:
    record = {"i": 0, "j": 0, "crc32c": checksum(block), "inputs": {"A": "", "B": ""}, **about}
    return writer._written((0, 0), {"C": block}, record)


def only_block(folder: Folder, token: str, array: Any) -> Writer:
    """Return what a worker has that writes the only block of a C."""
    plan: Any = None
    judge = Judge(folder.id, Contents(None, np.dtype("f8"), (2, 2)), plan, None, 0, 1, 0, {})
    return Writer(folder, counted_writes.CountedRun(token), Target(folder, {"C": array}, ((2,), (2,))), judge)


def test_a_block_is_not_marked_by_one_who_has_lost_the_lock_while_it_reached_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(str(tmp_path / "C.npy"), "id")
    os.makedirs(folder.path)
    mine, others = Lock.take(folder.path), []
    folder = folder.owned(mine.token)
    folder.make()
    target: Any = create_output(folder.target, (2, 2), "f8", (2, 2), draft=folder.draft)
    sync = type(target).sync

    def slow(self: Any, rows: slice, cols: slice) -> None:
        sync(self, rows, cols)
        os.unlink(os.path.join(folder.path, f"lock.{mine.number}"))
        others.append(Lock.take(folder.path))

    monkeypatch.setattr(type(target), "sync", slow)
    writer = only_block(folder, mine.token, target)
    with pytest.raises(InputError, match="taken over"):
        store(writer, np.ones((2, 2)))
    assert os.listdir(folder.owned(others[0].token).done) == []
    for lock in (mine, *others):
        lock.release()


@pytest.mark.minutes
def test_c_does_not_get_its_name_from_one_who_has_lost_the_lock(
    client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Lock] = []

    def late(*arguments: Any) -> Any:
        (path,) = Path("C.zarr.job").glob("lock.*")
        path.unlink()
        others.append(Lock.take("C.zarr.job"))
        return complete_units(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run, "complete_units", late)
        with pytest.raises(InputError, match="another job has taken over"):
            multiply(client)
    assert not os.path.exists("C.zarr")
    others[0].release()
    assert job.resume("C.zarr", client=client).kept == 16
    np.testing.assert_allclose(values(), product)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """What a worker has that writes the only block of a C, under a lock."""
    folder = Folder(str(tmp_path / "C.zarr"), "id")
    os.makedirs(folder.path)
    lock = Lock.take(folder.path)
    folder = folder.owned(lock.token)
    folder.make()
    target: Any = create_output(folder.target, (2, 2), "f8", (2, 2), draft=folder.draft)
    yield only_block(folder, lock.token, target)
    lock.release()


def test_of_two_workers_that_make_a_block_the_first_one_counts(writer: Writer) -> None:
    """The scheduler had lost one of them."""
    first = store(writer, np.ones((2, 2)), worker="first")
    assert store(writer, np.zeros((2, 2)), worker="second") == first
    assert open_matrix(writer.folder.draft)[...].min() == 1


def test_a_block_that_another_worker_has_written_and_not_marked_stays_and_is_marked_if_it_is_the_same(
    writer: Writer,
) -> None:
    writer.target.arrays["C"][:, :] = np.ones((2, 2))
    with pytest.raises(InputError, match="has written other bits"):
        store(writer, np.zeros((2, 2)))
    assert not writer.folder.markers()
    written = store(writer, np.ones((2, 2)))
    assert written == {**read_json(writer.folder.marker(0, 0)), "written": True}
