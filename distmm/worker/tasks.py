"""The functions that run on workers, and the only door to the kernels.

Kernels are imported inside the function bodies: the client and the scheduler import this module without Numba and
without a GPU. No function writes into its arguments, because a task may run twice (a retry, a lost result): in-place
accumulation would then count a product twice.
"""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.planning.problem import Symmetry
from distmm.transfer import Lent
from distmm.worker import files_to_gpu, gpu
from distmm.worker.worker_slots import beside_products

if TYPE_CHECKING:
    from distributed import Worker

    from distmm_kernels.kernel import Kernel

__all__ = ["Epilogue", "KernelChoice", "load", "mirror", "multiply", "pool_bytes", "probe", "warm"]

# Fraction of a worker's memory limit at which Dask pauses it (distributed.worker.memory.pause).
PAUSE_FRACTION = 0.8

LARGE = 8192  # edge of the blocks of most products

# Edge of the tiles on the diagonal whose upper half is chosen element by element, with a mask; the rest is copied.
DIAGONAL_TILE = 256

WARM = 512  # their depth where a kernel is only to be loaded; edge of what is sent to try the connections

Block = Any  # a NumPy or CuPy array, or an operand in a kernel's own format

# Of the loads that are under way so many copy at a time: two keep the link busy, and the first ones are there early.
_loading = threading.BoundedSemaphore(2)


@dataclass(frozen=True)
class KernelChoice:
    """Which kernel the tasks of a product use: device, result type, precision, and a name if one is asked for.

    On a GPU a worker keeps `prepared` elements of A and B in the kernel's own format at most.
    """

    device: Literal["cpu", "cuda"]
    dtype: np.dtype
    precision: str = "highest"
    name: str | None = None
    prepared: float = field(default=math.inf, compare=False)  # the kernel is the same


@dataclass(frozen=True)
class Epilogue:
    """What the last step of a chain does: ``alpha * D + beta * C0``, cast to `dtype`, as a NumPy or CuPy block.

    Of symmetric products: with `conjugate`, the conjugate of that (``A.conj().T @ A`` is made of blocks of ``A.T``, and
    is the conjugate of their Hermitian product); on the diagonal, where it has the product's `symmetry`, its upper half
    becomes the mirror image of the lower one.
    """

    dtype: np.dtype
    kind: Literal["numpy", "cupy"]
    alpha: complex = 1
    beta: complex = 0
    conjugate: bool = False
    symmetry: Symmetry | None = None


@lru_cache(maxsize=256)
def _kernel(choice: KernelChoice, m: int, k: int, n: int, batch: tuple[int, ...]) -> Kernel:
    from distmm_kernels import config, device, select

    here = device.cpu() if choice.device == "cpu" else device.current()
    if here.kind != choice.device:
        raise RuntimeError(f"this product was planned for GPUs, but this worker cannot use one: {device.why_no_gpu()}")
    problem = config.Problem(m=m, k=k, n=n, dtype=config.operand_dtype(choice.dtype), batch=batch)
    # Blocks of a product may differ in size, and must not differ in the kernel that multiplies them.
    reproducible = here.kind == "cuda" and choice.name is None
    return select.select(problem, here, choice.precision, reproducible=reproducible, name=choice.name)


def multiply(
    where: object,
    choice: KernelChoice,
    c: Block | None,
    a_blocks: list[Block],
    b_blocks: list[Block],
    epilogue: Epilogue | None = None,
    c0: Block | None = None,
    symmetry: Symmetry | None = None,
) -> Block:
    """One step of a chain: ``D = C + sum(A[i, p] @ B[p, j])`` over the step's panels, in ascending k, into a new block.

    Parameters
    ----------
    where : Placement
        Read by the scheduler's plugin, not here.
    choice : KernelChoice
    c : block ``(*batch, m, n)`` of accumulators, or None at the first step
    a_blocks, b_blocks : lists of blocks ``(*batch, m, k_p)`` and ``(*batch, k_p, n)``
    epilogue : Epilogue, optional
        Given at the last step.
    c0 : block ``(*batch, m, n)``, optional
        The user's C of ``beta * C``.
    symmetry : {"symmetric", "hermitian"}, optional
        Of a symmetric product: `b_blocks` are blocks ``(*batch, n, k_p)`` of A, whose (conjugate) transposes are B's.
    """
    batch = np.broadcast_shapes(a_blocks[0].shape[:-2], b_blocks[0].shape[:-2])
    depth = max(a.shape[-1] for a in a_blocks)
    kernel = _kernel(choice, a_blocks[0].shape[-2], depth, b_blocks[0].shape[-2 if symmetry else -1], batch)
    pairs = list(zip(a_blocks, b_blocks, strict=True))

    def prepare_b(block: Block, wait: bool = True) -> Any:
        return kernel.prepare_b(_flipped(block, symmetry) if symmetry else block, wait=wait)

    if choice.device == "cpu":
        # NumPy multiplies a block with its own transpose by SYRK, with other bits than GEMM's, if both are in the same
        # memory: where the block has to be copied first, one copy serves as both.
        lefts = [kernel.prepare_a(a) for a, _ in pairs]
        rights = [prepare_b(left if symmetry and b is a else b) for left, (a, b) in zip(lefts, pairs, strict=True)]
        return _step(kernel, c, list(zip(lefts, rights, strict=True)), epilogue, c0)

    def on_gpu() -> Block:
        with gpu.working("product"):
            a_form, b_form = ("A", kernel.name, kernel.dtype), ("B", kernel.name, kernel.dtype, symmetry)
            operands = [
                (
                    gpu.prepared.get(a, a_form, partial(kernel.prepare_a, wait=False), choice.prepared),
                    gpu.prepared.get(b, b_form, partial(prepare_b, wait=False), choice.prepared),
                )
                for a, b in pairs
            ]
            return _step(kernel, c, operands, epilogue, c0)

    out = gpu.retrying(on_gpu, f"a block of C, {a_blocks[0].shape[-2]} x {b_blocks[0].shape[-1]} {kernel.accumulator},")
    return to_host(out) if epilogue is not None and epilogue.kind == "numpy" else out


def _step(
    kernel: Kernel, c: Block | None, operands: list[tuple[Any, Any]], epilogue: Epilogue | None, c0: Block | None
) -> Block:
    """Add the products of prepared operands to `c`, and finish the last one."""
    *others, (a, b) = operands
    for left, right in others:
        c = kernel.multiply(left, right, c, wait=False)
    if epilogue is not None and epilogue.alpha == 1 and epilogue.beta == 0:
        return _shaped(kernel.multiply(a, b, c, dtype=epilogue.dtype, wait=False), epilogue)
    d = kernel.multiply(a, b, c, wait=False)
    if epilogue is None:
        return d
    return _shaped(kernel.finish(d, epilogue.alpha, epilogue.beta, c0, epilogue.dtype), epilogue)


def _shaped(block: Block, epilogue: Epilogue) -> Block:
    """Do to a new block, in its own memory, what an epilogue says of symmetric products."""
    if epilogue.conjugate:
        gpu.namespace(block).conjugate(block, out=block)
    if epilogue.symmetry is not None:
        # Real numbers as words of their size: no library need know how to choose between bfloat16 values.
        _symmetrize(block if block.dtype.kind == "c" else block.view(f"u{block.itemsize}"), epilogue.symmetry)
    return block


def _flipped(block: Block, symmetry: Symmetry) -> Block:
    """Return the transpose ``(*batch, n, m)`` of a block, as a view, or its conjugate transpose."""
    turned = block.swapaxes(-1, -2)
    return turned.conj() if symmetry == "hermitian" else turned


def _symmetrize(block: Block, symmetry: Symmetry) -> None:
    """Overwrite the upper half of a new block ``(*batch, m, m)`` by its lower half.

    ``A[i] @ A[i].T`` is symmetric, but kernels need not add the terms of its two halves in the same way: the bits would
    differ. The diagonal of ``A[i] @ A[i].conj().T`` is real, which rounding may miss (BLAS's HERK sets it, too).
    """
    size = block.shape[-1]
    if size > DIAGONAL_TILE:
        half = size // 2
        block[..., :half, half:] = _flipped(block[..., half:, :half], symmetry)
        _symmetrize(block[..., :half, :half], symmetry)
        _symmetrize(block[..., half:, half:], symmetry)
        return
    library = gpu.namespace(block)
    below = library.tri(size, k=-1, dtype=bool)
    diagonal = block.real if symmetry == "hermitian" else block
    block[...] = library.where(below, block, library.where(below.T, _flipped(block, symmetry), diagonal))


def mirror(where: object, symmetry: Symmetry, block: Block) -> Block:
    """Return C[j, i] of a symmetric product, given C[i, j]: a view of it, or a conjugate. Runs on workers."""
    on_gpu = symmetry == "hermitian" and gpu.namespace(block) is not np
    with gpu.working("product") if on_gpu else contextlib.nullcontext():
        return _flipped(block, symmetry)


def warm(choice: KernelChoice) -> None:
    """Load (or compile) the kernel for large blocks and use it as a chain does. Runs on workers."""
    kernel = _kernel(choice, LARGE, LARGE, LARGE, ())
    a = kernel.prepare_a(np.zeros((LARGE, WARM), choice.dtype))
    b = kernel.prepare_b(np.zeros((WARM, LARGE), choice.dtype))
    c = kernel.multiply(a, b, kernel.multiply(a, b, None))  # a first step, one between, and a last one
    kernel.multiply(a, b, c, dtype=choice.dtype)


def small_block() -> Block:
    """Return a block that travels between GPUs as large ones do. Runs on workers."""
    import cupy

    return cupy.zeros((WARM, WARM), "f4")


def touch(block: Block) -> None:
    """Have a block brought here. Runs on workers."""


def combine(
    where: object,
    choice: KernelChoice,
    left: Block,
    right: Block,
    epilogue: Epilogue | None = None,
    c0: Block | None = None,
) -> Block:
    """Add two partial blocks ``(*batch, m, n)`` of C, of accumulators, into a new one; then as `multiply`."""
    with gpu.working("product") if choice.device == "cuda" else contextlib.nullcontext():
        c = left + right
        if epilogue is None:
            return c
        kernel = _kernel(choice, c.shape[-2], 1, c.shape[-1], c.shape[:-2])
        out = _shaped(kernel.finish(c, epilogue.alpha, epilogue.beta, c0, epilogue.dtype), epilogue)
    return to_host(out) if epilogue.kind == "numpy" else out


def to_host(block: Block) -> Block:
    """Return a NumPy copy of a CuPy block; a NumPy block as it is."""
    if not (hasattr(block, "get") and hasattr(block, "__cuda_array_interface__")):
        return block
    from distmm.worker import gpu_copies

    return gpu_copies.fetch(block)


def to_device(block: Block) -> Block:
    """Return a CuPy copy of a NumPy block: uploaded once, then used by every product and sent between GPUs."""
    import cupy

    return cupy.asarray(block)


def load(source: Any, index: tuple[slice, ...], device: Literal["cpu", "cuda"]) -> Block:
    """Read one block of an array-like (Zarr array, HDF5 matrix, array of the client) into host or GPU memory."""
    if device == "cuda" and isinstance(source, (Lent, files_to_gpu.Source)):
        with beside_products("load"), _loading:
            return source.to_device(index) if isinstance(source, Lent) else files_to_gpu.upload(source, index)
    block = np.asarray(source[index])
    return to_device(block) if device == "cuda" else block


def probe(
    gpus: Literal["none", "own", "any"], dtype: np.dtype, precision: str, kernel: str | None, dask_worker: Worker
) -> dict[str, Any]:
    """Tell what this worker can do: device, free bytes for blocks, threads, kernel. Runs on workers (``client.run``).

    A worker of dask-cuda owns one GPU; any other worker would only share one by accident, and counts as a CPU worker
    unless `gpus` is "any".
    """
    import psutil

    threads, limit = dask_worker.state.nthreads, dask_worker.memory_manager.memory_limit
    rss = psutil.Process().memory_info().rss
    owned = any(type(plugin).__module__.startswith("dask_cuda") for plugin in dask_worker.plugins.values())
    gpu = {"problem": "it was not started by dask-cuda"}
    if gpus == "any" or (gpus == "own" and owned):
        gpu = local_gpu()
        if "problem" not in gpu:
            memory, host = gpu["memory"] - dask_worker.state.nbytes, max(0, limit - rss) if limit else None
            more = {"memory": memory, "host_memory": host, "threads": threads}
            return {**gpu, **more, **kernel_facts(KernelChoice("cuda", dtype, precision, kernel))}
    # Dask pauses a worker at 80 % of its limit; the interpreter and its libraries take their part, blocks held another.
    memory = int(PAUSE_FRACTION * limit) - rss if limit else psutil.virtual_memory().available
    more = {"device": "cpu", "memory": max(0, memory), "threads": threads}
    return {**gpu, **more, **kernel_facts(KernelChoice("cpu", dtype, precision, kernel))}


def kernel_facts(choice: KernelChoice) -> dict[str, Any]:
    """Return name and granule of the kernel for large blocks, or under "no kernel" why there is none."""
    try:
        kernel = _kernel(choice, LARGE, LARGE, LARGE, ())
    except (ValueError, RuntimeError) as error:
        return {"no kernel": str(error)}
    return {"kernel": kernel.name, "granule": kernel.granule}


def local_gpu() -> dict[str, Any]:
    """Return this process's GPU with its bytes for blocks, or under "problem" why there is none."""
    from distmm_kernels import device

    if device.current().kind != "cuda":
        return {"problem": device.why_no_gpu()}
    import cupy

    free, _ = cupy.cuda.Device().mem_info
    return {"device": "cuda", "threads": 1, "memory": pool_bytes() or int(free)}


def pool_bytes() -> int | None:
    """Size of RMM's pool on this GPU; None where CuPy allocates from the device itself."""
    try:
        import rmm
    except ImportError:
        return None
    resource = rmm.mr.get_current_device_resource()
    while not hasattr(resource, "pool_size") and hasattr(resource, "upstream_mr"):
        resource = resource.upstream_mr  # below what logs or counts allocations
    return int(resource.pool_size()) if hasattr(resource, "pool_size") else None
