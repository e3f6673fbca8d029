"""Descriptions of matrices for the tensor memory accelerator.

The driver encodes one in 9 us; it depends on nothing but the numbers below, so each is made once and kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from distmm_kernels.launch.driver import check
from distmm_kernels.layout.stack import Stack

__all__ = ["TensorMap", "TensorMaps", "tensor_map"]

MAP_BYTES = 128  # of an encoded map

_TYPES = {
    "bfloat16": "BFLOAT16",
    "float16": "FLOAT16",
    "tfloat32": "TFLOAT32",
    "float32": "FLOAT32",
    "int8": "UINT8",
    "uint8": "UINT8",
    "bool": "UINT8",
    "int32": "INT32",
}
# TFLOAT32: float32, which the accelerator rounds to nearest even as it loads; the tensor cores would cut bits off


class TensorMap:
    """Owns the encoded bytes; their address is what a launch takes."""

    def __init__(self, encoded: Any) -> None:
        self.encoded, self.address = encoded, int(encoded.getPtr())


class TensorMaps:
    """Owns copies of up to ``most`` maps, one behind the other, as a kernel takes an array of them."""

    def __init__(self, maps: Sequence[TensorMap], most: int) -> None:
        self._memory = ctypes.create_string_buffer(MAP_BYTES * most)
        self.address = ctypes.addressof(self._memory)
        for i, each in enumerate(maps):
            ctypes.memmove(self.address + MAP_BYTES * i, each.address, MAP_BYTES)


@functools.lru_cache(maxsize=4096)
def tensor_map(stack: Stack, kind: str, rows: int, columns: int) -> TensorMap:
    """Return the tensor map of a `Stack.for_tensor_map`, loaded or stored in boxes of ``rows`` by ``columns``.

    Rows of a box are at most 128 bytes long, and lie in shared memory permuted by the 128-byte swizzle.
    """
    from cuda.bindings import driver

    name = _TYPES[kind]
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
