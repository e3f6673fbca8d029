"""Choose the kernel: a table of candidates, one predicate that says why one cannot be used, one score.

Pure: the device is an argument, and a kernel's module is imported only once it is chosen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distmm_kernels.config import PRECISIONS, TILE, Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Kernel

__all__ = ["CANDIDATES", "Candidate", "explain", "names", "select", "why_not"]


@dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes
    ----------
    kernel
        ``module:class`` below ``distmm_kernels.gemm``.
    kinds
        Kinds of dtype that it multiplies, as in ``numpy.dtype.kind``.
    loads
        Loads from global memory for one element of C as a function of k; None for a library that does not say.
    by_name_only
        True for a peer that we measure ourselves against: never chosen unasked.
    """

    name: str
    device_kind: str
    kernel: str
    kinds: str
    idea: str
    loads: Callable[[int], int] | None = None
    by_name_only: bool = False


CANDIDATES = (
    Candidate("cpu", "cpu", "cpu:CpuKernel", "fci", "BLAS for floats, packed tiles on all cores for integers"),
    Candidate(
        "tiled",
        "cuda",
        "tiled:TiledKernel",
        "fci",
        f"{TILE} x {TILE} tiles in shared memory",
        # a thread loads one element of A and one of B for each tile along k
        loads=lambda k: 2 * -(-k // TILE),
    ),
    Candidate("naive", "cuda", "naive:NaiveKernel", "fci", "one thread per element of C", loads=lambda k: 2 * k),
    Candidate(
        "guvectorized",
        "cuda",
        "guvectorized:GuvectorizedKernel",
        "fci",
        "Numba's generalised ufunc, one thread per row of C",
        loads=lambda k: 2 * k,
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
    if problem.dtype.kind not in candidate.kinds:
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
        return min((candidate for candidate in legal if not candidate.by_name_only), key=lambda c: _score(c, problem))
    for candidate in legal:
        if candidate.name == name:
            return candidate
    known = {candidate.name: candidate for candidate in CANDIDATES}
    reason = why_not(known[name], problem, device) if name in known else "there is no kernel of this name"
    raise ValueError(
        f"kernel {name!r} cannot compute {problem} on {device}: {reason}; "
        f"use one of {', '.join(candidate.name for candidate in legal)}"
    )


def _score(candidate: Candidate, problem: Problem) -> int:
    """Global loads per element of C, the fewer the better: all of today's kernels wait for memory."""
    return 0 if candidate.loads is None else candidate.loads(problem.k)


def _loads(candidate: Candidate, problem: Problem) -> Any:
    return f"{_score(candidate, problem)} loads per element of C"
