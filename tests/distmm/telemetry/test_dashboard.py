"""The dashboard in a real browser: while a product runs, after a worker was killed, and with 1 and 256 workers."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster, Scheduler, secede, wait

from distmm import gram, matmul
from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import client as telemetry
from distmm.telemetry import figures, progress, report, theme
from distmm.telemetry.record import Record
from distmm.telemetry.scheduler import Telemetry
from tests import forked
from tests.until import until

# JavaScript for a Bokeh model on the page, by its name, and for the data that it draws.
MODEL = "Bokeh.documents[0].get_model_by_name('distmm-{}')"
SHADOW = "Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name('distmm-{}').id).shadow_el"
DATA = MODEL + ".renderers[0].data_source.data"
# Whether all texts of a pane, its title and labels, lie within the pane.
FITS = """(pane => {{
  const outside = pane.host.getBoundingClientRect();
  return [...pane.querySelectorAll(".title, text")].every(text => {{
    const inside = text.getBoundingClientRect();
    return inside.left >= outside.left - 1 && inside.right <= outside.right + 1;
  }});
}})({})"""
READY = "window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].get_model_by_name('distmm-{}') && true"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Client]:
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False, "distributed.scheduler.allowed-failures": 100}),
        forked.workers(),
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit="2GiB", dashboard_address="127.0.0.1:0") as two,
        Client(two, set_as_default=False) as client,
    ):
        telemetry.install(client)
        with client.as_current():
            yield client


@pytest.fixture
def browser(browser: Any, cluster: Client) -> Iterator[Any]:
    """A browser that leaves the page before the cluster closes: closing would interrupt Bokeh while it sends."""
    yield browser
    browser.open("about:blank")
    until(lambda: cluster.run_on_scheduler(connections) == 0)


def connections(dask_scheduler: Scheduler) -> int:
    """Count the pages that are open in browsers."""
    applications = dask_scheduler.http_application.applications
    sessions = (app.get_sessions(path) for app in applications for path in app.app_paths)
    return sum(session.connection_count for each in sessions for session in each)


def address(client: Client, path: str) -> str:
    return client.dashboard_link.rsplit("/", 1)[0] + path


def shown(browser: Any, pane: str) -> None:
    """Wait until a pane shows a record and is drawn."""
    browser.until(READY.format(pane))
    browser.until(f"Array.from({DATA.format(pane)}.x).length > 0")
    browser.until("Bokeh.documents[0].is_idle")


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
    cluster: Client, browser: Any, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "STALLED_SECONDS", 600.0)  # on a busy machine half a product stands for long
    monkeypatch.setattr(figures, "SILENT_SECONDS", 600.0)
    browser.open(address(cluster, "/status"))
    browser.until("document.querySelector('.navbar a[href=distmm]') !== null")
    browser.open(address(cluster, "/distmm"))
    browser.until(READY.format("head"))
    browser.until("Bokeh.documents[0].is_idle")
    assert "No product yet" in browser.evaluate(MODEL.format("head") + ".text")
    assert browser.evaluate(MODEL.format("figures") + ".visible") is False  # no empty axes
    browser.screenshot(pictures / "empty.png")

    A, B = (da.random.default_rng(seed).random((8 * 64,) * 2, chunks=64, dtype="f4") for seed in (1, 2))
    A = da.concatenate(
        [A[:, :256], shut(A[:, 256:], tmp_path / "gate")], axis=1
    )  # the second half of each chain has to wait
    C = matmul(A, B, client=cluster, blocks=(64, 64, 64))
    product = C.name
    C = cluster.persist(C)
    half = until(lambda: half_done(cluster, product))
    shown(browser, "blocks")
    browser.until(f"Array.from({DATA.format('blocks')}.done).every(done => done == 0.5)")
    assert browser.evaluate(f"new Set({DATA.format('blocks')}.fill).size") == 2  # two owners, two colours
    head = browser.until(f"{MODEL.format('head')}.text.includes('{half} of {2 * half}') && {MODEL.format('head')}.text")
    assert "0 of 64" in head
    assert "running" in head
    browser.screenshot(pictures / "running.png")

    pids = cluster.run(os.getpid)
    os.kill(next(iter(pids.values())), signal.SIGKILL)
    browser.until(f"{MODEL.format('head')}.text.includes('lost')")
    (tmp_path / "gate").touch()
    wait(C, timeout=120)
    browser.until(f"Array.from({DATA.format('blocks')}.done).every(done => done == 1)")
    browser.until(f"Array.from({DATA.format('blocks')}.edge).includes('{theme.AGAIN}')")
    head = browser.until(f"{MODEL.format('head')}.text.includes('complete') && {MODEL.format('head')}.text")
    assert "64 of 64" in head
    assert "step lost, computed again" in head
    browser.until("Bokeh.documents[0].is_idle")
    browser.screenshot(pictures / "killed.png")
    assert browser.errors == []
    assert telemetry.figures(cluster, product).again > 0  # type: ignore[union-attr]


def test_the_page_says_what_has_failed(cluster: Client, browser: Any, pictures: Path) -> None:
    def read(block: np.ndarray) -> np.ndarray:
        raise OSError("chunk c/1/1 has 100 bytes, not 2048")

    A = da.ones((64, 64), chunks=32)
    C = cluster.persist(matmul(A.map_blocks(read, dtype="f8", meta=np.empty((0, 0))), A, client=cluster))
    browser.open(address(cluster, "/distmm"))
    browser.until(READY.format("head"))
    head = browser.until(f"{MODEL.format('head')}.text.includes('100 bytes') && {MODEL.format('head')}.text")
    assert ">failed<" in head
    browser.until("Bokeh.documents[0].is_idle")
    browser.screenshot(pictures / "failed.png")
    assert browser.errors == []
    cluster.cancel(C, force=True)


@pytest.mark.minutes
def test_stopped_workers_are_named_while_they_are_silent_and_afterwards(
    cluster: Client,
    browser: Any,
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(figures, "SILENT_SECONDS", 3.0)  # the scheduler is in this process
    A, B = (da.random.default_rng(seed).random((64, 64), chunks=32) for seed in (5, 6))
    C = cluster.persist(matmul(shut(A, tmp_path / "gate"), B, client=cluster))
    browser.open(address(cluster, "/distmm"))
    browser.until(READY.format("head"))
    browser.until(f"{MODEL.format('head')}.text.includes('2 of 2')")
    until(
        lambda: cluster.run_on_scheduler(_hosts, C.name) == [socket.gethostname()] * 2, "no heartbeat has told the host"
    )
    pids = list(cluster.run(os.getpid).values())
    os.kill(pids[0], signal.SIGSTOP)
    name = cluster.run_on_scheduler(lambda dask_scheduler: str(next(iter(dask_scheduler.workers.values())).name))
    host = socket.gethostname()
    try:
        sentence = f"worker {name} on {host} has been silent since "
        head = browser.until(f"{MODEL.format('head')}.text.includes('{sentence}') && {MODEL.format('head')}.text")
        assert ">1 of 2<" in head
        browser.until(f"{MODEL.format('rate')}.text.includes('stroke=\"{theme.NOBODY}\"')")
        browser.until("Bokeh.documents[0].is_idle")
        browser.screenshot(pictures / "silent.png")
        found = telemetry.figures(cluster, C.name)
        assert found is not None
        assert sentence in progress.describe(found)
        assert dict(silences(cluster))[name] > 0
        os.kill(pids[1], signal.SIGSTOP)
        head = browser.until(f"{MODEL.format('head')}.text.includes('0 of 2') && {MODEL.format('head')}.text")
        assert ">stalled<" in head
        browser.until("Bokeh.documents[0].is_idle")
        browser.screenshot(pictures / "stalled.png")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    browser.until(f"{MODEL.format('head')}.text.includes('2 of 2')")
    (tmp_path / "gate").touch()
    wait(C, timeout=120)
    head = browser.until(f"{MODEL.format('head')}.text.includes('complete') && {MODEL.format('head')}.text")
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
    assert browser.errors == []


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


@functools.cache
def synthetic(workers: int, product: str) -> Record:
    """Make the record of a half-finished product: 30 s, lost workers, blocks kept from disk, and a failed check."""
    problem = Problem(131072, 131072, 131072, np.dtype("f4"))
    spec = ClusterSpec(workers, int(250e9), "cuda", problem.flops / workers / 60, 5e10)
    plan = make_plan(problem, spec, blocking=cut(problem, (4096, 8192, 4096)))
    now = time.time()
    kept = range(32)
    record = Record(product, plan, now - 31, kept=kept)
    names = [f"node{worker // 8:02d}-gpu{worker % 8}" for worker in range(workers)]
    rng = np.random.default_rng(workers)
    free = dict.fromkeys(names, now - 30)
    for step in range(record.steps):
        for i in range(record.rows):
            for j in range(record.columns):
                chain, owner = record.chain((), i, j), names[plan.grid.owner(i, j)]
                if chain in kept:
                    continue
                record.want(chain, step, owner)
                seconds = float(record.step_flops[chain, step] / spec.rate * (1 + 0.2 * rng.random()))
                if free[owner] + seconds < now:
                    start = free[owner] + 0.05 * seconds
                    record.step(chain, step, owner, start, start + seconds)
                    free[owner] = start + seconds
    for at, name in enumerate(names):
        for tenth in range(10):
            time_, blocks = now - 30 + 3 * tenth, int(plan.peak.worker * (0.05 * tenth + 0.4 * rng.random()))
            received = int(plan.bytes_moved / workers * 0.05 * rng.random() * 2)
            record.work(name, "receive", time_, time_ + 0.4)
            record.lane(name).sample(time_, blocks, blocks + 10**9, received)
        if at % 40 == 7:
            record.lose(now - 10, name)
    for chain in (100, 101, 102):
        record.repeat(now, chain, 0, finished=True)
    record.check(now, 200, passed=False)
    return record


def show(cluster: Client, record: Record) -> None:
    """Let the page of a cluster show a record."""

    def store(dask_scheduler: Scheduler) -> None:
        dask_scheduler.plugins[Telemetry.name]._store_record(record)

    cluster.run_on_scheduler(store)


@pytest.mark.minutes
@pytest.mark.parametrize(("workers", "scheme"), [(256, "dark"), (1, "light")])
def test_the_page_is_readable_with_one_worker_and_with_many(
    cluster: Client, browser: Any, pictures: Path, workers: int, scheme: str
) -> None:
    record = synthetic(workers, f"distmm-matmul-{workers}-{scheme}")
    show(cluster, record)
    browser.open(address(cluster, "/distmm"), scheme=scheme)
    shown(browser, "blocks")
    assert browser.evaluate(f"Array.from({DATA.format('blocks')}.x).length") == 32 * 32
    assert browser.evaluate(f"{SHADOW.format('rate')}.querySelectorAll('g').length") == workers + 1  # and the marks
    palette = theme.DARK if scheme == "dark" else theme.LIGHT
    assert browser.evaluate(MODEL.format("blocks") + ".title.text_color") == palette["ink"]
    red, green, blue = (int(palette["ground"][at : at + 2], 16) for at in (1, 3, 5))
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({red}, {green}, {blue})"
    # No label overlaps the next one, and nothing is wider than the window.
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(f"{SHADOW.format('rate')}.querySelectorAll('text[text-anchor=middle]').length") <= 5
    browser.screenshot(pictures / f"{workers}-{scheme}.png")
    assert browser.errors == []


@pytest.mark.minutes
@pytest.mark.usefixtures("blocks_are_chunks")
def test_the_table_shows_all_products_and_a_click_one_of_them(cluster: Client, browser: Any, pictures: Path) -> None:
    rng = da.random.default_rng(8)
    symmetric = cluster.persist(gram(rng.random((96, 64), chunks=32), client=cluster))
    batch = matmul(
        rng.random((4, 64, 64), chunks=(1, 32, 32)), rng.random((4, 64, 64), chunks=(1, 32, 32)), client=cluster
    )
    wait([symmetric, cluster.persist(batch)], timeout=120)
    browser.open(address(cluster, "/distmm?theme=dark"), width=1400)
    shown(browser, "blocks")
    rows = f"[...{SHADOW.format('products')}.querySelectorAll('tr')].map(row => row.innerText)"
    newest, second = browser.evaluate(rows)[1:3]
    assert "64 x 64" in newest
    assert "96 x 64 times its transpose" in second
    for row in (newest, second):
        assert "complete" in row
        assert "100 %" in row
        assert re.search(r"\d\d:\d\d:\d\d", row)
    names = browser.evaluate(f"Array.from({DATA.format('blocks')}.name)")
    assert sorted(names) == [f"C[{b}, {i}, {j}]" for b in range(4) for i in range(2) for j in range(2)]
    browser.screenshot(pictures / "batch.png")

    colors = f"[...{SHADOW.format('legend')}.querySelectorAll('span > span')].slice(-2).map(e => e.style.background)"
    before = browser.evaluate(colors)
    browser.evaluate(f"{SHADOW.format('products')}.querySelectorAll('a')[1].click()")
    browser.until("location.search.includes('product=') && document.readyState == 'complete'")
    shown(browser, "blocks")
    assert "theme=dark" in browser.evaluate("location.search")
    mirrored = f"Array.from({DATA.format('blocks')}.state).filter(state => state == 'mirrored').length"
    assert browser.evaluate(mirrored) == 3
    assert "96 x 64" in browser.evaluate(f"{SHADOW.format('products')}.querySelector('tr.shown').innerText")
    assert browser.evaluate(colors) == before
    # The product is over, and how it ran is still there.
    assert browser.evaluate(f"{SHADOW.format('rate-over-time')}.querySelectorAll('g').length") > 0
    head = browser.evaluate(MODEL.format("head") + ".text")
    for label in ("started", "took", "now", "blocks of C", "rate (of the plan)"):
        assert f"<div>{label}</div>" in head
    browser.screenshot(pictures / "gram.png")
    assert browser.errors == []


@pytest.mark.minutes
@pytest.mark.parametrize("width", [1400, 950, 800])
def test_nothing_is_cut(cluster: Client, browser: Any, pictures: Path, width: int) -> None:
    old, record = synthetic(1, f"distmm-matmul-{width}-old"), synthetic(16, f"distmm-matmul-{width}-wide")
    old.submitted -= 7e4  # its row has long texts
    show(cluster, old)
    show(cluster, record)
    browser.open(address(cluster, "/distmm"), width=width, height=950)
    shown(browser, "blocks")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert 200 < browser.evaluate(MODEL.format("blocks") + ".outer_width") <= width
    for pane in ("rate-over-time", "memory-over-time", "rate", "memory", "time", "transfers"):
        assert browser.evaluate(FITS.format(SHADOW.format(pane))), pane
        assert 200 < browser.evaluate(f"{SHADOW.format(pane)}.querySelector('svg').clientWidth") <= width, pane
    table = f"{SHADOW.format('products')}.querySelector('table')"
    bar = "document.querySelector('.navbar').getBoundingClientRect().bottom"
    assert browser.evaluate(f"{bar} <= {table}.getBoundingClientRect().top")
    assert browser.evaluate(f"{table}.scrollWidth <= innerWidth && {table}.getBoundingClientRect().right <= innerWidth")
    key = browser.evaluate(f"{SHADOW.format('legend')}.querySelector('.legend').innerText")
    assert "worker node00-gpu0" in key
    assert "worker node01-gpu7" in key
    # All that does not fit the window can be scrolled to.
    bottom = (
        "Math.max(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().bottom + scrollY))"
    )
    assert browser.evaluate(f"document.documentElement.scrollHeight >= {bottom} - 2")
    browser.screenshot(pictures / f"wide-{width}.png")
    assert browser.errors == []


@pytest.mark.minutes
def test_the_page_fits_a_pane_of_jupyterlab_whose_extension_finds_it(
    cluster: Client, browser: Any, pictures: Path
) -> None:
    with urllib.request.urlopen(address(cluster, "/individual-plots.json")) as answer:
        listed = json.load(answer)
    assert "Individual Task Stream" in listed
    show(cluster, synthetic(4, "distmm-matmul-pane"))
    # JupyterLab's panes are small, and the address says which theme they want.
    browser.open(address(cluster, listed["Distmm"] + "?theme=dark"), width=420, height=320)
    shown(browser, "blocks")
    assert browser.evaluate(MODEL.format("blocks") + ".title.text_color") == theme.DARK["ink"]
    assert 250 < browser.evaluate(MODEL.format("blocks") + ".inner_width") <= 420
    for pane in ("rate-over-time", "time"):
        assert browser.evaluate(FITS.format(SHADOW.format(pane)))
        assert 250 < browser.evaluate(f"{SHADOW.format(pane)}.querySelector('svg').clientWidth") <= 420
    browser.screenshot(pictures / "pane.png")
    assert browser.errors == []
