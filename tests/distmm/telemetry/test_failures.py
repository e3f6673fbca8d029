"""Whatever fails, a product is "failed", with its error: on page, in series, report and log, and for `watch`."""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, LocalCluster, Scheduler, futures_of, wait
from markupsafe import escape
from rich.console import Console

from distmm import job, matmul
from distmm.checking.verdict import Verdict
from distmm.errors import DistmmError
from distmm.telemetry import client as telemetry
from distmm.telemetry import facts, report
from distmm.telemetry.progress import watch
from distmm.telemetry.record import Record
from distmm.telemetry.scheduler import Telemetry
from distmm.worker.tasks import products
from tests.distmm.scheduler.known import known
from tests.tables import later
from tests.until import until

N, EDGE = 48, 16


@pytest.fixture(scope="module")
def one() -> Iterator[Client]:
    """A cluster in this process, so that patches and the log's handler reach all of it."""
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        yield client


def ones(name: str) -> da.Array:
    """Blocks under a name that no other product has, for Dask remembers failed tasks."""
    return da.from_array(np.ones((N, N)), chunks=EDGE, name=f"{name}-ones")


def broken(*_: object, **__: object) -> Any:
    raise OSError("no such luck")


class Refusing:
    """A target on a full disk."""

    def __setitem__(self, region: object, block: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def a_read(client: Client, folder: Path) -> tuple[da.Array, Any]:
    A = da.from_delayed(dask.delayed(broken)(dask_key_name="reader"), (N, N), "f8").rechunk(EDGE)
    C = matmul(A, ones("a"), client=client)
    return C, client.persist(C)


def a_truncated_chunk(client: Client, folder: Path) -> tuple[da.Array, Any]:
    A = zarr.create_array(folder / "A.zarr", data=np.ones((N, N)), chunks=(EDGE, EDGE), compressors=None)
    chunk = folder / "A.zarr" / "c" / "1" / "1"
    chunk.write_bytes(chunk.read_bytes()[:100])
    C = matmul(A, ones("b"), client=client)
    return C, client.persist(C)


def a_step(client: Client, folder: Path) -> tuple[da.Array, Any]:
    A = ones("c").map_blocks(lambda block: block.astype(object) if block.size else block, dtype="f8")
    C = matmul(A, ones("c"), client=client)  # no kernel multiplies these
    return C, client.persist(C)


def a_write(client: Client, folder: Path) -> tuple[da.Array, Any]:
    C = matmul(ones("d"), ones("d"), client=client)
    return C, client.compute(da.store(C, Refusing(), lock=False, compute=False))


def a_write_of_what_is_made_of_c(client: Client, folder: Path) -> tuple[da.Array, Any]:
    C = matmul(ones("e"), ones("e") + 1, client=client)
    return C, client.compute(da.store(C + 1, Refusing(), lock=False, compute=False))


def a_worker_that_is_not_there(client: Client, folder: Path) -> tuple[da.Array, Any]:
    key = ("nowhere", 0, 0)
    made = {key: client.submit(np.ones, (N, N), key=key, workers=["tcp://127.0.0.1:1"])}
    A = da.Array(HighLevelGraph.from_collections(key[0], made), key[0], ((N,), (N,)), "f8")
    C = matmul(A, ones("f"), client=client)
    kept = client.persist(C)
    until(lambda: telemetry.figures(client, C.name))

    def past_the_deadline(dask_scheduler: Scheduler) -> None:
        before, dask_scheduler.no_workers_timeout = dask_scheduler.no_workers_timeout, 1e-9
        dask_scheduler._check_no_workers()
        dask_scheduler.no_workers_timeout = before

    client.run_on_scheduler(past_the_deadline)
    return C, kept


LAZY: dict[str, tuple[Callable[[Client, Path], tuple[da.Array, Any]], str]] = {
    "a read": (a_read, "OSError('no such luck')"),
    "a truncated chunk": (a_truncated_chunk, "distmm-load[1, 1]"),
    "a step": (a_step, "step 0: "),
    "a write": (a_write, "No space left on device"),
    "a write of what is made of C": (a_write_of_what_is_made_of_c, "No space left on device"),
    "a worker that is not there": (a_worker_that_is_not_there, "NoValidWorkerError"),
}


def failures(client: Client) -> float:
    """What Prometheus would read now."""

    def read(dask_scheduler: Scheduler) -> float:
        return sum(n for name, _, n in dask_scheduler.plugins[Telemetry.name].readings() if name == "distmm_failures")

    return float(client.run_on_scheduler(read))


def newest(client: Client) -> Record:
    records = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins[Telemetry.name].records))
    record = telemetry.read(client, records[-1])
    assert record is not None
    return record


def told(record: Record, error: str, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that page, report and log say what has failed."""
    figures = record.figures(record.submitted + 60)
    assert figures.state == "failed"
    assert error in figures.error
    page = facts.head(record, record.submitted + 60)
    assert ">failed<" in page
    text = str(escape(error))
    assert text in page
    assert text in report.html(record)
    said = [entry.getMessage() for entry in caplog.records if entry.name == "distmm.telemetry.scheduler"]
    assert [line for line in said if record.title in line and error in line]


@pytest.mark.parametrize("fault", later(LAZY, first=2))
def test_a_product_that_fails_says_so_everywhere_and_what_watches_it_returns(
    one: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    telemetry.install(one)
    before = failures(one)
    begin, error = LAZY[fault]
    console = Console(file=io.StringIO(), force_terminal=False)
    C, kept = begin(one, tmp_path)
    last = watch(C, client=one, console=console)
    assert last.state == "failed"
    assert error in last.error
    assert last.error in console.file.getvalue()  # type: ignore[attr-defined]
    assert failures(one) > before
    told(newest(one), error, caplog)
    del kept
    one.cancel(C, force=True)


def test_a_product_whose_out_cannot_be_written_says_so(one: Client, caplog: pytest.LogCaptureFixture) -> None:
    class Full(Refusing):
        shape, dtype, ndim, chunks = (N, N), np.dtype("f8"), 2, (EDGE, EDGE)

    telemetry.install(one)
    with pytest.raises(OSError, match="No space left"):
        matmul(ones("o"), ones("o"), out=Full(), client=one)
    told(newest(one), "No space left on device", caplog)


def truncated(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    chunk = folder / "B.zarr" / "c" / "1" / "1"
    chunk.write_bytes(chunk.read_bytes()[:100])
    return {}


def unwritable(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    def announce(*_: object) -> None:  # when all is there, and before any block is made
        for draft in folder.glob("C.zarr.job/*/*/*.zarr*"):
            shutil.rmtree(draft)
            draft.write_text("not a folder")

    return {"announce": announce}


def wrong(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    real = products.multiply
    patch.setattr(products, "multiply", lambda *args, **options: real(*args, **options) + 1)
    return {}


def wrong_in_full(folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr("distmm.product.verification.verdict", lambda *_, **__: Verdict("wrong", 9.0, "C[0, 0] is off"))
    return {"check": "full"}


JOBS = {
    "a truncated chunk": (truncated, "distmm-load[1, 1]"),
    "a write": (unwritable, "Not a directory"),
    "the check of a block": (wrong, "C is not A @ B"),
    "the check in full": (wrong_in_full, "C[0, 0] is off"),
}


@pytest.mark.parametrize("fault", later(JOBS))
def test_a_job_that_fails_says_so_everywhere(
    one: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    np.save(tmp_path / "A.npy", np.ones((N, N)))
    zarr.create_array(tmp_path / "B.zarr", data=np.ones((N, N)), chunks=(EDGE, EDGE), compressors=None)
    telemetry.install(one)
    before = failures(one)
    inject, error = JOBS[fault]
    with monkeypatch.context() as patch, pytest.raises(DistmmError):
        job.multiply(
            tmp_path / "A.npy", tmp_path / "B.zarr", tmp_path / "C.zarr", client=one, blocks=(EDGE, EDGE, EDGE),
            **inject(tmp_path, patch),
        )  # fmt: skip
    assert failures(one) > before
    record = newest(one)
    assert record.title == str(tmp_path / "C.zarr")
    told(record, error, caplog)
    (written,) = [*tmp_path.glob("C.zarr.report.html"), *tmp_path.glob("C.zarr.job/**/report.html")]
    assert record.figures(0).state in written.read_text()


def test_a_product_that_is_tried_again_goes_on(one: Client, tmp_path: Path) -> None:
    there = tmp_path / "there"

    def read(block: np.ndarray) -> np.ndarray:
        if block.size and not there.exists():
            raise OSError("not mounted")
        return block

    C = matmul(ones("g").map_blocks(read, dtype="f8"), ones("g"), client=one)
    kept = one.persist(C)
    assert watch(C, client=one, console=Console(file=io.StringIO())).state == "failed"
    wait(kept)
    there.touch()
    keys = [future.key for future in futures_of(kept)]

    def again(dask_scheduler: Scheduler) -> None:  # `Client.retry` knows only tasks that the client holds itself
        dask_scheduler.stimulus_retry(keys)

    one.run_on_scheduler(again)
    last = watch(kept, client=one, console=Console(file=io.StringIO()))
    assert (last.state, last.error) == ("complete", "")


def test_a_repeated_product_is_watched_from_its_new_beginning(one: Client, tmp_path: Path) -> None:
    C = matmul(ones("h"), ones("h"), client=one)
    seen = set()
    for _ in range(3):
        kept = one.persist(C)
        last = watch(kept, client=one, console=Console(file=io.StringIO()))
        record = telemetry.read(one, C.name)
        assert record is not None
        assert last.done == last.total == sum(each.kind == "multiply" for each in record.activities)
        seen.add(record.submitted)
        for future in futures_of(kept):
            future.release()
        until(lambda: not any(key[0] == C.name for key in known(one)))
    assert len(seen) == 3


def test_a_worker_that_leaves_after_a_product_is_not_lost_to_it() -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        C = matmul(ones("i"), ones("i"), client=client, blocks=(EDGE,) * 3)
        kept = client.persist(C)
        wait(kept)
        assert watch(C, client=client, console=Console(file=io.StringIO())).state == "complete"
        client.retire_workers([next(iter(client.scheduler_info()["workers"]))])
        record = telemetry.read(client, C.name)
    assert record is not None
    assert list(map(str, record.incidents)) == []
    assert [lane.lost for lane in record.lanes.values()] == [None, None]
