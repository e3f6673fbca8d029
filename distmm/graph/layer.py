"""Plan -> Dask graph. The only module that names keys or touches Dask's task classes.

Stationary C: block ``C[i, j]`` stays with its owner, which runs one chain of steps over k::

    D0 = A[i,0] @ B[0,j];  D1 = D0 + A[i,1] @ B[1,j];  ...;  C[i,j] = epilogue(D_last)

each into a new block. The chain is the loop over k of a kernel's tile, continued across tasks: step s starts from the
bits that step s - 1 left. Where C has too few blocks for all workers, k is split: each layer of the grid runs such a
chain over its part of k, and a binary tree of fixed shape adds their ends.

A symmetric product has chains for ``i >= j`` only. They read blocks of A alone, ``A[j,p]`` for the transpose of
``B[p,j]``, and ``C[j, i]`` is a view of ``C[i, j]`` on the same worker.

Placement and priority do not travel as annotations, which array optimisation drops: every product task carries a
`Placement`, and the scheduler's plugin (`distmm.scheduler.plugin`) reads it from there, whatever graph the task has
become part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import dask.array as da
from dask._task_spec import List, Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, Layer

from distmm.planning.blocks import Wave
from distmm.planning.grid import Grid
from distmm.planning.plan import Plan
from distmm.planning.problem import operand_batch
from distmm.worker import tasks

__all__ = ["Chain", "Key", "Placed", "Placement", "Product", "ProductLayer", "build", "calls", "kernel_choice"]

Key = tuple[Any, ...]
Chain = tuple[tuple[int, ...], int, int]  # batch index, i, j


@dataclass(frozen=True)
class Placement:
    """Where and when one product task belongs: its product, chain ``(batch, i, j)`` and step, the grid of workers.

    `order` counts the steps of all waves: those of earlier waves come first. Waves of one `run` share their workers'
    memory, also where each is a product of its own, as those of jobs are.
    """

    product: str
    grid: Grid
    batch: tuple[int, ...]
    i: int
    j: int
    step: int
    order: int
    layer: int = 0
    run: str = ""

    @property
    def chain(self) -> Chain:
        """Block of C that it belongs to."""
        return self.batch, self.i, self.j

    @property
    def rank(self) -> int:
        """Rank of the worker that owns this block of C, on its layer."""
        return self.grid.owner(self.i, self.j, self.batch, self.layer)


class Placed(Task):
    """A task whose first argument says where it belongs. It keeps its key through Dask's optimisers."""

    __slots__ = ()

    @property
    def block_fusion(self) -> bool:
        """Tell the optimisers to leave this task alone: fused with others it would lose its placement."""
        return True

    @property
    def placement(self) -> Placement:
        """Where the task belongs."""
        where = self.args[0]
        assert isinstance(where, Placement)
        return where


class Product(Placed):
    """A step of a chain.

    The plan is for the scheduler's plugin, where the tasks are made; it does not travel to the workers.
    """

    __slots__ = ("plan",)

    def __init__(self, key: Key, func: Callable[..., Any], /, *args: Any, plan: Plan | None = None, **kwargs: Any):
        super().__init__(key, func, *args, **kwargs)
        self.plan = plan

    def __getstate__(self) -> tuple[Any, ...]:
        slots = zip(self.get_all_slots(), super().__getstate__(), strict=True)
        return tuple(None if name == "plan" else value for name, value in slots)

    @property
    def is_first(self) -> bool:
        """Whether it begins a chain: there is no sum yet that it adds to."""
        return self.func is tasks.multiply and self.args[2] is None

    def operands(self) -> Iterator[Key]:
        """Key of every block of A and B that this step reads."""
        if self.func is tasks.multiply:  # the others sum partial blocks of C
            for blocks in self.args[3:5]:
                yield from (ref.key for ref in blocks.args)

    @property
    def operand_names(self) -> set[str]:
        """Names of the arrays of which this step reads blocks."""
        return {blocks.args[0].key[0] for blocks in self.args[3:5]} if self.func is tasks.multiply else set()

    def home(self, operand: Key) -> int:
        """Rank of the worker at which a block of A or B that this step reads lives."""
        *batch, row, column = operand[1:]
        return self.placement.grid.owner(row, column, tuple(batch), self.placement.layer)


class ProductLayer(Layer):
    """All chains of one product, or of one wave of it, and mirror images of their ends, by their parameters alone.

    It travels from client to scheduler as some hundred bytes and makes its tasks there, where Dask optimises and
    expands graphs: for 100,000 tasks that saves the client seconds, and the connection 70 MB.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        operands: tuple[str, str, str | None],
        choice: tasks.KernelChoice,
        epilogue: tasks.Epilogue,
        wave: Wave | None = None,
        run: str | None = None,
    ) -> None:
        super().__init__()
        self.name, self.plan, self.operands, self.choice, self.epilogue = name, plan, operands, choice, epilogue
        self.wave, self.run = wave, run or name
        self._made: dict[Key, Placed] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.plan, self.operands, self.choice, self.epilogue, self.wave, self.run)

    def is_materialized(self) -> bool:
        """Whether the tasks have been made."""
        return self._made is not None

    def get_output_keys(self) -> set[Key]:
        """Keys of the blocks of C."""
        blocks = self.plan.blocking.c_indices(self.wave)
        mirrored = self.plan.problem.symmetry is not None
        return {(self.name, *b, *at) for b, i, j in blocks for at in ((i, j), *([(j, i)] if mirrored else []))}

    def __len__(self) -> int:
        blocking = self.plan.blocking
        wave = blocking.whole if self.wave is None else self.wave
        return wave.c_blocks * blocking.chain_tasks(self.plan.grid.layers) + blocking.mirrored(wave)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._tasks())

    def __getitem__(self, key: Key) -> Placed:
        return self._tasks()[key]

    def _tasks(self) -> dict[Key, Placed]:
        if self._made is None:
            waves = self.plan.waves if self.wave is None else (self.wave,)
            self._made = {task.key: task for wave in waves for task in self._chains(wave)}
        return self._made

    def _chains(self, wave: Wave) -> Iterator[Placed]:
        plan, (a, b, c0) = self.plan, self.operands
        symmetry = plan.problem.symmetry
        both = {} if symmetry is None else {"symmetry": symmetry}
        on_diagonal = replace(self.epilogue, symmetry=symmetry)
        parts = plan.blocking.parts(plan.grid.layers)
        orders = max(map(len, parts)) + (len(parts) - 1).bit_length()  # steps, and levels of the tree
        token = self.name.rpartition("-")[2]

        def task(
            chain: Chain, key: Key, step: int, order: int, layer: int, func: Any, *args: Any, **kwargs: Any
        ) -> Product:
            where = Placement(self.name, plan.grid, *chain, step, wave.index * orders + order, layer, self.run)
            last = key[0] == self.name
            added = TaskRef((c0, *key[1:])) if last and c0 is not None else None
            epilogue = on_diagonal if chain[1] == chain[2] else self.epilogue
            return Product(key, func, where, self.choice, *args, epilogue if last else None, added, plan=plan, **kwargs)

        for chain in plan.blocking.c_indices(wave):
            batch, i, j = chain
            c_key = (self.name, *batch, i, j)
            a_batch, b_batch = (operand_batch(batch, own) for own in (plan.problem.a_batch, plan.problem.b_batch))
            partial: list[tuple[Key, int]] = []  # sums over the parts of k, and the layers that have them
            first = 0
            for layer, steps in enumerate(parts):
                previous: TaskRef | None = None
                for s, panels in enumerate(steps):
                    last = len(parts) == 1 and s == len(steps) - 1
                    key = c_key if last else (f"distmm-step-{token}", *batch, i, j, first + s)
                    a_blocks = List(*(TaskRef((a, *a_batch, i, p)) for p in panels))
                    b_keys = ((b, *b_batch, *((p, j) if symmetry is None else (j, p))) for p in panels)
                    b_blocks = List(*map(TaskRef, b_keys))
                    end = task(chain, key, first + s, s, layer, tasks.multiply, previous, a_blocks, b_blocks, **both)
                    yield end
                    previous = TaskRef(key)
                partial.append((key, layer))
                first += len(steps)
            # A tree of fixed shape: its bits depend on how k was split, and not on who was first.
            order = max(map(len, parts))
            while len(partial) > 1:
                sums: list[tuple[Key, int]] = []
                for (left, layer), (right, _) in zip(partial[::2], partial[1::2], strict=False):
                    key = c_key if len(partial) == 2 else (f"distmm-sum-{token}", *batch, i, j, first)
                    end = task(chain, key, first, order, layer, tasks.combine, TaskRef(left), TaskRef(right))
                    yield end
                    sums.append((key, layer))
                    first += 1
                partial = sums + partial[2 * len(sums) :]
                order += 1
            if symmetry is not None and i != j:
                yield Placed((self.name, *batch, j, i), tasks.mirror, end.placement, symmetry, TaskRef(c_key))


def calls(name: str, function: Callable[..., Any], arguments: dict[tuple[int, ...], Any]) -> HighLevelGraph:
    """Return a graph with one task for each block of an array: what a function makes of that block's argument."""
    made = {(name, *index): Task((name, *index), function, argument) for index, argument in arguments.items()}
    return HighLevelGraph.from_collections(name, made)


def kernel_choice(plan: Plan) -> tasks.KernelChoice:
    """Return what the tasks of a plan need to know of their kernel."""
    dtype, prepared = plan.problem.dtype, plan.peak.prepared
    return tasks.KernelChoice(plan.cluster.device, dtype, plan.precision, plan.kernel, prepared)


def build(
    name: str,
    plan: Plan,
    a: da.Array,
    b: da.Array | None,
    choice: tasks.KernelChoice,
    epilogue: tasks.Epilogue,
    c0: da.Array | None = None,
    wave: Wave | None = None,
    run: str | None = None,
) -> HighLevelGraph:
    """Return the graph of C: keys ``(name, *batch, i, j)``, lazy, with A, B (and the user's C) as dependencies.

    Parameters
    ----------
    name : str
        Name of the resulting Dask array, ending in ``-token``.
    plan : Plan
    a, b : dask.array.Array
        Operands whose chunks are the plan's blocks; a symmetric product has no B.
    choice, epilogue
        What the tasks need to know.
    c0 : dask.array.Array, optional
        Added by the last step, times ``epilogue.beta``; its shape and chunks are those of C.
    wave : Wave, optional
        Of ``plan.waves``: only its blocks of C; all waves by default, one after another by priority.
    run : str, optional
        What the waves of several calls have in common, if they have names of their own.
    """
    names = a.name, (a if b is None else b).name, None if c0 is None else c0.name
    layer = ProductLayer(name, plan, names, choice, epilogue, wave, run)
    return HighLevelGraph.from_collections(name, layer, dependencies=[x for x in (a, b, c0) if x is not None])
