"""Address, shape and strides of matrices in memory. Copies, launches and TMA descriptors all use this description."""

from __future__ import annotations

from typing import Any, NamedTuple

from distmm_kernels.tiles.tiling import VECTOR_BYTES as VECTOR_BYTES

Array = Any  # cupy.ndarray: CuPy ships no types

LONGEST_PITCH = 2**40  # bytes; strides of a TMA descriptor are smaller


class Stack(NamedTuple):
    """Matrices of one size in memory.

    Attributes
    ----------
    address
        Address of the first element.
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
        """Describe an array of two axes or more. A single matrix becomes a stack of one matrix."""
        shape, strides = array.shape, array.strides
        if len(shape) == 2:
            shape, strides = (1, *shape), (0, *strides)
        return cls(address(array), shape, strides, array.itemsize)

    @classmethod
    def for_tensor_map(cls, array: Array) -> Stack:
        """Describe an array of two or three axes whose rows are `loadable`, with strides that TMA descriptors allow.

        A broadcast stack becomes one matrix. The stride of an axis with one element becomes that of a packed matrix.
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
        """Bytes from one matrix to the next."""
        return self.strides[-3]

    @property
    def pitch(self) -> int:
        """Bytes from one row to the next: the leading dimension, in bytes."""
        return self.strides[-2]

    def contiguous(self, axis: int) -> bool:
        """Whether elements along an axis are contiguous. An axis of one element may have any stride."""
        return self.strides[axis] == self.itemsize or self.shape[axis] == 1

    def has_vectors(self, axis: int) -> bool:
        """Whether the axis, -1 or -2, is contiguous, and every line along it begins at a multiple of 16 bytes.

        This checks strides of axes of one element, too: kernels compute addresses with them, even if they do not load.
        """
        across = self.strides[-3 - axis]  # stride of the other one of the last two axes
        return self.contiguous(axis) and not any(
            number % VECTOR_BYTES for number in (self.address, across, *self.strides[:-2])
        )

    def aligned(self, axis: int) -> bool:
        """Whether every line along the axis, -1 or -2, begins at a multiple of 16 bytes."""
        others = [i for i in range(-len(self.shape), 0) if i != axis and self.shape[i] > 1]
        return all(number % VECTOR_BYTES == 0 for number in (self.address, *(self.strides[i] for i in others)))

    def loadable(self) -> bool:
        """Whether the tensor memory accelerator can load and store boxes of rows of these matrices."""
        # each product calls this for its C: plain variables, since properties take three times as long
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
        """Return the description of matrices with the same shape and strides at another address."""
        return Stack(address, self.shape, self.strides, self.itemsize)

    def part(self, axis: int, first: int, after: int) -> Stack:
        """Describe matrices (axis -3), rows (-2) or columns (-1), from ``first`` up to the one before ``after``."""
        shape = list(self.shape)
        shape[axis] = after - first
        return Stack(self.address + first * self.strides[axis], tuple(shape), self.strides, self.itemsize)


def address(array: Array) -> int:
    """Return the address of the first element of a CuPy array."""
    return array.data.ptr


def distinct(array: Array) -> Array:
    """Return each matrix of a broadcast batch once: axes of the batch with stride 0 get one element.

    A copy of the result broadcasts to the same batch as the array.
    """
    if array.ndim == 2:
        return array
    batch = zip(array.shape[:-2], array.strides[:-2], strict=True)
    return array[tuple(slice(0, 1 if stride == 0 and size > 1 else size) for size, stride in batch)]
