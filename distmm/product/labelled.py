"""Arrays whose dimensions have labels: the operands of contractions, and the operations on a single operand."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import dask.array as da
import numpy as np
from distributed import Client

from distmm.graph.block_arrays import reshaped
from distmm.planning.problem import accumulator_dtype
from distmm.product.operand import Operand
from distmm.product.operand_blocks import blocked, checked, uploaded

Label = Hashable
Edges = Mapping[Label, tuple[int, ...]]  # the chunks of each label


@dataclass(frozen=True)
class Labelled(Operand):
    """An operand of any number of dimensions, and a label for each of its dimensions.

    Arrays in memory are transposed and reshaped as views where the strides allow. Dask arrays are rearranged when they
    are computed. Other objects become Dask arrays where they have to be rearranged.

    Attributes
    ----------
    labels : tuple
        One label for each dimension.
    unchecked : bool
        Whether it is the user's Dask array, whose blocks must be checked before anything but a product reads them.
    """

    labels: tuple[Label, ...] = ()
    unchecked: bool = False

    @classmethod
    def of(cls, source: Any, name: str) -> Labelled:
        """Check the user's operand, and label its dimensions 0, 1, 2, ...

        Raises
        ------
        InputError
            If `source` is not an array, or distmm does not multiply its type.
        """
        array = super().of(source, name)
        return replace(array, labels=tuple(range(len(array.shape))), unchecked=isinstance(array.source, da.Array))

    def made(self, source: Any, labels: Sequence[Label], name: str | None = None) -> Labelled:
        """Return what was made of its elements, by default with its name."""
        return replace(self, source=source, labels=tuple(labels), name=name or self.name, file=None, unchecked=False)

    def labelled(self, labels: Sequence[Label]) -> Labelled:
        """Return the same array with other labels."""
        return replace(self, labels=tuple(labels))

    @cached_property
    def sizes(self) -> dict[Label, int]:
        """Length of each dimension."""
        return {label: int(n) for label, n in zip(self.labels, self.source.shape, strict=True)}

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes.values())

    @property
    def edges(self) -> Edges:
        """Chunks of each label, of a Dask array."""
        return dict(zip(self.labels, self.source.chunks, strict=True))

    def lazy(
        self, edges: Edges | None = None, device: Literal["cpu", "cuda"] = "cpu", client: Client | None = None
    ) -> Labelled:
        """Return it as a Dask array. The labels in `edges` get those chunks.

        Workers of `client` load the blocks of an array in this process's memory, when they need them, to `device`.
        """
        edges = {label: cut for label, cut in (edges or {}).items() if label in self.labels}
        source = self.source
        if isinstance(source, da.Array):
            source = checked(source, self.name) if self.unchecked else source
            cuts = {self.labels.index(label): cut for label, cut in edges.items()}
            return self.made(source.rechunk(cuts, method="tasks"), self.labels)
        if not self.labels:
            element = (source if self.kind == "cupy" else np.asarray(source)).reshape(1)
            return self.made(reshaped(da.from_array(element, asarray=False), ()), ())
        stored = self.storage_chunk or ("auto",) * len(self.labels)
        wanted = tuple(edges.get(label, size) for label, size in zip(self.labels, stored, strict=True))
        chunks = chosen(wanted, self.shape, self.dtype)
        return self.made(blocked(self, chunks, device, client), self.labels)

    def cut(self, edges: Edges) -> Labelled:
        """Return it as a Dask array in which the labels in `edges` have those chunks; itself if it is one."""
        given = self.edges if isinstance(self.source, da.Array) else {}
        return self if given and given == {**given, **edges} else self.lazy(edges)

    def whole(self) -> Labelled:
        """Return a Dask array that `from_array` made as its NumPy array, for which the plan chooses the blocks."""
        found = self.here
        if found is None or found is self or not found.in_memory:
            return self
        return self.made(found.source.swapaxes(-1, -2) if found.transposed else found.source, self.labels)

    def chunked(self) -> Labelled:
        """Return it as an array in memory or a Dask array, whose blocks may be unchecked."""
        return self if self.in_memory or isinstance(self.source, da.Array) else self.lazy()

    def movable(self) -> Labelled:
        """Return it as an array that can be transposed and reshaped: an array in memory, or a checked Dask array."""
        array = self.chunked()
        return array.lazy() if array.unchecked else array

    def uploaded(self) -> Labelled:
        """Return a Dask array whose blocks are in GPU memory, for tasks of distmm. Other arrays are returned."""
        return replace(self, source=uploaded(self.source)) if isinstance(self.source, da.Array) else self

    def arranged(self, labels: Sequence[Label]) -> Labelled:
        """Return it with its dimensions in this order."""
        if tuple(labels) == self.labels:
            return self
        axes = [self.labels.index(label) for label in labels]
        return self.made(self.movable().source.transpose(axes), labels)

    def without_broadcast(self, sizes: Mapping[Label, int]) -> Labelled:
        """Return it without its broadcast dimensions: those of length 1 whose label has another length in `sizes`."""
        kept = [label for label, n in self.sizes.items() if n == sizes[label]] if self.labels else []
        if len(kept) == len(self.labels):
            return self
        index = (slice(None) if label in kept else 0 for label in self.labels)
        return self.made(self.movable().source[*index, ...], kept)

    def diagonal(self) -> Labelled:
        """Return its diagonal along the dimensions that share a label."""
        array, labels = self, list(self.labels)
        while len(set(labels)) < len(labels):
            label = next(label for label in labels if labels.count(label) > 1)
            first, second = [axis for axis, each in enumerate(labels) if each == label][:2]
            source = array.movable().source
            take = da.diagonal if isinstance(source, da.Array) else type(source).diagonal
            labels = [*labels[:first], *labels[first + 1 : second], *labels[second + 1 :], label]
            array = self.made(take(source, axis1=first, axis2=second), labels)
        return array

    def summed(self, keep: Collection[Label], dtype: np.dtype) -> Labelled:
        """Sum over the dimensions whose labels are not in `keep`. The sums have type `dtype`."""
        axes = tuple(axis for axis, label in enumerate(self.labels) if label not in keep)
        if not axes:
            return self
        total = self.movable().source.sum(axis=axes, dtype=accumulator_dtype(dtype)).astype(dtype)
        total = np.asarray(total) if isinstance(total, np.generic) else total
        return self.made(total, [label for label in self.labels if label in keep])

    def cast(self, dtype: np.dtype) -> Labelled:
        """Convert it to another type: an array in memory at the call, other arrays when they are computed."""
        if self.dtype == dtype:
            return self
        return self.made(self.movable().source.astype(dtype), self.labels)


def chosen(wanted: tuple[Any, ...], shape: tuple[int, ...], dtype: np.dtype) -> tuple[tuple[int, ...], ...]:
    """Return chunks. `wanted` has the chunks of a dimension, or "auto" for chunks of Dask's configured size."""
    if 0 in shape:  # with "auto", Dask would divide by 0
        wanted = tuple(-1 if isinstance(cut, str) else cut for cut in wanted)
    return da.core.normalize_chunks(wanted, shape, dtype=dtype)
