"""Progress on terminals, in files and in notebooks, and the figures that it writes."""

from __future__ import annotations

import io
import math
import time
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client
from rich.console import Console

from distmm import matmul, units
from distmm.telemetry.progress import describe, live, watch


def figures(done: int, seconds: float, state: str = "running", **others: Any) -> Any:
    """Figures of a product of 80 steps and 8 TFLOP, `done` of them done after `seconds`."""
    rate = done * 1e11 / seconds
    left = (80 - done) * 1e11 / rate if done else math.inf
    rest = {"again": 0, "failed": 0, "refuted": 0, "error": "", "verb": "", "reasons": [], "unwritten": 0, **others}
    return SimpleNamespace(done=done, total=80, seconds=seconds, rate=rate, left=left, state=state, **rest)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (999.7, "B", "1 kB"),
        (4.29e9, "B", "4.29 GB"),
        (5.25e13, "FLOP/s", "52.5 TFLOP/s"),
        (3e21, "B", "3e+03 EB"),
    ],
)
def test_sizes_and_rates_have_three_digits_and_a_prefix(value: float, unit: str, text: str) -> None:
    assert units.scaled(value, unit) == text


def test_one_thing_is_counted_in_the_singular() -> None:
    found = [units.count(number, what) for number, what in ((0, "worker"), (1, "block of C"), (4, "block of C"))]
    assert found == ["0 workers", "1 block of C", "4 blocks of C"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01234, "0.0123 s"), (99.94, "99.9 s"), (99.96, "1 min 40 s"), (3599, "59 min 59 s"), (7850, "2 h 10 min")],
)
def test_durations_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_names_are_ordered_by_their_numbers() -> None:
    names = ["gpu10", "gpu9", "10.0.0.2:40", "3", "node1-gpu2"]
    assert sorted(names, key=units.natural) == ["3", "10.0.0.2:40", "gpu9", "gpu10", "node1-gpu2"]


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=False)
    with live(console) as report:
        for second, done, state in [
            (4, 10, "running"),
            (5, 20, "running"),
            (9, 30, "running"),
            (12, 60, "running"),
            (13, 80, "complete"),
            (14, 80, "complete"),
        ]:
            now = 100.0 + second
            report(None)
            report(figures(done, second, state, again=3 if done == 60 else 0))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "20 of 80 steps, 400 GFLOP/s, 15 s left",
        "60 of 80 steps, 500 GFLOP/s, 4 s left, 3 computed again",
        "80 of 80 steps, 615 GFLOP/s, complete after 13 s",
    ]


def test_after_the_last_step_the_line_says_what_is_left_to_write() -> None:
    late = figures(80, 12, unwritten=3)
    assert describe(late).endswith("FLOP/s, checking and writing, 3 tasks left")
    assert "writing" not in describe(figures(60, 12, unwritten=3))


def test_a_terminal_gets_a_bar_and_live_figures() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with live(console) as report:
        report(None)
        report(figures(0, 1.0))
        report(figures(80, 10.0, "complete"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "80/80 steps" in text
    assert "800 GFLOP/s, complete after 10 s" in text


@pytest.mark.parametrize("width", [60, 100])
def test_nothing_is_cut_on_a_terminal_and_the_end_names_all_reasons(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    reasons = (
        "other work on the same workers takes 63% of their time: D.zarr",
        "links carry 100 MB/s, 1 GB/s were planned",
    )
    with live(console) as report:
        report(figures(40, 5.0, reasons=reasons))
        report(figures(80, 10.0, "complete", reasons=reasons))
    lines = console.file.getvalue().replace("\x1b[2K", "\n").splitlines()  # type: ignore[attr-defined]
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    assert f"800 GFLOP/s, complete after 10 s; slow: {reasons[0]}; {reasons[1]}" in text


CELLS = """
import io, time
from distmm.telemetry import progress
from types import SimpleNamespace
rest = {"again": 0, "failed": 0, "refuted": 0, "error": "", "verb": "", "reasons": [], "unwritten": 0}
with progress.live() as report:
    for done in (0, 40, 80):
        report(SimpleNamespace(done=done, total=80, seconds=10.0, rate=done * 1e10, left=10.0, state="running", **rest))
"""


@pytest.mark.minutes
def test_a_notebook_gets_one_line_below_the_cell_that_changes_in_place() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELLS)])
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    (output,) = book.cells[0].outputs
    assert "80/80 steps" in output["data"]["text/plain"]
    assert "800 GFLOP/s, 10 s left" in output["data"]["text/plain"]
    assert "80/80 steps" in output["data"]["text/html"]


@pytest.mark.usefixtures("blocks_are_chunks")
def test_a_product_is_watched_until_it_is_done(client: Client) -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    C = matmul(da.ones((256, 256), chunks=64), da.ones((256, 256), chunks=64), client=client)
    with pytest.raises(ValueError, match="knows no product"):
        watch(C, client=client, console=console)
    kept = client.persist(C)
    last = watch(kept, client=client, console=console)
    assert (last.state, last.blocks_done, last.blocks) == ("complete", 16, 16)
    assert last.flops == 2 * 256**3
    assert "16 of 16 steps" in console.file.getvalue() or last.total > 16  # type: ignore[attr-defined]
    assert "complete after" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_whole_error_of_a_product_is_printed_and_watch_returns(client: Client) -> None:
    words = " ".join(map(str, range(500)))

    def fail(block: Any) -> Any:
        if block.size:
            raise ValueError(words)
        return block

    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    A = da.ones((64, 64), chunks=32).map_blocks(fail, meta=np.empty((0, 0)))
    C = client.persist(matmul(A, da.ones((64, 64), chunks=32), client=client))
    assert watch(C, client=client, console=console).state == "failed"
    assert words in console.file.getvalue()  # type: ignore[attr-defined]
    client.cancel(C, force=True)
