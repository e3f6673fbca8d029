"""Blocks of bfloat16 in GPU memory travel as such.

Dask describes a CuPy block by CUDA's array interface, which knows NumPy's own types only: bfloat16 arrives as two bytes
without a meaning (``|V2``).
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes  # noqa: F401  tells NumPy the names of its types
import numpy as np
from dask.utils import Dispatch
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

__all__ = ["register"]

KEY = "distmm-element"


def register() -> None:
    """Have Dask name the type of elements in what it sends, from the first CuPy block on."""
    if "distributed.protocol.cupy" in sys.modules:
        _wrap()
        return
    for dispatch in (cuda_serialize, cuda_deserialize, dask_serialize, dask_deserialize):
        dispatch.register_lazy("cupy", _wrap)


def _wrap() -> None:
    import cupy
    import distributed.protocol.cupy  # noqa: F401  registers what is wrapped here

    for serialize, deserialize in ((cuda_serialize, cuda_deserialize), (dask_serialize, dask_deserialize)):
        _name_elements(serialize, deserialize, cupy.ndarray)


def _name_elements(serialize: Dispatch, deserialize: Dispatch, block: type) -> None:
    """Replace how blocks are sent and received, unless that is done already."""
    send, receive = (dispatch._lookup[block] for dispatch in (serialize, deserialize))
    if send.__module__ == __name__:
        return

    def named(x: Any) -> tuple[dict[str, Any], list[Any]]:
        header, frames = send(x)
        return (header | {KEY: x.dtype.name} if x.dtype.kind == "V" else header), frames

    def typed(header: dict[str, Any], frames: list[Any]) -> Any:
        if KEY in header:
            header = header | {"typestr": np.dtype(header[KEY])}
        return receive(header, frames)

    serialize.register(block, named)
    deserialize.register(block, typed)
