"""The peers: cuBLAS as users call it, through CuPy, or through PyTorch if CuPy does not offer the product."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

Multiply = Callable[[Any, Any], Any]  # enqueues the product of a and b; returns a type that DLPack can read


def peer(
    dtype: np.dtype[Any], out: np.dtype[Any], tf32: bool = False
) -> tuple[str, Callable[[Any, str], Any], Multiply]:
    """Return the peer for operands and result of these types.

    Parameters
    ----------
    tf32
        Whether the peer may round float32 operands to TF32.

    Returns
    -------
    tuple
        Three values: the peer's name; a function that converts a CuPy operand, ``"A"`` or ``"B"``, to the peer's type
        of array, in its fastest layout; a function that enqueues the product of two such arrays on the default stream.

    Raises
    ------
    LookupError
        If the peer needs PyTorch, and PyTorch is not installed.
    """
    if dtype.kind in "fc" and dtype.itemsize >= 4 and not tf32:
        import cupy

        return f"cuBLAS {dtype}", lambda array, _: array, cupy.matmul
    if importlib.util.find_spec("torch") is None:
        raise LookupError(f"cuBLAS for {'TF32' if tf32 else dtype} is reached through PyTorch, which is not installed")
    import torch

    def tensor(array: Any, operand: str) -> Any:
        if operand == "B" and dtype == np.int8:  # columns contiguous: 785 Tera-operations/s; rows contiguous: 118
            return torch.from_dlpack(array).t().contiguous().t()
        if array.dtype.name != "bfloat16":
            return torch.from_dlpack(array)
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)  # DLPack of CuPy has no bfloat16

    if dtype == np.int8:
        return "cuBLAS int8 (torch._int_mm)", tensor, torch._int_mm
    if tf32:
        torch.backends.cuda.matmul.allow_tf32 = True  # for the whole process; CuPy is the peer without it
        return "cuBLAS TF32 (torch.mm)", tensor, torch.mm
    if out == dtype:
        return f"cuBLAS {dtype} (torch.mm)", tensor, torch.mm
    return f"cuBLAS {dtype} to {out} (torch.mm)", tensor, lambda a, b: torch.mm(a, b, out_dtype=torch.float32)
