"""What is shown while a product runs, and how figures are written."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from distmm.telemetry import units
from distmm.telemetry.progress import live


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (4_294_967_296, "4.29 GB"), (1e21, "1e+03 EB"), (-2500, "-2.5 kB")],
)
def test_sizes_have_three_digits_and_a_decimal_prefix(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.01234, "0.0123 s"), (99.94, "99.9 s"), (99.96, "1 min 40 s"), (3599, "59 min 59 s"), (7850, "2 h 10 min")],
)
def test_durations_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_rates_survive_clocks_that_stand_still() -> None:
    assert units.rate(5.25e13, 1) == "52.5 TFLOP/s"
    assert units.rate(1, 0) == "1 GFLOP/s"


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    console = Console(file=io.StringIO(), force_terminal=False)
    with live(8e12, console, quiet_seconds=5) as report:
        for second, done, total in [
            (1, 0, 0),
            (4, 10, 80),
            (5, 20, 80),
            (6, 25, 80),
            (9, 30, 80),
            (12, 60, 80),
            (13, 0, 0),
        ]:
            now = 100.0 + second
            report(done, total)
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "20 of 80 steps, 400 GFLOP/s, 15 s left",
        "60 of 80 steps, 500 GFLOP/s, 4 s left",
    ]


def test_a_terminal_gets_a_live_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with live(8e12, console) as report:
        report(0, 0)
        report(0, 80)
        report(80, 80)
        report(0, 0)  # forgotten by the scheduler: the line stays
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "80/80" in text
    assert "0 s left" in text
