"""Random products of random operands beside NumPy: ``python tests/bench/random_products.py --seconds 60 --seed 1``.

Each case draws a function, types, sizes, keywords, and for each operand where it is (NumPy, CuPy, PyTorch, lazy and
persisted Dask arrays) and its layout (transposed, from the last row to the first, every second row, and others). The
result is compared with NumPy's in float64. Cases that differ or fail are printed with their number: the same seed on
the same kind of machine gives the same cases. The exit code is 1 if there is one, or if every case was refused.

On a machine with GPUs, clusters that users start: ``--cluster tcp``, ``ucx``, ``own``, or ``none``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import dask
import dask.array as da
import ml_dtypes
import numpy as np
from users_products import Setting

import distmm
import distmm_kernels
from distmm.errors import DistmmError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPES = (*map(np.dtype, ("f2", "f4", "f8", "c8", "c16", "i1", "u1", "i2", "i4", "i8", "u4", "?")), BFLOAT16)
SMALL, LARGE = (0, 1, 2, 7, 16, 33, 64, 65, 100, 130, 257), (1, 16, 512, 700, 1024, 1500)

Memory = Literal["host", "gpu"]

# Where an operand is, by the memory of its elements. Operands of one product are in one of the two.
HOST, GPU = ("numpy", "lazy", "persisted"), ("cupy", "torch", "lazy", "persisted")
LAYOUTS = ("as it is", "transposed", "from the last", "every second", "columns from the last", "shifted")


@dataclass(frozen=True)
class Case:
    """A product as it was drawn. NumPy's product of the numbers is `wanted`, that of their absolute values `size`."""

    call: str
    operands: tuple[str, ...]
    keywords: dict[str, Any]
    wanted: np.ndarray = field(repr=False)
    size: np.ndarray = field(repr=False)
    dtype: np.dtype[Any] = field(repr=False)
    depth: int = field(repr=False)


class Draws:
    """Random operands.

    Parameters
    ----------
    seed : int
    on_gpu : bool
        Whether the machine has a GPU.
    large : float
        Share of the cases with large sizes.
    """

    def __init__(self, seed: int, on_gpu: bool, large: float) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.on_gpu, self.large = on_gpu, large

    def size(self) -> Callable[[], int]:
        """Return a function that draws sizes of one case."""
        sizes = LARGE if self.random.random() < self.large else SMALL
        return lambda: self.random.choice(sizes)

    def values(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return numbers of a type: normally distributed, or whole ones below 10. Sometimes all rows are alike."""
        if len(shape) > 1 and shape[0] > 1 and self.random.random() < 0.1:
            return np.repeat(self.values((1, *shape[1:]), dtype), shape[0], axis=0)
        if dtype.kind in "iub":
            least, end = {"i": (-9, 10), "u": (0, 10), "b": (0, 2)}[dtype.kind]
            return self.numbers.integers(least, end, shape).astype(dtype)
        real = self.numbers.standard_normal(shape)
        imaginary = 1j * self.numbers.standard_normal(shape) if dtype.kind == "c" else 0
        return np.asarray(real + imaginary).astype(dtype)

    def operand(self, x: np.ndarray, memory: Memory) -> tuple[Any, str]:
        """Return an array with these elements, and what it is."""
        kind = self.random.choice(HOST if memory == "host" else GPU)
        alike = len(x) > 1 and x.ndim > 1 and bool((x == x[:1]).all())
        layout = "repeated" if alike and self.random.random() < 0.7 else self.random.choice(LAYOUTS)
        if kind == "torch" and (x.dtype in (BFLOAT16, np.uint32) or layout not in ("as it is", "transposed")):
            kind = "cupy"
        what = f"{kind} {memory}, {layout}, {x.dtype} {x.shape}"
        if kind in ("lazy", "persisted"):
            return self._dask(x, memory, layout, kind == "persisted"), what
        source = _laid_out(x, layout, module_of(memory))
        if kind == "torch":
            import torch

            source = torch.as_tensor(source, device="cuda")
        return source, what

    def _dask(self, x: np.ndarray, memory: Memory, layout: str, persisted: bool) -> da.Array:
        """Return a Dask array. Its layout is that of its blocks, and of its graph."""
        base, index = _base(np.asarray, x[:1] if layout == "repeated" else x, layout)
        chunks = tuple(self._chunks(n) for n in base.shape)
        made = da.from_array(base, chunks=chunks)
        if memory == "gpu":
            cupy = module_of(memory)
            made = made.map_blocks(cupy.asarray, dtype=x.dtype, meta=cupy.empty((0,) * base.ndim, x.dtype))
        if persisted and self.random.random() < 0.5:
            made = made.persist()
        made = made.swapaxes(-1, -2) if index is None else made[index]
        if layout == "repeated":
            made = da.broadcast_to(made, x.shape, chunks=(self._chunks(len(x)), *made.chunks[1:]))
        return made.persist() if persisted else made

    def _chunks(self, n: int) -> tuple[int, ...]:
        cuts = sorted(self.random.sample(range(1, n), min(n - 1, self.random.choice([0, 0, 1, 2, 3])))) if n > 1 else []
        return tuple(after - before for before, after in zip([0, *cuts], [*cuts, n], strict=True))


def module_of(memory: Memory) -> Any:
    """Return NumPy or CuPy."""
    if memory == "host":
        return np
    import cupy

    return cupy


def _base(place: Callable[[np.ndarray], Any], x: np.ndarray, layout: str) -> tuple[Any, Any]:
    """Return an array, and the index that gives `x` of it; None for its transpose."""
    every: tuple[Any, ...] = (slice(None),) * (x.ndim - 1)
    if layout == "transposed" and x.ndim > 1:
        return place(np.ascontiguousarray(x.swapaxes(-1, -2))), None
    if layout == "from the last":
        return place(np.ascontiguousarray(x[::-1])), np.s_[::-1]
    if layout == "columns from the last":
        return place(np.ascontiguousarray(x[..., ::-1])), (*every, np.s_[::-1])
    if layout == "every second":
        return place(np.repeat(x, 2, axis=0)), np.s_[::2]
    return place(x), np.s_[...]


def _laid_out(x: np.ndarray, layout: str, module: Any) -> Any:
    if layout == "shifted":  # by one element: rows do not begin at vectors
        whole = module.zeros(x.size + 1, x.dtype)
        whole[1:] = module.asarray(x).ravel()
        return whole[1:].reshape(x.shape)
    if layout == "repeated":
        return module.broadcast_to(module.asarray(x[:1]), x.shape)
    base, index = _base(module.asarray, x, layout)
    return base.swapaxes(-1, -2) if index is None else base[index]


def on_host(x: Any) -> np.ndarray:
    """Return a result as a NumPy array."""
    if type(x).__module__.startswith("torch"):
        x = x.detach().cpu().numpy()
    return x.get() if hasattr(x, "get") and hasattr(x, "__cuda_array_interface__") else np.asarray(x)


def wide(x: Any) -> np.ndarray:
    """Return numbers in float64 or complex128."""
    x = on_host(x)
    return x.astype("c16" if x.dtype.kind == "c" else "f8")


def difference(case: Case, got: Any) -> str:
    """Say how a result differs from NumPy's by more than its type explains; nothing if it does not."""
    made, wanted, dtype = on_host(got), np.asarray(case.wanted), case.dtype
    if (made.shape, made.dtype) != (wanted.shape, dtype):
        return f"it is {made.dtype} {made.shape}, and not {dtype} {wanted.shape}"
    if dtype.kind in "iub":
        exact = wanted != 0 if dtype.kind == "b" else wanted.astype("i8").astype(dtype)
        return "" if np.array_equal(made, exact) else "whole numbers differ"
    short = dtype.itemsize == 2
    unit = float(ml_dtypes.finfo(dtype).eps)
    allowed = unit * (4 + np.sqrt(case.depth)) * (abs(wanted) + case.size * (0.3 if short else 1)) + short * 1e-6
    error = np.where(abs(wanted) < float(ml_dtypes.finfo(dtype).max), abs(wide(made) - wanted), 0)
    worst = (error - allowed).max(initial=-1)
    return "" if worst <= 0 else f"{int((error > allowed).sum())} of {error.size} elements differ, by {error.max():.3g}"


@dataclass
class Pair:
    """Two operands, and NumPy's products of their numbers, `wanted`, and of the absolute values, `size`."""

    draws: Draws
    memory: Memory
    a: Any
    b: Any
    numbers: tuple[np.ndarray, np.ndarray]
    keywords: dict[str, Any]

    def __post_init__(self) -> None:
        left, right = map(wide, self.numbers)
        self.wanted, self.size = left @ right, abs(left) @ abs(right)


Call = tuple[Callable[[], Any], np.ndarray, np.ndarray]  # computes a product by distmm; and its `wanted` and `size`


def _matmul(pair: Pair) -> Call:
    return lambda: distmm.matmul(pair.a, pair.b, **pair.keywords).compute(), pair.wanted, pair.size


def _gram(pair: Pair) -> Call:
    x = wide(pair.numbers[0])
    turned = x.conj().swapaxes(-1, -2)
    return lambda: distmm.gram(pair.a, **pair.keywords).compute(), x @ turned, abs(x) @ abs(turned)


def _gemm(pair: Pair) -> Call:
    chance, (m, n), dtype = pair.draws.random, pair.wanted.shape, pair.numbers[0].dtype
    if dtype.kind == "b":  # alpha = 2 makes whole numbers of it
        return _matmul(pair)
    alpha, beta = chance.choice([1, 2, 3]), chance.choice([0, 1, 2])
    numbers = pair.draws.values(chance.choice([(m, n), (1, n), (n,)]), dtype)
    c, _ = pair.draws.operand(numbers, pair.memory)
    wanted, size = alpha * pair.wanted + beta * wide(numbers), alpha * pair.size + beta * abs(wide(numbers))
    return lambda: distmm.gemm(alpha, pair.a, pair.b, beta, c, **pair.keywords).compute(), wanted, size


def _einsum(pair: Pair) -> Call:
    how = pair.keywords
    return lambda: distmm.einsum("ij,jk->ki", pair.a, pair.b, **how).compute(), pair.wanted.T, pair.size.T


def _tensordot(pair: Pair) -> Call:
    return lambda: distmm.tensordot(pair.a, pair.b, axes=1, **pair.keywords).compute(), pair.wanted, pair.size


def _accelerated(pair: Pair) -> Call:
    def compute() -> Any:
        with distmm.accelerated(), dask.config.set({"distmm.accelerate.min-flops": 0}):
            made = (pair.a @ pair.b).compute()
        return made.astype(np.result_type(*pair.numbers))  # Dask itself sums blocks of small integers in a wider type

    # Dask computes some of them, and cannot sum blocks of bfloat16.
    lazy = isinstance(pair.a, da.Array) and isinstance(pair.b, da.Array) and pair.numbers[0].dtype != BFLOAT16
    return (compute, pair.wanted, pair.size) if lazy else _matmul(pair)


def _out(pair: Pair) -> Call:
    (m, n), dtype = pair.wanted.shape, np.result_type(*pair.numbers)
    module, how = module_of(pair.memory), pair.draws.random.choice(["C", "F", "gaps", "lent"])
    if how == "gaps":
        out = module.zeros((2 * m, 3 * n), dtype)[::2, ::3]
    elif how == "lent" and pair.memory == "host":
        out = distmm.empty((m, n), dtype)
    else:
        out = module.zeros((m, n), dtype, order="F" if how == "F" else "C")
    return lambda: distmm.matmul(pair.a, pair.b, out=out, **pair.keywords), pair.wanted, pair.size


def _part(pair: Pair) -> Call:
    chance = pair.draws.random
    at = tuple(slice(*sorted(chance.choices(range(edge + 1), k=2))) for edge in pair.wanted.shape)
    return lambda: distmm.matmul(pair.a, pair.b, **pair.keywords)[at].compute(), pair.wanted[at], pair.size[at]


def _alone(pair: Pair) -> Call:
    if isinstance(pair.a, da.Array) or type(pair.a) is not type(pair.b):  # one package and no Dask
        return _matmul(pair)
    return lambda: distmm_kernels.matmul(pair.a, pair.b, **pair.keywords), pair.wanted, pair.size


# By name, how the product is computed. "vector" and "batch" differ in the operands.
CALLS: dict[str, Callable[[Pair], Call]] = {
    "matmul": _matmul,
    "vector": _matmul,
    "batch": _matmul,
    "gram": _gram,
    "gemm": _gemm,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "accelerated": _accelerated,
    "out": _out,
    "part": _part,
    "alone": _alone,
}


def drawn(draws: Draws) -> tuple[Case, Callable[[], Any]]:
    """Draw a case. Return it, and a function that computes it by distmm."""
    chance, size = draws.random, draws.size()
    name, dtype = chance.choice([*CALLS]), chance.choice(TYPES)
    memory: Memory = "gpu" if draws.on_gpu and chance.random() < 0.6 else "host"
    left: tuple[int, ...] = (size(), size())
    right: tuple[int, ...] = (left[1],) if name == "vector" else (left[1], size())
    if name == "batch":
        batch = chance.choice([(2,), (3, 2), (1, 3)])
        left, right = (*batch, *left), (*chance.choice([(), batch, (1,) * len(batch)]), *right)
    numbers = draws.values(left, dtype), draws.values(right, dtype)
    (a, of_a), (b, of_b) = (draws.operand(x, memory) for x in numbers)
    keywords: dict[str, Any] = {"reproducible": True} if draws.on_gpu and chance.random() < 0.15 else {}
    if dtype in (np.float32, np.float64) and chance.random() < 0.1:
        keywords["precision"] = "ieee"
    compute, wanted, sizes = CALLS[name](Pair(draws, memory, a, b, numbers, keywords))
    return Case(name, (of_a, of_b), keywords, wanted, sizes, dtype, left[-1]), compute


def run(draws: Draws, seconds: float, most: int = sys.maxsize) -> tuple[int, list[str], Counter[str]]:
    """Compute cases for some seconds. Return their number, a line for each that is wrong, and what was refused."""
    wrong: list[str] = []
    refused: Counter[str] = Counter()
    ends, count = time.monotonic() + seconds, 0
    while count < most and time.monotonic() < ends:
        count += 1
        case = None
        try:
            case, compute = drawn(draws)
            what = difference(case, compute())
        except DistmmError as error:
            refused[str(error)] += 1
            continue
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
        if what:
            wrong.append(f"case {count}: {what[:300]}: {case}")
            sys.stdout.write(f"{wrong[-1]}\n")
    return count, wrong, refused


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", type=float, default=0.1, help="share of the cases with large sizes")
    parser.add_argument("--cluster", choices=["none", "tcp", "ucx", "own"], default="tcp")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    setting = Setting(given.device, given.workers, given.cluster, 1, 1.0, given.seconds)
    with nullcontext() if given.cluster == "none" else setting.started():
        draws = Draws(given.seed, given.device == "gpu", given.large)
        count, wrong, refused = run(draws, given.seconds)
    for message, times in refused.most_common():
        sys.stdout.write(f"refused {times} times: {message[:200]}\n")
    sys.stdout.write(f"{count} cases, {len(wrong)} wrong, {refused.total()} refused\n")
    return 1 if wrong or refused.total() == count else 0


if __name__ == "__main__":
    sys.exit(main())
