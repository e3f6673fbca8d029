"""How matrices lie in memory: the one description that copies, launches and tensor maps are made from."""

from __future__ import annotations

from typing import Any, NamedTuple

from distmm_kernels.tiles.tiling import VECTOR_BYTES

__all__ = ["VECTOR_BYTES", "Stack", "address", "distinct"]

Array = Any  # cupy.ndarray: CuPy ships no types

LONGEST_PITCH = 2**40  # bytes, of a tensor map


class Stack(NamedTuple):
    """Matrices of one size in memory.

    Attributes
    ----------
    address
        Of the first element.
    shape
        ``(*batch, rows, columns)``, three axes or more.
    strides
        Bytes from an element to the next along each axis.
    itemsize
        Bytes of an element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, array: Array) -> Stack:
        """Describe an array of two axes or more; one matrix alone is a stack of one."""
        shape, strides = array.shape, array.strides
        if len(shape) == 2:
            shape, strides = (1, *shape), (0, *strides)
        return cls(address(array), shape, strides, array.itemsize)

    @classmethod
    def for_tensor_map(cls, array: Array) -> Stack:
        """Describe an array of two or three axes whose rows are `loadable`, with strides that a tensor map may have.

        A broadcast stack is one matrix, and strides of axes of one element are as if the matrix lay alone.
        """
        shape, strides, itemsize = array.shape, array.strides, array.itemsize
        rows, columns, pitch = shape[-2], shape[-1], strides[-2]
        matrices, step = (shape[0], strides[0]) if len(shape) == 3 else (1, 0)
        if rows == 1:
            pitch = -(-columns * itemsize // VECTOR_BYTES) * VECTOR_BYTES
        if step == 0 or matrices == 1:
            matrices, step = 1, rows * pitch
        return cls(address(array), (matrices, rows, columns), (step, pitch, itemsize), itemsize)

    @property
    def matrices(self) -> int:
        """Matrices along the last axis of the batch."""
        return self.shape[-3]

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of a matrix."""
        return self.shape[-1]

    @property
    def step(self) -> int:
        """Bytes from a matrix to the next one."""
        return self.strides[-3]

    @property
    def pitch(self) -> int:
        """Bytes from a row to the next one."""
        return self.strides[-2]

    def contiguous(self, axis: int) -> bool:
        """Whether neighbours along an axis touch. An axis of one element may have any stride."""
        return self.strides[axis] == self.itemsize or self.shape[axis] == 1

    def has_vectors(self, axis: int) -> bool:
        """Whether neighbours along the axis, -1 or -2, touch, and every line along it begins at a multiple of 16 bytes.

        Strides of axes of one element count too: kernels compute addresses with them, even if they load nothing there.
        """
        across = self.strides[-3 - axis]  # the other of the last two
        return self.contiguous(axis) and not any(
            number % VECTOR_BYTES for number in (self.address, across, *self.strides[:-2])
        )

    def aligned(self, axis: int) -> bool:
        """Whether every line along the axis, -1 or -2, begins at a multiple of 16 bytes."""
        others = [i for i in range(-len(self.shape), 0) if i != axis and self.shape[i] > 1]
        return all(number % VECTOR_BYTES == 0 for number in (self.address, *(self.strides[i] for i in others)))

    def loadable(self) -> bool:
        """Whether the tensor memory accelerator can load and store boxes of rows of these matrices."""
        # a product asks this of its C each time: plain variables, since properties take three times as long
        start, (*_, rows, columns), (*steps, pitch, stride), itemsize = self
        if stride != itemsize and columns != 1:
            return False
        row = columns * itemsize
        if rows == 1:
            pitch = -(-row // VECTOR_BYTES) * VECTOR_BYTES  # there is no next row
        if (start | pitch) % VECTOR_BYTES or not row <= pitch < LONGEST_PITCH:
            return False
        return all(step >= 0 and step % VECTOR_BYTES == 0 for step in steps)

    def at(self, address: int) -> Stack:
        """Return the description of matrices that lie in the same way elsewhere."""
        return Stack(address, self.shape, self.strides, self.itemsize)

    def rows_from(self, first: int, count: int) -> Stack:
        """Describe ``count`` rows of each matrix, from row ``first`` on."""
        shape = *self.shape[:-2], count, self.columns
        return Stack(self.address + first * self.pitch, shape, self.strides, self.itemsize)


def address(array: Array) -> int:
    """Return where the first element of a CuPy array lies."""
    pointer: int = array.data.ptr
    return pointer


def distinct(array: Array) -> Array:
    """Return matrices without those that a broadcast repeats: axes of the batch with stride 0 have one element.

    What is made of the result broadcasts to the batch as the array itself does.
    """
    if array.ndim == 2:
        return array
    batch = zip(array.shape[:-2], array.strides[:-2], strict=True)
    return array[tuple(slice(0, 1 if stride == 0 and size > 1 else size) for size, stride in batch)]
