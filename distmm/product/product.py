"""One product of operands: its type, shape and plan, and its result, which is a lazy array or the filled `out`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import dask
import numpy as np

from distmm.clusters import view
from distmm.errors import DeviceMemoryError
from distmm.planning.plan import Plan
from distmm.planning.problem import FLOAT8, Problem, Symmetry
from distmm.planning.write_units import unit_of
from distmm.product import one_task, out_target
from distmm.product.aliasing import coincide
from distmm.product.array_types import check_sendable, is_dask
from distmm.product.choices import Choices
from distmm.product.dlpack import package_among
from distmm.product.operand import Operand, as_matrix
from distmm.product.operand_pair import check_added
from distmm.product.request import PlanRequest, is_modest, plan_for, plan_reduced
from distmm.product.scalars import check_represents, common_type
from distmm.product.smaller_plan import smaller_plan
from distmm.product.users_blocks import Chunks
from distmm.transfer import ClientArray
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.worker.gpu_copies import to_host
from distmm.worker.tasks.epilogue import Epilogue, of_c, of_matrix

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Client


@dataclass(frozen=True)
class Gemm:
    """The general matrix product ``alpha * a @ b + beta * c``.

    Attributes
    ----------
    a, b : Operand
        Of two dimensions or more. In a symmetric product, b is the transpose of a.
    dropped : tuple of int
        The axes that the user's C lacks: -2 if A was a vector, and -1 if B was one.
    alpha, beta : scalars
    c : Operand, optional
        Given if beta is not 0.
    symmetry : {"symmetric", "hermitian"}, optional
    once : bool
        Whether the keys of its tasks are used for one call only: for products that are written at the call. A failure
        of one such call then has no effect on another one. Equal lazy products have equal keys, so that Dask computes
        both at once.
    """

    a: Operand
    b: Operand
    dropped: tuple[int, ...]
    alpha: complex = 1
    beta: complex = 0
    c: Operand | None = None
    symmetry: Symmetry | None = None
    once: bool = False

    @classmethod
    def of(cls, a: Operand, b: Operand, **more: Any) -> Gemm:
        """Make a product of the user's operands, which may be vectors. With an alpha of 0 they are not read."""
        dropped = tuple(axis for axis, x in ((-2, a), (-1, b)) if len(x.shape) == 1)
        matrices = as_matrix(a, 0), as_matrix(b, 1)
        if more.get("alpha", 1) == 0:
            matrices = matrices[0].part(slice(0), -1), matrices[1].part(slice(0), -2)
        return cls(*matrices, dropped, **more)

    @property
    def operands(self) -> list[Operand]:
        """A, B and, if it is added, C."""
        return [x for x in (self.a, self.b, self.c) if x is not None]

    @cached_property
    def dtype(self) -> np.dtype:
        """NumPy's result type."""
        dtype = common_type({x.name: x.dtype for x in self.operands}, alpha=self.alpha, beta=self.beta)
        check_represents(dtype, alpha=self.alpha, beta=self.beta)
        return dtype

    @cached_property
    def problem(self) -> Problem:
        """Sizes and type, for the planner. Vectors count as matrices."""
        (*batch_a, m, k), (*batch_b, _, n) = self.a.shape, self.b.shape
        narrow = self.a.dtype if self.a.dtype in FLOAT8 and self.b.dtype in FLOAT8 else None
        return Problem(m, k, n, self.dtype, tuple(batch_a), tuple(batch_b), self.symmetry, narrow)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the user's C: vectors add no dimension."""
        return of_c(self.problem.shape, self.dropped)

    def plan(self, choices: Choices, out: Any = None, c_chunks: Chunks | None = None, **more: Any) -> Plan:
        """Plan the product.

        Blocks that are written to `out` do not stay in the workers' memory. C gets the chunks of `out` if that is a
        Dask array, or else `c_chunks`, along the dimensions that the operands' chunks do not cut. `more` may have
        `kept` and `shared` of `PlanRequest`, if blocks of C are reduced, and `most`, to plan with less memory.
        """
        written = out_target.is_written(out)
        unit = unit_of(out) if written else None
        c_chunks = of_matrix(out.chunks, self.dropped, (1,)) if is_dask(out) else c_chunks
        unit = None if unit is None else of_matrix(unit, self.dropped, 1)
        request = PlanRequest(self.problem, self.a, self.b, choices, written, c_chunks, unit, **more)
        free = all(x is None for x in (choices.client, choices.hardware, choices.blocks, choices.plan, c_chunks))
        here = one_task.device_of(self) if free and not (more or self.problem.batch) else None
        if here is not None:
            # One task: a GPU has nothing to load while it multiplies, and BLAS uses all cores for one call. Tasks that
            # run side by side have one core each.
            whole = tuple(max(1, size) for size in (self.problem.m, self.problem.k, self.problem.n))
            plan = plan_for(replace(request, choices=replace(choices, blocks=whole)), None)
            short = is_modest(plan) and one_task.is_short(self, plan) and not choices.reproducible
            if plan.cluster.device == here and not plan.shortfall and (here == "cuda" or short):
                return plan
        return plan_for(request, choices.client)

    def array(self, choices: Choices, out: Any = None, c_chunks: Chunks | None = None) -> Any:
        """Plan the product. Return it as a lazy array, or fill `out` and return that."""
        if (elements := out_target.elements_of(out)) is not out:
            self.array(choices, elements, c_chunks)
            return out
        in_place = self.c is not None and coincide(self.c.source, out)
        if out is not None:
            read = {x.name: x.source for x in self.operands if not (in_place and x is self.c)}
            out_target.check_out(out, self.shape, self.dtype, self.a.kind, read)
        written, client = out_target.is_written(out), choices.client
        check_added(self.a, self.c, self.shape)
        self._check_sendable(client)
        if written and (block := one_task.short(self, choices, out)) is not None:
            if block is not out:
                out[tuple(slice(0, n) for n in block.shape)] = block if is_on_gpu(out) else to_host(block)
            return out
        plan = self.plan(choices, out, c_chunks)
        self._prepare(plan, choices)
        to = out_target.target(out, client) if written else None
        if to is not None:
            out_target.check_unit(out, plan.cluster)
        product = self._for_later() if out is None else self
        if in_place and self.c is not None and client is not None:
            # After a failure a task may run again. It must then read the old C, and not a block that it has written.
            product = replace(self, c=replace(self.c, source=self.c.source.copy()))
        if not written:
            from distmm.product.chains import Chains  # late, as below: other products need no Dask array and no client

            chains = Chains(product, plan, self.a.kind, client)
            later = plan.schedule.chunks is None and all(x.in_memory for x in product.operands)
            lazy, blocks = (chains.later(), None) if later else chains.arrays(None)
            if out is None:
                return product._computable(lazy, choices, plan, None if blocks is lazy else blocks)
            from distmm.product import sinks

            return sinks.become(out, lazy)
        for attempt in itertools.count():
            try:
                product._store(plan, choices, out, to)
                break
            except DeviceMemoryError as error:
                if client is None:
                    raise
                # The same blocks, if the caller chose them by a plan. All blocks of `out` are written again.
                less = choices if choices.plan is None else replace(choices, plan=None, blocks=plan.block_shape)
                within = partial(self.plan, less, out, c_chunks)
                what, remedy = "the product starts again", "use smaller blocks (blocks=)"
                plan, _ = smaller_plan(plan, error, attempt, within, what, remedy)
        return out

    def _store(self, plan: Plan, choices: Choices, out: Any, to: Any) -> None:
        """Compute the product, and write its blocks to `out`."""
        client = choices.client
        from distmm.product import sinks
        from distmm.product.chains import Chains

        # Other blocks are copied to the host by the task that makes them.
        on_gpu = plan.cluster.device == "cuda" and out_target.takes_gpu_blocks(out, to)
        chains = partial(Chains, replace(self, once=True), plan, "cupy" if on_gpu else "numpy", client)

        def waves() -> Iterator[sinks.WaveRegions]:
            # `sinks.store` calls this again if the tasks cannot write to `out`. The blocks then have new keys, because
            # they read new load tasks. A worker (Dask 2026.7) remembers a key, and what it read, as long as a task that
            # needs it runs, even a cancelled one. With the same keys it would wait for old and new load tasks.
            of_all = chains()
            for wave in plan.waves if client is not None and len(plan.waves) > 1 else (None,):
                chunks, blocks = of_all.arrays(wave)
                regions = [None] if wave is None else [of_c(at, self.dropped) for at in plan.blocking.regions(wave)]
                yield (chunks if to is None else blocks), regions

        if isinstance(to, ClientArray) and one_task.writes_itself(self, plan):
            sinks.store_block(chains(), out, to)
        else:
            sinks.store(waves, out, to, client)

    def epilogue(self, dtype: np.dtype, kind: Literal["numpy", "cupy"], diagonal: Symmetry | None = None) -> Epilogue:
        """Return what is done with finished sums of type `dtype`, which become blocks of a `kind`.

        `diagonal` is the symmetry of a block on the diagonal of a symmetric product.
        """
        conjugate = self.symmetry == "hermitian" and self.a.transposed
        return Epilogue(dtype, kind, self.alpha, self.beta, conjugate, diagonal, self.dropped)

    def _for_later(self) -> Gemm:
        """Return the product of the operands as they are at the call (`Operand.for_later`)."""
        b = self.b if self.symmetry is not None else self.b.for_later()
        return replace(self, a=self.a.for_later(), b=b, c=None if self.c is None else self.c.for_later())

    def _computable(self, array: da.Array, choices: Choices, plan: Plan, blocks: da.Array | None) -> da.Array:
        """Return the lazy product. If workers can write to this process's memory, its `compute` works like ``out=``.

        Its `compute` returns an array of the operands' package. `blocks` is the product in the plan's blocks, if these
        are not the chunks of `array`.
        """
        from distmm.product.product_array import InBlocks, ProductArray

        package = package_among(self.operands)
        devices = [x.source.device.id for x in self.operands if is_on_gpu(x.source)]
        device = devices[0] if devices else None
        annotations = dask.get_annotations()  # those of the call hold for the graphs that are made later

        def here(client: Client | None) -> Any:
            return one_task.short(self, replace(choices, client=client))

        @lru_cache(maxsize=64)
        def part(box: tuple[range, ...]) -> da.Array | None:
            # It would have tasks that conjugate, or that cut the C that is added. Without a cluster it has no plan.
            lost = choices.client is not None and choices.client.status != "running"
            if self.symmetry == "hermitian" or self.c is not None or lost:
                return None
            cuts = of_matrix(box, self.dropped, range(1))

            def of(x: Operand, along_k: int) -> Operand:
                for axis in range(-len(x.shape), 0):
                    if axis != along_k and (axis >= -2 or x.shape[axis] > 1):  # others are broadcast
                        x = x.part(slice(cuts[axis].start, cuts[axis].stop), axis)
                return x

            with dask.annotate(**annotations):
                return replace(self, a=of(self.a, -1), b=of(self.b, -2), symmetry=None).array(choices)

        in_blocks = None if blocks is None else InBlocks(blocks, part, plan.cost.seconds)
        if choices.client is None:
            own = package or blocks is not None or one_task.device_of(self)
            return ProductArray.of(array, None, here, package, device, in_blocks) if own else array

        def fill(out: Any, client: Client) -> bool:
            # If workers cannot write to `out`, Dask's `compute` fetches C as one array, provided that C fits.
            if out_target.target(out, client) is None and not plan.streamed:
                return False
            with dask.annotate(**annotations):
                self.array(replace(choices, client=client), out)
            return True

        return ProductArray.of(array, fill, here, package, device, in_blocks)

    def plan_reduced(self, choices: Choices, kept: Callable[[Plan], int], shared: bool = False) -> Plan:
        """Plan a product whose finished blocks are reduced at once, and prepare the cluster for it.

        Parameters
        ----------
        choices : Choices
        kept : callable
            Takes a plan. Returns the bytes that reduced blocks and results take in the memory of all workers together.
        shared : bool
            As in `PlanRequest`.

        Raises
        ------
        InputError, DoesNotFitError
            As in `distmm.topk`.
        """
        self._check_sendable(choices.client)
        if isinstance(choices.plan, Plan):  # it has no memory for reduced blocks
            choices = replace(choices, plan=str(choices.plan))
        plan = plan_reduced(lambda room: self.plan(choices, kept=room, shared=shared), kept)
        self._prepare(plan, choices)
        return plan

    def _check_sendable(self, client: Client | None) -> None:
        """Refuse operands that the workers of a cluster cannot open."""
        if client is not None:
            for operand in self.operands:
                check_sendable(operand.source, operand.name)

    def _prepare(self, plan: Plan, choices: Choices) -> None:
        """Refuse a plan that does not fit, and install distmm's plugins on the cluster."""
        if choices.client is not None:
            if plan is not choices.plan:
                plan.check_memory()
            view.ask(choices.client)
