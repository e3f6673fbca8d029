"""The chains of a product as graphs and lazy arrays: of one wave, or of all of C."""

from __future__ import annotations

import uuid
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import dask.array as da
from dask.array.utils import meta_from_array
from dask.base import get_annotations, tokenize

from distmm.graph import product_graph
from distmm.graph.consumers import in_chunks
from distmm.graph.later_graph import LaterGraph, with_graph
from distmm.graph.parametric_layer import one_graph
from distmm.graph.reduced_blocks import Reduced
from distmm.planning.blocks import Wave
from distmm.planning.plan import Plan
from distmm.planning.problem import operand_cuts
from distmm.product import operand_blocks
from distmm.product.arrays_in_graphs import rechunked
from distmm.product.operand import Operand
from distmm.product.users_blocks import Chunks
from distmm.worker.tasks.epilogue import of_c
from distmm.worker.tasks.kernel_choice import KernelChoice

if TYPE_CHECKING:
    from dask.highlevelgraph import HighLevelGraph
    from distributed import Client

    from distmm.product.product import Gemm
    from distmm.worker.client_output import ClientOutput
    from distmm.worker.tasks.arrivals import Form
    from distmm.worker.tasks.loads import Load


@dataclass(eq=False)
class Chains:
    """The chains of a product by a plan.

    Parameters
    ----------
    product : Gemm
    plan : Plan
    kind : {"numpy", "cupy"}
        Type of the finished blocks.
    client : distributed.Client, optional
    reduced, norms
        As in `product_graph.build`.
    out : ClientOutput, optional
        What the only task writes C to. The task also reads operands that are arrays of this process.
    """

    product: Gemm
    plan: Plan
    kind: Literal["numpy", "cupy"]
    client: Client | None
    reduced: Reduced | None = None
    norms: tuple[da.Array, ...] = ()
    out: ClientOutput | None = None
    name: str = field(default="", init=False)  # in the keys of C's blocks; the first graph gives it to all waves
    # Blocks of operands that all waves read.
    _shared: dict[tuple[int, Chunks], tuple[da.Array, Form]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def chunks(self) -> Chunks:
        """The plan's blocks of C."""
        blocking = self.plan.blocking
        return of_c((*blocking.batch, blocking.m, blocking.n), self.product.dropped)

    def arrays(self, wave: Wave | None) -> tuple[da.Array, da.Array]:
        """Return C, lazy, in the user's chunks and in the plan's blocks. With a wave, only its blocks have tasks."""
        graph = self.graph(wave)
        blocks = da.Array(graph, self.name, self.chunks, meta=self._meta)
        if self.plan.schedule.chunks is None:
            return blocks, blocks
        return in_chunks(blocks, self.plan, self.product.dropped), blocks

    def later(self) -> da.Array:
        """Return C, lazy, in the plan's blocks. Its graph is made when something reads it.

        For arrays of this process, which have new names in each graph.
        """
        self.name, context = f"distmm-matmul-{uuid.uuid4().hex}", copy_context()  # of the call, with its annotations

        def graph() -> HighLevelGraph:
            if self.client is not None and self.client.status != "running":
                self.client = None  # other workers get the arrays in the graph
            return context.run(self.arrays, None)[1].dask

        return with_graph(LaterGraph(graph), da.Array, self.name, self.chunks, meta=self._meta)

    @property
    def _meta(self) -> Any:
        a = self.product.a
        return meta_from_array(a.source if a.kind == "cupy" else None, ndim=len(self.chunks), dtype=self.product.dtype)

    def graph(self, wave: Wave | None) -> HighLevelGraph:
        """Return the graph of one wave, or of all of C."""
        operands = self.product.a, self.product.b
        if wave is not None or not (self.plan.streamed and any(x.loads_again for x in operands)):
            return self._graph(wave)
        waves = [self._graph(each) for each in self.plan.waves]
        return one_graph(self.name, waves)

    def _graph(self, wave: Wave | None) -> HighLevelGraph:
        product, plan = self.product, self.plan
        a, form_a = self._blocks(product.a, "A")
        b, form_b = (None, form_a) if product.symmetry else self._blocks(product.b, "B")
        c = None if product.c is None else self._added(product.c)
        epilogue = product.epilogue((self.reduced and self.reduced.dtype) or product.dtype, self.kind)
        if not self.name:
            # Arrays of this process have new names in each graph.
            again = not product.once and self.reduced is None
            again &= all(isinstance(x.source, da.Array) for x in product.operands)
            # Annotations too: what failed under some of them must not be found as the result under others.
            how = form_a, form_b, product.problem, plan.schedule, KernelChoice.of(plan), epilogue, get_annotations()
            own = tokenize([x.name for x in (a, b, c) if isinstance(x, da.Array)], *how) if again else uuid.uuid4().hex
            self.name = f"distmm-matmul-{own}"
        return product_graph.build(
            self.name, plan, a, b, epilogue, c, wave,
            reduced=self.reduced, norms=self.norms, out=self.out, forms=(form_a, form_b),
        )  # fmt: skip

    def _blocks(self, x: Operand, of: Literal["A", "B"]) -> tuple[da.Array | Load, Form]:
        """Return the blocks of A or B for one wave, and how they arrive.

        A product task joins the chunks of a block, unless a task reads the block whole (`Operand.read_in`).

        Each call gives the operand new names, but for lazy products of Dask arrays. Blocks that one wave has read are
        then freed at its end, and the next wave loads them again. Waves of a streamed plan share the blocks that cannot
        be loaded again.
        """
        if self.out is not None and (load := operand_blocks.load(x, self.plan.cluster.device, self.client)) is not None:
            return load, "matrix"
        plan, device = self.plan, self.plan.cluster.device
        original = x.read_in(operand_cuts(of, plan.blocking.cuts, x.shape[:-2]))
        chunks = operand_cuts(of, (plan.schedule if original is None else plan.blocking).cuts, x.shape[:-2])
        if (id(x), chunks) in self._shared:
            return self._shared[id(x), chunks]
        if original is None:
            blocks = operand_blocks.arriving(x, chunks, device, self.client)
        else:
            blocks = self._loaded(x, original, chunks, device), "matrix"
        if plan.streamed and not x.loads_again:
            self._shared[id(x), chunks] = blocks
        return blocks

    def _loaded(self, x: Operand, source: Operand, chunks: Chunks, device: Literal["cpu", "cuda"]) -> da.Array:
        """Return an operand `x` in these chunks, read from `source`: `x` itself, or what is behind it."""
        # Equal lazy products of Dask arrays have equal names, so that Dask computes them once.
        new = source is x or self.product.once
        name = "" if new else f"distmm-load-{tokenize(x.source.name, x.transposed, chunks, device)}"
        return operand_blocks.blocked(source, chunks, device, self.client, name=name)

    def _added(self, c: Operand) -> da.Array | Load:
        """Return the C of ``beta * C``, broadcast to the product's shape, in the product's chunks.

        Workers read a NumPy array of the product's shape from the client's memory. An array that has to be broadcast
        is smaller, and is sent inside the graph.
        """
        shape = self.product.shape
        if self.out is not None and (load := operand_blocks.load(c, "cpu", self.client)) is not None:
            return load
        if c.shape == shape:
            return self._loaded(c, c.read_in(self.chunks) or c, self.chunks, "cpu")
        whole = tuple((n,) for n in c.shape)
        source = c.source if isinstance(c.source, da.Array) else operand_blocks.blocked(c, whole, "cpu")
        return rechunked(da.broadcast_to(source, shape), self.chunks)
