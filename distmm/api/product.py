"""One product of operands: its type and shape, its plan, and its result: a lazy array, or `out`, filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph
from distributed import Client

from distmm.api import out_array
from distmm.api.aliasing import coincide
from distmm.api.array_types import check_sendable
from distmm.api.dlpack import as_writable, is_foreign
from distmm.api.operands import Operand, as_matrix
from distmm.api.plan_request import PlanRequest, plan_for
from distmm.api.product_array import ProductArray
from distmm.api.scalars import check_held, common_type
from distmm.api.users_blocks import Chunks, batch_chunks
from distmm.api.wishes import Wishes
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.graph import product_graph
from distmm.planning.blocks import Wave
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem, Symmetry
from distmm.planning.write_units import unit_of
from distmm.worker.tasks import Epilogue

__all__ = ["Gemm"]


@dataclass(frozen=True)
class Gemm:
    """The general matrix product ``alpha * a @ b + beta * c``.

    Attributes
    ----------
    a, b : Operand
        Of two dimensions or more; of a symmetric product, b is the transpose of a.
    vectors : tuple of bool
        Whether A and B were vectors. The user's C lacks the dimensions that they lack.
    alpha, beta : scalars
    c : Operand, optional
        Given where beta is not 0.
    symmetry : {"symmetric", "hermitian"}, optional
    """

    a: Operand
    b: Operand
    vectors: tuple[bool, bool]
    alpha: complex = 1
    beta: complex = 0
    c: Operand | None = None
    symmetry: Symmetry | None = None

    @classmethod
    def of(cls, a: Operand, b: Operand, **more: Any) -> Gemm:
        """Make a product of operands as the user gave them."""
        return cls(as_matrix(a, 0), as_matrix(b, 1), (len(a.shape) == 1, len(b.shape) == 1), **more)

    @cached_property
    def dtype(self) -> np.dtype:
        """NumPy's result type."""
        types = {x.name: x.dtype for x in (self.a, self.b, self.c) if x is not None}
        dtype = common_type(types, alpha=self.alpha, beta=self.beta)
        check_held(dtype, alpha=self.alpha, beta=self.beta)
        return dtype

    @cached_property
    def problem(self) -> Problem:
        """Sizes and type, as a plan knows them."""
        (*batch_a, m, k), (*batch_b, _, n) = self.a.shape, self.b.shape
        return Problem(m, k, n, self.dtype, tuple(batch_a), tuple(batch_b), self.symmetry)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as the user sees it: vectors add no dimension."""
        *batch, m, n = self.problem.shape
        vector_a, vector_b = self.vectors
        return (*batch, *(() if vector_a else (m,)), *(() if vector_b else (n,)))

    def plan(
        self, wishes: Wishes, out: Any, client: Client | None, c_chunks: Chunks | None = None, **reduced: Any
    ) -> Plan:
        """Plan the product. With an `out` that is written to, C does not stay in the workers' memory.

        C gets the chunks of a Dask array as `out`, or `c_chunks`, as far as the operands' chunks do not cut it.
        `reduced` is `kept` and `shared` of `PlanRequest`, where blocks of C are reduced.
        """
        written = _is_written(out)
        unit = unit_of(out) if written else None
        c_chunks = self._as_matrix(out.chunks, (1,)) if isinstance(out, da.Array) else c_chunks
        unit = None if unit is None else self._as_matrix(unit, 1)
        request = PlanRequest(self.problem, self.a, self.b, wishes, written, c_chunks, unit, **reduced)
        return plan_for(request, client)

    def _as_matrix(self, by_dimension: tuple[Any, ...], one: Any) -> tuple[Any, ...]:
        """Insert `one` for each dimension of C that vectors lack."""
        values = list(by_dimension)
        if self.vectors[1]:
            values.append(one)
        if self.vectors[0]:
            values.insert(-1, one)
        return tuple(values)

    def array(
        self, wishes: Wishes, out: Any = None, client: Client | None = None, c_chunks: Chunks | None = None
    ) -> Any:
        """Plan the product, and return it as a lazy array, or `out`, filled."""
        if is_foreign(out):
            self.array(wishes, as_writable(out, "out"), client, c_chunks)
            return out
        in_place = self.c is not None and coincide(self.c.source, out)
        if out is not None:
            read = (self.a, self.b) if in_place else (self.a, self.b, self.c)
            given = {x.name: x.source for x in read if x is not None}
            out_array.check_out(out, self.shape, self.dtype, self.a.kind, given)
        written = _is_written(out)
        client = cluster.usable(client)
        if client is None and written:
            cluster.refuse_asynchronous()
        self._check_sendable(client)
        plan = self.plan(wishes, out, client, c_chunks)
        self._prepare(plan, wishes, client)
        to = out_array.target(out, client) if written else None
        if to is not None:
            out_array.check_unit(out, plan.cluster)
        product = self._held() if out is None else self
        if in_place and self.c is not None and client is not None:
            # A task that runs again after a failure must not add to what its block has been written to.
            product = replace(self, c=replace(self.c, source=self.c.source.copy()))
        lazy = product._lazy(plan, to, client)
        if out is None:
            return product._computable(lazy(None), wishes, plan, client)
        if not written:
            return out_array.become(out, lazy(None))
        if client is None or any(self.vectors) or len(plan.waves) == 1:
            out_array.store([(lazy(None), [None])], out, to, client)
        else:
            out_array.store(((lazy(wave), plan.blocking.regions(wave)) for wave in plan.waves), out, to, client)
        return out

    def _held(self) -> Gemm:
        """Return the product of the operands as they are now, for a call that reads them later."""
        b = self.b if self.symmetry is not None else self.b.held()
        return replace(self, a=self.a.held(), b=b, c=None if self.c is None else self.c.held())

    def _computable(self, array: da.Array, wishes: Wishes, plan: Plan, client: Client | None) -> da.Array:
        """Return the lazy product as an array whose `compute` is that of ``out=``, where that pays."""
        if client is None or self.a.kind == "cupy" or any(self.vectors):
            return array

        def fill(out: np.ndarray, client: Client) -> bool:
            # Workers that do not reach `out` send C in one go, if it fits.
            if out_array.target(out, client) is None and not plan.streamed:
                return False
            self.array(wishes, out, client)
            return True

        return ProductArray.of(array, fill)

    def reduced(self, wishes: Wishes, kept: Callable[[Plan], int], client: Client | None, shared: bool = False) -> Plan:
        """Plan the product of which each block is reduced when it is made, and get the cluster ready for it.

        Parameters
        ----------
        wishes : Wishes
        kept : callable
            Bytes that the parts of blocks, and the results, take in the memory of all workers together.
        client : distributed.Client, optional
        shared : bool
            As in `PlanRequest`.
        """
        self._check_sendable(client)
        room, needed = 0, 1
        while needed > room:  # more room for parts leaves less for blocks, and smaller waves have fewer parts
            room = needed
            plan = replace(self.plan(wishes, None, client, kept=room, shared=shared), result="reduced", streamed=True)
            needed = 0 if plan.shortfall else kept(plan)
        self._prepare(plan, wishes, client)
        return plan

    def _check_sendable(self, client: Client | None) -> None:
        """Refuse operands that the workers of a cluster cannot open."""
        if client is None:
            return
        for operand in (self.a, self.b) if self.c is None else (self.a, self.b, self.c):
            check_sendable(operand.source, operand.name)

    def _prepare(self, plan: Plan, wishes: Wishes, client: Client | None) -> None:
        """Refuse what cannot run on a cluster, and get the cluster ready."""
        if client is None:
            return
        if plan is not wishes.plan:
            plan.validate_streamed()
        cluster.install(client)

    def _lazy(self, plan: Plan, to: Any, client: Client | None) -> Callable[[Wave | None], da.Array]:
        """Return a function that makes C. Given a wave, its graph has the blocks of that wave alone."""
        a, blocking, (vector_a, vector_b) = self.a, plan.blocking, self.vectors
        kind = "cupy" if plan.cluster.device == "cuda" and out_array.takes_gpu_blocks(to) else a.kind
        chunks = (*blocking.batch, blocking.m, blocking.n)
        meta = meta_from_array(a.source if a.kind == "cupy" else None, ndim=len(chunks), dtype=self.dtype)
        graphs = self.graphs(plan, kind, client)

        def lazy(wave: Wave | None) -> da.Array:
            name, layers = graphs(wave)
            c = da.Array(layers, name, chunks, meta=meta)
            c = c[..., 0, :] if vector_a else c
            return c[..., 0] if vector_b else c

        return lazy

    def graphs(
        self,
        plan: Plan,
        kind: Literal["numpy", "cupy"],
        client: Client | None,
        reduced: product_graph.Reduced | None = None,
        norms: tuple[da.Array, ...] = (),
    ) -> Callable[[Wave | None], tuple[str, HighLevelGraph]]:
        """Return a function that makes the graph of C, or of one wave of it, and says the name of its keys.

        Parameters
        ----------
        plan : Plan
        kind : {"numpy", "cupy"}
            Of the finished blocks.
        client : distributed.Client, optional
        reduced, norms
            As in `product_graph.build`.
        """
        a, b, symmetry, on, blocking = self.a, self.b, self.symmetry, plan.cluster.device, plan.blocking
        choice = product_graph.kernel_choice(plan)
        conjugate = symmetry == "hermitian" and a.transposed
        epilogue = Epilogue(self.dtype, kind, self.alpha, self.beta, conjugate=conjugate)
        self._check_added()
        chunks = (*blocking.batch, blocking.m, blocking.n)
        how: dict[str, Any] = {"reduced": reduced, "norms": norms}
        name = ""

        def blocked(x: Operand, cuts: Chunks) -> Callable[[], da.Array]:
            # Operands get new names each time, so that the blocks which a wave has read are freed at its end. Waves of
            # one graph share what cannot be loaded again.
            make = partial(x.blocked, (*batch_chunks(x, blocking), *cuts), on, client)
            return cache(make) if plan.streamed and not x.loads_again else make

        a_of, b_of = blocked(a, (blocking.m, blocking.k)), blocked(b, (blocking.k, blocking.n))

        def graph(wave: Wave | None) -> HighLevelGraph:
            nonlocal name
            a_blocks, b_blocks = a_of(), b_of() if symmetry is None else None
            c_blocks = None if self.c is None else self._added(self.c, chunks, client)
            if not name:
                names = [x.name for x in (a_blocks, b_blocks, c_blocks) if x is not None]
                name = f"distmm-matmul-{tokenize(names, self.problem, plan.schedule, choice, epilogue, reduced)}"
            return product_graph.build(name, plan, a_blocks, b_blocks, choice, epilogue, c_blocks, wave, **how)

        def named(wave: Wave | None) -> tuple[str, HighLevelGraph]:
            apart = wave is None and plan.streamed and (a.loads_again or b.loads_again)
            made = [graph(each) for each in (plan.waves if apart else (wave,))]
            return name, product_graph.one_graph(name, made) if apart else made[0]

        return named

    def _check_added(self) -> None:
        """Refuse a C of ``beta * C`` that does not broadcast to the product, or is not where A and B are."""
        c, kind = self.c, self.a.kind
        if c is None:
            return
        if c.kind != kind:
            raise InputError(f"C has {c.kind} blocks, A and B have {kind} blocks: convert C with map_blocks")
        try:
            fits = np.broadcast_shapes(c.shape, self.shape) == self.shape
        except ValueError:
            fits = False
        if not fits:
            raise InputError(f"C has shape {c.shape}, the product {self.shape}: C must broadcast to it")

    def _added(self, c: Operand, chunks: Chunks, client: Client | None) -> da.Array:
        """Return the C of ``beta * C``, broadcast to the product's shape and cut like it.

        Workers read a NumPy array of the product's shape in the client's memory. One that is broadcast is small, and
        travels with the graph.
        """
        shape = self.problem.shape
        if c.shape == shape:
            return c.blocked(chunks, "cpu", client)
        source = c.source if isinstance(c.source, da.Array) else c.blocked(tuple((n,) for n in c.shape), "cpu")
        # C has the shape that the user sees: without the dimensions that a vector operand lacks.
        source = source[..., None] if self.vectors[1] else source
        source = source[..., None, :] if self.vectors[0] else source
        return da.broadcast_to(source, shape).rechunk(chunks)


def _is_written(out: Any) -> bool:
    """Whether blocks of C are written to `out`; a Dask array becomes the lazy product instead."""
    return out is not None and not isinstance(out, da.Array)
