"""Products of blocks: one step of a chain over k, the sum of two chains of split-K, and mirror images."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from distmm.planning.problem import Symmetry
from distmm.worker import gpu, prepared_operands
from distmm.worker.blas_threads import shared_by
from distmm.worker.client_output import ClientOutput
from distmm.worker.tasks.arrivals import Arrivals
from distmm.worker.tasks.epilogue import Block, Epilogue, applied, flipped
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_for
from distmm.worker.tasks.loads import Load
from distmm.worker.tasks.metrics import exponents, scaled, unscaled
from distmm.worker.tasks.reductions import BlockReduction, Part, on_host
from distmm.worker.united_chunks import Union

if TYPE_CHECKING:
    from distmm_kernels.kernel import Kernel


def multiply(
    where: object,
    choice: KernelChoice,
    c: Block | None,
    a_blocks: list[Block],
    b_blocks: list[Block],
    epilogue: Epilogue | None = None,
    c0: Block | None = None,
    symmetry: Symmetry | None = None,
    most_prepared: float = math.inf,
    tasks: int = 1,
    reduction: BlockReduction | None = None,
    norms: list[np.ndarray] | None = None,
    peak: int | None = None,
    arrivals: Arrivals | None = None,
) -> Block | tuple[Part, ...]:
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
        For a symmetric product. `b_blocks` are then blocks ``(*batch, n, k_p)`` of A, whose transposes are B's.
    most_prepared : float
        Most elements of A and B that a GPU worker keeps in the kernel's own format.
    tasks : int
        Number of these tasks that run side by side, on all workers together: on CPUs they share the cores.
    reduction : BlockReduction, optional
        Given at the last step of a product that is reduced: the block's parts are returned in its place.
    norms : list of arrays ``(m,)`` and ``(n,)``, optional
        For a reduction that asks for norms. All steps have them if products of rows may overflow (`exponents`).
    peak : int, optional
        Bytes that the plan expects on a GPU at the peak, for the message where its memory is full.
    arrivals : Arrivals, optional
        What A, B and C say of these blocks, which are then checked.
    """
    if arrivals is not None:
        a_blocks, b_blocks, c0 = arrivals.checked(a_blocks, b_blocks, c0)
    batch = np.broadcast_shapes(a_blocks[0].shape[:-2], b_blocks[0].shape[:-2])
    depth = max(a.shape[-1] for a in a_blocks)
    kernel = kernel_for(choice, a_blocks[0].shape[-2], depth, b_blocks[0].shape[-2 if symmetry else -1], batch)
    on_diagonal = symmetry if all(a is b for a, b in zip(a_blocks, b_blocks, strict=True)) else None
    powers = None if norms is None else exponents(norms, choice.dtype)
    reduced = partial(_reduced, reduction, norms, powers)

    def prepare_a(block: Block, wait: bool = True) -> Any:
        return kernel.prepare_a(block if powers is None else scaled(block, powers[0], choice.dtype), wait=wait)

    def prepare_b(block: Block, wait: bool = True) -> Any:
        if powers is not None:
            rows = block if symmetry else block.T
            return kernel.prepare_b(scaled(rows, powers[1], choice.dtype).T, wait=wait)
        return kernel.prepare_b(flipped(block, symmetry) if symmetry else block, wait=wait)

    if choice.device == "cpu":
        # NumPy multiplies a block with its own transpose by SYRK, with other bits than GEMM's, if both are in the same
        # memory. So where the block has to be copied first, one copy serves as both operands.
        pairs = _joined(a_blocks, b_blocks)
        lefts = [prepare_a(a) for a, _ in pairs]
        shared = symmetry is not None and powers is None
        rights = [prepare_b(left if shared and b is a else b) for left, (a, b) in zip(lefts, pairs, strict=True)]
        with shared_by(tasks):
            return _step(kernel, c, list(zip(lefts, rights, strict=True)), epilogue, c0, reduced, on_diagonal)

    def on_gpu() -> Block | tuple[Part, ...]:
        with gpu.multiplying():
            form = kernel.name, kernel.dtype, powers is not None
            a_form, b_form = ("A", *form), ("B", *form, symmetry)

            def left(block: Block) -> Any:
                return prepared_operands.prepared.get(block, a_form, partial(prepare_a, wait=False), most_prepared)

            def right(block: Block) -> Any:
                if symmetry and powers is None:  # one copy of a block serves as A and as the transpose of B
                    made = kernel.turned(left(block), symmetry)
                    if made is not None:
                        return made
                return prepared_operands.prepared.get(block, b_form, partial(prepare_b, wait=False), most_prepared)

            operands = [(left(a), right(b)) for a, b in zip(a_blocks, b_blocks, strict=True)]
            return _step(kernel, c, operands, epilogue, c0, reduced, on_diagonal)

    height, width = a_blocks[0].shape[-2], b_blocks[0].shape[-2 if symmetry else -1]
    result = math.prod(batch) * height * width * kernel.accumulator.itemsize
    needs = result + sum(block.nbytes for block in (*a_blocks, *b_blocks))
    out = gpu.retrying(on_gpu, f"a block of C, {height} x {width} {kernel.accumulator},", needs, peak)
    return _leaving(out, epilogue, reduction)


def multiply_here(
    choice: KernelChoice,
    a: Block,
    b: Block,
    epilogue: Epilogue,
    c0: Block | None = None,
    out: Block | None = None,
) -> Block:
    """Compute a product of one task by the kernel that is the fastest for a call of its own, on the current stream.

    Tasks take the kernel that is the fastest for the large blocks of most products.

    Parameters
    ----------
    choice : KernelChoice
        Its `name` and `planned` do not count. Its type is that of A, B and the epilogue.
    a, b, c0, epilogue
        As in `multiply`. In a symmetric product, `b` is the transpose of `a`, and in a Hermitian one, too.
    out : block ``(*batch, m, n)`` of the same type, optional
        Receives C, and is returned. It shares no memory with the others.
    """
    from distmm_kernels.arrays.packages import multiply_of
    from distmm_kernels.arrays.products import Options

    def step(alpha: complex, beta: complex, c0: Block | None, dtype: Any, symmetry: Symmetry | None) -> Block:
        options = Options(alpha, beta, choice.precision, symmetry=symmetry)
        return multiply_of(a, b, c0, out, None)(a, b, out, c0, options)

    def made() -> Block:
        block = applied(epilogue, step, c0)
        gpu.wait_for_current_stream(block)
        return block

    if choice.device == "cpu":
        return made()
    return gpu.retrying(made, f"C, {a.shape[-2]} x {b.shape[-1]} {epilogue.dtype},", a.nbytes + b.nbytes)


def multiply_and_store(
    where: object,
    choice: KernelChoice,
    c: None,
    a_blocks: list[Block | Load],
    b_blocks: list[Block | Load],
    epilogue: Epilogue,
    c0: Block | Load | None = None,
    *,
    out: ClientOutput,
    **how: Any,
) -> None:
    """Compute a product of one block: read its operands, multiply as `multiply` does, and write the block to `out`.

    The task holds the lease of `out` all the time: it reads nothing of the client's memory when the call has ended.

    Raises
    ------
    OSError
        If the lease has ended.
    """
    with out.array.writing():
        given = (*a_blocks, *b_blocks, c0)
        read = {id(x): x() if isinstance(x, Load) else x for x in given}  # a block of A and B is read once
        a_blocks, b_blocks = ([read[id(x)] for x in blocks] for blocks in (a_blocks, b_blocks))
        block = multiply(where, choice, c, a_blocks, b_blocks, epilogue, read[id(c0)], **how)
        out.write(tuple(map(slice, out.array.shape)), block)


def _joined(a_blocks: list[Block], b_blocks: list[Block]) -> list[tuple[Block, Block]]:
    """Return pairs of blocks, each of them one array. A block that is in both lists stays one object."""
    whole = {id(x): x.joined() if isinstance(x, Union) else x for x in (*a_blocks, *b_blocks)}
    return [(whole[id(a)], whole[id(b)]) for a, b in zip(a_blocks, b_blocks, strict=True)]


def _step(
    kernel: Kernel,
    c: Block | None,
    operands: list[tuple[Any, Any]],
    epilogue: Epilogue | None,
    c0: Block | None,
    reduced: Callable[[Block], Block | tuple[Part, ...]],
    symmetry: Symmetry | None,
) -> Block | tuple[Part, ...]:
    """Add the products of prepared operands to `c`. After the last product, apply the epilogue and the reduction.

    `symmetry` is that of a block on the diagonal.
    """
    *others, (a, b) = kernel.joined(operands)
    for left, right in others:
        c = kernel.multiply(left, right, c, symmetry=symmetry, wait=False)
    if epilogue is None:
        return kernel.multiply(a, b, c, symmetry=symmetry, wait=False)
    return reduced(applied(epilogue, partial(kernel.multiply, a, b, c, wait=False), c0))


def _reduced(
    reduction: BlockReduction | None,
    norms: list[np.ndarray] | None,
    powers: tuple[np.ndarray, np.ndarray] | None,
    block: Block,
) -> Block | tuple[Part, ...]:
    """Reduce a finished block, if there is a reduction. `powers` are those by which rows were divided (`exponents`)."""
    if reduction is None:
        return block
    return reduction(block if powers is None else unscaled(block, powers), norms)


def _leaving(made: Any, epilogue: Epilogue | None, reduction: BlockReduction | None) -> Any:
    """Return a finished block, or its parts, in the memory from which they are read."""
    to_read = reduction is not None or (epilogue is not None and epilogue.kind == "numpy")
    return on_host(made) if to_read else made


def combine(
    where: object,
    choice: KernelChoice,
    left: Block,
    right: Block,
    epilogue: Epilogue | None = None,
    c0: Block | None = None,
    reduction: BlockReduction | None = None,
    norms: list[np.ndarray] | None = None,
    arrivals: Arrivals | None = None,
) -> Block | tuple[Part, ...]:
    """Add two partial blocks ``(*batch, m, n)`` of C, of accumulators, into a new one; the rest is as in `multiply`."""
    if arrivals is not None:
        _, _, c0 = arrivals.checked([], [], c0)
    powers = None if norms is None or reduction is None else exponents(norms, choice.dtype)

    def summed() -> Block | tuple[Part, ...]:
        with gpu.multiplying() if choice.device == "cuda" else contextlib.nullcontext():
            c = left + right
            if epilogue is None:
                return c
            kernel = kernel_for(choice, c.shape[-2], 1, c.shape[-1], c.shape[:-2])
            return _reduced(reduction, norms, powers, applied(epilogue, partial(kernel.finish, c), c0))

    if choice.device == "cuda":
        what = f"a sum of two blocks of C, {left.shape[-2]} x {left.shape[-1]} {left.dtype},"
        out = gpu.retrying(summed, what, 3 * left.nbytes)
    else:
        out = summed()
    return _leaving(out, epilogue, reduction)


def part(where: object, block: Block, index: tuple[slice, slice]) -> Block:
    """Return a chunk of a block of C, as a view."""
    return block[index]


def mirror(where: object, symmetry: Symmetry, block: Block) -> Block:
    """Return C[j, i] of a symmetric product, given C[i, j]: a view of it, or a conjugate."""
    if symmetry != "hermitian" or gpu.namespace(block) is np:
        return flipped(block, symmetry)
    return gpu.completed(lambda: flipped(block, symmetry), "the mirror image of a block of C", block.nbytes)
