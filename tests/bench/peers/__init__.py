"""Programs that `scaling.py` measures beside distmm: a module for each, imported by the process that measures it."""

from __future__ import annotations

from experiment import DISTMM, Program
from experiment.cases import TYPES

__all__ = ["PROGRAMS"]

# JAX's algorithms that emulate float32 on tensor cores (`jax.lax.DotAlgorithmPreset`): sums of three products of TF32
# parts, and of six and nine of bfloat16 parts.
JAX_ALGORITHMS = ("TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9")

# JAX compiles for each size, and cuBLASXt loads quickly: both warm up with small products.
PROGRAMS = (
    DISTMM,
    Program(
        "dask.array.matmul",
        f"{__name__}.dask_product",
        dict.fromkeys(("gpu", "cpu"), (("resident",), ("float32", "float64"))),
    ),
    Program("cuBLASXt", f"{__name__}.cublasxt", {"gpu": (("host",), ("float32",))}, warm_edge=2048),
    Program("JAX", f"{__name__}.jax_product", {"gpu": (("resident",), TYPES)}, warm_edge=256),
    *(
        Program(f"JAX:{name}", f"{__name__}.jax_product", {"gpu": (("resident",), ("float32",))}, warm_edge=256)
        for name in JAX_ALGORITHMS
    ),
    Program("NumPy", f"{__name__}.numpy_product", {"cpu": (("host",), ("float32",))}),
)
