"""What a task is: the products that it works for, what it does for them, its name for people, and its error."""

from __future__ import annotations

from itertools import islice

from dask.utils import key_split
from distributed.protocol.pickle import loads
from distributed.scheduler import TaskState

from distmm.graph.dask_tasks import PlacedTask, ProductTask, stores
from distmm.telemetry.activity import Kind
from distmm.telemetry.record import Record
from distmm.worker.tasks.reductions import BlockReduction, Largest
from distmm.worker.tasks.threshold import Threshold

# Letters of an error that are kept: enough for a path and its fault.
LONGEST_ERROR = 400

# Most tasks between one that makes a part of an operand and the step that reads the operand, and most dependents of
# each that are looked at. A sum of all elements may have a hundred thousand dependents, and each chunk leads to it.
LONGEST_WAY, MOST_DEPENDENTS = 30, 10


def of_product(ts: TaskState) -> list[PlacedTask]:
    """Return the tasks that say which products a task belongs to: itself; or those whose blocks it writes."""
    if isinstance(ts.run_spec, PlacedTask):
        return [ts.run_spec]
    return _read_by(ts) if stores(ts.key) else []


def _read_by(ts: TaskState) -> list[PlacedTask]:
    return [of.run_spec for of in ts.dependencies if isinstance(of.run_spec, PlacedTask)]


def served(ts: TaskState) -> tuple[list[PlacedTask], Kind]:
    """Return the tasks that say for which products a task works, and what it does for them; none for others' tasks.

    It may also be a task of a user: one that reads blocks of C, or one that a block of A or B is made by.
    """
    if found := of_product(ts) or _read_by(ts):
        return found, "write"
    kind: Kind = "load" if key_split(ts.key) == "distmm-load" else "operands"
    reader = ts
    for _ in range(LONGEST_WAY):
        dependents = list(islice(reader.dependents, MOST_DEPENDENTS))
        for each in dependents:
            if isinstance(each.run_spec, PlacedTask):
                return [each.run_spec], kind
        if not dependents:
            break
        reader = dependents[0]
    return [], "other"


def verb(task: ProductTask) -> str:
    """Return what is done with C, as in ``topk``, if a task reduces its block of C so; else an empty text."""
    reduction = next(
        (each.reduction for each in (*task.args, *task.kwargs.values()) if isinstance(each, BlockReduction)), None
    )
    if isinstance(reduction, Largest):
        return "topk" if reduction.metric is None else "nearest"
    return "threshold" if isinstance(reduction, Threshold) else ""


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
