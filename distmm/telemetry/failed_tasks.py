"""Name and error of a failed task, as records show them."""

from __future__ import annotations

from dask.utils import key_split
from distributed.protocol.pickle import loads
from distributed.scheduler import TaskState

from distmm.graph.dask_tasks import ProductTask
from distmm.telemetry.record import Record

__all__ = ["error", "name"]

# Letters of an error that are kept: enough for a path and its fault.
LONGEST_ERROR = 400


def name(record: Record, ts: TaskState) -> str:
    """Return the name of a failed task, as in ``C[0, 3], step 2`` or ``distmm-load[1, 0]``."""
    if isinstance(ts.run_spec, ProductTask):
        where = ts.run_spec.placement
        return f"{record.block(record.chain(*where.chain))}, step {where.step}"
    index = list(ts.key[1:]) if isinstance(ts.key, tuple) else ""
    return f"{key_split(ts.key)}{index}"


def error(ts: TaskState) -> str:
    """Return a task's error in one line. For errors of the scheduler, such as lost workers, Dask has no text."""
    text = ts.exception_text
    if not text and isinstance(ts.exception, bytes):
        raised = loads(ts.exception)
        text = f"{type(raised).__name__}: {raised}"
    return (text or "error").partition("\n")[0][:LONGEST_ERROR]
