"""The report: one HTML file that a browser shows without loading anything else, for real jobs and large clusters."""

from __future__ import annotations

import platform
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm import job, units
from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import charts, report, theme
from distmm.telemetry.charts import Curve
from distmm.telemetry.figures import Figures
from distmm.telemetry.record import Record


class Balance(HTMLParser):
    """Checks that each element is closed, and notes everything that the page would load."""

    VOID = ("meta", "br", "hr", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def run(workers: int) -> Record:
    """Make the record of a product of 10 s on so many workers, with events of each kind."""
    problem = Problem(65536, 65536, 65536, np.dtype("f4"))
    made = make_plan(
        problem, ClusterSpec(workers, int(1e11), "cuda", 2e14, 5e10), blocking=cut(problem, (2048, 4096, 2048))
    )
    r = Record("distmm-matmul-1", made, 1000.0)
    names = [f"node{rank // 8:02d}-gpu{rank % 8}" for rank in range(workers)]
    for chain in range(r.chains):
        name = names[chain % workers]
        for step in range(r.steps):
            r.want(chain, step, name)
            start = 1000.0 + 10 * (step + (chain // workers * workers) / r.chains) / r.steps
            r.step(chain, step, name, start, start + 9.5 * workers / r.chains / r.steps)
        r.check(1010.0, chain, passed=chain != 3)
    for name in names:
        for second in range(10):
            r.work(name, "receive", 1000.0 + second, 1000.3 + second)
            r.lane(name).sample(1000.0 + second, 10**9 * second, 10**9, 10**8)
    r.lose(1005.0, names[0])
    r.repeat(1005.0, 0, 0, finished=True)
    return r


@pytest.mark.parametrize("workers", [1, 256])
def test_a_report_is_one_file_that_loads_nothing(workers: int, tmp_path: Path) -> None:
    rows = [("largest error", "0.1 of <its> bound")]
    path = report.write(tmp_path / "C.report.html", run(workers), title="/data/C & D.zarr", certificate=rows)
    text = path.read_text()
    assert len(text) < 1_000_000
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert parser.loads == []
    assert re.findall(r"url\(|@import|http", text) == []
    assert "C &amp; D.zarr" in text
    assert "0.1 of &lt;its&gt; bound" in text
    assert "5.0 s" in text  # the time when the worker was lost
    assert text.count("<svg") == 3
    assert "nan" not in text.lower().replace("nano", "")
    assert [file.name for file in tmp_path.iterdir()] == ["C.report.html"]


def test_a_report_of_a_product_that_never_ran_says_so() -> None:
    r = run(2)
    empty = Record("distmm-matmul-2", r.plan, 1000.0)
    text = report.html(empty)
    assert "<th>state</th><td>waiting</td>" in text
    assert "<td>0 of 1024</td>" in text
    assert "not checked" in text


def test_a_report_says_when_and_where_and_shows_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    r = run(4)
    r.work("node00-gpu1", "load", 1000.5, 1001.0)
    r.work("node00-gpu2", "write", 1009.0, 1009.5)
    text = report.html(r, runs=[{"started": 900.0, "host": "<yesterday>"}, {"started": 1000.0}])
    assert "Slurm job 4711, restart 2" in text
    for at, label in ((1000.0, "started"), (r.advanced, "last step")):
        date = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(at))
        assert f"<th>{label}</th><td>{date}</td>" in text
    assert platform.node() in text
    assert "<title>node00-gpu1: reads of A and B</title>" in text
    assert "<title>node00-gpu2: checks and writes of C</title>" in text
    assert "node00-gpu0: reads" not in text
    assert "<td>&lt;yesterday&gt;</td>" in text
    colors = {name: r.color(name) for name in r.lanes}
    assert len(set(colors.values())) == 4
    for name, color in colors.items():  # in timeline, rate and memory
        drawn = re.findall(rf"<g><title>{name}[^<]*</title><path[^>]*{color}", text)
        assert len(drawn) == 3


def test_intervals_that_nearly_touch_are_drawn_as_one() -> None:
    assert charts.merged([(0, 1), (5, 6)], 0.01).tolist() == [[0, 1], [5, 6]]
    assert charts.merged([(5, 6), (0, 4.9999)], 0.01).tolist() == [[0, 6]]
    assert charts.merged([(0, 9), (1, 2), (3, 4), (20, 21)], 0.01).tolist() == [[0, 9], [20, 21]]
    assert charts.merged([], 0.01).shape == (0, 2)


def test_a_silence_is_drawn_for_the_time_of_the_product_alone() -> None:
    r = run(2)
    early, late = sorted(r.lanes)
    r.fall_silent(early, 900.0)
    r.wake(early, 1002.0)
    r.fall_silent(late, 1020.0)  # the product was over
    text = charts.timeline(r, 10.0)
    (path,) = re.findall(r'<title>[^<]*: silent</title><path d="M([\d.-]+) [\d.]+H([\d.]+)', text)
    assert float(path[0]) == charts.REPORT.x(0)
    assert float(path[1]) == pytest.approx(charts.REPORT.x(0.2), abs=0.2)


@pytest.mark.parametrize("name", ["a$x_1$b", "$\\frac$"])
def test_names_of_workers_are_no_formulas(name: str) -> None:
    r = Record("C", run(1).plan, 1000.0)
    r.work(name, "load", 1000.0, 1001.0)
    assert f">{name}</text>" in charts.timeline(r, 1.0)


@pytest.mark.parametrize("seconds", [0.003, 0.7, 1, 9.9, 10, 61, 3600, 1e5])
def test_time_axes_have_five_to_eleven_labels(seconds: float) -> None:
    r = Record("C", run(1).plan, 1000.0)
    r.work("worker", "load", 1000.0, 1000.0 + seconds)
    text = charts.timeline(r, seconds)
    assert 5 <= len(re.findall(r">[\d.]+ (?:s|min|h|d)[^<]*</text>", text)) <= 11


def test_labels_are_round() -> None:
    assert units.ticks(0.7) == pytest.approx([0, 0.2, 0.4, 0.6])
    assert units.ticks(3) == [0, 1, 2, 3]
    assert units.ticks(0) == [0]
    assert [units.time_unit(seconds)[1] for seconds in (0.1, 119, 120, 7200, 2e5)] == ["s", "s", "min", "h", "d"]


def test_charts_take_the_colours_of_the_page() -> None:
    times, values = np.array([0.0, 1.0]), np.array([1e12, 2e12])
    text = charts.lines(1, [Curve("a & <b>", theme.DATA, times, values)], (3e12, "limit"), "FLOP/s")
    assert "<title>a &amp; &lt;b&gt;</title>" in text
    assert " TFLOP/s</text>" in text
    assert {"var(--muted)", "var(--line)"} <= set(re.findall(r"var\(--\w+\)", text))
    assert not any(color in text for color in theme.LIGHT.values())


@pytest.mark.minutes
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_report(browser: Any, pictures: Path, tmp_path: Path, scheme: str) -> None:
    begun = {"host": "login-node-1.cluster", "batch_job": "Slurm job 4711 (4700_3), restart 2", "workers": 16}
    killed = {**begun, "started": 900.0, "last_block": 960.0, "kept": 0}
    runs = [killed, {**begun, "started": 1000.0, "ended": 1010.0, "kept": 512}]
    path = report.write(tmp_path / "C.report.html", run(16), title="C.zarr", runs=runs)
    browser.open(f"file://{path}", width=1100, height=2000, scheme=scheme)
    browser.until("document.querySelectorAll('svg').length == 3")
    palette = theme.DARK if scheme == "dark" else theme.LIGHT
    ground = [int(palette["ground"][at : at + 2], 16) for at in (1, 3, 5)]
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb({}, {}, {})".format(*ground)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # 16 lanes, each as wide as the chart.
    lanes = "[...document.querySelectorAll('svg')[0].querySelectorAll('path')].map(path => path.getBBox().width)"
    assert sum(width > 800 for width in browser.evaluate(lanes)) >= 16
    browser.screenshot(pictures / f"report-{scheme}.png")
    assert browser.errors == []


def test_a_job_leaves_a_report_and_shows_its_progress(client: Client, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.random((200, 160)), rng.random((160, 120))
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    seen: list[Figures] = []
    summary = job.multiply(
        tmp_path / "A.npy", tmp_path / "B.npy", tmp_path / "C.npy", client=client, blocks=(50, 40, 40),
        progress=seen.append,
    )  # fmt: skip
    np.testing.assert_allclose(np.load(tmp_path / "C.npy"), a @ b)
    last = seen[-1]
    assert (last.state, last.blocks_done, last.blocks) == ("complete", 12, 12)
    assert last.flops == 2 * 200 * 160 * 120
    assert summary.report == str(tmp_path / "C.npy.report.html")
    text = (tmp_path / "C.npy.report.html").read_text()
    assert "<th>state</th><td>complete</td>" in text
    assert "<td>12 of 12</td>" in text
    assert "12 blocks passed, 0 failed" in text
    assert "12 written in this run" in text
    for what in ("reads of A and B", "checks and writes of C"):
        assert f": {what}</title>" in text
    assert str(tmp_path / "C.npy.certificate.json") in text


def test_a_job_that_reduces_c_is_named_by_what_it_does(client: Client, tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", np.random.default_rng(3).random((64, 48)))
    seen: list[Figures] = []
    summary = job.topk(
        tmp_path / "A.npy", tmp_path / "A.npy", 3, tmp_path / "best.zarr", client=client, transb=True,
        progress=seen.append,
    )  # fmt: skip
    assert {figures.verb for figures in seen} == {"topk"}
    assert "topk of 64 x 48 times 48 x 64" in Path(str(summary.report)).read_text()
