"""TMA descriptors of matrices, which CUDA calls tensor maps.

The driver encodes a descriptor in 9 us. It depends only on the arguments of `tensor_map`, so each is encoded once and
kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from distmm_kernels.launch.driver import check
from distmm_kernels.layout.stack import Stack
from distmm_kernels.tiles.hopper_tiles import BITS, MAP_BYTES, MOST_PANELS


class TensorMap:
    """Owns the encoded bytes of a TMA descriptor. A launch gets their address."""

    def __init__(self, encoded: Any) -> None:
        self.encoded, self.address = encoded, int(encoded.getPtr())


class TensorMaps:
    """Owns a contiguous array with copies of TMA descriptors, which is one argument of a kernel."""

    def __init__(self, maps: Sequence[TensorMap]) -> None:
        self._memory = ctypes.create_string_buffer(MAP_BYTES * MOST_PANELS)  # as many as the driver reads, or more
        self.address = ctypes.addressof(self._memory)
        for i, each in enumerate(maps):
            ctypes.memmove(self.address + MAP_BYTES * i, each.address, MAP_BYTES)


@functools.lru_cache(maxsize=4096)
def tensor_map(stack: Stack, kind: str, rows: int, columns: int) -> TensorMap:
    """Return the TMA descriptor of a `Stack.for_tensor_map`. The TMA loads or stores boxes of ``rows`` by ``columns``.

    Rows of a box are at most 128 bytes long. The 128-byte swizzle permutes them in shared memory.
    """
    from cuda.bindings import driver

    # TFLOAT32: the TMA rounds float32 to TF32, to nearest even, when it loads. Without it, tensor cores truncate.
    name = "UINT8" if BITS[kind] == 8 else kind.upper()
    sizes = [driver.cuuint64_t(size) for size in (stack.columns, stack.rows, stack.matrices)]
    pitches = [driver.cuuint64_t(stack.pitch), driver.cuuint64_t(stack.step)]
    box = [driver.cuuint32_t(size) for size in (columns, rows, 1)]
    encoded = check(
        *driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
            3,
            stack.address,
            sizes,
            pitches,
            box,
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return TensorMap(encoded)
