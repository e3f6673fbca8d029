"""bfloat16 blocks in GPU memory keep their type when Dask sends them between workers.

Dask describes a CuPy block by CUDA's array interface, which knows NumPy's own types only: a bfloat16 block arrives as
two bytes without a meaning (``|V2``). The functions that Dask has registered for CuPy blocks are private parts, used
here and nowhere else: ``Dispatch._lookup`` and the keys of their headers. Where they have changed, blocks are sent as
Dask sends them; blocks of bfloat16 then fail by their type, and never give wrong numbers.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import ml_dtypes  # noqa: F401  tells NumPy the names of its types
import numpy as np
from dask.utils import Dispatch
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.protocol.serialize import dask_deserialize, dask_serialize

__all__ = ["register"]

logger = logging.getLogger(__name__)

KEY = "distmm-element"  # of the headers of messages


def register() -> None:
    """Have Dask send the type of elements too, from the first CuPy block on."""
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
    """Replace the functions that send and receive blocks, unless that is done already."""
    try:
        send, receive = (dispatch._lookup[block] for dispatch in (serialize, deserialize))
    except (AttributeError, KeyError):
        logger.warning("this version of Dask sends CuPy blocks in an unknown way: bfloat16 blocks lose their type")
        return
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
