"""The dashboard in a real browser, in windows of several sizes: with 1 and 256 workers, and in a pane of JupyterLab."""

from __future__ import annotations

import functools
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, Scheduler

from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import theme
from distmm.telemetry.record import Record
from distmm.telemetry.scheduler import Telemetry
from tests.distmm.telemetry.pages import DATA, MODEL, SHADOW, address, shown

# Whether all texts of a pane, its title and labels, lie within the pane.
FITS = """(pane => {{
  const outside = pane.host.getBoundingClientRect();
  return [...pane.querySelectorAll(".title, text")].every(text => {{
    const inside = text.getBoundingClientRect();
    return inside.left >= outside.left - 1 && inside.right <= outside.right + 1;
  }});
}})({})"""


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
    cluster: Client, page: Any, pictures: Path, workers: int, scheme: str
) -> None:
    record = synthetic(workers, f"distmm-matmul-{workers}-{scheme}")
    show(cluster, record)
    page.open(address(cluster, "/distmm"), scheme=scheme)
    shown(page, "blocks")
    assert page.evaluate(f"Array.from({DATA.format('blocks')}.x).length") == 32 * 32
    assert page.evaluate(f"{SHADOW.format('rate')}.querySelectorAll('g').length") == workers + 1  # and the marks
    palette = theme.DARK if scheme == "dark" else theme.LIGHT
    assert page.evaluate(MODEL.format("blocks") + ".title.text_color") == palette["ink"]
    red, green, blue = (int(palette["ground"][at : at + 2], 16) for at in (1, 3, 5))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == f"rgb({red}, {green}, {blue})"
    # No label overlaps the next one, and nothing is wider than the window.
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(f"{SHADOW.format('rate')}.querySelectorAll('text[text-anchor=middle]').length") <= 5
    page.screenshot(pictures / f"{workers}-{scheme}.png")
    assert page.errors == []


@pytest.mark.minutes
@pytest.mark.parametrize("width", [1400, 950, 800])
def test_nothing_is_cut(cluster: Client, page: Any, pictures: Path, width: int) -> None:
    old, record = synthetic(1, f"distmm-matmul-{width}-old"), synthetic(16, f"distmm-matmul-{width}-wide")
    old.submitted -= 7e4  # its row has long texts
    show(cluster, old)
    show(cluster, record)
    page.open(address(cluster, "/distmm"), width=width, height=950)
    shown(page, "blocks")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert 200 < page.evaluate(MODEL.format("blocks") + ".outer_width") <= width
    for pane in ("rate-over-time", "memory-over-time", "rate", "memory", "time", "transfers"):
        assert page.evaluate(FITS.format(SHADOW.format(pane))), pane
        assert 200 < page.evaluate(f"{SHADOW.format(pane)}.querySelector('svg').clientWidth") <= width, pane
    table = f"{SHADOW.format('products')}.querySelector('table')"
    bar = "document.querySelector('.navbar').getBoundingClientRect().bottom"
    assert page.evaluate(f"{bar} <= {table}.getBoundingClientRect().top")
    assert page.evaluate(f"{table}.scrollWidth <= innerWidth && {table}.getBoundingClientRect().right <= innerWidth")
    key = page.evaluate(f"{SHADOW.format('legend')}.querySelector('.legend').innerText")
    assert "worker node00-gpu0" in key
    assert "worker node01-gpu7" in key
    # All that does not fit the window can be scrolled to.
    bottom = (
        "Math.max(...[...document.querySelectorAll('body *')].map(e => e.getBoundingClientRect().bottom + scrollY))"
    )
    assert page.evaluate(f"document.documentElement.scrollHeight >= {bottom} - 2")
    page.screenshot(pictures / f"wide-{width}.png")
    assert page.errors == []


@pytest.mark.minutes
def test_the_page_fits_a_pane_of_jupyterlab_whose_extension_finds_it(
    cluster: Client, page: Any, pictures: Path
) -> None:
    with urllib.request.urlopen(address(cluster, "/individual-plots.json")) as answer:
        listed = json.load(answer)
    assert "Individual Task Stream" in listed
    show(cluster, synthetic(4, "distmm-matmul-pane"))
    # JupyterLab's panes are small, and the address says which theme they want.
    page.open(address(cluster, listed["Distmm"] + "?theme=dark"), width=420, height=320)
    shown(page, "blocks")
    assert page.evaluate(MODEL.format("blocks") + ".title.text_color") == theme.DARK["ink"]
    assert 250 < page.evaluate(MODEL.format("blocks") + ".inner_width") <= 420
    for pane in ("rate-over-time", "time"):
        assert page.evaluate(FITS.format(SHADOW.format(pane)))
        assert 250 < page.evaluate(f"{SHADOW.format(pane)}.querySelector('svg').clientWidth") <= 420
    page.screenshot(pictures / "pane.png")
    assert page.errors == []
