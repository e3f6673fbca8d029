"""How fast each kernel was measured to be, by GPU model, and the time that this gives for a product."""

from __future__ import annotations

import itertools
import math

from distmm_kernels.candidates import Candidate
from distmm_kernels.config import Problem
from distmm_kernels.tiles.tiling import TILINGS

__all__ = ["SIZES", "rate", "seconds"]

# TFLOP/s of whole products of n x n matrices, the preparation of both operands and the host's time included; by type of
# operand, or of accumulator where a kernel converts to that. One NVIDIA H200, N(0, 1) data (README.md says how).
# bool as the result of bool: the counts are compared with 0 in another pass. uint8 has the rates of int8, within 4 %
# at 8192. Those of mma_sync were measured next to Hopper's kernels, with hopper_bf16 and hopper's int8 below 8192; its
# bfloat16 to float32, its float16 to float16. Estimated from the others: at 512 those of bool, dmma, residues,
# integer_residues, complex_fp16x3 and complex_residues, and of register_tiled's types but float32 and complex64; below
# 4096 float64 and complex128 there. int32 and int64 there were measured without the preparation, which takes as long as
# that of float32.
SIZES = (512, 1024, 2048, 4096, 8192)
_RATES: dict[tuple[int, int], dict[str, dict[str, tuple[float, ...]]]] = {
    (9, 0): {
        "hopper_bf16": {"float32": (2.7, 32, 209, 393, 528)},
        "hopper_tf32": {"float32": (4.9, 37, 284, 358, 383)},
        "hopper": {
            "bfloat16": (6.7, 61, 459, 736, 736),
            "float16": (7.1, 59, 469, 725, 729),
            **dict.fromkeys(("int8", "uint8"), (4.0, 25.4, 192, 1171, 1464)),
            "bool": (1.5, 11.8, 99.5, 693, 959),
        },
        "mma_sync_fp16x3": {"float32": (1.5, 12.4, 78.1, 122, 127)},
        "mma_sync_tf32x3": {"float32": (1.2, 12.9, 50.3, 49.4, 53.6)},
        "mma_sync_bf16": {"float32": (3.4, 30, 185, 292, 375)},
        "mma_sync_tf32": {"float32": (3.3, 20.9, 165, 200, 218)},
        "mma_sync": {
            "bfloat16": (6.2, 54.4, 337, 430, 457),
            "float16": (3.8, 35.6, 213, 338, 399),
            "int8": (3.7, 24.6, 186, 717, 850),
        },
        "fp16x3": {"float32": (1.5, 14, 92, 207, 243)},
        "tf32x3": {"float32": (1.8, 15, 100, 115, 133)},
        "dmma": {"float64": (5.2, 41.3, 52.5, 54.4, 54.3)},
        "residues": {"float64": (1.8, 14.5, 48.9, 71.1, 87.1)},
        "integer_residues": {"int32": (1.4, 11.2, 87.9, 122, 139), "int64": (1.4, 11.1, 51.6, 69.9, 77.6)},
        "complex_fp16x3": {"complex64": (5, 38.2, 176, 219, 222)},
        "complex_residues": {"complex128": (5.7, 27.1, 72.4, 96.3, 104)},
        "register_tiled": {
            "float32": (4.3, 35, 50, 52.8, 53.6),
            "int32": (3.5, 25, 28.3, 31, 31.2),
            "float64": (3.5, 15, 22, 25.5, 26),
            "int64": (2, 6, 6.2, 6.1, 6.4),
            "complex64": (10, 30.9, 45.9, 46.4, 46.8),
            "complex128": (18.3, 23.4, 24, 25, 25),
        },
        "tiled": {
            "float32": (1, 4.5, 7, 7.4, 7.4),
            "int32": (1, 4.5, 7, 7.3, 7.3),
            "float64": (1, 3, 4.2, 4.5, 4.5),
            "int64": (1, 2.5, 3.1, 3.2, 3.2),
            "complex64": (2, 6, 8, 8.4, 8.4),
            "complex128": (2, 4, 5, 5, 5),
        },
        "naive": dict.fromkeys(TILINGS, (0.9, 1.9, 2.5, 2.6, 2.6)),
        "guvectorized": {name: (0.0075,) * len(SIZES) for name in TILINGS},
    }
}
# A GPU that has not been measured uses the rates of this one: the reasons for their order are the same.
_MEASURED = (9, 0)
_COPY = 4.2e12  # bytes a second, read and written, by a copy within an H200


def seconds(candidate: Candidate, problem: Problem, capability: tuple[int, int]) -> float:
    """Time that a product should take: its operations, with those of tiles that stick out of C, by the measured rate.

    And its passes over operands and C, as far as they are more than those of a cube of as many multiply-adds.
    """
    m, k, n, batch = (max(1, size) for size in (problem.m, problem.k, problem.n, math.prod(problem.batch)))
    rows, columns = (-(-size // tile) * tile for size, tile in zip((m, n), candidate.tile, strict=True))
    together, turns = (batch, 1) if candidate.side_by_side else (1, batch)
    operations = (8 if problem.accumulator.kind == "c" else 2) * together * rows * columns * k
    edge: float = (together * m * k * n) ** (1 / 3)
    of_operands, of_c = candidate.passes
    passes = together * (of_operands * (m * k + k * n) + of_c * m * n) - (2 * of_operands + of_c) * edge**2
    return turns * (operations / rate(candidate, problem, capability, edge) + max(0.0, passes) / _COPY)


def rate(candidate: Candidate, problem: Problem, capability: tuple[int, int], edge: float) -> float:
    """Operations a second, at which ``2 m k n`` are done (4 times as many for complex numbers).

    Parameters
    ----------
    edge
        Size of a cube of as many multiply-adds. Between measured sizes the logarithm is interpolated; below the least
        one, time is constant, and above the greatest, the rate is.
    """
    rates = _RATES.get(capability, _RATES[_MEASURED])[candidate.name]
    measured = rates.get(problem.dtype.name) or rates[problem.accumulator.name]
    if edge <= SIZES[0]:
        return 1e12 * measured[0] * (edge / SIZES[0]) ** 3
    for (low, below), (high, above) in itertools.pairwise(zip(SIZES, measured, strict=True)):
        if edge <= high:
            share = math.log(edge / low) / math.log(high / low)
            return 1e12 * below * math.exp(share * math.log(above / below))
    return 1e12 * measured[-1]
