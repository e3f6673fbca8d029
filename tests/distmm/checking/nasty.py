"""Right products that a check finds hard: data with every kind of range and pattern, sums in every order of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from tests.kernels.reference import twins

Pair = tuple[np.ndarray, np.ndarray]
Draw = Callable[[np.random.Generator, int, int, int], Pair]
Kernel = Callable[[np.ndarray, np.ndarray], np.ndarray]

TYPES = ("float32", "float32", "complex64", "bfloat16", "float16", "float64", "complex128")


def _normal(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


def _uniform(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return rng.random((m, k)), rng.random((k, n))


def _graded(axis: str, decades: float, draw: Draw, rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = draw(rng, m, k, n)
    sizes = 10.0 ** np.linspace(-decades, decades, {"rows": m, "columns": n, "k": k}[axis])
    if axis == "rows":
        return a * sizes[:, None], b
    return (a, b * sizes) if axis == "columns" else (a * sizes, b / sizes[:, None])


def _cauchy(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return tuple(rng.standard_cauchy(shape).clip(-1e4, 1e4) for shape in ((m, k), (k, n)))  # type: ignore[return-value]


def _lognormal(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return np.exp(3 * rng.standard_normal((m, k))), np.exp(2 * rng.standard_normal((k, n)))


def _sparse(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _normal(rng, m, k, n)
    return a * (rng.random(a.shape) < 0.01), b * (rng.random(b.shape) < 0.05)


def _one_hot(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return np.eye(k)[rng.integers(0, k, m)], rng.standard_normal((k, n))


def _constant(noise: float, rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _normal(rng, m, k, n)
    return rng.random() + noise * a, rng.random() + noise * b


def _constant_rows(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return np.repeat(rng.random((m, 1)), k, axis=1), np.repeat(rng.random((1, n)), k, axis=0)


def _cancelling(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _uniform(rng, m, k, n)
    half = k // 2
    a[:, half : 2 * half], b[half : 2 * half] = a[:, :half], -b[:half] * (1 + 1e-3 * rng.standard_normal((half, n)))
    return a, b


def _period(length: int, rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Signs that change each `length` steps: partial sums of one order are large, those of another one are not."""
    a, b = _uniform(rng, m, k, n)
    return a * np.where(np.arange(k) // length % 2, -1, 1), b


def _sorted(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _lognormal(rng, m, k, n)
    return np.sort(a, axis=1), (np.sort(b, axis=0) if rng.random() < 0.5 else -np.sort(-b, axis=0))


def _waves(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    at = np.arange(k) / max(k, 2)
    return np.sin(np.outer(rng.random(m) * 20, at)), np.cos(np.outer(at, rng.random(n) * 20))


def _walks(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _normal(rng, m, k, n)
    return a.cumsum(axis=1), b.cumsum(axis=0)


def _hilbert(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return 1 / (1.0 + np.add.outer(np.arange(m), np.arange(k))), 1 / (1.0 + np.add.outer(np.arange(k), np.arange(n)))


def _integers(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    return rng.integers(-9, 10, (m, k)).astype(float), rng.integers(-9, 10, (k, n)).astype(float)


def _outliers(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a, b = _normal(rng, m, k, n)
    a[::3, k // 2] *= 2.0**12
    b[k // 2] *= 2.0**-10
    return a, b


def _mixed_rows(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Some rows whose sums grow with k, among those that grow with its root."""
    a, b = rng.standard_normal((m, k)), 0.2 + rng.standard_normal((k, n))
    a[::5] = abs(a[::5])
    return a, b


def _own_transpose(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    a = rng.standard_normal((max(m, n), k))
    return a[:m], a[:n].T.copy()


DATA: dict[str, Draw] = {
    "normal": _normal,
    "uniform": _uniform,
    "graded rows": partial(_graded, "rows", 4, _normal),
    "graded columns": partial(_graded, "columns", 4, _normal),
    "graded along k": partial(_graded, "k", 3, _normal),
    "graded uniform": partial(_graded, "columns", 4, _uniform),
    "cauchy": _cauchy,
    "lognormal": _lognormal,
    "sparse": _sparse,
    "one hot": _one_hot,
    "constant": partial(_constant, 0.0),
    "nearly constant": partial(_constant, 1e-6),
    "mean and noise": partial(_constant, 1e-2),
    "constant rows": _constant_rows,
    "cancelling": _cancelling,
    "period 1": partial(_period, 1),
    "period 8": partial(_period, 8),
    "period 384": partial(_period, 384),
    "sorted": _sorted,
    "waves": _waves,
    "walks": _walks,
    "hilbert": _hilbert,
    "integers": _integers,
    "outliers": _outliers,
    "mixed rows": _mixed_rows,
    "own transpose": _own_transpose,
}


def _chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype == np.float32:
        return twins.fma_chain(a, b)
    d = np.zeros((len(a), b.shape[1]), a.dtype)
    for p in range(a.shape[1]):
        d = d + a[:, p, None] * b[p]
    return d


def _slices(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _blocks(-(-a.shape[1] // count), a, b)


def _lanes(width: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    d = np.zeros((len(a), b.shape[1]), a.dtype)
    for lane in range(width):
        d = d + _chain(a[:, lane::width], b[lane::width])
    return d


def _blocks(size: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    d = np.zeros((len(a), b.shape[1]), a.dtype)
    for p in range(0, a.shape[1], size):
        d = d + _chain(a[:, p : p + size], b[p : p + size])
    return d


def _pairwise(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    k = a.shape[1]
    if k <= 4:
        return _chain(a, b)
    return np.asarray(_pairwise(a[:, : k // 2], b[: k // 2]) + _pairwise(a[:, k // 2 :], b[k // 2 :]))


def _blas(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a @ b)


def _halves(twin: Any, guarded: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of halves, where the kernel would make them: others are made by the chain."""
    for first in range(0, a.shape[1], 8192):
        left, right = a[:, first : first + 8192], b[first : first + 8192].T
        if left.shape[1] < 256 or guarded(np.ascontiguousarray(left))[-1] or guarded(np.ascontiguousarray(right))[-1]:
            return _chain(a, b)
    return np.asarray(twin(a, b))


def _real_parts(three: bool, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Complex products of four real ones, or of three."""
    ar, ai, br, bi = (np.ascontiguousarray(x) for x in (a.real, a.imag, b.real, b.imag))
    rr, ii = _chain(ar, br), _chain(ai, bi)
    mixed = _chain(ar + ai, br + bi) - rr - ii if three else _chain(ar, bi) + _chain(ai, br)
    out = np.empty(rr.shape, a.dtype)
    out.real, out.imag = rr - ii, mixed
    return out


KERNELS: dict[str, Kernel] = {
    "blas": _blas,
    "chain": _chain,
    "8 slices": partial(_slices, 8),
    "2 lanes": partial(_lanes, 2),
    "16 lanes": partial(_lanes, 16),
    "blocks of 384": partial(_blocks, 384),
    "pairwise": _pairwise,
}
OF_FLOAT32: dict[str, Kernel] = {
    "fp16x3": partial(_halves, twins.fp16x3, twins.split_fp16),
    "tf32x3": partial(_halves, twins.tf32x3, twins.split_tf32),
}
OF_COMPLEX: dict[str, Kernel] = {
    "four real products": partial(_real_parts, False),
    "three real products": partial(_real_parts, True),
}
OF_16_BITS: dict[str, Kernel] = {"tensor cores": lambda a, b: np.asarray(twins.one_product(a, b))}


@dataclass(frozen=True)
class Product:
    """A right product ``C = alpha A @ B + beta C0``, and what it is."""

    name: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    alpha: float
    beta: float
    added: np.ndarray | None


def product(number: int, most: int = 4096) -> Product:
    """Return one of the nasty products: its number is its seed. Most have a k below `most`."""
    rng = np.random.default_rng([20, number])
    data = list(DATA)[number % len(DATA)]
    name = TYPES[int(rng.integers(len(TYPES)))]
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    m, n = (int(x) for x in rng.integers(1, 40, 2))
    k = int(2 ** rng.uniform(0, np.log2(most)))
    a, b = DATA[data](rng, m, k, n)
    # Towards the ends of float32's range, and of float16's, sums of squares of small numbers underflow.
    if name in ("float32", "complex64", "bfloat16") and number % 3 == 0:
        a, b = a * 10.0 ** rng.uniform(-42, 0), b * 10.0 ** rng.uniform(-5, 15)
    if dtype.kind == "c":
        a, b = a + 1j * (a[::-1] if rng.random() < 0.5 else rng.standard_normal(a.shape)), b - 1j * b[:, ::-1]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        a, b = a.astype(dtype), b.astype(dtype)
        kernels = dict(KERNELS)
        if name == "float32":
            kernels |= OF_FLOAT32
        elif dtype.kind == "c":
            kernels |= OF_COMPLEX
        elif dtype.itemsize == 2:
            kernels |= OF_16_BITS
        kernel = list(kernels)[int(rng.integers(len(kernels)))]
        wide = kernel != "tensor cores" and dtype.itemsize == 2
        operands = (a.astype(np.float32), b.astype(np.float32)) if wide else (a, b)
        made = kernels[kernel](*operands)
        alpha, beta, added = 1.0, 0.0, None
        if rng.random() < 0.3:
            alpha, beta = float(rng.uniform(-3, 3)), float(rng.uniform(-3, 3))
            added = (made[::-1] * made.dtype.type(rng.uniform(0, 2))).astype(dtype)
        of = made.dtype.type
        c = of(alpha) * made + (0 if added is None else of(beta) * added.astype(made.dtype))
        c = c.astype(dtype)
    where = f"{number}: {data}, {name}, {kernel}, {m} x {k} x {n}, alpha {alpha:.3g}, beta {beta:.3g}"
    return Product(where, a, b, c, alpha, beta, added)
