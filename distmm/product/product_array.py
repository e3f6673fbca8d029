"""Lazy products whose `compute` fills an array of this process, as ``out=`` does.

Dask's `compute` joins all blocks on one worker. It sends the result to the scheduler, which sends it to this process.
Here, workers on this process's machine write each block directly into the array (`distmm.product.sinks`).

Dask's `compute` is used if the workers cannot write to this process's memory, and for calls of ``dask.compute``, such
as ``dask.compute(C, C.sum())`` and ``dask.compute(C)``. No hook of Dask (2026.7) runs in this process when the blocks
are finished: `__dask_postcompute__` returns a task for a worker, and `__dask_optimize__` changes the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partialmethod
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

import dask.array as da
import numpy as np
import psutil
from dask.array.slicing import normalize_index
from dask.core import flatten

from distmm.graph.later_graph import with_graph
from distmm.planning.blocks import slices
from distmm.product.array_types import package_of
from distmm.product.context import computing
from distmm.product.dlpack import as_given
from distmm.product.out_target import target
from distmm.transfer.gpu_allocations import empty_on

if TYPE_CHECKING:
    from distributed import Client

# Parts that a task of a reduction joins along each axis. Dask joins two: 16 blocks are then 15 tasks, in four rounds.
PARTS = 16

# Some chunks of C become a product of their own if they have at most this share of the elements of their blocks, and if
# it saves more than so many seconds: to plan it, and to make its graph, takes 5 to 50 ms for operands of 10 to 800
# chunks (CPU, 2026-12-01).
SMALL_PART, WORTH_A_PRODUCT = 0.25, 0.05

Fill = Callable[[Any, "Client"], bool]  # computes a product into an array; returns False if Dask has to do it
Here = Callable[["Client | None"], Any]  # computes a product in this process; returns None if it may not


class InBlocks(NamedTuple):
    """A product whose chunks are parts of the plan's blocks."""

    blocks: da.Array  # the product, in the plan's blocks
    part: Callable[[tuple[range, ...]], da.Array | None]  # makes a part of C a product of its own; None if it may not
    seconds: float  # that all blocks are expected to take


class ProductArray(da.Array):  # type: ignore[misc]  # Dask's classes are untyped
    """A product, lazy or persisted. Arrays that are made from it are plain Dask arrays."""

    _fill: Fill | None
    _here: Here
    _made_as: str
    _package: str
    _device: int | None
    _in_blocks: InBlocks | None

    @classmethod
    def of(
        cls,
        array: da.Array,
        fill: Fill | None = None,
        here: Here = lambda _: None,
        package: str = "",
        device: int | None = None,
        in_blocks: InBlocks | None = None,
    ) -> ProductArray:
        """Make one from a Dask array.

        Parameters
        ----------
        array : dask.array.Array
        fill : callable, optional
            Computes a lazy array on a cluster; a persisted array needs none.
        here : callable, optional
            Computes a lazy array in this process.
        package : str
            Name of the package of the arrays that `compute` returns (`distmm.product.dlpack.as_given`).
        device : int, optional
            This process's GPU that receives blocks of CuPy; by default the current one.
        in_blocks : InBlocks, optional
            The same product in the plan's blocks, if chunks are parts of them.
        """
        self: ProductArray = with_graph(array.dask, cls, array.name, array.chunks, meta=array)
        self._fill, self._here = fill, here
        self._made_as, self._package, self._device, self._in_blocks = array.name, package, device, in_blocks
        return self

    def rearranged(self, array: da.Array, within: Callable[[Any], Any], turned: Callable[[Any], Any]) -> ProductArray:
        """Return a reshaped or transposed `array` of this product's elements, whose `compute` works like ``out=``, too.

        `within` takes an array of the new shape. It returns a view of it that has the product's shape, or None.
        `turned` takes the computed product, and returns it in the new shape.
        """

        def fill(out: Any, client: Client) -> bool:
            view = within(out)
            return view is not None and self._fill is not None and self._fill(view, client)

        def here(client: Client | None) -> Any:
            block = self._here(client)
            return None if block is None else turned(block)

        return ProductArray.of(array, fill, here, self._package, self._device)

    def compute(self, **kwargs: Any) -> Any:
        """Compute the array as `dask.array.Array.compute` does. Workers on this machine write blocks to its memory.

        Parameters
        ----------
        **kwargs
            Dask's arguments. With any of them, Dask computes the array.

        Returns
        -------
        array
            Of the operands' package: NumPy, CuPy, PyTorch or JAX. Writable (JAX has no writable arrays), in this
            process's memory, on the GPU of the operands if they are on one.
        """
        # Dask computes an array that was changed, for example by C[0] = 1, or as `out` of a NumPy function.
        out = None if kwargs or self.name != self._made_as else self._computed(computing())
        result = as_given(super().compute(**kwargs) if out is None else out, self._package)
        return result[()] if isinstance(result, np.ndarray) and not result.ndim else result

    def __getitem__(self, index: Any) -> da.Array:
        """Return a part of C as Dask does. Its chunks become a product of their own if their blocks take longer."""
        part, in_blocks = super().__getitem__(index), self._still_in_blocks()
        given = index if isinstance(index, tuple) else (index,)
        if in_blocks is None or not part.size or not all(map(_is_plain, given)):
            return part
        there = normalize_index(given, self.shape)
        cuts = [at if isinstance(at, slice) else slice(at, at + 1) for at in there]
        ranges = [range(n)[cut] for cut, n in zip(cuts, self.shape, strict=True)]
        chunks, blocks = (tuple(map(_hull, edges, ranges)) for edges in (self.chunks, in_blocks.blocks.chunks))
        elements, touched = (math.prod(map(len, hull)) for hull in (chunks, blocks))
        worth = in_blocks.seconds * (touched - elements) / self.size > WORTH_A_PRODUCT
        own = in_blocks.part(chunks) if worth and elements <= SMALL_PART * touched else None
        if own is None:
            return part
        moved = ((at.start - by.start, at.stop - by.start, at.step) for at, by in zip(ranges, chunks, strict=True))
        return own[tuple(slice(*m) if isinstance(at, slice) else m[0] for at, m in zip(there, moved, strict=True))]

    def _still_in_blocks(self) -> InBlocks | None:
        """Return the plan's blocks, but not if C is another array by now, nor if the cluster has the chunks.

        The blocks of these are gone.
        """
        return None if self.name != self._made_as or self._is_on(computing()) else self._in_blocks

    def _reduced(self, reduction: Callable[..., da.Array], *args: Any, **how: Any) -> da.Array:
        """Return a reduction in few tasks, with the chunks that Dask's reduction has. It reads the plan's blocks."""
        given = signature(reduction).bind(self, *args, **how)
        given.arguments.setdefault("split_every", dict.fromkeys(range(self.ndim), PARTS))
        by_chunks, in_blocks = reduction(*given.args, **given.kwargs), self._still_in_blocks()
        if in_blocks is None or given.arguments.get("out") is not None:
            return by_chunks
        given.arguments["self"] = in_blocks.blocks
        return reduction(*given.args, **given.kwargs).rechunk(by_chunks.chunks, method="tasks")

    # Reductions of a block that need no further memory of its size.
    sum = partialmethod(_reduced, da.Array.sum)
    mean = partialmethod(_reduced, da.Array.mean)
    max = partialmethod(_reduced, da.Array.max)
    min = partialmethod(_reduced, da.Array.min)
    any = partialmethod(_reduced, da.Array.any)
    all = partialmethod(_reduced, da.Array.all)

    def _computed(self, client: Client | None) -> Any:
        """Return the computed array; None if Dask has to compute its chunks."""
        there = self._is_on(client)
        if not there and (block := self._here(client)) is not None:
            return block
        if client is not None and (out := self._empty()) is not None and self._filled(out, client):
            return out
        # The plan's blocks are fewer than the chunks, which are views of them.
        return None if there or self._in_blocks is None else self._in_blocks.blocks.compute()

    def _empty(self) -> Any:
        """Return an array to compute into; None if it would be larger than the free memory."""
        if package_of(self._meta) != "cupy":
            return None if self.nbytes > psutil.virtual_memory().available else np.empty(self.shape, self.dtype)
        return empty_on(self._device, self.shape, self.dtype)

    def _filled(self, out: Any, client: Client) -> bool:
        """Compute into `out`. Return False if Dask has to compute the array."""
        from distributed import futures_of

        from distmm.product import sinks

        if self._fill is not None and not self._is_on(client):
            return self._fill(out, client)
        if self._fill is None and not futures_of(self):
            return False
        to = target(out, client)  # the array is persisted: its blocks are on the cluster
        if to is not None:
            sinks.store(lambda: [(self, [None])], out, to, client)
        return to is not None

    def _is_on(self, client: Client | None) -> bool:
        """Whether the cluster has the array already, or computes it."""
        return client is not None and next(flatten(self.__dask_keys__())) in client.futures

    def __dask_postpersist__(self) -> tuple[Callable[..., ProductArray], tuple[Any, ...]]:
        return _rebuilt, (*super().__dask_postpersist__(), self._package, self._device)


def _is_plain(at: Any) -> bool:
    """Whether an index is an integer, an ellipsis or an ascending range."""
    return isinstance(at, Integral) or at is Ellipsis or (isinstance(at, slice) and (at.step is None or at.step > 0))


def _hull(edges: tuple[int, ...], at: range) -> range:
    """Return the range of all parts with these edges that overlap a range."""
    inside = [part for part in slices(edges) if part.start < at.stop and at.start < part.stop]
    return range(inside[0].start, inside[-1].stop)


def of_package(array: da.Array, package: str) -> da.Array:
    """Return a new lazy array as one that computes to an array of `package`, if that is not ""."""
    if package:
        array = array if isinstance(array, ProductArray) else ProductArray.of(array)
        array._package = package
    return array


def _rebuilt(
    graph: Any, rebuild: Callable[..., da.Array], more: tuple[Any, ...], package: str, device: int | None, **how: Any
) -> ProductArray:
    return ProductArray.of(rebuild(graph, *more, **how), package=package, device=device)
