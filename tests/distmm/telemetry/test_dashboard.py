"""The dashboard in a real browser: while products run, when they fail, and after workers were killed or stopped."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, secede, wait

from distmm import gram, matmul
from distmm.telemetry import client as telemetry
from distmm.telemetry import figures, progress, report, theme
from distmm.telemetry.scheduler import Telemetry
from tests.distmm.telemetry.pages import DATA, MODEL, READY, SHADOW, address, shown
from tests.until import until


def shut(array: da.Array, gate: Path) -> da.Array:
    """Return an array whose blocks wait until the file `gate` exists; other tasks run on their workers meanwhile."""

    def wait_for_gate(block: np.ndarray) -> np.ndarray:
        secede()
        until(gate.exists)
        return block

    return array.map_blocks(wait_for_gate, dtype=array.dtype, meta=np.empty((0, 0), array.dtype))


def half_done(client: Client, product: str) -> int | None:
    """Return the number of finished steps once they are half of all; None before."""
    figures = telemetry.figures(client, product)
    return figures.done if figures is not None and 2 * figures.done >= figures.total else None


@pytest.mark.minutes
def test_the_page_shows_a_product_that_runs_and_the_loss_of_a_worker(
    cluster: Client, page: Any, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "STALLED_SECONDS", 600.0)  # on a busy machine half a product stands for long
    monkeypatch.setattr(figures, "SILENT_SECONDS", 600.0)
    page.open(address(cluster, "/status"))
    page.until("document.querySelector('.navbar a[href=distmm]') !== null")
    page.open(address(cluster, "/distmm"))
    page.until(READY.format("head"))
    page.until("Bokeh.documents[0].is_idle")
    assert "No product yet" in page.evaluate(MODEL.format("head") + ".text")
    assert page.evaluate(MODEL.format("figures") + ".visible") is False  # no empty axes
    page.screenshot(pictures / "empty.png")

    A, B = (da.random.default_rng(seed).random((8 * 64,) * 2, chunks=64, dtype="f4") for seed in (1, 2))
    A = da.concatenate(
        [A[:, :256], shut(A[:, 256:], tmp_path / "gate")], axis=1
    )  # the second half of each chain has to wait
    C = matmul(A, B, client=cluster, blocks=(64, 64, 64))
    product = C.name
    C = cluster.persist(C)
    half = until(lambda: half_done(cluster, product))
    shown(page, "blocks")
    page.until(f"Array.from({DATA.format('blocks')}.done).every(done => done == 0.5)")
    assert page.evaluate(f"new Set({DATA.format('blocks')}.fill).size") == 2  # two owners, two colours
    head = page.until(f"{MODEL.format('head')}.text.includes('{half} of {2 * half}') && {MODEL.format('head')}.text")
    assert "0 of 64" in head
    assert "running" in head
    page.screenshot(pictures / "running.png")

    pids = cluster.run(os.getpid)
    os.kill(next(iter(pids.values())), signal.SIGKILL)
    page.until(f"{MODEL.format('head')}.text.includes('lost')")
    (tmp_path / "gate").touch()
    wait(C, timeout=120)
    page.until(f"Array.from({DATA.format('blocks')}.done).every(done => done == 1)")
    page.until(f"Array.from({DATA.format('blocks')}.edge).includes('{theme.AGAIN}')")
    head = page.until(f"{MODEL.format('head')}.text.includes('complete') && {MODEL.format('head')}.text")
    assert "64 of 64" in head
    assert "step lost, computed again" in head
    page.until("Bokeh.documents[0].is_idle")
    page.screenshot(pictures / "killed.png")
    assert page.errors == []
    assert telemetry.figures(cluster, product).again > 0  # type: ignore[union-attr]


def test_the_page_says_what_has_failed(cluster: Client, page: Any, pictures: Path) -> None:
    def read(block: np.ndarray) -> np.ndarray:
        raise OSError("chunk c/1/1 has 100 bytes, not 2048")

    A = da.ones((64, 64), chunks=32)
    C = cluster.persist(matmul(A.map_blocks(read, dtype="f8", meta=np.empty((0, 0))), A, client=cluster))
    page.open(address(cluster, "/distmm"))
    page.until(READY.format("head"))
    head = page.until(f"{MODEL.format('head')}.text.includes('100 bytes') && {MODEL.format('head')}.text")
    assert ">failed<" in head
    page.until("Bokeh.documents[0].is_idle")
    page.screenshot(pictures / "failed.png")
    assert page.errors == []
    cluster.cancel(C, force=True)


@pytest.mark.minutes
def test_stopped_workers_are_named_while_they_are_silent_and_afterwards(
    cluster: Client,
    page: Any,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(figures, "SILENT_SECONDS", 3.0)  # the scheduler is in this process
    A, B = (da.random.default_rng(seed).random((64, 64), chunks=32) for seed in (5, 6))
    C = cluster.persist(matmul(shut(A, tmp_path / "gate"), B, client=cluster))
    page.open(address(cluster, "/distmm"))
    page.until(READY.format("head"))
    page.until(f"{MODEL.format('head')}.text.includes('2 of 2')")
    until(
        lambda: cluster.run_on_scheduler(_hosts, C.name) == [socket.gethostname()] * 2, "no heartbeat has told the host"
    )
    pids = list(cluster.run(os.getpid).values())
    os.kill(pids[0], signal.SIGSTOP)
    name = cluster.run_on_scheduler(lambda dask_scheduler: str(next(iter(dask_scheduler.workers.values())).name))
    host = socket.gethostname()
    try:
        sentence = f"worker {name} on {host} has been silent since "
        head = page.until(f"{MODEL.format('head')}.text.includes('{sentence}') && {MODEL.format('head')}.text")
        assert ">1 of 2<" in head
        page.until(f"{MODEL.format('rate')}.text.includes('stroke=\"{theme.NOBODY}\"')")
        page.until("Bokeh.documents[0].is_idle")
        page.screenshot(pictures / "silent.png")
        found = telemetry.figures(cluster, C.name)
        assert found is not None
        assert sentence in progress.describe(found)
        assert dict(silences(cluster))[name] > 0
        os.kill(pids[1], signal.SIGSTOP)
        head = page.until(f"{MODEL.format('head')}.text.includes('0 of 2') && {MODEL.format('head')}.text")
        assert ">stalled<" in head
        page.until("Bokeh.documents[0].is_idle")
        page.screenshot(pictures / "stalled.png")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    page.until(f"{MODEL.format('head')}.text.includes('2 of 2')")
    (tmp_path / "gate").touch()
    wait(C, timeout=120)
    head = page.until(f"{MODEL.format('head')}.text.includes('complete') && {MODEL.format('head')}.text")
    sentence = f"worker {name} on {host} was silent from "
    assert sentence in head
    record = telemetry.read(cluster, C.name)
    assert record is not None
    assert sentence in report.html(record)
    assert f"<title>{name}: silent</title>" in report.html(record)
    assert dict(silences(cluster))[name] == 0
    said = [entry.getMessage() for entry in caplog.records if entry.name == "distmm.telemetry.heartbeats"]
    assert [line for line in said if line.startswith(f"worker {name} has sent no heartbeat since ")]
    assert [line for line in said if line.startswith(f"worker {name} was silent from ")]
    assert page.errors == []


def _hosts(product: str, dask_scheduler: Scheduler) -> list[str]:
    """Return the names of the hosts of a product's workers, as far as heartbeats have told them."""
    record = dask_scheduler.plugins[Telemetry.name].records[product]
    return [lane.host for lane in record.lanes.values()]


def silences(client: Client) -> list[tuple[str, float]]:
    """Return what Prometheus would read: each worker, and the seconds since its last heartbeat if it is silent."""

    def read(dask_scheduler: Scheduler) -> list[tuple[str, float]]:
        readings = dask_scheduler.plugins[Telemetry.name].readings()
        return [(worker, value) for name, worker, value in readings if name == "distmm_silent_seconds"]

    return client.run_on_scheduler(read)


@pytest.mark.minutes
@pytest.mark.usefixtures("blocks_are_chunks")
def test_the_table_shows_all_products_and_a_click_one_of_them(cluster: Client, page: Any, pictures: Path) -> None:
    rng = da.random.default_rng(8)
    symmetric = cluster.persist(gram(rng.random((96, 64), chunks=32), client=cluster))
    batch = matmul(
        rng.random((4, 64, 64), chunks=(1, 32, 32)), rng.random((4, 64, 64), chunks=(1, 32, 32)), client=cluster
    )
    wait([symmetric, cluster.persist(batch)], timeout=120)
    page.open(address(cluster, "/distmm?theme=dark"), width=1400)
    shown(page, "blocks")
    rows = f"[...{SHADOW.format('products')}.querySelectorAll('tr')].map(row => row.innerText)"
    newest, second = page.evaluate(rows)[1:3]
    assert "64 x 64" in newest
    assert "96 x 64 times its transpose" in second
    for row in (newest, second):
        assert "complete" in row
        assert "100 %" in row
        assert re.search(r"\d\d:\d\d:\d\d", row)
    names = page.evaluate(f"Array.from({DATA.format('blocks')}.name)")
    assert sorted(names) == [f"C[{b}, {i}, {j}]" for b in range(4) for i in range(2) for j in range(2)]
    page.screenshot(pictures / "batch.png")

    colors = f"[...{SHADOW.format('legend')}.querySelectorAll('span > span')].slice(-2).map(e => e.style.background)"
    before = page.evaluate(colors)
    page.evaluate(f"{SHADOW.format('products')}.querySelectorAll('a')[1].click()")
    page.until("location.search.includes('product=') && document.readyState == 'complete'")
    shown(page, "blocks")
    assert "theme=dark" in page.evaluate("location.search")
    mirrored = f"Array.from({DATA.format('blocks')}.state).filter(state => state == 'mirrored').length"
    assert page.evaluate(mirrored) == 3
    assert "96 x 64" in page.evaluate(f"{SHADOW.format('products')}.querySelector('tr.shown').innerText")
    assert page.evaluate(colors) == before
    # The product is over, and how it ran is still there.
    assert page.evaluate(f"{SHADOW.format('rate-over-time')}.querySelectorAll('g').length") > 0
    head = page.evaluate(MODEL.format("head") + ".text")
    for label in ("started", "took", "now", "blocks of C", "rate (of the plan)"):
        assert f"<div>{label}</div>" in head
    page.screenshot(pictures / "gram.png")
    assert page.errors == []
