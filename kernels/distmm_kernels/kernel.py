"""The methods of every kernel: prepare the operands, multiply, finish.

Checks, empty sizes and the order of the steps are the same on every device, and are in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from distmm_kernels.device_steps import DeviceSteps
from distmm_kernels.last_step import Last
from distmm_kernels.symmetric import Symmetry, turned

Array = Any  # numpy.ndarray or cupy.ndarray: CuPy ships no types
Enqueue: TypeAlias = Callable[[int, int, int, int], None]  # takes the addresses of A, B and D, and of a CUDA stream


class Kernel(DeviceSteps):
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

    granule: ClassVar[int | None] = 1
    compiled: ClassVar[bool] = True
    capturable: ClassVar[bool] = True
    guarded: ClassVar[bool] = False

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
