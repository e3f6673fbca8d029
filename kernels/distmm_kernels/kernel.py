"""The methods of every kernel: prepare the operands, multiply, finish.

Checks, empty sizes and the epilogue are the same on every device, and are in this module. A kernel adds `_accumulate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from distmm_kernels.config import FLOAT8, Problem
from distmm_kernels.device import Device
from distmm_kernels.last_step import Last
from distmm_kernels.layout.float8 import native, widened
from distmm_kernels.symmetric import Symmetry, mirror, turned

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy ships no types
Enqueue: TypeAlias = Callable[[int, int, int, int], None]  # takes the addresses of A, B and D, and of a CUDA stream


class Kernel(ABC):
    """Multiplies blocks of one type on one device. A worker uses one kernel for all its blocks, ragged ones included.

    Every method returns when its result is complete, so another thread or stream may use it at once. `prepare_a`,
    `prepare_b` and `multiply` return earlier if ``wait`` is False.

    Parameters
    ----------
    problem
        Its type is that of all blocks. The sizes of blocks may differ from its sizes.
    device
        Device that computes, and that has the results in its memory.

    Attributes
    ----------
    granule
        A chain of calls that cuts k at multiples of it gives the same bits as one call; None: no such guarantee.
    compiled
        Of a GPU's kernel: whether Numba compiles it, on its first use on a machine. False for a library.
    capturable
        Whether a CUDA graph can capture a product of operands that are prepared during the capture.
    guarded
        Whether it has the methods of `distmm_kernels.gemm.guarded.GuardedKernel` that leave products to the library.
    takes_narrow
        Whether operands keep a type narrower than the accumulator's; otherwise they are converted to it.
    takes_float8
        Whether 8-bit floats, of two types, are kept as well. Otherwise they become float16, which is exact.
    reads
        Formats of the prepared operands that it multiplies: arrays of a type, or `distmm_kernels.gemm.operands`.
    dtype, accumulator
        Type of prepared operands, and of c and d.
    """

    _module: Any  # NumPy or CuPy, whichever holds this kernel's arrays
    name: ClassVar[str]
    device_kind: ClassVar[Literal["cpu", "cuda"]]
    granule: ClassVar[int | None] = 1
    compiled: ClassVar[bool] = True
    capturable: ClassVar[bool] = True
    guarded: ClassVar[bool] = False
    takes_narrow: ClassVar[bool] = False
    takes_float8: ClassVar[bool] = False

    def __init__(self, problem: Problem, device: Device) -> None:
        self.accumulator = problem.accumulator
        self.dtype = problem.dtype if self.takes_narrow else self.accumulator
        if self.dtype in FLOAT8 and not self.takes_float8:
            self.dtype = np.dtype(np.float16)
        self.reads: tuple[str, ...] = (f"array of {self.dtype}",)
        self.device = device

    def prepare_a(self, block: Array, *, wait: bool = True) -> Array:
        """Convert a left operand ``(..., m, k)`` to this kernel's format, on its device.

        Parameters
        ----------
        block
            NumPy or CuPy array with any strides.
        wait
            As for `multiply`.

        Raises
        ------
        TypeError
            If the conversion to the kernel's type would change the kind of number, for example complex to real.
        ValueError
            If it has fewer than two dimensions.
        """
        return self._prepare(block, "A", wait)

    def prepare_b(self, block: Array, *, wait: bool = True) -> Array:
        """Convert a right operand ``(..., k, n)`` to this kernel's format, on its device: see `prepare_a`."""
        return self._prepare(block, "B", wait)

    def prepare_both(self, block: Array, symmetry: Symmetry, *, wait: bool = True) -> tuple[Any, Any]:
        """Prepare A, and its transpose or conjugate transpose as B, for `multiply` with this ``symmetry``.

        They share their memory if the kernel reads both in the same format.
        """
        a = self.prepare_a(block, wait=wait)
        b = self.turned(a, symmetry)
        return a, self.prepare_b(turned(block, symmetry), wait=wait) if b is None else b

    def turned(self, a: Any, symmetry: Symmetry) -> Any | None:
        """Return a prepared A, transposed or conjugated and transposed, as a prepared B in the same memory.

        None: this kernel's formats differ, so the block must be prepared as B.
        """
        shares = symmetry == "symmetric" or self.accumulator.kind != "c"
        return getattr(a, "transposed", None) if shares else None  # of `distmm_kernels.gemm.operands.Shareable`

    def joined(self, operands: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Join consecutive panels of k that the kernel can multiply in one pass over C.

        Parameters
        ----------
        operands
            Prepared ``(*batch, m, k_p)`` and ``(*batch, k_p, n)``, in ascending k.

        Returns
        -------
        list
            At most as many pairs. `multiply`, called on them one after the other, gives the same bits as on the given.
        """
        return list(operands)

    def multiply(
        self,
        a: Array,
        b: Array,
        c: Array | None,
        *,
        alpha: complex = 1,
        beta: complex = 0,
        c0: Array | None = None,
        dtype: DTypeLike | None = None,
        symmetry: Symmetry | None = None,
        out: Array | None = None,
        wait: bool = True,
    ) -> Array:
        """Return ``c + a @ b`` in a new buffer, or in ``out``, adding in ascending k and starting from ``c``.

        Parameters
        ----------
        a, b
            Prepared operands, ``(*batch, m, k)`` and ``(*batch, k, n)``; batch dimensions broadcast.
        c
            ``(*batch, m, n)`` in the accumulator's type, or None for zero. It is never written.
        alpha, beta, c0, dtype
            For the last step of a chain: the result is that of `finish` with these arguments, in one pass if the kernel
            can do so. By default the result has the accumulator's type, and is not scaled.
        symmetry
            ``"symmetric"``: ``b`` is the transpose of ``a``; ``"hermitian"``: its conjugate transpose. Then elements of
            the result on and below the diagonal have the bits of the full product, those above it are their mirror
            images, and the diagonal of a Hermitian result is real. As in BLAS's SYRK and HERK, the elements of ``c``
            and ``c0`` above the diagonal are not used. Kernels that can do so compute one triangle only.
        out
            Array of the result's shape and type on the kernel's device, which shares no memory with a, b and c. It may
            be c0. By default the result is a new array.
        wait
            False: return when the work is enqueued on the calling thread's current stream. The caller must keep the
            operands alive until it is complete.

        Raises
        ------
        ValueError
            If the shapes do not match, or if `finish` would raise it. Also if ``symmetry`` is given and the product is
            not square.
        TypeError
            If an operand was not prepared by this kernel, or ``c`` is not of the accumulator's type.
        """
        shape = product_shape(a.shape, b.shape)
        self._check(a, "a")
        self._check(b, "b")
        if c is not None and c.dtype != self.accumulator:
            raise TypeError(f"c is {c.dtype}, this kernel accumulates in {self.accumulator}: convert it first")
        if c is not None and c.shape != shape:
            raise ValueError(f"c has shape {c.shape}, but a @ b has {shape}: {a.shape} @ {b.shape}")
        out_dtype = self.accumulator if dtype is None else np.dtype(dtype)
        last = Last.of(alpha, beta, c0, out_dtype, self.accumulator, symmetry)
        if symmetry is not None and shape[-1] != shape[-2]:
            raise ValueError(f"a @ b is {shape[-2]} x {shape[-1]}: with symmetry={symmetry!r}, b must be a's transpose")
        with self._on_device():
            c, d = None if c is None else self._to_device(c), None
            mirrored = False
            if not last.plain and a.shape[-1] and 0 not in shape:
                addend = None if last.beta == 0 else self._addend(c0, shape)
                d = self._finished(a, b, c, last._replace(c0=addend), symmetry is not None, out)
                mirrored = d is not None
            if d is None:
                direct = last.plain and self._stores(out_dtype)
                if direct and out is not None and self._writes(out):
                    d = out
                else:
                    d = self._empty(shape, out_dtype if direct else self.accumulator)
                if a.shape[-1] == 0:
                    d[...] = 0 if c is None else c
                elif 0 not in shape and symmetry is None:
                    self._accumulate(a, b, c, d)
                elif 0 not in shape:
                    mirrored = self._triangle(a, b, c, d) and last.beta == 0
                d = self._in_passes(d, last)
            if symmetry is not None and not mirrored:
                self._mirror(d, symmetry)
            if out is not None and d is not out:
                out[...], d = d, out
            if wait:
                self._complete()
        return d

    def direct(self, a: Array, b: Array, d: Array, symmetric: bool = False) -> Enqueue | None:
        """Return a function that enqueues ``d = a @ b`` for arrays with these layouts, in a few microseconds.

        Parameters
        ----------
        a, b, d
            Arrays on this kernel's device: blocks as for `prepare_a` and `prepare_b`, and the result.
        symmetric
            Whether b is the transpose of a, and d must be exactly symmetric.

        Returns
        -------
        callable or None
            The device must be current when it is called. None if this kernel has to copy one of these arrays, or needs
            more than one launch.
        """
        return None

    def finish(
        self,
        d: Array,
        alpha: complex,
        beta: complex,
        c0: Array | None,
        dtype: DTypeLike,
        symmetry: Symmetry | None = None,
    ) -> Array:
        """Return ``alpha * d + beta * c0`` cast to ``dtype``, on the kernel's device.

        Parameters
        ----------
        d
            A result of `multiply`. Returned itself if ``alpha == 1``, ``beta == 0`` and it has the type ``dtype``.
        alpha, beta
            For integer and bool results they must be integers that ``dtype`` or the accumulator holds exactly.
        c0
            Broadcasts to ``d``. It is not read if ``beta == 0``, and may then be None or contain NaN.
        dtype
            Type of the result; bool means ``!= 0``.
        symmetry
            As for `multiply`; the result is a new array.

        Raises
        ------
        ValueError
            If ``alpha`` or ``beta`` is not exact in the result's type, or complex and the result is Hermitian; if
            ``c0`` is missing or has another shape.
        """
        last = Last.of(alpha, beta, c0, np.dtype(dtype), self.accumulator, symmetry)
        with self._on_device():
            out = self._in_passes(d, last)
            if symmetry is not None:
                out = out.copy() if out is d else out
                self._mirror(out, symmetry)
            self._complete()
        return out

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


def product_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Shape ``(*batch, m, n)`` of ``a @ b``, batch dimensions broadcast as `numpy.matmul` does.

    Raises
    ------
    ValueError
        If the inner sizes differ or the batch dimensions do not broadcast.
    """
    if a[-1] != b[-2]:
        raise ValueError(f"{a} @ {b}: a has {a[-1]} columns and b has {b[-2]} rows, but these must be equal")
    if len(a) == len(b) == 2:  # the usual case; broadcasting nothing takes NumPy 3 us
        return a[0], b[1]
    try:
        return (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    except ValueError as error:
        raise ValueError(f"{a} @ {b}: the batch sizes {a[:-2]} and {b[:-2]} do not broadcast") from error
