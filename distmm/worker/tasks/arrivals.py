"""Checks of the user's blocks: a block that a user's task or array-like gives is what its array says, or is refused.

Dask trusts the shape, the type and the chunks that an array states. NumPy would broadcast a block of one row over the
rows that it should have. Masked elements would be multiplied by the value that stands below the mask.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from distmm.errors import InputError
from distmm.worker import gpu
from distmm.worker.united_chunks import Gathered, Union

Shape = tuple[int, ...]

# How blocks of an operand arrive: as they are multiplied, as their transposes, or as parts of a vector.
Form = Literal["matrix", "transpose", "vector"]


def arrived(block: Any, what: str, shape: Shape | None = None, dtype: Any = None) -> Any:
    """Return a block as a NumPy array in native byte order, or unchanged if it is in GPU memory.

    Parameters
    ----------
    block : array-like
    what : str
        Its name in messages.
    shape, dtype : optional
        What its array says. Elements of another type are converted if none loses its value, such as those of the
        float64 zeros that `dask.array.linalg.lu` puts into float32 matrices.

    Raises
    ------
    InputError
        For masked elements, sparse matrices, another shape, and elements of a type that would lose values.
    """
    given = type(block).__name__
    if not hasattr(block, "__cuda_array_interface__"):
        if isinstance(block, np.ma.MaskedArray) and (masked := np.count_nonzero(block.mask)):
            raise InputError(
                f"{what} has {masked} masked elements of {block.size}, and a product has no rule "
                "for these: fill them, for example with x.filled(0) or x.map_blocks(np.ma.filled, 0)"
            )
        array = np.asarray(block)
        if array.shape != tuple(getattr(block, "shape", array.shape)):  # a sparse matrix becomes one object
            raise InputError(
                f"{what} is a {given}, and products read dense blocks: convert them, for example with "
                "x.map_blocks(lambda block: block.toarray()), or state their type (meta= of map_blocks or "
                "from_delayed), with which distmm.accelerate() leaves the product to Dask"
            )
        block = array
        if not block.dtype.isnative:
            block = block.astype(block.dtype.newbyteorder("="))
    if shape is not None and block.shape != shape:
        raise InputError(
            f"{what} is a {given} of shape {block.shape}, and its array says {shape}: state the true chunks, for "
            "example with chunks= of map_blocks or shape= of from_delayed"
        )
    dtype = block.dtype if dtype is None else np.dtype(dtype).newbyteorder("=")
    if block.dtype == dtype or block.dtype == gpu.carrier(dtype):  # asked last: `carrier` imports
        return block
    if not np.can_cast(block.dtype, dtype, "safe") and not _keeps_values(block, dtype):
        raise InputError(
            f"{what} is a {given} of {block.dtype} elements, and its array says {dtype}: state the true dtype (dtype= "
            "of map_blocks or from_delayed), or convert the blocks where they are made (netCDF4: "
            "variable.set_auto_scale(False))"
        )
    return block.astype(dtype)


def _keeps_values(block: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a type of the same kind holds the values of all elements."""
    with np.errstate(over="ignore"):
        return np.can_cast(block.dtype, dtype, "same_kind") and bool((block.astype(dtype) == block).all())


def arrived_at(
    block: Any, what: str, chunks: tuple[tuple[int, ...], ...], dtype: Any, block_id: tuple[int, ...] = ()
) -> Any:
    """Return a block of a Dask array with these chunks as `arrived` does, as a scalar if it has no dimensions.

    For `map_blocks`, which sets `block_id`.
    """
    made = arrived(block, what, tuple(edges[i] for edges, i in zip(chunks, block_id, strict=True)), dtype)
    return made if made.ndim else made[()]


def rearranged(block: Any, axes: tuple[int, ...], shape: Shape, check: tuple[Any, ...] | None) -> Any:
    """Return a block with its dimensions in the order `axes`, reshaped. `check` has more arguments of `arrived`."""
    block = (block if check is None else arrived(block, *check)).transpose(axes)
    return block.reshape(shape) if shape else block.reshape(1)[0]


@dataclass(frozen=True)
class Arrivals:
    """Shapes and types of the user's blocks that a task of a chain reads.

    Attributes
    ----------
    a, b : tuples of shapes
        Of the blocks of A and of B, or of a symmetric product's A. For a block of several chunks: their edges along
        each dimension, or how they are `Gathered`.
    c0 : shape
        Of the block of ``beta * C``.
    dtypes : tuple of dtype or None
        Of A, B and C. None: of any type.
    forms : pair of {"matrix", "transpose", "vector"}
        How blocks of A, and of B, arrive.
    """

    a: tuple[Any, ...]
    b: tuple[Any, ...]
    c0: Shape
    dtypes: tuple[np.dtype[Any] | None, ...]
    forms: tuple[Form, Form] = ("matrix", "matrix")

    def checked(self, a_blocks: Sequence[Any], b_blocks: Sequence[Any], c0: Any) -> tuple[list[Any], list[Any], Any]:
        """Return the blocks as `arrived` does. A block that is in both lists stays one object."""
        (of_a, of_b, of_c), (form_a, form_b) = self.dtypes, self.forms
        left = [
            arrived_block(x, "a block of A", shape, of_a, form_a) for x, shape in zip(a_blocks, self.a, strict=True)
        ]
        seen = {(_identity(x), form_a, shape): made for x, made, shape in zip(a_blocks, left, self.a, strict=True)}
        right = [
            seen[key]
            if (key := (_identity(x), form_b, shape)) in seen
            else arrived_block(x, "a block of B", shape, of_b, form_b)
            for x, shape in zip(b_blocks, self.b, strict=True)
        ]
        return left, right, None if c0 is None else arrived(c0, "a block of C", self.c0, of_c)


def arrived_block(block: Any, what: str, shape: Any, dtype: Any, form: Form) -> Any:
    """Return a block as `arrived` does. `shape` is that of the operand's block.

    A block in several chunks is a list of them, and `shape` their edges, or how they are `Gathered`.
    """
    if isinstance(shape, Gathered):
        return shape.joined(block)
    if isinstance(block, list):
        shapes = itertools.product(*shape)
        return Union(shape, [arrived_block(x, what, own, dtype, form) for x, own in zip(block, shapes, strict=True)])
    if form == "vector":
        return arrived(block, what, (math.prod(shape),), dtype).reshape(shape)
    return arrived(block, what, shape[::-1], dtype).T if form == "transpose" else arrived(block, what, shape, dtype)


def gather(chunks: list[Any], what: str, shapes: list[Shape], dtype: Any, form: Form) -> np.ndarray:
    """Return the elements of some chunks of a block, one chunk after another: see `Gathered`."""
    checked = [arrived_block(x, what, shape, dtype, form) for x, shape in zip(chunks, shapes, strict=True)]
    return np.concatenate([chunk.ravel() for chunk in checked])


def _identity(block: Any) -> Any:
    return id(block) if not isinstance(block, list) else tuple(map(id, block))
