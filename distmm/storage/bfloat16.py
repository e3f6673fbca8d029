"""bfloat16 in Zarr: the data type of that name of the Zarr extensions, for ml_dtypes' NumPy type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
from zarr.core.dtype import DataTypeValidationError, data_type_registry
from zarr.core.dtype.npy.float import BaseFloat

__all__ = ["BFloat16", "register"]

DTYPE = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class BFloat16(BaseFloat[Any, Any]):
    """Elements of two bytes, of little-endian byte order as ml_dtypes has them in memory."""

    dtype_cls = type(DTYPE)
    _zarr_v3_name: ClassVar[str] = "bfloat16"
    _zarr_v2_names: ClassVar[tuple[str, ...]] = ()
    endianness: Any = "little"

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return int(DTYPE.itemsize)

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """Return this type for NumPy's."""
        if dtype != DTYPE:
            raise DataTypeValidationError(f"{dtype} is not bfloat16")
        return cls()

    def to_native_dtype(self) -> Any:
        """Return NumPy's type."""
        return DTYPE


def register() -> None:
    """Have Zarr know the type; asked twice, nothing happens."""
    if BFloat16._zarr_v3_name not in data_type_registry.contents:
        data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)
