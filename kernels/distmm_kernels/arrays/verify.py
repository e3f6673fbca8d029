"""Freivalds' test of a product of arrays of this process.

Freivalds (1977): for random vectors X, ``A (B X)`` and ``C X`` agree. Each matrix is read once. On a GPU this runs in
the current stream, and nothing waits until the verdict is asked for. `distmm_kernels.tolerance` has the bound of the
error of a right C, and the reasons for it.

A wrong C of floating-point numbers is found unless its errors are as small as rounding. The elements of the vectors are
+-U(1, 2), so no single error is lost. A wrong C of integers is missed with a probability of at most 2**-15.
"""

from __future__ import annotations

import functools
import math
import secrets
from typing import Any

import numpy as np

from distmm_kernels.arrays import packages
from distmm_kernels.arrays.on_gpu import device_of
from distmm_kernels.config import PRECISIONS
from distmm_kernels.freivalds import vectors
from distmm_kernels.kernel import product_shape
from distmm_kernels.layout.vectors import has_vectors
from distmm_kernels.reductions import thin_products
from distmm_kernels.tolerance import Tolerance

SUSPECTS = 4  # rows that are computed again, element by element, if they exceed the bound or stand out
OUTLIER = 12.0  # times the median: Gaussian errors of 10**6 rows reach 8
SINGLE = 2.0**-24  # unit roundoff of float32

_seed = secrets.randbits(64)  # a new one in each process; the vectors of a size are drawn once


def verify(a: Any, b: Any, c: Any, *, alpha: Any = 1, precision: str = "highest") -> Check:
    """Test whether ``c`` is ``alpha * a @ b``, whoever computed it, in the current stream.

    Parameters
    ----------
    a : array of shape (..., m, k)
        As in `distmm_kernels.matmul`.
    b : array of shape (..., k, n)
    c : array of shape (..., m, n)
        It may have a wider type than `a` and `b`.
    alpha : scalar
    precision : {"highest", "high", "medium", "ieee"}
        Of the product: "high" and "medium" allow for rounded float32 operands.

    Returns
    -------
    Check
        True as a bool if `c` is right. The first use of it waits for the device.

    Raises
    ------
    TypeError
        If the arrays are of different packages, or `c` is of bool.
    ValueError
        If their shapes do not match, or the precision is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from distmm_kernels import matmul, verify
    >>> a, b = np.ones((3, 4)), np.ones((4, 5))
    >>> bool(verify(a, b, matmul(a, b)))
    True
    >>> verify(a, b, matmul(a, b) + 1).message
    'row 0 of c is wrong: element (0, 0) is 5.0, and a @ b has 4.0'
    """
    for name, x in (("b", b), ("c", c)):
        if packages.kind_of(x, name) != packages.kind_of(a):
            raise TypeError(f"a is a {type(a).__name__}, {name} a {type(x).__name__}: convert one of them")
    if packages.kind_of(a) == "torch":
        from distmm_kernels.arrays import pytorch

        left, right, made = (pytorch.as_array(x) for x in (a, b, c))
        if a.device.type == "cuda":
            with pytorch.working(a.device.index):
                return Check(left, right, made, alpha, precision)
    else:
        left, right, made = (packages.view(x) for x in (a, b, c))
    return Check(left, right, made, alpha, precision)


class Check:
    """A test that has been enqueued. As a bool it is True only if C is right.

    Attributes
    ----------
    residual : float
        Largest error of a row, as a ratio to the largest error that rounding may cause in a right C; infinite if
        integers differ, or if inf or NaN are in A, B or C.
    message : str
        One sentence, with the first wrong element that was found.
    """

    def __init__(self, a: Any, b: Any, c: Any, alpha: Any, precision: str) -> None:
        if min(a.ndim, b.ndim) < 2 or product_shape(a.shape, b.shape) != c.shape:
            raise ValueError(f"c has shape {c.shape}, a @ b is {a.shape} @ {b.shape}: give the c of these matrices")
        if c.dtype.kind == "b":
            raise TypeError("c is of bool, whose sums cannot be tested: compare it with matmul(a, b)")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}: use highest, high, medium or ieee")
        if alpha == 0:  # as in BLAS, a and b are not read
            a, b = a[..., :0], b[..., :0, :]
        self._operands, self._alpha = (a, b, c), alpha
        types = a.dtype, b.dtype, c.dtype
        self._tolerance, self._fused, work = _method(*types, a.shape[-1], precision, isinstance(a, np.ndarray))
        where = None if isinstance(a, np.ndarray) else a.data.device_id
        x = _vectors(c.shape[-1], self._tolerance.exact, work, where)
        (product, self._columns), (self._right, self._norms) = self._both(b, c, x)
        self._left, self._rows = self._times(a, product)

    def __bool__(self) -> bool:
        return self.residual <= 1

    def __repr__(self) -> str:
        return f"<{'right' if self else 'not right'}: {self.message}>"

    @property
    def residual(self) -> float:
        """The largest ratio of an error to its bound."""
        return self._verdict[0]

    @property
    def message(self) -> str:
        """One sentence that says what was found."""
        return self._verdict[1]

    def _both(self, b: Any, c: Any, x: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Return what `_times` returns for B and for C: by one launch, if the kernel reads both of them in place."""
        alike = b.ndim == 2 and (b.shape, b.strides, b.dtype) == (c.shape, c.strides, c.dtype)
        if not (self._fused and alike and has_vectors(b, -1) and has_vectors(c, -1)):
            return self._times(b, x), self._times(c, x)
        stack = type(b)((2, *b.shape), b.dtype, b.data, (c.data.ptr - b.data.ptr, *b.strides))
        products, squares = thin_products.times_vectors(stack, x, device_of(b.data.device_id))
        return (products[0], squares[0]), (products[1], squares[1])

    def _times(self, matrices: Any, vectors: Any) -> tuple[Any, Any]:
        """Return matrices times vectors, and the norms of rows, of which a fused kernel returns the squares."""
        if self._fused:
            device = device_of(matrices.data.device_id)
            if max(matrices.ndim, vectors.ndim) == 2:
                return thin_products.times_vectors(matrices, vectors, device)
            batch = np.broadcast_shapes(matrices.shape[:-2], vectors.shape[:-2])
            stacks: Any = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (matrices, vectors))
            stack, of_stack = (x.reshape(math.prod(batch), *x.shape[-2:]) for x in stacks)
            products, squares = thin_products.times_vectors(stack, of_stack, device)
            return products.reshape(*batch, *products.shape[-2:]), squares.reshape(*batch, squares.shape[-1])
        wide = matrices.astype(vectors.dtype) if vectors.dtype.kind != "c" or matrices.dtype.kind == "c" else matrices
        with np.errstate(over="ignore", invalid="ignore"):
            return wide @ vectors, _norms(wide)

    @functools.cached_property
    def _verdict(self) -> tuple[float, str]:
        left, rows, right, norms, columns = map(
            _on_host, (self._left, self._rows, self._right, self._norms, self._columns)
        )
        if self._fused:
            rows, norms, columns = map(np.sqrt, (rows, norms, columns))
        tolerance, n = self._tolerance, self._operands[2].shape[-1]
        if not right.size:
            return 0.0, "c has no elements"
        if tolerance.exact:
            factor = np.array(int(self._alpha) % 2**64, np.uint64).astype(left.dtype)
            ratio = _largest(np.where(tolerance.differ(left * factor, right), np.inf, 0.0))
        else:
            spread = abs(self._alpha) * rows * np.hypot.reduce(columns, axis=-1)[..., None]
            underflow = tolerance.underflow(self._alpha, np.zeros(n, np.int32))
            sums = SINGLE if right.real.dtype == np.float32 else 2.0**-53
            with np.errstate(over="ignore", invalid="ignore"):
                limit = tolerance.limit(spread, norms, underflow, n, sums=sums)
                error = _largest(abs(left.astype(np.result_type(left, np.float64)) * self._alpha - right))
                ratio = np.where(error == 0, 0.0, error / limit)
            ratio[~(np.isfinite(error) & np.isfinite(limit))] = np.inf
        usual = float(np.median(ratio))
        suspects = np.flatnonzero((ratio > 1) | ((usual > 0) & (ratio > OUTLIER * usual)))
        for flat in suspects[np.argsort(-ratio.ravel()[suspects])][:SUSPECTS]:
            row = tuple(int(i) for i in np.unravel_index(flat, ratio.shape))
            if message := self._again(row):
                return max(float(ratio[row]), math.nextafter(1, 2)), message
            ratio[row] = min(ratio[row], 1.0)  # its elements are right: roundings had one direction
        worst = float(ratio.max())
        if worst > 1:
            return worst, f"rows of c differ from a @ b by up to {worst:.3g} of the tolerance for rounding"
        return worst, f"c is a @ b: the largest error is {worst:.2g} of the tolerance for rounding"

    def _again(self, row: tuple[int, ...]) -> str | None:
        """Compute a row again, element by element, with the bound for roundings that all have one direction.

        Returns what is wrong, or None.
        """
        a, b, c = self._operands
        batch, work = row[:-1], self._tolerance.work
        of_a, of_b = (np.broadcast_to(x, (*c.shape[:-2], *x.shape[-2:]))[batch] for x in (a, b))
        of_a = of_a[row[-1]].astype(work)
        of_b, given = of_b.astype(work), _on_host(c[row])
        if self._tolerance.exact:
            truth = _on_host(of_a @ of_b) * np.array(int(self._alpha) % 2**64, np.uint64).astype(work)
            wrong = self._tolerance.differ(truth, given.astype(work))
            truth = truth.astype(given.dtype)
        else:
            truth, sizes = _on_host(of_a @ of_b) * self._alpha, _on_host(abs(of_a) @ abs(of_b)) * abs(self._alpha)
            arguments = sizes, abs(truth), self._tolerance.underflow(self._alpha), 0
            with np.errstate(invalid="ignore"):
                error = abs(truth - given.astype(work))
                wrong = ~(error <= self._tolerance.limit(*arguments, math.inf))
                # errors of one direction are in the whole row, so that none stands out
                wrong |= (error > self._tolerance.limit(*arguments)) & (error > OUTLIER * np.median(error))
        if not wrong.any():
            return None
        column = int(np.argmax(wrong))
        place, expected, found = (*row, column), truth[column], given[column].item()
        if not abs(expected) <= self._tolerance.most:  # also NaN, and what C's type cannot hold
            return f"row {row[-1]} cannot be tested: element {place} of a @ b is {expected}, c is {c.dtype}"
        return f"row {row[-1]} of c is wrong: element {place} is {found}, and a @ b has {expected.item()}"


def _largest(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the largest number of each row. Rows are short, and NumPy's ``max`` takes 20 ns for each."""
    return functools.reduce(np.maximum, np.moveaxis(x, -1, 0))


def _norms(x: Any) -> Any:
    """Return the norms of rows; of NumPy's floating-point numbers also where their squares overflow or underflow."""
    norms = (abs(x) ** 2).sum(-1) ** 0.5
    if x.dtype.kind != "u" and isinstance(x, np.ndarray):
        odd = ~((norms > 1e-140) & (norms < 1e150))  # squares that are 0, infinite or subnormal, or NaN
        rows = abs(x[odd])
        largest = rows.max(axis=-1, keepdims=True, initial=1e-300)
        norms[odd] = largest[:, 0] * ((rows / largest) ** 2).sum(-1) ** 0.5
    return norms


def _on_host(x: Any) -> np.ndarray[Any, Any]:
    return x if isinstance(x, np.ndarray) else np.asarray(x.get())


@functools.lru_cache(maxsize=256)
def _method(
    a: np.dtype[Any], b: np.dtype[Any], c: np.dtype[Any], k: int, precision: str, on_host: bool
) -> tuple[Tolerance, bool, np.dtype[Any]]:
    """Return the tolerance, whether one kernel multiplies and adds squares, and the type of the vectors."""
    tolerance, types = Tolerance.of(a, b, c, k, precision), (a, b, c)
    alike = len({thin_products.of_vectors(x) for x in types}) == 1 and all(map(thin_products.reads, types))
    fused = alike and not on_host
    return tolerance, fused, thin_products.of_vectors(c) if fused else tolerance.work


@functools.lru_cache(maxsize=64)
def _vectors(n: int, exact: bool, work: np.dtype[Any], device: int | None) -> Any:
    """Return the random vectors ``(n, v)``, in the memory of a GPU, or of the host for None."""
    x = vectors(_seed, n, n, exact).astype(work)
    if device is None:
        return x
    import cupy

    pool = cupy.get_default_memory_pool()  # not the memory of a graph
    with cupy.cuda.Device(device), cupy.cuda.using_allocator(pool.malloc):
        there = cupy.asarray(x)
        cupy.cuda.get_current_stream().synchronize()  # other streams read it, too
    return there
