"""A product's progress on the terminal: a live line, or plain lines now and then in a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from distmm.telemetry import units

__all__ = ["live"]

# Seconds between plain lines: an hour's job leaves seven hundred in its log.
QUIET_SECONDS = 5.0

Report = Callable[[int, int], None]


@contextmanager
def live(flops: float, console: Console, quiet_seconds: float = QUIET_SECONDS) -> Iterator[Report]:
    """Show the progress of one product.

    Parameters
    ----------
    flops : float
        Operations of the whole product.
    console : rich.console.Console
        Where to show it.
    quiet_seconds : float
        Least seconds between two lines where `console` is no terminal.

    Yields
    ------
    callable
        To be called with the steps done and the steps in all, as often as they are known. Totals of 0 (not known
        yet, or forgotten since) change nothing.
    """
    show = _bar if console.is_terminal else _lines
    with show(flops, console, quiet_seconds) as report:
        yield report


def _figures(flops: float, done: int, total: int, seconds: float) -> str:
    """Rate so far and time left at that rate."""
    if not done or seconds <= 0:
        return "starting"
    left = seconds * (total - done) / done
    return f"{units.rate(flops * done / total, seconds)}, {units.duration(left)} left"


@contextmanager
def _bar(flops: float, console: Console, quiet_seconds: float) -> Iterator[Report]:
    columns = (
        TextColumn("multiplying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[figures]}"),
    )
    started = time.perf_counter()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("multiplying", total=None, figures="starting")

        def report(done: int, total: int) -> None:
            if total:
                figures = _figures(flops, done, total, time.perf_counter() - started)
                bar.update(task, completed=done, total=total, figures=figures)

        yield report


@contextmanager
def _lines(flops: float, console: Console, quiet_seconds: float) -> Iterator[Report]:
    started = last = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if total and now - last >= quiet_seconds:
            last = now
            figures = _figures(flops, done, total, now - started)
            console.print(f"{done} of {total} steps, {figures}", highlight=False)

    yield report
