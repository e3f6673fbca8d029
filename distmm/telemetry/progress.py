"""Progress display: a live line on terminals and in notebooks, plain lines every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import dask.array as da
from distributed import Client, futures_of
from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn
from rich.table import Table
from rich.text import Text

from distmm import units
from distmm.telemetry import client as telemetry
from distmm.telemetry.figures import UNDER_WAY, Figures

# Seconds between two lines where the console is neither a terminal nor a notebook. A job of one hour writes about 700.
QUIET_SECONDS = 5.0

# Seconds between two requests for the figures of a product.
POLL_SECONDS = 0.5

Report = Callable[[Figures | None], None]


@contextmanager
def live(console: Console | None = None) -> Iterator[Report]:
    """Show the progress of one product.

    Parameters
    ----------
    console : rich.console.Console, optional
        Console for the display; by default stderr, or the output of a notebook's cell.

    Yields
    ------
    callable
        Call it with each new `Figures`; it ignores None (no figures yet).
    """
    console = console or Console(stderr=True)
    if not console.is_jupyter and not console.is_terminal:
        yield _lines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.completed:g}/{task.total:g} steps")
    bar = _Bar(*columns, console=console, auto_refresh=not console.is_jupyter)
    task, cell = bar.add_task("multiplying", total=0, figures="starting"), None
    if console.is_jupyter:  # with IPython's display, since rich's live display would need ipywidgets
        from IPython.display import display

        cell = display(bar.make_tasks_table(bar.tasks), display_id=True)

    def report(f: Figures | None) -> None:
        if f is not None and f.total:
            verb = f.verb or "multiplying"
            bar.update(task, description=verb, completed=f.done, total=f.total, figures=describe(f))
            if cell is not None:
                cell.update(bar.make_tasks_table(bar.tasks))

    with bar if cell is None else nullcontext():
        yield report


class _Bar(Progress):
    """The bar of a product, and below it its figures, which take as many lines as they need."""

    def make_tasks_table(self, tasks: Iterable[Task]) -> Table:
        """Return the lines."""
        lines = Table.grid()
        for task in tasks:
            lines.add_row(super().make_tasks_table([task]))
            lines.add_row(Text(task.fields["figures"]))
        return lines


def watch(C: da.Array, *, client: Client | None = None, console: Console | None = None) -> Figures:
    """Show the progress of a running product until it ends. An interrupt ends the display only.

    It returns however the product ends, and prints the whole error of a product that fails. ``C.compute()`` raises it.

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
        The final counts, rate, bytes moved, and the state in which the product ended: "complete", "failed" or
        "cancelled". The state "failed" comes with the error.

    Raises
    ------
    ValueError
        If the scheduler does not know the product: C has not been started, or is not the result of a product.
    """
    client = client or Client.current()
    # Wait until the client's requests have reached the scheduler: before that it may know only an earlier run of C.
    while not telemetry.arrived(client):
        time.sleep(POLL_SECONDS / 10)
    console = console or Console(stderr=True)
    with live(console) as report:
        while True:
            figures = telemetry.figures(client, C.name)
            # `Future.done` fails for a future that came by pickle, which has no status.
            if figures is None and all(future.status != "pending" for future in futures_of(C)):
                raise ValueError(
                    f"the scheduler knows no product {C.name}: start it first, as in C = client.persist(C), and watch "
                    f"the array that distmm.matmul returned, not one made from it"
                )
            report(figures)
            if figures is not None and figures.state not in UNDER_WAY:
                break
            time.sleep(POLL_SECONDS)
    if figures.error:  # the record has at most 400 letters of it, and the future has all
        whole = next((str(future.exception()) for future in futures_of(C) if future.status == "error"), "")
        told = [figures.error, *([] if whole in figures.error else [whole])]
        console.print("\n".join(told), highlight=False, soft_wrap=True, markup=False)
    return figures


def describe(f: Figures) -> str:
    """Return rate so far, time left or phase after the last step, failures, and why it is slow.

    For a product under way this is the first reason, and all of them for one that has ended. Callers print the error of
    a product that has failed, as a whole.
    """
    if f.state == "stalled":
        return ", ".join([f"stalled: no step for {units.duration(f.idle)}", *f.reasons[:1]])
    if not f.done and f.state in UNDER_WAY:
        parts = ["starting"]
    else:
        parts = [units.scaled(f.rate, "FLOP/s")]
        if f.state == "running" and f.done == f.total and f.unwritten:
            parts.append(f"checking and writing, {f.unwritten} tasks left")
        elif f.state == "running" and math.isfinite(f.left):
            parts.append(f"{units.duration(f.left)} left")
        elif f.state != "running":
            parts.append(f"{f.state} after {units.duration(f.seconds)}")
        trouble = {"failed": f.failed, "computed again": f.again, "failed checks": f.refuted}
        parts += [f"{count} {what}" for what, count in trouble.items() if count]
    reasons = f.reasons[:1] if f.state in UNDER_WAY else f.reasons
    return ", ".join(parts) + ("; slow: " + "; ".join(reasons) if reasons and not f.error else "")


def _lines(console: Console) -> Report:
    """Return a function that writes a line now and then, and one at the end."""
    last = time.perf_counter()
    ended = False

    def report(f: Figures | None) -> None:
        nonlocal last, ended
        if f is None or not f.total or ended:
            return
        now, ended = time.perf_counter(), f.state not in UNDER_WAY
        if ended or now - last >= QUIET_SECONDS:
            last, verb = now, f"{f.verb}: " if f.verb else ""
            console.print(f"{verb}{f.done} of {f.total} steps, {describe(f)}", highlight=False, soft_wrap=True)

    return report
