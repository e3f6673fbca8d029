"""Choose the kernel: a predicate says why one cannot be used, a score ranks the others, and both can be printed.

Pure: the device is an argument, and a kernel's module is imported only once it is chosen.
"""

from __future__ import annotations

import dataclasses
import importlib
import math

from distmm_kernels.candidates import CANDIDATES, Candidate
from distmm_kernels.config import PRECISIONS, Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Kernel
from distmm_kernels.rates import SIZES, seconds

__all__ = ["CANDIDATES", "Candidate", "choose", "explain", "names", "select", "why_not"]

STRICTNESS = {name: rank for rank, name in enumerate(("medium", "high", "highest", "ieee"))}


def names(device: Device) -> tuple[str, ...]:
    """Return the names of the kernels that run on this kind of device."""
    return tuple(candidate.name for candidate in CANDIDATES if candidate.device_kind == device.kind)


def why_not(
    candidate: Candidate, problem: Problem, device: Device, precision: str = "medium", *, reproducible: bool = False
) -> str | None:
    """Say why a candidate cannot compute the problem on the device as asked; None if it can."""
    if candidate.device_kind != device.kind:
        return f"it runs on {candidate.device_kind} devices, and {device} is a {device.kind} device"
    if problem.dtype.name not in candidate.dtypes:
        return f"it does not multiply {problem.dtype}"
    least, greatest = candidate.capabilities
    if device.compute_capability is not None and not least <= device.compute_capability <= greatest:
        needs = "{}.{}".format(*least) if greatest == least else "{}.{} or more".format(*least)
        return f"it needs compute capability {needs}, and {device} has {'{}.{}'.format(*device.compute_capability)}"
    largest = max(problem.m, problem.k, problem.n, math.prod(problem.batch))
    if candidate.sizes_below is not None and largest >= candidate.sizes_below:
        return f"it counts to 2^{candidate.sizes_below.bit_length() - 1} along an axis, and a size is {largest:,}"
    if problem.accumulator.kind != "i" and STRICTNESS[candidate.precision] < STRICTNESS[precision]:
        return f"its products are of precision {candidate.precision!r}"
    if reproducible and candidate.granule is None and problem.accumulator.kind != "i":
        return "its bits may change with how k is cut"
    return None


def select(
    problem: Problem,
    device: Device,
    precision: str = "highest",
    *,
    reproducible: bool = False,
    name: str | None = None,
) -> Kernel:
    """Return the kernel for a problem, ready to use: the fastest, by its measured rate, of those that may be used.

    Parameters
    ----------
    precision
        ``"highest"``: the error of float32, float64 and complex products is not larger than that of ``"ieee"``; 16-bit
        operands are multiplied exactly and added in float32. ``"ieee"``: a chain of fused multiply-adds in the
        operands' own type, bit for bit. ``"high"``: float32 operands may be rounded to TF32 (11 bits), ``"medium"``: to
        bfloat16 (8 bits). A kernel that is stricter than asked for may be chosen where it is faster. 16-bit types,
        float64 and complex numbers have ``"ieee"`` and ``"highest"``, integers one precision.
    reproducible
        True: only kernels whose bits do not change with how k is cut into calls, at multiples of ``Kernel.granule``;
        and the choice looks at types and device alone, so that blocks of any size are multiplied by the same kernel.
    name
        Forces one kernel, for example ``"cublas"``, of whatever precision.

    Raises
    ------
    ValueError
        If the named kernel is unknown or cannot compute this problem here, or the precision is unknown.
    """
    chosen = choose(problem, device, precision, reproducible, name)
    module, cls = chosen.kernel.split(":")
    kernel: type[Kernel] = getattr(importlib.import_module(f"distmm_kernels.gemm.{module}"), cls)
    return kernel(problem, device)


def explain(problem: Problem, device: Device, precision: str = "highest", *, reproducible: bool = False) -> str:
    """Say which kernel `select` takes and why, and why not the others: one printable line each."""
    chosen = choose(problem, device, precision, reproducible, None)
    lines = [f"{problem} on {device}, precision {precision}: {chosen.name}, {chosen.idea}"]
    for candidate in CANDIDATES:
        if candidate is not chosen:
            reason = why_not(candidate, problem, device, precision, reproducible=reproducible)
            if reason is None and not _unasked(candidate, device):
                where = "" if candidate.by_name_only else " on this GPU"
                reason = f"{candidate.idea}: used{where} only when asked for by name"
            elif reason is None:
                expected, least = (_seconds(each, problem, device, reproducible) for each in (candidate, chosen))
                reason = f"{expected * 1e6:,.3g} µs expected, {chosen.name} takes {least * 1e6:,.3g}"
            lines.append(f"  not {candidate.name}: {reason}")
    return "\n".join(lines)


def choose(problem: Problem, device: Device, precision: str, reproducible: bool, name: str | None) -> Candidate:
    """Return the row of the table that `select` makes a kernel from; nothing is imported, and no device is needed."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if name is None:
        unasked = [c for c in CANDIDATES if _unasked(c, device)]
        legal = [c for c in unasked if why_not(c, problem, device, precision, reproducible=reproducible) is None]
        if not legal:
            raise ValueError(
                f"no kernel for {problem} on {device} promises the same bits for any cuts of k: "
                "leave out reproducible=True"
            )
        return min(legal, key=lambda candidate: _seconds(candidate, problem, device, reproducible))
    legal = [c for c in CANDIDATES if why_not(c, problem, device, reproducible=reproducible) is None]
    for candidate in legal:
        if candidate.name == name:
            return candidate
    known = {candidate.name: candidate for candidate in CANDIDATES}
    reason = "there is no kernel of this name"
    if name in known:
        reason = why_not(known[name], problem, device, reproducible=reproducible) or reason
    raise ValueError(
        f"kernel {name!r} cannot compute {problem} on {device}: {reason}; "
        f"use one of {', '.join(candidate.name for candidate in legal)}"
    )


def _unasked(candidate: Candidate, device: Device) -> bool:
    """Whether a candidate may be chosen on the device where nobody has named it."""
    if candidate.by_name_only:
        return False
    return candidate.worth_it is None or device.compute_capability in candidate.worth_it


def _seconds(candidate: Candidate, problem: Problem, device: Device, reproducible: bool) -> float:
    """Time that a product should take; of a large cube if the choice must not look at sizes."""
    if device.compute_capability is None:
        return 0.0  # one kernel
    if reproducible:
        size = SIZES[-1]
        problem = dataclasses.replace(problem, m=size, k=size, n=size, batch=())
    return seconds(candidate, problem, device.compute_capability)
