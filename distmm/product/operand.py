"""Operands: their checks, and what the planner asks of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from distmm.errors import InputError
from distmm.planning.problem import accumulator_dtype
from distmm.product.array_types import as_array, check_sendable, is_dask, kind_of, package_of
from distmm.product.scalars import check_flags
from distmm.transfer import has_gaps, shared_memory
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.transfer.memory_map import MappedFile, is_mapped

if TYPE_CHECKING:
    import dask.array as da
    from distributed import Future


@dataclass(frozen=True)
class Operand:
    """A matrix, or a stack of matrices, that the user gave.

    Attributes
    ----------
    source : Any
        Dask, NumPy or CuPy array, or anything with ``shape``, ``dtype`` and ``__getitem__``.
    name : str
        Name in messages: "A", "B" or "C".
    kind : {"numpy", "cupy"}
        Type of the blocks.
    transposed : bool
        Whether the operand is the transpose of `source` in its last two dimensions. Blocks are transposed as views,
        without a copy.
    file : MappedFile, optional
        The file, if `source` is a memory map.
    package : str
        Name of the package whose array the user gave, such as "torch"; `source` may be a view of that array.
    vector : dask.array.Array, optional
        The user's vector, if `source` is made from one.
    """

    source: Any
    name: str
    kind: Literal["numpy", "cupy"]
    transposed: bool = False
    file: MappedFile | None = None
    package: str = ""
    vector: da.Array | None = None

    @classmethod
    def of(cls, source: Any, name: str) -> Self:
        """Check the user's operand, and wrap it.

        Raises
        ------
        InputError
            For objects that are not arrays, for blocks of other packages, and for types of elements that distmm does
            not multiply.
        """
        package, source = package_of(source), as_array(source, name)
        kind = kind_of(source, name)
        if is_dask(source):
            # late: plans of files need no Dask array, whose import takes a second
            from distmm.graph.block_arrays import transposed

            while (once := transposed(source)) is not None and (twice := transposed(once)) is not None:
                source = twice  # Q of ``Q.T.T @ B``
        try:
            accumulator_dtype(np.dtype(source.dtype))
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
        file = MappedFile.behind(source) if is_mapped(source) else None
        return cls(source, name, kind, file=file, package=package)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the operand."""
        return swapped(tuple(int(n) for n in self.source.shape), self.transposed)

    @cached_property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return np.dtype(self.source.dtype)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...] | None:
        """Chunks of a Dask array. None for other arrays."""
        return swapped(self.source.chunks, self.transposed) if is_dask(self.source) else None

    @cached_property
    def resident(self) -> bool:
        """Whether its blocks are already in the workers' memory: of a persisted Dask array, or its transpose.

        What is computed from a persisted array has its futures in the graph, but blocks of its own.
        """
        if not is_dask(self.source):
            return False
        from distmm.graph.block_arrays import transposed  # late, as above

        array = self.source if self.vector is None else self.vector
        if (inner := transposed(array)) is not None:
            array = inner
        return all((array.name, *index) in self._futures for index in product(*map(range, array.numblocks)))

    @property
    def made_from_resident(self) -> bool:
        """Whether its blocks are made from as many blocks in the workers' memory, or are themselves there."""
        return len(self._futures) > 0 and len(self._futures) == self.source.npartitions

    @cached_property
    def _futures(self) -> dict[Any, Future]:
        """Futures in the graph of a Dask array, by their keys."""
        if not is_dask(self.source):
            return {}
        from distmm.clusters.homes import futures_in  # late, as above

        return futures_in(self.source)

    @property
    def loads_again(self) -> bool:
        """Whether workers can load its blocks several times: it is in a file, and not in memory."""
        return not (is_dask(self.source) or self.in_memory)

    @property
    def in_memory(self) -> bool:
        """Whether it is a NumPy or CuPy array of this process. A memory map is in a file."""
        return is_on_gpu(self.source) or (isinstance(self.source, np.ndarray) and self.file is None)

    @property
    def pageable(self) -> bool:
        """Whether it is a NumPy array in pageable memory, from which a GPU copies at a lower rate."""
        return isinstance(self.source, np.ndarray) and shared_memory.behind(self.source) is None

    @property
    def storage_chunk(self) -> tuple[int, ...] | None:
        """Chunk shape of its file. If block edges are multiples of it, each chunk is read once."""
        chunk = getattr(self.source, "chunks", None)
        if is_dask(self.source) or not isinstance(chunk, tuple) or len(chunk) != len(self.shape):
            return None
        return swapped(chunk, self.transposed)

    @property
    def here(self) -> Operand | None:
        """The same operand as an array of this process. None if it is none.

        It is one if the user gave a NumPy or CuPy array. It is also one if the user gave a Dask array that
        `dask.array.from_array` made of a NumPy array or of a memory map (which Dask copies), or the transpose of one.
        """
        # Not a cached property: an operand that refers to itself is freed by the garbage collector alone.
        found = self if self.in_memory else self._behind
        return found if found is not None and found.in_memory else None

    def read_in(self, chunks: tuple[tuple[int, ...], ...]) -> Operand | None:
        """Return the array from which tasks read blocks with these edges. None if the user's array has its own tasks.

        It is `here`. If a Dask array was made of an array of Zarr, HDF5 or xarray, it is that one, if each block unites
        whole chunks of the Dask array: otherwise several tasks would read the same chunk of the file. A Dask array with
        these chunks has tasks of its own. Those that read a memory map get all of it through the scheduler.
        """
        here = self.here
        in_one_task = here is not None and isinstance(here.source, np.ndarray) and type(here.source.base) is np.memmap
        if self.chunks == chunks and not in_one_task:
            return None
        if here is not None or self.chunks is None:
            return here
        pairs = zip(chunks, self.chunks, strict=True)
        unites = all(set(accumulate(edges)) <= set(accumulate(given)) for edges, given in pairs)
        return self._opened if unites else None

    @cached_property
    def _behind(self) -> Operand | None:
        """A Dask array as the array of which `from_array` made it (`array_behind`). None for other arrays."""
        if not is_dask(self.source) or self.kind == "cupy":
            return None
        from distmm.graph.block_arrays import transposed  # late, as above
        from distmm.product.arrays_in_graphs import array_behind

        inner = transposed(self.source)
        found, turned = array_behind(self.source if inner is None else inner), self.transposed != (inner is not None)
        return None if found is None else replace(self, source=found, transposed=turned, vector=None)

    @cached_property
    def _opened(self) -> Operand | None:
        """The array in a file that is behind a Dask array, opened by its path. None if distmm does not read it."""
        if (behind := self._behind) is None:
            return None
        try:
            found = replace(behind, source=as_array(behind.source, self.name))
            check_sendable(found.source, self.name)
        except InputError:  # Dask may read it
            return None
        return found if (found.shape, found.dtype) == (self.shape, self.dtype) else None

    def part(self, cut: slice, axis: int) -> Operand:
        """Return a part of it along an axis, counted from the last one: -1. All of it is itself."""
        if range(self.shape[axis])[cut] == range(self.shape[axis]):
            return self
        index = tuple(cut if at == axis else slice(None) for at in range(-len(self.shape), 0))
        return replace(self, source=self.source[swapped(index, self.transposed)], file=None, vector=None)

    def for_later(self) -> Operand:
        """Return the operand of a lazy product. Elements of arrays in memory may still be read after the call.

        A Dask array is copied, because ``D[0] = 1`` changes `D` into another array. A NumPy array with gaps between the
        elements of its rows and of its columns is copied.
        """
        if is_dask(self.source):
            return replace(self, source=self.source.copy())
        if isinstance(self.source, np.ndarray) and self.file is None and has_gaps(self.source):
            return replace(self, source=np.ascontiguousarray(self.source))
        return self

    def region(self, rows: slice, columns: slice) -> Any:
        """Read a region of a matrix, in this process."""
        return self.source[columns, rows].T if self.transposed else self.source[rows, columns]


def swapped(values: tuple[Any, ...], transposed: bool) -> tuple[Any, ...]:
    """Return values of the dimensions of an operand, the last two exchanged if it is transposed."""
    return (*values[:-2], values[-1], values[-2]) if transposed else values


def wrap(source: Any, name: str, transposed: bool = False) -> Operand:
    """Check one operand. Vectors stay vectors.

    Raises
    ------
    InputError
        For objects that are not arrays, types that distmm does not multiply, sizes that are unknown or not whole
        numbers, and a `transposed` that is neither True nor False.
    """
    check_flags(**{f"trans{name.lower()}": transposed})
    operand = Operand.of(source, name)
    if len(operand.shape) == 0:
        raise InputError(f"{name} is a scalar: matrix products need at least one dimension; multiply with * instead")
    if transposed and len(operand.shape) < 2:
        raise InputError(f"{name} has shape {operand.shape}: give a matrix, as vectors have no transpose")
    return replace(operand, transposed=True) if transposed else operand


def as_matrix(operand: Operand, axis: int) -> Operand:
    """Return a vector as a matrix with one row (axis 0) or one column (axis 1). A matrix is returned unchanged."""
    if len(operand.shape) > 1:
        return operand
    source = operand.source
    if not (is_dask(source) or isinstance(source, np.ndarray)) and operand.kind == "numpy":
        import dask.array as da

        source = da.from_array(source, chunks=operand.storage_chunk or "auto")
    vector = source.copy() if is_dask(source) else None
    return Operand(source[None, :], operand.name, operand.kind, axis == 1, package=operand.package, vector=vector)
