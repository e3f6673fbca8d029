"""Kernels that are built ahead, without a GPU: those of the usual products on GPUs of one compute capability.

A product that needs another kernel compiles it, in 1 to 5 seconds. The usual products are those of matrices in C order,
transposed or not, of any size, at the default precision, and their chains over k; `gram`; checks; the largest elements
of rows. No kernels are built ahead for factors of `gemm`, 8-bit floats, ``"high"`` and ``"medium"`` precision of
float32, and numbers that float16 halves do not hold.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import Any, TypeAlias

import numpy as np

from distmm_kernels.candidate import AMPERE, FAST_FLOAT64, HOPPER
from distmm_kernels.emulation.formats import FP16_PAIR
from distmm_kernels.launch.binary import Recipe, binary, kept
from distmm_kernels.layout.copies import NUMBERS
from distmm_kernels.layout.real_view import REALS
from distmm_kernels.reductions import largest
from distmm_kernels.reductions.lines import COMPARED, WIDER
from distmm_kernels.tiles import fragment_tiles, mma_tiles
from distmm_kernels.tiles.hopper_tiles import HopperTile, box_columns, widest
from distmm_kernels.tiles.hopper_widths import RATES, best_columns
from distmm_kernels.tiles.tiling import TILINGS, Tiling

Capability: TypeAlias = tuple[int, int]

BOTH = False, True
LARGE = 8192  # edge of the blocks of most products; in smaller chunks, half of it
H200 = 132  # its multiprocessors, and those of an H100
CODE = "distmm_kernels.device_code."
LAYOUTS: tuple[tuple[Any, Any], ...] = ("k", "n"), ("k", "k"), ("m", "n"), ("m", "k")  # of A and of B
OWN_TRANSPOSE: tuple[tuple[Any, Any], ...] = ("k", "k"), ("m", "n")


def recipes(capability: Capability, dtype: str) -> list[Recipe]:
    """Return the kernels of the usual products of operands of a type, those of most products first.

    Raises
    ------
    ValueError
        If no kernel is built ahead for this type or compute capability.
    """
    if not AMPERE[0] <= capability or dtype not in TYPES:
        raise ValueError(
            f"no kernels of {dtype} are built ahead for compute capability {capability[0]}.{capability[1]}: give "
            f"8.0 or a later one, and types among {', '.join(TYPES)}"
        )
    return sorted(dict.fromkeys([*TYPES[dtype](capability, dtype), *_beside(dtype)]), key=_rarity)


@functools.cache
def usual(capability: Capability, dtype: str) -> list[Recipe]:
    """Return those of `recipes` that most products need; they are built first. The list is kept: do not change it."""
    return [recipe for recipe in recipes(capability, dtype) if _rarity(recipe) < 1]


def build(capability: Capability, dtypes: Sequence[str], processes: int | None = None) -> Iterator[int]:
    """Build the kernels of these types that are not on disk; yield the size in bytes of each one that is there.

    Parameters
    ----------
    processes : int, optional
        Number of processes that compile at the same time; by default one for each core.
    """
    wanted = dict.fromkeys(recipe for dtype in dtypes for recipe in recipes(capability, dtype))
    there = {recipe: found for recipe in wanted if (found := kept(recipe, capability)) is not None}
    missing = [recipe for recipe in wanted if recipe not in there]
    # A process for each kernel: Numba numbers the functions of a process, and names are in the machine code.
    processes = processes or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(processes, preloaded(), max_tasks_per_child=1) as pool:
        # These come first: the builder of a short program soon ends with it, and builds a few kernels each time.
        yield from pool.map(_size, missing, itertools.repeat(capability), itertools.repeat(dict(os.environ)))
    yield from (len(found.cubin) for found in there.values())


def preloaded() -> ForkServerContext:
    """Begin to import the compilers in a process, whose forks compile: the imports take longer than most kernels."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["distmm_kernels.device_code.preloaded"])
    ensure_running()
    return context


def _size(recipe: Recipe, capability: Capability, environment: dict[str, str]) -> int:
    os.environ.update(environment)  # this process was forked from one that may be older
    return len(binary(recipe, capability).cubin)


def _rarity(recipe: Recipe) -> float:
    """Return 0 for kernels of most products, and more for those of less usual layouts, sizes and chains.

    Kernels that take less time to compile than a Hopper kernel come a little later.
    """
    copies = recipe.maker.startswith((f"{CODE}copies.transpose", f"{CODE}copies.realign", f"{CODE}copies.mirror"))
    for tile in recipe.parameters:
        if isinstance(tile, HopperTile):
            widths = {best_columns(edge, edge, 1, tile.products, H200) for edge in (LARGE // 2, LARGE)}
            layout = (tile.a_major == "m") + (tile.b_major == "k")
            return (tile.columns not in widths) + layout + 2 * bool(tile.symmetric) + tile.sliced
    return 0.5 + copies + 2 * any(isinstance(each, Tiling) for each in recipe.parameters)


def _all(maker: str, *choices: Iterable[Any]) -> Iterator[Recipe]:
    """Yield the kernels of a maker for all combinations of these parameters."""
    return (Recipe(f"{CODE}{maker}", parameters) for parameters in itertools.product(*choices))


def _beside(dtype: str) -> Iterator[Recipe]:
    """Yield copies of operands of any layout, mirror images, checks, and the largest elements of rows."""
    yield from _all("copies.realign:source")
    yield from _all("copies.transpose:source", NUMBERS.values(), [1])
    yield from _all("copies.transpose:source", [NUMBERS[4]], (2, 4))
    yield from _all("copies.mirror:source", [NUMBERS[size] for size in (2, 4, 8, 16)], [False])
    if dtype.startswith("complex"):
        yield from _all("copies.mirror:source", [dtype], [True])
        yield from _all("copies.real_view:source", [REALS[dtype].name], BOTH)
    if "float" in dtype or dtype in REALS:
        yield from _all("thin_products:times_vectors", [REALS[dtype].name if dtype in REALS else dtype])
    compared = WIDER.get(dtype, dtype)
    if compared in COMPARED:
        weighings = ("", "plain", "times", "minus") if "float" in compared else ("",)
        for weighing, by_columns in itertools.product(weighings, BOTH):
            yield largest.recipe(np.dtype(compared), 1, weighing, by_columns)


def _hopper(operand: Any, output: Any, layouts: Iterable[tuple[Any, Any]], **more: Any) -> Iterator[Recipe]:
    """Yield all widths of tiles of a variant, for these layouts of A and B."""
    for a_major, b_major in layouts:
        for columns in RATES[more.get("products", 1)]:
            if columns > widest(more.get("promotes", False)) or columns % box_columns(output):
                continue
            tile = HopperTile(operand, output, columns, a_major, b_major, **more)
            yield from _all("hopper.hopper_gemm:hopper_gemm", [tile])


def _in_chains(operand: Any, output: Any, layouts: Any, sums: str) -> Iterator[Recipe]:
    """Yield products by one launch, of one panel or several, whose sums begin at zero or at C."""
    for adds, panels in itertools.product(BOTH if output != "bool" else (False,), BOTH):
        if sums == "float32":
            yield from _hopper(operand, output, layouts, adds=adds, panels=panels, promotes=True)
        if sums != "float32" or not panels:
            yield from _hopper(operand, output, layouts, adds=adds, panels=panels)


def _tiled(maker: str, name: str, tilings: Iterable[Tiling], *more: Any) -> Iterator[Recipe]:
    """Yield the kernels of these tilings, with wide and with narrow stores of C."""
    for tiling in tilings:
        yield from _all(f"{maker}:source", [name], [tiling], {tiling.widest, 1}, *([each] for each in more))


def _fragments(capability: Capability, operand: Any, residues: bool = False) -> Iterator[Recipe]:
    layouts = itertools.product(BOTH, BOTH) if fragment_tiles.ITEMSIZE[operand] == 2 else [(True, True)]
    for along_k in layouts:
        tilings = fragment_tiles.tilings(operand, capability, along_k)
        yield from _tiled("fragments", operand, tilings, residues)


def _chain(capability: Capability, dtype: str) -> Iterator[Recipe]:
    """Yield chains of multiply-adds, for a short k."""
    if dtype == "float64" and capability in FAST_FLOAT64:
        for along_k in itertools.product(BOTH, BOTH):
            some = (dataclasses.replace(tiling, along_k=along_k) for tiling in mma_tiles.tilings(capability))
            yield from _tiled("mma", dtype, some)
    else:
        yield from _tiled("register_tiled", dtype, TILINGS[dtype])


def _float32(capability: Capability, dtype: str) -> Iterator[Recipe]:
    """Yield the kernels of float32, and of complex64 as real numbers."""
    yield from _chain(capability, "float32")
    if capability not in FAST_FLOAT64:
        return
    for vectors in reversed(BOTH):
        yield from _all("copies.prepass:find_maxima", [vectors])
        yield from _all("copies.prepass:split_columns", [FP16_PAIR], [vectors])
        yield from _all("copies.prepass:split_rows", [FP16_PAIR], [vectors], (1, 2, 4, 8))
    if capability != HOPPER[0]:
        for along_k in itertools.product(BOTH, BOTH):
            yield from _tiled(
                "fragments", "float16", fragment_tiles.tilings_of_halves("float16", capability, along_k), False
            )
        return
    yield from _all("slices:add_slices", ["float32"], ["float32"], BOTH)
    for adds in BOTH:
        halves = {"products": 3, "scaled": True, "adds": adds}
        yield from _hopper("float16", "float32", LAYOUTS, **halves)
        own, symmetric = (LAYOUTS[:2], 2) if dtype == "complex64" else (OWN_TRANSPOSE, 1)
        yield from _hopper("float16", "float32", own, symmetric=symmetric, **halves)


def _float64(capability: Capability, dtype: str) -> Iterator[Recipe]:
    """Yield the kernels of float64, and of complex128, which has two parts."""
    parts = 2 if dtype == "complex128" else 1
    yield from _chain(capability, "float64")
    yield from _all("residues:find_factors", [parts])
    yield from _all("residues:sum_squares", BOTH, [parts])
    yield from _all("residues:split", BOTH, [parts])
    file, few = "reconstruct_complex" if parts == 2 else "reconstruct", capability not in FAST_FLOAT64
    yield from _all(f"{file}:reconstruct", [few], BOTH)
    if parts == 2:  # Hermitian products
        yield from _all(f"{file}:reconstruct", [few], BOTH, [True])
    yield from _residues(capability)


def _residues(capability: Capability) -> Iterator[Recipe]:
    if capability != HOPPER[0]:
        yield from _fragments(capability, "int8", residues=True)
        return
    for symmetric in BOTH:
        yield from _hopper("int8", "int8", [("k", "k")], symmetric=symmetric)


def _integers(capability: Capability, dtype: str) -> Iterator[Recipe]:
    """Yield the kernels of int32 and int64."""
    bits = int(dtype[3:])
    yield from _chain(capability, dtype)
    yield from _all("integer_residues:split", [bits], BOTH)
    yield from _all("integer_residues:reconstruct", [bits], BOTH)
    yield from _residues(capability)


def _narrow(capability: Capability, dtype: str) -> Iterator[Recipe]:
    """Yield the kernels of operands that tensor cores read as they are."""
    integer = "int" in dtype
    sums = "int32" if integer else "float32"
    if capability != HOPPER[0]:
        if dtype == "uint8":
            yield from _integers(capability, "int32")
        else:
            yield from _fragments(capability, dtype)
        return
    layouts = [("k", "k")] if integer else LAYOUTS[:1]
    for output in (sums, "uint8" if integer else dtype):
        yield from _in_chains(dtype, output, layouts, sums)
    yield from _hopper(dtype, sums, layouts, sliced=True)
    yield from _all("slices:add_slices", [sums], [sums] if integer else [sums, dtype], BOTH)
    for promotes in (False,) if integer else BOTH:
        output = sums if integer else dtype
        yield from _hopper(dtype, output, layouts if integer else OWN_TRANSPOSE, symmetric=True, promotes=promotes)


TYPES: dict[str, Callable[[Capability, str], Iterator[Recipe]]] = {
    "float32": _float32,
    "float64": _float64,
    "bfloat16": _narrow,
    "float16": _narrow,
    "complex64": _float32,
    "complex128": _float64,
    "int8": _narrow,
    "uint8": _narrow,
    "int32": _integers,
    "int64": _integers,
}
"""Operand types whose kernels are built ahead."""
