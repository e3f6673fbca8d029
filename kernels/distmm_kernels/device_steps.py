"""The steps of a product on one device: a kernel adds `_accumulate`, and replaces those that it can do better."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import numpy as np

from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.device import Device
from distmm_kernels.last_step import Last
from distmm_kernels.layout.float8 import native, widened
from distmm_kernels.symmetric import Array, Symmetry, mirror


class DeviceSteps(ABC):
    """What a kernel does on its device; `distmm_kernels.kernel.Kernel` describes the attributes."""

    _module: Any  # NumPy or CuPy, whichever holds this kernel's arrays
    name: ClassVar[str]
    device_kind: ClassVar[Literal["cpu", "cuda"]]
    takes_narrow: ClassVar[bool] = False
    takes_float8: ClassVar[bool] = False

    def __init__(self, problem: Problem, device: Device) -> None:
        self.accumulator = problem.accumulator
        self.dtype = problem.dtype if self.takes_narrow else self.accumulator
        if self.dtype in FLOAT8 and not self.takes_float8:
            self.dtype = np.dtype(np.float16)
        self.reads: tuple[str, ...] = (f"array of {self.dtype}",)
        self.device = device

    @abstractmethod
    def _accumulate(self, a: Array, b: Array, c: Array | None, d: Array) -> None:
        """Write ``c + a @ b`` into ``d``, whose type `_stores` allows. No size is 0."""

    def _triangle(self, a: Array, b: Array, c: Array | None, d: Array) -> bool:
        """Do what `_accumulate` does, for a symmetric or Hermitian product: at least its lower half.

        Returns whether elements above the diagonal are mirror images of those below it.
        """
        self._accumulate(a, b, c, d)
        return False

    def _finished(
        self, a: Array, b: Array, c: Array | None, last: Last, symmetric: bool, out: Array | None = None
    ) -> Array | None:
        """Return the result of the last step in one launch, with the bits of `_in_passes`. It may be ``out``.

        Returns None if this kernel cannot do so. If ``symmetric``, the result has mirror images above the diagonal.
        """
        return None

    def _in_passes(self, d: Array, last: Last) -> Array:
        out = d if last.alpha == 1 else d * last.alpha
        if last.beta != 0:
            # without the type check of `prepare`: c0 may have the result's type, for example bool or uint8
            addend = self._addend(last.c0, d.shape).astype(self.accumulator, copy=False)
            out = out + (addend if last.beta == 1 else addend * last.beta)
        if out.dtype == last.dtype:
            return out
        return out != 0 if last.dtype.kind == "b" else out.astype(last.dtype, copy=False)

    def _addend(self, c0: Array, shape: tuple[int, ...]) -> Array:
        try:
            return self._module.broadcast_to(widened(self._to_device(c0)), shape)
        except ValueError:
            raise ValueError(f"c has shape {c0.shape}, which does not broadcast to the product's, {shape}") from None

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array for a result."""
        return self._module.empty(shape, dtype)

    def _stores(self, dtype: np.dtype[Any]) -> bool:
        """Whether `_accumulate` can write results of this type."""
        return dtype == self.accumulator

    def _writes(self, d: Array) -> bool:
        """Whether `_accumulate` can write into an array with this layout."""
        return bool(d.flags.c_contiguous)

    def _check(self, operand: Array, name: str) -> None:
        """Raise TypeError if an operand is not in this kernel's format."""
        found = f"array of {operand.dtype}" if hasattr(operand, "dtype") else operand.format
        if found not in self.reads:
            wanted = " or ".join(self.reads)
            raise TypeError(f"{name} is {found}, {self.name} multiplies {wanted}: prepare it with this kernel first")

    @abstractmethod
    def _to_device(self, block: Array) -> Array:
        """Return the array in the device's memory. Type and strides may stay as they are."""

    @abstractmethod
    def _on_device(self) -> Any:
        """Return a context in which the kernel's device is current."""

    @abstractmethod
    def _complete(self) -> None:
        """Wait until the work that this thread has enqueued is complete."""

    def _prepare(self, block: Array, operand: str, wait: bool) -> Array:
        if block.ndim < 2:
            raise ValueError(f"{operand} has shape {block.shape}; a block has two dimensions or more: add an axis")
        dtype = native(block.dtype)
        # integers wrap around: types with the same number of bits hold the same number modulo 2^bits
        wraps = dtype.kind in "iub" and self.dtype.kind in "iu"
        exact = dtype in FLOAT8 and self.dtype.kind not in "iub"  # kept, or made float16
        # NumPy lets complex pass to bfloat16 of ml_dtypes
        narrows = self.dtype in FLOAT8 or (dtype.kind == "c" and self.dtype.kind != "c")
        if not (dtype == self.dtype or wraps or exact or (not narrows and np.can_cast(dtype, self.dtype, "same_kind"))):
            raise TypeError(f"{operand} is {dtype}, the kernel computes in {self.dtype}: convert it with .astype")
        with self._on_device():
            moved = self._to_device(block)
            prepared = self._format(moved if self.dtype in FLOAT8 else widened(moved), operand)
            if wait:
                self._complete()
        return prepared

    def _format(self, block: Array, operand: str) -> Array:
        """Convert operand ``"A"`` or ``"B"``, which is on the device, to the format of `_accumulate`."""
        return block.astype(self.dtype, copy=False)

    def _mirror(self, d: Array, symmetry: Symmetry) -> None:
        """Overwrite a result above the diagonal by its mirror image."""
        mirror(d, symmetry)
