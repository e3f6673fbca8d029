"""Functions that several commands call: consoles, two-column tables, notes, and a cluster."""

from __future__ import annotations

import atexit
import json
import logging
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import typer

from distmm import clusters, interrupts, units

if TYPE_CHECKING:
    from distributed import Client
    from rich.console import Console

    from distmm.cli.options import Where
    from distmm.clusters.cluster import DeviceChoice
    from distmm.storage.matrix import Matrix


def out(stderr: bool = False) -> Console:
    """Return a console on stdout, for tables of rich, or on stderr, for progress. It prints all text as it is."""
    from rich.console import Console  # here: its import takes 25 ms, and most commands print plain text

    width = None if stderr else 10_000  # rich cuts the columns of a table that is too wide; a terminal folds its lines
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=True, markup=False, emoji=False)


def table(rows: Iterable[tuple[str, str]], title: str) -> str:
    """Return a table of labels and values. Long values are wrapped on a terminal, and stay one line in a file."""
    rows, wide = list(rows), get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    edge = max((len(label) for label, _ in rows), default=0) + 2
    lines = [title]
    for label, value in rows:
        cut = textwrap.wrap(value, max(20, wide - edge), break_long_words=False, break_on_hyphens=False) or [""]
        lines += [f"{label if i == 0 else '':<{edge}}{line}" for i, line in enumerate(cut)]
    return "\n".join(lines)


def print_json(facts: dict[str, Any]) -> None:
    """Print facts as JSON on stdout, with null for what is not a finite number."""
    finite = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in facts.items()}
    typer.echo(json.dumps(finite, indent=1, allow_nan=False))


def tell_missing(*matrices: Matrix) -> None:
    """Print a note on stderr about chunks that a Zarr array lacks: they may be empty or lost."""
    for matrix in matrices:
        if (what := matrix.missing()) is not None:
            typer.echo(f"note: {matrix.path}: {what}", err=True)


def tell_device(where: str, device: DeviceChoice) -> None:
    """Print a note on stderr if this machine has GPUs that cannot be used."""
    if where == "local" and device == "auto" and clusters.gpu_count() and (missing := clusters.missing_for_gpu()):
        typer.echo(f"Working on the CPU: {missing}", err=True)


@contextmanager
def cluster(ctx: typer.Context, where: Where, device: DeviceChoice) -> Iterator[Client]:
    """Connect to a cluster or start one; print its number of workers and the address of its dashboard."""
    from distributed.deploy import spec

    from distmm.all_workers import workers_of
    from distmm.telemetry.client import page_address

    # At exit Dask would wait 10 s, or fail, if a signal has interrupted the start of a cluster, whose workers end with
    # this process anyhow. The function is private (seen in Dask 2026.7.1). Without it, such an exit is slow.
    if close := getattr(spec, "close_clusters", None):
        atexit.unregister(close)
    tell_device(where.cluster, device)
    # Without this, workers log a traceback for each failed task, and a local scheduler logs its error. The client
    # receives the error and prints it once. An interrupted wait of Dask leaves an asyncio task whose error is unread.
    quiet = not ctx.find_root().obj  # --debug
    if quiet:
        for name in ("distributed", "distributed.client", "distmm.telemetry.scheduler", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        logging.getLogger("distributed.nanny").setLevel(logging.WARNING)  # still report restarted workers
    with ExitStack() as stack:
        with interrupts.while_started():
            own: dict[str, Any] = {"workers": where.workers, "memory_limit": where.memory_limit, "tls": where.tls}
            own["timeout"] = where.connect_timeout
            client = stack.enter_context(clusters.connect(where.cluster, device=device, quiet=quiet, **own))
        page = page_address(client)
        dashboard = "without a dashboard" if page is None else f"dashboard {page}"
        typer.echo(f"Cluster with {units.count(len(workers_of(client)), 'worker')}, {dashboard}", err=True)
        yield client
