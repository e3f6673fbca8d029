"""The table of kernels: what each multiplies, how precisely, and on which devices; `rates` says how fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distmm_kernels.config import NARROW, PRECISIONS, SUPPORTED, TILE, Problem
from distmm_kernels.emulation.formats import GRANULE
from distmm_kernels.tiles.fragment_tiles import MULTIPLICANDS, FragmentTiling, Multiplicand, tilings_of_halves
from distmm_kernels.tiles.fragment_tiles import tilings as fragment_tilings
from distmm_kernels.tiles.hopper_tiles import COORDINATES, STRETCH
from distmm_kernels.tiles.mma_tiles import tilings
from distmm_kernels.tiles.tiling import TILINGS, Tiling

__all__ = ["CANDIDATES", "Candidate"]


@dataclass(frozen=True)
class Candidate:
    """One row of the table.

    Attributes
    ----------
    kernel
        ``module:class`` below ``distmm_kernels.gemm``.
    dtypes
        Operands that it multiplies, by name.
    precision
        The strictest of ``PRECISIONS`` that float products meet; integer products are exact in every kernel.
    granule
        The kernel's own; None if it promises no bits.
    tile
        Rows and columns of C that one thread block owns; the part of a tile beyond C is computed in vain.
    loads
        Loads from global memory for one element of C; None for a kernel whose threads load nothing themselves.
    capabilities
        The least and the greatest compute capability.
    worth_it
        Compute capabilities where it is chosen unasked, of those that it runs on; None: all.
    passes
        Bytes that are read and written beside the tiles, for each element of A and B and for each of C. Cubes have
        them in their measured rates; thin products have more of them for an operation.
    side_by_side
        Whether it works on the matrices of a batch at the same time; else each takes as long as it does alone.
    sizes_below
        Sizes that its coordinates can count; None: any.
    by_name_only
        True for what is never chosen unasked: a peer that we measure ourselves against.
    """

    name: str
    device_kind: str
    kernel: str
    idea: str
    dtypes: frozenset[str]
    precision: str
    granule: int | None
    tile: tuple[int, int] = (1, 1)
    loads: Callable[[Problem], int] | None = None
    capabilities: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (99, 0))
    worth_it: frozenset[tuple[int, int]] | None = None
    passes: tuple[int, int] = (0, 0)
    side_by_side: bool = True
    sizes_below: int | None = None
    by_name_only: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(f"{self.name} has precision {self.precision!r}: use one of {', '.join(PRECISIONS)}")


ALL = frozenset(dtype.name for dtype in SUPPORTED + NARROW)
FLOATS = frozenset(dtype.name for dtype in SUPPORTED + NARROW if dtype.kind not in "iub")
FLOAT32 = frozenset({"float32"})
FLOAT64 = frozenset({"float64"})
COMPLEX64 = frozenset({"complex64"})
WIDE_INTEGERS = frozenset({"int32", "int64"})
COMPLEX128 = frozenset({"complex128"})
HOPPER = ((9, 0), (9, 0))  # wgmma exists there only
AMPERE = ((8, 0), (99, 0))  # and later: asynchronous copies to shared memory
# A100, H100 and H200, B200: float64 tensor cores at full rate. Other GPUs since then have the instruction, and do it at
# the rate of a few float64 units, which multiply-adds reach as well.
FAST_FLOAT64 = frozenset({(8, 0), (9, 0), (10, 0)})
# The same have float16 tensor cores 15 times as fast as float32 units, and more; other GPUs 2 to 4 times, so that three
# products and a split gain nothing.
FAST_TENSOR_CORES = FAST_FLOAT64


def _register_loads(problem: Problem) -> int:
    return _tile_loads(TILINGS[problem.accumulator.name][0], problem)


def _tile_loads(tiling: Tiling, problem: Problem) -> int:
    steps = -(-problem.k // tiling.depth) * tiling.depth
    return -(-steps * (tiling.rows + tiling.columns) // (tiling.rows * tiling.columns))


def _fragment_loads(
    kind: Multiplicand | None = None, made: Callable[..., tuple[FragmentTiling, ...]] = fragment_tilings
) -> Callable[[Problem], int]:
    def loads(problem: Problem) -> int:
        tiling = made(kind or MULTIPLICANDS[problem.dtype.name], (9, 0), (True, True))[0]
        return tiling.parts * _tile_loads(tiling, problem)

    return loads


CANDIDATES = (
    Candidate(
        "cpu", "cpu", "cpu:CpuKernel", "BLAS for floats, packed tiles on all cores for integers", ALL, "ieee", None
    ),
    Candidate(
        "hopper_bf16",
        "cuda",
        "hopper:HopperBf16Kernel",
        "operands rounded to bfloat16, on tensor cores",
        FLOAT32,
        "medium",
        granule=STRETCH,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES,
    ),
    Candidate(
        "hopper_tf32",
        "cuda",
        "hopper:HopperTf32Kernel",
        "operands rounded to TF32, on tensor cores",
        FLOAT32,
        "high",
        granule=STRETCH,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES,
    ),
    Candidate(
        "hopper",
        "cuda",
        "hopper:HopperKernel",
        "tensor cores fed by the tensor memory accelerator",
        frozenset(dtype.name for dtype in NARROW),
        "highest",
        granule=STRETCH,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES,
    ),
    Candidate(
        "fp16x3",
        "cuda",
        "emulated:Fp16x3Kernel",
        "three products of scaled float16 halves, on tensor cores",
        FLOAT32,
        "highest",
        granule=8192,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES,
    ),
    Candidate(
        "tf32x3",
        "cuda",
        "emulated:Tf32x3Kernel",
        "three products of TF32 halves, on tensor cores",
        FLOAT32,
        "highest",
        granule=8192,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES,
    ),
    Candidate(
        "mma_sync_fp16x3",
        "cuda",
        "emulated_mma_sync:MmaSyncFp16x3Kernel",
        "three products of scaled float16 halves, on tensor cores fed by ldmatrix",
        FLOAT32,
        "highest",
        granule=GRANULE,
        tile=(64, 64),
        loads=_fragment_loads("float16", tilings_of_halves),
        capabilities=AMPERE,
        worth_it=FAST_TENSOR_CORES,
    ),
    Candidate(
        "mma_sync_tf32x3",
        "cuda",
        "emulated_mma_sync:MmaSyncTf32x3Kernel",
        "three products of TF32 halves, on tensor cores fed by ldmatrix",
        FLOAT32,
        "highest",
        granule=GRANULE,
        tile=(64, 64),
        loads=_fragment_loads("tfloat32", tilings_of_halves),
        capabilities=AMPERE,
        worth_it=FAST_TENSOR_CORES,
    ),
    Candidate(
        "mma_sync_bf16",
        "cuda",
        "mma_sync:MmaSyncBf16Kernel",
        "operands rounded to bfloat16, on tensor cores fed by ldmatrix",
        FLOAT32,
        "medium",
        granule=GRANULE,
        tile=(64, 128),
        loads=_fragment_loads("bfloat16"),
        capabilities=AMPERE,
    ),
    Candidate(
        "mma_sync_tf32",
        "cuda",
        "mma_sync:MmaSyncTf32Kernel",
        "operands rounded to TF32, on tensor cores fed by ldmatrix",
        FLOAT32,
        "high",
        granule=GRANULE,
        tile=(64, 128),
        loads=_fragment_loads("tfloat32"),
        capabilities=AMPERE,
    ),
    Candidate(
        "mma_sync",
        "cuda",
        "mma_sync:MmaSyncKernel",
        "tensor cores fed by ldmatrix",
        frozenset(MULTIPLICANDS),
        "highest",
        granule=GRANULE,
        tile=(64, 128),
        loads=_fragment_loads(),
        capabilities=AMPERE,
    ),
    Candidate(
        "dmma",
        "cuda",
        "dmma:DmmaKernel",
        "float64 tensor cores, in ascending k",
        FLOAT64,
        "ieee",
        granule=1,
        tile=(64, 64),
        loads=lambda problem: _tile_loads(tilings((9, 0))[0], problem),
        capabilities=AMPERE,
        worth_it=FAST_FLOAT64,
    ),
    Candidate(
        "residues",
        "cuda",
        "residues:ResidueKernel",
        "sixteen products of int8 residues, on tensor cores",
        FLOAT64,
        "highest",
        granule=8192,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES,
        passes=(32, 40),  # two times 8 in, 16 out; 16 out, 16 in, 8 out
        side_by_side=False,
    ),
    Candidate(
        "integer_residues",
        "cuda",
        "integer_residues:IntegerResidueKernel",
        "ten or eighteen products of int8 residues, on tensor cores",
        WIDE_INTEGERS,
        "ieee",
        granule=1,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES,
        passes=(26, 44),  # of int64: 8 in, 18 out; 18 out, 18 in, 8 out
        side_by_side=False,
    ),
    Candidate(
        "complex_fp16x3",
        "cuda",
        "real_view:ComplexFp16x3Kernel",
        "one real product by scaled float16 halves, on tensor cores",
        COMPLEX64,
        "highest",
        granule=4096,
        tile=(128, 64),
        capabilities=HOPPER,
        sizes_below=COORDINATES // 2,
        passes=(44, 0),  # A: 8 in, 8 out; B: 8 in, 16 out, two times 16 in, 16 out
    ),
    Candidate(
        "complex_residues",
        "cuda",
        "residues:ComplexResidueKernel",
        "three times sixteen products of int8 residues, on tensor cores",
        COMPLEX128,
        "highest",
        granule=8192,
        tile=(128, 128),
        capabilities=HOPPER,
        sizes_below=COORDINATES // 2,
        passes=(80, 112),  # two times 16 in, 48 out; 48 out, 48 in, 16 out
        side_by_side=False,
    ),
    Candidate(
        "register_tiled",
        "cuda",
        "register_tiled:RegisterTiledKernel",
        "tiles in shared memory, and tiles of those in registers",
        ALL,
        "ieee",
        granule=1,
        tile=(64, 64),
        loads=_register_loads,
        capabilities=AMPERE,
    ),
    Candidate(
        "tiled",
        "cuda",
        "tiled:TiledKernel",
        f"{TILE} x {TILE} tiles in shared memory",
        ALL,
        "ieee",
        granule=1,
        tile=(TILE, TILE),
        # a thread loads one element of A and one of B for each tile along k
        loads=lambda problem: 2 * -(-problem.k // TILE),
    ),
    Candidate(
        "naive",
        "cuda",
        "naive:NaiveKernel",
        "one thread per element of C",
        ALL,
        "ieee",
        granule=1,
        tile=(TILE, TILE),
        loads=lambda problem: 2 * problem.k,
    ),
    Candidate(
        "guvectorized",
        "cuda",
        "guvectorized:GuvectorizedKernel",
        "Numba's generalised ufunc, one thread per row of C",
        ALL,
        "ieee",
        granule=1,
        tile=(TILE, TILE),
        loads=lambda problem: 2 * problem.k,
    ),
    Candidate(
        "cublas", "cuda", "cublas:CublasKernel", "NVIDIA's library, through CuPy", FLOATS, "highest", None,
        by_name_only=True,
    ),
)  # fmt: skip
