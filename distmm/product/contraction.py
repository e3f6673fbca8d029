"""The contraction of two labelled arrays as one GEMM or a batched GEMM.

A label that both arrays have and the result lacks is summed over: it belongs to k. A label that both arrays and the
result have is a batch dimension. A label of a single array belongs to the rows or to the columns of C. Labels of one
kind are merged into one dimension. In C they are split again:

- An array in memory is reshaped: a view if its strides allow it, else a copy. Labels merge without a copy if they form
  a run, which means that they are contiguous. A large NumPy array for a cluster is not copied at the call: workers load
  boxes of it to their devices, and reshape them there like the blocks of a Dask array.
- A Dask array is reshaped block by block (`distmm.graph.block_arrays.reshaped`). The order of elements along k does not
  matter if it is the same in both arrays. Two Dask arrays get the same chunks along k: those of the larger one. If the
  other array is in memory, a Dask array gets chunks in C order. Dask rechunks an array whose chunks change, which
  moves parts of blocks.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import dask.array as da
import numpy as np

from distmm.graph.block_arrays import reshaped
from distmm.graph.parametric_layer import with_copies
from distmm.planning.blocks import even_edges
from distmm.planning.problem import accumulator_dtype
from distmm.product.choices import Choices
from distmm.product.labelled import Edges, Label, Labelled, chosen
from distmm.product.operand import Operand, wrap
from distmm.product.product import Gemm
from distmm.product.product_array import ProductArray
from distmm.product.scalars import common_type
from distmm.product.users_blocks import Chunks
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.transfer.lending import SMALLEST

Labels = tuple[Label, ...]


def contract(x: Labelled, y: Labelled, output: Labels, choices: Choices, out: Any = None) -> Labelled:
    """Multiply two arrays, and sum over the labels that `output` lacks.

    Parameters
    ----------
    x, y : Labelled
        No label occurs twice in an array. The lengths of common labels agree.
    output : tuple
        Labels of the result, each in x or y.
    choices : Choices
    out : array, optional
        May receive the result. The caller has checked it.

    Returns
    -------
    Labelled
        A lazy Dask array, or `out` if that has received the result.
    """
    dtype = common_type({array.name: array.dtype for array in (x, y)})
    x, y = x.summed({*output, *y.labels}, dtype), y.summed({*output, *x.labels}, dtype)
    shared = [label for label in x.labels if label in y.labels]
    has_rows_or_columns = len(shared) < max(len(x.labels), len(y.labels))
    inner = [label for label in shared if label not in output]
    if not inner or (len(inner) < len(shared) and not has_rows_or_columns):
        return x.made(_elementwise(x, y, output, dtype), output, f"{x.name} times {y.name}")
    free = [label for label in output if label not in shared]
    if len(free) == 2 and free[0] in y.labels:
        x, y = y, x  # as for "ij,jk->ki": Dask would transpose each chunk of the result of x times y
    x, y = (x, y) if choices.client is None else (x.whole(), y.whole())
    return _Matrices.of(x, y, output, inner).loaded(choices).product(output, choices, out)


def _elementwise(x: Labelled, y: Labelled, output: Labels, dtype: np.dtype) -> da.Array:
    """Multiply element by element, by Dask: for outer products and batched dot products."""
    labels = (*output, *(label for label in x.labels if label not in output))
    accumulator = accumulator_dtype(dtype)
    given = {label: cut for array in (x, y) if isinstance(array.source, da.Array) for label, cut in array.edges.items()}
    wanted, sizes = tuple(given.get(label, "auto") for label in labels), {**x.sizes, **y.sizes}
    chunks = chosen(wanted, tuple(sizes[label] for label in labels), accumulator)
    factors = []
    for array in (x, y):
        ordered = array.lazy(dict(zip(labels, chunks, strict=True))).arranged([a for a in labels if a in array.labels])
        factors.append(ordered.source[tuple(slice(None) if label in array.labels else None for label in labels)])
    with warnings.catch_warnings(action="ignore", category=da.PerformanceWarning):  # many chunks are intended
        product = factors[0].astype(accumulator) * factors[1].astype(accumulator)
    axes = tuple(range(len(output), len(labels)))
    return (product.sum(axis=axes, dtype=accumulator) if axes else product).astype(dtype)


@dataclass(frozen=True)
class _Matrices:
    """Two arrays as stacks of matrices: `x` is (*batch, rows, inner), and `y` is (*batch, inner, columns).

    NumPy blocks of Dask arrays are copied to `device` before they are rearranged.
    """

    x: Labelled
    y: Labelled
    batch: Labels
    rows: Labels
    inner: Labels
    columns: Labels
    device: Literal["cpu", "cuda"] = "cpu"

    @classmethod
    def of(cls, x: Labelled, y: Labelled, output: Labels, inner: Sequence[Label]) -> _Matrices:
        """Choose the labels of rows, columns, k and batch, and give Dask arrays suitable chunks along k."""
        rows = _merged_labels(x, [label for label in x.labels if label not in y.labels])
        columns = _merged_labels(y, [label for label in y.labels if label not in x.labels])
        x, y = x.chunked() if len(rows) > 1 else x, y.chunked() if len(columns) > 1 else y
        batch = tuple(label for label in output if label not in rows and label not in columns)
        in_memory = [array for array in (x, y) if array.in_memory]
        merged = _merged_labels(max(in_memory or (x, y), key=lambda array: array.size), inner)
        if len(merged) > 1 and len(in_memory) == 1:
            x, y = (array if array.in_memory else _cut_in_order(array.chunked(), merged) for array in (x, y))
        elif len(merged) > 1 and not in_memory:
            x, y = _cut_alike(x, y, merged)
        return cls(x, y, batch, rows, merged, columns)

    def loaded(self, choices: Choices) -> _Matrices:
        """Return the same arrays. Large NumPy arrays that would be copied here become blocks that workers load."""
        sides = (self.x, self.rows, self.inner), (self.y, self.inner, self.columns)
        if choices.client is None or "cupy" in (self.x.kind, self.y.kind):
            return self
        device = choices.described(choices.client, self.x.dtype, on_gpu=False, old=True).device
        if not any(itertools.starmap(_is_copied, sides)):
            return replace(self, device=device)
        whole = [np.broadcast_to(np.zeros((), side[0].dtype), self._shape(*side)) for side in sides]
        cuts = Gemm.of(wrap(whole[0], self.x.name), wrap(whole[1], self.y.name)).plan(choices).schedule.cuts
        lazy = [array for array in (self.x, self.y) if isinstance(array.source, da.Array)]
        inner = lazy[0].edges if lazy else _box(self.x, self.inner, max(cuts[-2]))
        edges = {**self._edges(cuts), **{label: inner[label] for label in self.inner}}
        x, y = (side[0].lazy(edges, device, choices.client) if _is_copied(*side) else side[0] for side in sides)
        return replace(self, x=x, y=y, device=device)

    def product(self, output: Labels, choices: Choices, out: Any) -> Labelled:
        """Return the lazy product, or compute it into `out` and return that, if `out` has a view of C's shape."""
        name = f"{self.x.name} times {self.y.name}"
        a, b = self._operand(self.x, self.rows, self.inner), self._operand(self.y, self.inner, self.columns)
        gemm = Gemm.of(a, b, once=out is not None and not isinstance(out, da.Array))
        if out is not None and (matrix := self._within(out, output)) is not None:
            gemm.array(choices, matrix)
            return self.x.made(out, output, name)
        if len(self.rows) == len(self.columns) == 1:
            lazy = product = gemm.array(choices)
        else:
            edges = self._edges(gemm.plan(choices).schedule.cuts)
            c_chunks = *(edges[label] for label in self.batch), _merged(edges, self.rows), _merged(edges, self.columns)
            product = gemm.array(choices, None, c_chunks)
            lazy = product.rechunk(c_chunks)
            lazy = with_copies(reshaped(lazy, tuple(edges[each] for each in (*self.batch, *self.rows, *self.columns))))
        result = self.x.made(lazy, (*self.batch, *self.rows, *self.columns), name).arranged(output)
        if result.source is product or not isinstance(product, ProductArray):
            return result
        within, turned = partial(self._within, output=output), partial(self._turned, output=output)
        return replace(result, source=product.rearranged(result.source, within, turned))

    # Operands

    def _operand(self, array: Labelled, first: Labels, second: Labels) -> Operand:
        """Return an array as ``(*batch, first, second)``, with the labels of `first` and of `second` merged."""
        own = array.labels
        if len(first) == len(second) == 1 and own[:-2] == self.batch[len(self.batch) - len(own) + 2 :]:
            if own[-2:] == (*first, *second):
                return array
            if own[-2:] == (*second, *first):
                return replace(array, transposed=True)
        present = [label for label in self.batch if label in own]
        array = array.movable().uploaded() if self.device == "cuda" else array.chunked()
        if not isinstance(array.source, da.Array):
            source = array.arranged([*present, *first, *second]).source
            return wrap(source.reshape(self._shape(array, first, second)), array.name)
        # On CPUs, product tasks transpose blocks: the same array may be an operand in both forms.
        turned = self.device == "cpu" and not self.batch and own == (*second, *first)
        first, second = (second, first) if turned else (first, second)
        batch = (array.edges.get(label, (1,)) for label in self.batch)
        chunks = *batch, _merged(array.edges, first), _merged(array.edges, second)
        axes = tuple(array.labels.index(label) for label in (*present, *first, *second))
        what = " and ".join(each.name for each in (self.x, self.y) if each.source is array.source)
        return wrap(reshaped(array.source, chunks, axes, array.unchecked and what), array.name, turned)

    def _shape(self, array: Labelled, *groups: Labels) -> tuple[int, ...]:
        """Return the shape of an array as a stack of matrices, with the labels of two groups merged."""
        stack = (array.sizes.get(label, 1) for label in self.batch)
        return *stack, *(math.prod(array.sizes[label] for label in group) for group in groups)

    # The result

    def _edges(self, cuts: Chunks) -> Edges:
        """Return the chunks of C by label: a plan's cuts, changed to boxes in the dimensions that are merged."""
        *batch, m, _, n = cuts
        edges = dict(zip(self.batch, batch, strict=True))
        for array, group, cut in ((self.x, self.rows, m), (self.y, self.columns, n)):
            if isinstance(array.source, da.Array):
                edges |= {label: array.edges[label] for label in group}
            else:
                edges |= _box(array, group, max(cut))
        return edges

    def _turned(self, c: Any, output: Labels) -> Any:
        """Return the product ``(*batch, m, n)``, in memory, with the labels of the result."""
        labels, sizes = (*self.batch, *self.rows, *self.columns), {**self.x.sizes, **self.y.sizes}
        return c.reshape([sizes[label] for label in labels]).transpose([labels.index(label) for label in output])

    def _within(self, out: Any, output: Labels) -> Any:
        """Return a view of `out` of shape ``(*batch, m, n)``, for the product. None if there is no such view."""
        labels = *self.batch, *self.rows, *self.columns
        if len(self.rows) == len(self.columns) == 1 and labels == output:
            return out
        in_order = _in_order(self.x, self.rows) and _in_order(self.y, self.columns)
        if not in_order or not (isinstance(out, np.ndarray) or is_on_gpu(out)):
            return None
        sizes, strides = (dict(zip(output, values, strict=True)) for values in (out.shape, out.strides))
        if not _form_runs((self.rows, self.columns), sizes, strides):
            return None
        turned = out.transpose([output.index(label) for label in labels])
        m, n = (math.prod(sizes[label] for label in group) for group in (self.rows, self.columns))
        return turned.reshape(*turned.shape[: len(self.batch)], m, n)


def _merged_labels(array: Labelled, labels: Sequence[Label]) -> Labels:
    """Return labels in the order in which they are merged: in memory that of their strides."""
    if not array.in_memory:
        return tuple(label for label in array.labels if label in labels)
    strides = dict(zip(array.labels, array.source.strides, strict=True))
    return tuple(sorted(labels, key=lambda label: -strides[label]))


def _form_runs(groups: Sequence[Labels], sizes: Mapping[Label, int], strides: Mapping[Label, int]) -> bool:
    """Whether the labels of each group merge without a copy."""
    neighbours = itertools.chain(*map(itertools.pairwise, groups))
    return all(strides[label] == strides[then] * sizes[then] for label, then in neighbours)


def _is_copied(array: Labelled, *groups: Labels) -> bool:
    """Whether a NumPy array is large enough to be lent to workers, and has to be copied to become matrices."""
    if not array.in_memory or array.kind == "cupy" or array.source.nbytes < SMALLEST:
        return False
    strides = dict(zip(array.labels, array.source.strides, strict=True))
    gaps = all(strides[group[-1]] != array.dtype.itemsize for group in groups if group)
    return gaps or not _form_runs(groups, array.sizes, strides)


def _cut_alike(x: Labelled, y: Labelled, labels: Labels) -> tuple[Labelled, Labelled]:
    """Return both as Dask arrays with the same chunks along these labels: those of the larger Dask array."""
    given = [array for array in (x, y) if isinstance(array.source, da.Array)] or [x, y]
    larger = max(given, key=lambda array: array.size).chunked().edges
    edges = {label: larger[label] for label in labels}
    return x.cut(edges), y.cut(edges)


def _cut_in_order(array: Labelled, labels: Labels) -> Labelled:
    """Return a Dask array whose blocks are in C order along these labels, and no larger than before."""
    if _in_order(array, labels):
        return array
    return array.cut(_box(array, labels, math.prod(max(array.edges[label]) for label in labels)))


def _merged(edges: Edges, labels: Labels) -> tuple[int, ...]:
    """Return the chunks of the dimension into which these labels are merged block by block."""
    return tuple(math.prod(box) for box in itertools.product(*(edges[label] for label in labels)))


def _box(array: Labelled, labels: Labels, edge: int) -> dict[Label, tuple[int, ...]]:
    """Cut dimensions into boxes of at most `edge` elements, in C order."""
    edges = {}
    for label in reversed(labels):
        n = array.sizes[label]
        edges[label] = even_edges(n, max(1, min(n, edge)))
        edge //= max(1, n)  # 0 if this dimension is cut: the dimensions before it are then cut into single indices
    return edges


def _in_order(array: Labelled, labels: Labels) -> bool:
    """Whether the merged dimension has its elements in C order. The boxes of a Dask array may have another order."""
    cut = [] if not isinstance(array.source, da.Array) else [n for n, x in enumerate(labels) if len(array.edges[x]) > 1]
    return not cut or all(max(array.edges[label]) == 1 for label in labels[: cut[-1]])
