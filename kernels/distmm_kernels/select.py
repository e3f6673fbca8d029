"""Choose the kernel: a table of candidates, one predicate that says why one cannot be used, one score.

Pure: the device is an argument, and a kernel's module is imported only once it is chosen.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from distmm_kernels.config import PRECISIONS, TILE, Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Kernel
from distmm_kernels.tiling import TILINGS

__all__ = ["CANDIDATES", "Candidate", "explain", "names", "select", "why_not"]


@dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes
    ----------
    kernel
        ``module:class`` below ``distmm_kernels.gemm``.
    kinds
        Kinds of accumulator that it adds in, as in ``numpy.dtype.kind``.
    loads
        Loads from global memory for one element of C; None for a library that does not say.
    tile
        Rows and columns of C that one thread block shares its loads for; None if threads share nothing.
    by_name_only
        True for what is never chosen unasked: a peer that we measure ourselves against, a kernel on trial.
    """

    name: str
    device_kind: str
    kernel: str
    kinds: str
    idea: str
    loads: Callable[[Problem], int] | None = None
    tile: Callable[[Problem], tuple[int, int]] | None = None
    by_name_only: bool = False


def _tile(problem: Problem) -> tuple[int, int]:
    return TILE, TILE


def _register_loads(problem: Problem) -> int:
    tiling = TILINGS[problem.accumulator.name][0]
    steps = -(-problem.k // tiling.depth) * tiling.depth
    return -(-steps * (tiling.rows + tiling.columns) // (tiling.rows * tiling.columns))


def _register_tile(problem: Problem) -> tuple[int, int]:
    tiling = TILINGS[problem.accumulator.name][0]
    return tiling.rows, tiling.columns


CANDIDATES = (
    Candidate("cpu", "cpu", "cpu:CpuKernel", "fci", "BLAS for floats, packed tiles on all cores for integers"),
    Candidate(
        "register_tiled",
        "cuda",
        "register_tiled:RegisterTiledKernel",
        "fci",
        "tiles in shared memory, and tiles of those in registers",
        loads=_register_loads,
        tile=_register_tile,
        by_name_only=True,  # its sizes for float64, int32 and complex types have not run on a GPU yet
    ),
    Candidate(
        "tiled",
        "cuda",
        "tiled:TiledKernel",
        "fci",
        f"{TILE} x {TILE} tiles in shared memory",
        # a thread loads one element of A and one of B for each tile along k
        loads=lambda problem: 2 * -(-problem.k // TILE),
        tile=_tile,
    ),
    Candidate(
        "naive", "cuda", "naive:NaiveKernel", "fci", "one thread per element of C", loads=lambda problem: 2 * problem.k
    ),
    Candidate(
        "guvectorized",
        "cuda",
        "guvectorized:GuvectorizedKernel",
        "fci",
        "Numba's generalised ufunc, one thread per row of C",
        loads=lambda problem: 2 * problem.k,
    ),
    Candidate("cublas", "cuda", "cublas:CublasKernel", "fc", "NVIDIA's library, through CuPy", by_name_only=True),
)


def names(device: Device) -> tuple[str, ...]:
    """Return the names of the kernels that run on this kind of device, best first."""
    return tuple(candidate.name for candidate in CANDIDATES if candidate.device_kind == device.kind)


def why_not(candidate: Candidate, problem: Problem, device: Device) -> str | None:
    """Say why a candidate cannot compute the problem on the device; None if it can."""
    if candidate.device_kind != device.kind:
        return f"it runs on {candidate.device_kind} devices, and {device} is a {device.kind} device"
    if problem.accumulator.kind not in candidate.kinds:
        return f"it does not multiply {problem.dtype}"
    return None


def select(problem: Problem, device: Device, precision: str = "highest", name: str | None = None) -> Kernel:
    """Return the kernel for a problem, ready to use.

    Parameters
    ----------
    precision
        One of ``PRECISIONS``. Every kernel of today computes in the operands' own IEEE type, so all are met.
    name
        Forces one kernel, for example ``"cublas"``.

    Raises
    ------
    ValueError
        If the named kernel is unknown or cannot compute this problem here, or the precision is unknown.
    """
    chosen = _choose(problem, device, precision, name)
    module, cls = chosen.kernel.split(":")
    kernel: type[Kernel] = getattr(importlib.import_module(f"distmm_kernels.gemm.{module}"), cls)
    return kernel(problem, device)


def explain(problem: Problem, device: Device, precision: str = "highest") -> str:
    """Say which kernel `select` takes and why, and why not the others: one printable line each."""
    chosen = _choose(problem, device, precision, None)
    lines = [f"{problem} on {device}, precision {precision}: {chosen.name}, {chosen.idea}"]
    for candidate in CANDIDATES:
        if candidate is not chosen:
            reason = why_not(candidate, problem, device)
            if reason is None and candidate.by_name_only:
                reason = f"{candidate.idea}: the peer, used only when asked for by name"
            elif reason is None:
                reason = f"{_loads(candidate, problem)}, {chosen.name} {_loads(chosen, problem)}"
            lines.append(f"  not {candidate.name}: {reason}")
    return "\n".join(lines)


def _choose(problem: Problem, device: Device, precision: str, name: str | None) -> Candidate:
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    legal = [candidate for candidate in CANDIDATES if why_not(candidate, problem, device) is None]
    if name is None:
        return min(
            (candidate for candidate in legal if not candidate.by_name_only), key=lambda c: _score(c, problem, device)
        )
    for candidate in legal:
        if candidate.name == name:
            return candidate
    known = {candidate.name: candidate for candidate in CANDIDATES}
    reason = why_not(known[name], problem, device) if name in known else "there is no kernel of this name"
    raise ValueError(
        f"kernel {name!r} cannot compute {problem} on {device}: {reason}; "
        f"use one of {', '.join(candidate.name for candidate in legal)}"
    )


def _score(candidate: Candidate, problem: Problem, device: Device) -> int:
    """Global loads of all thread blocks, the fewer the better: what serves most multiply-adds with a load is fastest.

    Blocks pay for all of their tile, also where it sticks out of C, and multiprocessors without a block as if they had
    one: large tiles suit large products only.
    """
    if candidate.loads is None:
        return 0
    rows, columns = candidate.tile(problem) if candidate.tile else (TILE, TILE)
    blocks = math.prod(problem.batch) * -(-problem.m // rows) * -(-problem.n // columns)
    return max(blocks, device.multiprocessors) * rows * columns * candidate.loads(problem)


def _loads(candidate: Candidate, problem: Problem) -> str:
    loads = "unknown" if candidate.loads is None else str(candidate.loads(problem))
    tiles = "" if candidate.tile is None else " in tiles of {} x {}".format(*candidate.tile(problem))
    return f"{loads} loads per element of C{tiles}"
