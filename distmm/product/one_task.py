"""Products of one task: small ones, of arrays of this process and of persisted arrays of one chunk.

Without a client, the task is a call in this process. So it is with a client, too, if the cluster would save less time
than its messages take, and the caller has not said where or how to multiply: `short` decides that without a plan. On a
cluster, a graph of one task reads the operands in this process's memory, or on the worker that holds them, and writes C
to `out`: there are no tasks for loads and stores.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from dask.callbacks import Callback

from distmm.clusters import cluster
from distmm.errors import DeviceMemoryError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.write_units import unit_of
from distmm.product.array_types import package_of
from distmm.product.choices import Choices
from distmm.product.context import tasks_run_here
from distmm.product.operand import Operand
from distmm.product.request import SMALL_SHARE
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.worker import gpu
from distmm.worker.prepared_operands import alias
from distmm.worker.tasks import products
from distmm.worker.tasks.arrivals import arrived
from distmm.worker.tasks.kernel_choice import KernelChoice

if TYPE_CHECKING:
    from distmm.product.product import Gemm

# Most seconds that a task is expected to take: after Ctrl-C the call waits for it, as it uses memory of this process.
MOST_SECONDS = 1.0

# This process computes a product if the client's cluster would save less than so many seconds of arithmetic.
SHORT_SECONDS = 0.01


def computed(product: Gemm, choice: KernelChoice, choices: Choices, out: Any = None) -> Any:
    """Return the only block of a product of arrays in the memory of one device of this process. It may be `out`.

    The kernel is that of `choice` if the caller has chosen one, or wants the bits that a cluster gives.
    """
    symmetry = product.symmetry
    with product.a.source.device if is_on_gpu(product.a.source) else nullcontext():
        a, c0 = _elements(product.a), None if product.c is None else _elements(product.c)
        b = _elements(product.b) if symmetry is None else a
        epilogue = product.epilogue(product.dtype, product.a.kind, symmetry)
        as_planned = choices.kernel or choices.reproducible
        if not as_planned and a.dtype == b.dtype == choice.dtype == product.dtype:
            right = b if symmetry is None else a.swapaxes(-1, -2)
            # Not where C is read: a call that finds the GPU's memory full is made again.
            fits = type(out) is type(a) and (out.dtype, out.device) == (a.dtype, a.device)
            fits &= c0 is None and not product.dropped
            return products.multiply_here(choice, a, right, epilogue, c0, out if fits else None)
        for x in product.operands:
            gpu.wait_for_current_stream(x.source)  # tasks use other streams
        return products.multiply(None, choice, None, [a], [b], epilogue, c0, symmetry)


def device_of(product: Gemm) -> Literal["cpu", "cuda"] | None:
    """Return the device in whose memory all operands are, in this process. None if they are elsewhere.

    Operands on several GPUs are on none.
    """
    sources = [x.source for x in product.operands]
    if all(map(is_on_gpu, sources)):
        return "cuda" if len({source.device.id for source in sources}) == 1 else None
    return "cpu" if all(isinstance(x.source, np.ndarray) and x.file is None for x in product.operands) else None


def short(product: Gemm, choices: Choices, out: Any = None) -> Any:
    """Return a product, computed in this process, if it is short there and no cluster would save much time.

    None for a longer one, if its operands are not in the memory of one device here, and if the caller has chosen
    blocks. Without a client, None if Dask's tasks run elsewhere or are observed. With one, None if `out` is not in the
    same memory, or if the caller has said how or where to multiply.

    A cluster must save more than its messages take. Its P GPUs save 1 - 1 / P of the time that the GPU of the operands
    takes. For operands in host memory, it counts as if it took no time for the arithmetic.
    """
    problem, client, kernel, promised = product.problem, choices.client, choices.kernel, choices.reproducible
    where, like = device_of(product), product.a.source
    if where is None or choices.blocks is not None or choices.plan is not None or not _is_whole(product):
        return None
    on_gpu = where == "cuda"
    device: cluster.DeviceChoice = "gpu" if on_gpu else "cpu"
    if choices.device not in ("auto", device):
        return None
    if client is None:
        elsewhere = Callback.active or not tasks_run_here()
    else:
        other = out is not None and (package_of(out) != package_of(like) or (on_gpu and out.device != like.device))
        elsewhere = other or kernel or promised or choices.precision == "ieee" or choices.named
    if elsewhere:
        return None
    how = {"kernel": kernel, "precision": choices.precision, "reproducible": promised, "flops": problem.flops}
    spec = _described(int(time.monotonic()), problem.multiplied, device, **how)
    copies = (spec.prepared + spec.copied) * sum(math.prod(x.shape) * x.dtype.itemsize for x in product.operands)
    of_c = max(math.prod(problem.shape), math.prod(unit_of(out) or ()))  # a write covers whole chunks of `out`
    needed = of_c * problem.accumulator_bytes + spec.workspace + copies
    seconds = saved = problem.flops / spec.rate
    if seconds > MOST_SECONDS or needed > spec.memory * (1 if on_gpu else SMALL_SHARE):
        return None
    if client is not None and saved >= SHORT_SECONDS and on_gpu:
        saved *= 1 - 1 / choices.described(client, problem.multiplied, on_gpu, old=True).workers
    if client is not None and saved >= SHORT_SECONDS:
        return None
    choice = KernelChoice(where, problem.multiplied, choices.precision, kernel, None if kernel else spec.kernel)
    try:
        return computed(product, choice, choices, out)
    except DeviceMemoryError:  # workers may have all of the GPU's memory
        return None


@lru_cache(maxsize=64)
def _described(second: int, dtype: np.dtype[Any], device: cluster.DeviceChoice, **how: Any) -> ClusterSpec:
    """Describe this process, as `cluster.describe` does. The answer of a `second` is kept."""
    return cluster.describe(None, dtype, device, old=True, **how)


def _elements(operand: Operand) -> Any:
    """Return the elements of an array of this process, as they are now.

    On a GPU this is another array with the same memory. What a kernel prepares is kept as long as its array exists, and
    the caller may write to his own one before the next product.
    """
    source = operand.source.swapaxes(-1, -2) if operand.transposed else operand.source
    return arrived(alias(source) if is_on_gpu(source) else source, operand.name)


def writes_itself(product: Gemm, plan: Plan) -> bool:
    """Whether a product has one task that may read its operands and write C: all are in this process, or persisted."""
    return is_short(product, plan) and all(x.resident or x.in_memory for x in product.operands)


def is_short(product: Gemm, plan: Plan) -> bool:
    """Whether one short task computes a product."""
    return _is_whole(product) and plan.schedule.tasks == 1 and plan.cost.seconds <= MOST_SECONDS


def _is_whole(product: Gemm) -> bool:
    """Whether a C that is added needs no broadcast."""
    return product.c is None or product.c.shape == product.shape
