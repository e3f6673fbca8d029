"""Progress display: a live line on terminals and in notebooks, plain lines every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask.array as da
from distributed import Client, futures_of
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from distmm.telemetry import client as telemetry
from distmm.telemetry import units
from distmm.telemetry.record import UNDER_WAY, Figures

__all__ = ["Report", "live", "watch"]

# Seconds between plain lines. A job of one hour writes about 700 lines to its log.
QUIET_SECONDS = 5.0

# Seconds between two requests for the figures of a product.
POLL_SECONDS = 0.5

Report = Callable[[Figures | None], None]


@contextmanager
def live(console: Console | None = None, quiet_seconds: float = QUIET_SECONDS) -> Iterator[Report]:
    """Show the progress of one product.

    Parameters
    ----------
    console : rich.console.Console, optional
        Console for the display; by default stderr, or the output of a notebook's cell.
    quiet_seconds : float
        Minimum seconds between two lines if `console` is neither a terminal nor a notebook.

    Yields
    ------
    callable
        Call it with each new `Figures`; it ignores None (no figures yet).
    """
    console = console or Console(stderr=not _in_notebook(), force_jupyter=_in_notebook())
    if console.is_jupyter:
        show = _cell()
    elif console.is_terminal:
        show = _bar(console)
    else:
        show = _lines(console, quiet_seconds)
    with show as report:
        yield report


def watch(C: da.Array, *, client: Client | None = None, console: Console | None = None) -> Figures:
    """Show the progress of a running product until it ends. An interrupt ends the display only.

    Parameters
    ----------
    C : dask.array.Array
        Result of `distmm.matmul` or `distmm.gemm` that has been persisted or is being computed.
    client : distributed.Client, optional
        Dask's current client by default.
    console : rich.console.Console, optional
        As in `live`.

    Returns
    -------
    Figures
        The final counts, rate, bytes moved, and the state in which the product ended.

    Raises
    ------
    ValueError
        If the scheduler does not know the product: C has not been started, or is not the result of a product.
    """
    client = client or Client.current()
    # Wait until the client's requests have reached the scheduler: before that it may know only an earlier run of C.
    while not telemetry.arrived(client, _pending(client)):
        time.sleep(POLL_SECONDS / 10)
    with live(console) as report:
        while True:
            figures = telemetry.figures(client, C.name)
            if figures is None and all(future.done() for future in futures_of(C)):
                raise ValueError(
                    f"the scheduler knows no product {C.name}: start it first, as in C = client.persist(C), and watch "
                    f"the array that distmm.matmul returned, not one made from it"
                )
            report(figures)
            if figures is not None and figures.state not in UNDER_WAY:
                return figures
            time.sleep(POLL_SECONDS)


def _pending(client: Client) -> list[Any]:
    """Return the keys of this client's pending futures."""
    return [key for key, state in list(client.futures.items()) if state.status == "pending"]


def describe(f: Figures) -> str:
    """Return one line with the rate so far, the time left, and failures."""
    if f.state == "stalled":
        return f"stalled: no step for {units.duration(f.idle)}, {f.workers} of {f.planned} workers are heard of"
    if not f.done and f.state in UNDER_WAY:
        return "starting"
    parts = [units.scaled(f.rate, "FLOP/s")]
    if f.state == "running" and math.isfinite(f.left):
        parts.append(f"{units.duration(f.left)} left")
    elif f.state != "running":
        parts.append(f"{f.state} after {units.duration(f.seconds)}")
    trouble = {"failed": f.failed, "computed again": f.again, "failed checks": f.refuted}
    said = ", ".join(parts + [f"{count} {what}" for what, count in trouble.items() if count])
    return f"{said}: {f.error}" if f.error else said


def _progress(**options: Any) -> Progress:
    return Progress(
        TextColumn("multiplying"),
        BarColumn(),
        TextColumn("{task.completed:g}/{task.total:g} steps, {task.fields[figures]}", markup=False),
        **options,
    )


def _in_notebook() -> bool:
    """Whether this process is a Jupyter kernel. IPython on a terminal is not: it shows no rich output."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def _bar(console: Console) -> Iterator[Report]:
    with _progress(console=console) as bar:
        task = bar.add_task("", total=0, figures="starting")

        def report(f: Figures | None) -> None:
            if f is not None and f.total:
                bar.update(task, completed=f.done, total=f.total, figures=describe(f))

        yield report


@contextmanager
def _cell() -> Iterator[Report]:
    """Show the progress below a notebook's cell with IPython's display: rich's live display would need ipywidgets."""
    from IPython.display import display

    bar = _progress(console=Console(force_jupyter=True), auto_refresh=False)
    task = bar.add_task("", total=0, figures="starting")
    handle = display(bar.make_tasks_table(bar.tasks), display_id=True)

    def report(f: Figures | None) -> None:
        if f is not None and f.total:
            bar.update(task, completed=f.done, total=f.total, figures=describe(f))
            handle.update(bar.make_tasks_table(bar.tasks))

    yield report


@contextmanager
def _lines(console: Console, quiet_seconds: float) -> Iterator[Report]:
    last = time.perf_counter()
    ended = False

    def report(f: Figures | None) -> None:
        nonlocal last, ended
        if f is None or not f.total or ended:
            return
        now, ended = time.perf_counter(), f.state not in UNDER_WAY
        if ended or now - last >= quiet_seconds:
            last = now
            console.print(f"{f.done} of {f.total} steps, {describe(f)}", highlight=False, soft_wrap=True)

    yield report
