"""Choose the kernel: a predicate says why a kernel cannot be used, and a score ranks the others. `explain` prints both.

These functions are pure: the device is an argument, and only the chosen kernel is constructed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from distmm_kernels.candidate import Candidate
from distmm_kernels.candidates import CANDIDATES as CANDIDATES
from distmm_kernels.config import PRECISIONS, Problem
from distmm_kernels.device import Device
from distmm_kernels.kernel import Kernel
from distmm_kernels.rates import SIZES, edge_of, rate, relative, seconds

STRICTNESS = {name: rank for rank, name in enumerate(("medium", "high", "highest", "ieee"))}

# A kernel without reproducible bits is chosen only if it is faster by this factor. Rates of different runs differ by as
# much.
WORTH = 1.05


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
    if reproducible and not promises_bits(candidate, problem):
        return "its bits may change with how k is cut"
    return None


def select(
    problem: Problem, device: Device, precision: str = "highest", *, reproducible: bool = False, name: str | None = None
) -> Kernel:
    """Return the kernel for a problem: by measured rates, the fastest of those that may be used.

    Parameters
    ----------
    precision
        ``"highest"``: float32, float64 and complex products keep the error bound of ``"ieee"`` for each element, and
        have a smaller error on ordinary data (``kernels/README.md``, Grades); 16-bit operands are multiplied exactly
        and added in float32. ``"ieee"``: a chain of fused multiply-adds in the operands' own type, bit for bit.
        ``"high"``: float32 operands may be rounded to TF32 (11 bits), ``"medium"``: to bfloat16 (8 bits). A kernel that
        is stricter than asked for may be chosen if it is faster. 16-bit types, float64 and complex numbers have
        ``"ieee"`` and ``"highest"``, integers one precision.
    reproducible
        True: use only kernels whose results have the same bits for any cuts of k into calls at multiples of
        ``Kernel.granule``. The choice then depends on type and device only, so that one kernel multiplies blocks of any
        size.
    name
        Use the kernel of this name, for example ``"cublas"``, whatever its precision.

    Raises
    ------
    ValueError
        If the named kernel is unknown or cannot compute this problem here, or the precision is unknown.
    """
    chosen = choose(problem, device, precision, reproducible=reproducible, name=name)
    return chosen.kernel(problem, device)


def explain(problem: Problem, device: Device, precision: str = "highest", *, reproducible: bool = False) -> str:
    """Return text that says which kernel `select` takes and why, and why not the others for this kind of device."""
    expected = {each.name: time for each, time in ranked(problem, device, precision, reproducible=reproducible)}
    chosen = choose(problem, device, precision, reproducible=reproducible)
    lines = [f"{problem} on {device}, precision {precision}: {chosen.name}, {chosen.idea}"]
    for candidate in CANDIDATES:
        if candidate is chosen or candidate.device_kind != device.kind:
            continue
        reason = why_not(candidate, problem, device, precision, reproducible=reproducible)
        if reason is None and candidate.name not in expected:
            reason = f"{candidate.idea}: used on this GPU only when asked for by name"
        elif reason is None:
            least = expected[chosen.name]
            reason = f"{expected[candidate.name] * 1e6:,.3g} µs expected, {chosen.name} takes {least * 1e6:,.3g}"
            if expected[candidate.name] < least:
                reason += f", but has reproducible bits, which are worth {100 * (WORTH - 1):.0f} %"
        lines.append(f"  not {candidate.name}: {reason}")
    return "\n".join(lines)


def choose(
    problem: Problem, device: Device, precision: str, *, reproducible: bool = False, name: str | None = None
) -> Candidate:
    """Return the row of the table from which `select` constructs the kernel. It needs no GPU."""
    if name is None:
        legal = ranked(problem, device, precision, reproducible=reproducible)
        if not legal:
            raise ValueError(
                f"no kernel of {problem.dtype} on {device} promises the same bits for any cuts of k: "
                "leave out reproducible=True"
            )
        return legal[0][0]
    _check(precision)
    by_name = {c.name: c for c in CANDIDATES if why_not(c, problem, device, reproducible=reproducible) is None}
    if name in by_name:
        return by_name[name]
    known = next((candidate for candidate in CANDIDATES if candidate.name == name), None)
    refused = "there is no kernel of this name"
    reason = why_not(known, problem, device, reproducible=reproducible) if known else refused
    others = ", ".join(by_name)
    raise ValueError(f"kernel {name!r} does not multiply {problem.dtype} on {device}: {reason}; use one of {others}")


def ranked(
    problem: Problem, device: Device, precision: str, *, reproducible: bool = False, everywhere: bool = False
) -> list[tuple[Candidate, float]]:
    """Return the kernels that `select` may choose without a name, the best one first, and the expected seconds of each.

    A kernel without reproducible bits ranks after those with reproducible bits that are slower by less than `WORTH`.

    Parameters
    ----------
    everywhere
        Also the kernels that `Candidate.worth_it` excludes on this GPU.
    """
    _check(precision)
    size = SIZES[-1]  # with reproducible bits, the choice is that for a large cube: it does not depend on sizes
    sized = dataclasses.replace(problem, m=size, k=size, n=size, batch=()) if reproducible else problem
    legal = [
        (candidate, seconds(candidate, sized, device))
        for candidate in CANDIDATES
        if (everywhere or candidate.worth_it is None or device.compute_capability in candidate.worth_it)
        and why_not(candidate, problem, device, precision, reproducible=reproducible) is None
    ]
    return sorted(legal, key=lambda each: _cost(each[0], each[1], problem))


@functools.lru_cache(maxsize=64)
def facts(
    problem: Problem,
    device: Device,
    precision: str,
    *,
    reproducible: bool = False,
    name: str | None = None,
    measured: tuple[tuple[str, float], ...] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return what plans need to know of the kernels that may be chosen: by name, the best one first.

    Parameters
    ----------
    measured
        Names of kernels, and their operations per second for a product of this size, from rates measured on this GPU.
        Only these kernels may be chosen then.

    Returns
    -------
    dict
        It is kept, since it takes 0.6 ms to make: do not change it. For each kernel ``"rate"``, the operations per
        second of this product; ``"cost"``, the seconds by which it is ranked; ``"relative"``, the factor that these
        have from `distmm_kernels.rates.relative`; ``"granule"``, None if its bits are not reproducible;
        ``"prepared"``, ``"copied"``, ``"workspace"``, ``"one_launch"``, ``"triangles"`` and ``"unit"`` as in
        `Candidate`, for the operands' type; ``"compiled"`` as in `Kernel`.

    Raises
    ------
    ValueError
        If `select` would raise it.
    """
    if name is not None:
        chosen = choose(problem, device, precision, reproducible=reproducible, name=name)
        listed = [(chosen, seconds(chosen, problem, device))]
    else:
        choose(problem, device, precision, reproducible=reproducible)  # raises if there is no kernel
        listed = ranked(problem, device, precision, reproducible=reproducible, everywhere=measured is not None)
    rates = {candidate.name: rate(candidate, problem, device, edge_of(problem)) for candidate, _ in listed}
    if measured is not None:
        given = dict(measured)
        listed = [(each, time * rates[each.name] / given[each.name]) for each, time in listed if each.name in given]
        listed.sort(key=lambda each: _cost(each[0], each[1], problem))
        rates = given
    return {
        candidate.name: {
            "rate": rates[candidate.name],
            "cost": _cost(candidate, expected, problem),
            "relative": relative(candidate, problem, device) if measured is None else 1.0,
            "granule": 1 if problem.accumulator.kind == "i" else candidate.granule,
            "prepared": candidate.prepared,
            "copied": candidate.copied,
            "workspace": candidate.workspace_of(problem.dtype.name),
            "one_launch": problem.dtype.name in candidate.one_launch,
            "triangles": problem.dtype.name in candidate.triangles,
            "unit": candidate.unit_of(problem.dtype.name),
            "compiled": candidate.kernel.compiled,
        }
        for candidate, expected in listed
    }


def serves(name: str, problem: Problem, device: Device) -> bool:
    """Whether a kernel can compute a problem on a device."""
    return any(each.name == name and why_not(each, problem, device) is None for each in CANDIDATES)


def _cost(candidate: Candidate, expected: float, problem: Problem) -> float:
    """Return the expected seconds of a product, times `WORTH` if the kernel's bits are not reproducible."""
    return expected * (1 if promises_bits(candidate, problem) else WORTH)


def promises_bits(candidate: Candidate, problem: Problem) -> bool:
    """Whether results have the same bits for any cuts of k at the kernel's granule. Integers always have."""
    return candidate.granule is not None or problem.accumulator.kind == "i"


def _check(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
