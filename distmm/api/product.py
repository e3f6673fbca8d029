"""One product of operands: its type and shape, its plan, and its result: a lazy array, or `out`, filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.base import tokenize
from distributed import Client

from distmm.api import out_array
from distmm.api.aliasing import coincide
from distmm.api.array_types import check_sendable
from distmm.api.operands import Operand, as_matrix
from distmm.api.plan_request import Chunks, PlanRequest, Wishes, batch_chunks, plan_for
from distmm.api.scalars import check_held, common_type
from distmm.clusters import cluster
from distmm.errors import InputError
from distmm.graph import product_graph
from distmm.planning.blocks import Wave
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem, Symmetry
from distmm.planning.write_units import unit_of
from distmm.telemetry import client as telemetry
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

    def plan(self, wishes: Wishes, out: Any, client: Client | None, c_chunks: Chunks | None = None) -> Plan:
        """Plan the product. With an `out` that is written to, C does not stay in the workers' memory.

        C gets the chunks of a Dask array as `out`, or `c_chunks`, as far as the operands' chunks do not cut it.
        """
        written = _is_written(out)
        unit = unit_of(out) if written else None
        c_chunks = self._as_matrix(out.chunks, (1,)) if isinstance(out, da.Array) else c_chunks
        unit = None if unit is None else self._as_matrix(unit, 1)
        return plan_for(PlanRequest(self.problem, self.a, self.b, wishes, written, c_chunks, unit), client)

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
        in_place = self.c is not None and coincide(self.c.source, out)
        if out is not None:
            read = (self.a, self.b) if in_place else (self.a, self.b, self.c)
            given = {x.name: x.source for x in read if x is not None}
            out_array.check_out(out, self.shape, self.dtype, self.a.kind, given)
        written = _is_written(out)
        client = cluster.usable(client)
        if client is None and written:
            cluster.refuse_asynchronous()
        if client is not None:
            for operand in (self.a, self.b) if self.c is None else (self.a, self.b, self.c):
                check_sendable(operand.source, operand.name)
        plan = self.plan(wishes, out, client, c_chunks)
        if client is not None:
            if plan is not wishes.plan:
                plan.validate()
            cluster.install(client)
            telemetry.install(client)
        to = out_array.target(out, client) if written else None
        if to is not None:
            out_array.check_unit(out, plan.cluster)
        product = self
        if in_place and self.c is not None and client is not None:
            # A task that runs again after a failure must not add to what its block has been written to.
            product = replace(self, c=replace(self.c, source=self.c.source.copy()))
        lazy = product._lazy(plan, to, client)
        if out is None:
            return lazy(None)
        if not written:
            return out_array.become(out, lazy(None))
        if client is None or any(self.vectors) or len(plan.waves) == 1:
            out_array.store([(lazy(None), [None])], out, to, client)
        else:
            out_array.store(((lazy(wave), plan.blocking.regions(wave)) for wave in plan.waves), out, to, client)
        return out

    def _lazy(self, plan: Plan, to: Any, client: Client | None) -> Callable[[Wave | None], da.Array]:
        """Return a function that makes C. Given a wave, its graph has the blocks of that wave alone."""
        a, b, symmetry, (vector_a, vector_b) = self.a, self.b, self.symmetry, self.vectors
        on, blocking = plan.cluster.device, plan.blocking
        choice = product_graph.kernel_choice(plan)
        kind = "cupy" if on == "cuda" and out_array.takes_gpu_blocks(to) else a.kind
        conjugate = symmetry == "hermitian" and a.transposed
        epilogue = Epilogue(self.dtype, kind, self.alpha, self.beta, conjugate=conjugate)
        chunks = (*blocking.batch, blocking.m, blocking.n)
        c_blocks = None if self.c is None else self._added(self.c, chunks)
        meta = meta_from_array(a.source if a.kind == "cupy" else None, ndim=len(chunks), dtype=self.dtype)
        name = None

        def lazy(wave: Wave | None) -> da.Array:
            nonlocal name
            # Operands get new names each time, so that the blocks which a wave has read are freed at its end.
            a_blocks = a.blocked((*batch_chunks(a, blocking), blocking.m, blocking.k), on, client)
            b_blocks = None
            if symmetry is None:
                b_blocks = b.blocked((*batch_chunks(b, blocking), blocking.k, blocking.n), on, client)
            if name is None:
                names = [x.name for x in (a_blocks, b_blocks, c_blocks) if x is not None]
                name = f"distmm-matmul-{tokenize(names, self.problem, plan.schedule, choice, epilogue)}"
            layers = product_graph.build(name, plan, a_blocks, b_blocks, choice, epilogue, c_blocks, wave)
            c = da.Array(layers, name, chunks, meta=meta)
            c = c[..., 0, :] if vector_a else c
            return c[..., 0] if vector_b else c

        return lazy

    def _added(self, c: Operand, chunks: Chunks) -> da.Array:
        """Return the C of ``beta * C``, broadcast to the product's shape and cut like it."""
        kind, shape = self.a.kind, self.problem.shape
        if c.kind != kind:
            raise InputError(f"C has {c.kind} blocks, A and B have {kind} blocks: convert C with map_blocks")
        if c.shape == shape:
            return c.blocked(chunks, "cpu")
        source = c.source if isinstance(c.source, da.Array) else c.blocked(tuple((n,) for n in c.shape), "cpu")
        # C has the shape that the user sees: without the dimensions that a vector operand lacks.
        source = source[..., None] if self.vectors[1] else source
        source = source[..., None, :] if self.vectors[0] else source
        try:
            return da.broadcast_to(source, shape).rechunk(chunks)
        except ValueError:
            raise InputError(f"C has shape {c.shape}, the product {shape}: C must broadcast to it") from None


def _is_written(out: Any) -> bool:
    """Whether blocks of C are written to `out`; a Dask array becomes the lazy product instead."""
    return out is not None and not isinstance(out, da.Array)
