"""JAX on all GPUs that the process sees: rows of A and C and columns of B shared out, one compiled ``A @ B``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from experiment.cases import Case, element
from experiment.measuring_process import Task

from .samples import sampled

__all__ = ["program"]

# What JAX calls the precisions that `distmm.matmul` knows.
PRECISIONS = {"ieee": "highest", "highest": "highest", "high": "high", "medium": "default"}

# What the user may set otherwise. JAX's pool has as much of a GPU as other programs have. JAX multiplies by cuBLAS, as
# cuBLAS chooses to. XLA's search for an algorithm takes minutes at n = 65536, and without the search XLA takes kernels
# of its own, half as fast in float32 (27 for 55 TFLOP/s on an H200).
SETTINGS = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    "XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0",
}


@contextmanager
def program(task: Task) -> Iterator[Callable[[Case, int], dict[str, Any]]]:
    """Yield what measures a case; compiling, with XLA's search for the fastest algorithm, is not in the seconds."""
    for name, value in SETTINGS.items():  # which JAX reads when it starts
        os.environ.setdefault(name, value)
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)  # without it, float64 becomes float32
    devices = jax.devices("gpu")
    if len(devices) < task.workers:
        raise RuntimeError(f"JAX finds {len(devices)} of {task.workers} GPUs")
    mesh = Mesh(np.array(devices[: task.workers]), ("gpu",))
    by_rows, by_columns = (NamedSharding(mesh, PartitionSpec(*where)) for where in (("gpu", None), (None, "gpu")))
    _, _, algorithm = task.program.partition(":")
    precision = jax.lax.DotAlgorithmPreset[algorithm] if algorithm else PRECISIONS[task.precision]

    def measure(case: Case, seed: int) -> dict[str, Any]:
        dtype, shape = element(case.dtype), (case.n, case.n)
        # Drawn as bfloat16 they would be fewer than 256 different numbers. A GPU takes less power for such data, and is
        # faster.
        drawn = jnp.float32 if dtype.itemsize < 4 else dtype
        make_a, make_b = (
            jax.jit(lambda key: jax.random.normal(key, shape, drawn).astype(dtype), out_shardings=where)
            for where in (by_rows, by_columns)
        )
        multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision), out_shardings=by_rows)
        a, b = make_a(jax.random.key(seed)), make_b(jax.random.key(seed + 1))
        jax.block_until_ready((a, b))
        compiled = multiply.lower(a, b).compile()
        start = time.perf_counter()
        c = jax.block_until_ready(compiled(a, b))
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "note": f"JAX {jax.__version__}", **sampled(a, b, c, task.precision, seed)}

    yield measure
