"""The precisions of products: the names that PyTorch and JAX use, and "ieee".

This module is the one place in distmm that lists them. The kernels package stands alone and has its own list
(`distmm_kernels.config.PRECISIONS`); a test compares the two.
"""

from __future__ import annotations

from typing import Literal, get_args

# For float32 products, "highest" has an error no worse than that of IEEE arithmetic, "high" one like that of TF32, and
# "medium" one like that of bfloat16. "ieee" gives products of any float type the bits of a plain chain of fused
# multiply-adds.
Precision = Literal["highest", "high", "medium", "ieee"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
