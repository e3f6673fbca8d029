"""cuBLAS as users reach it: through CuPy, and through PyTorch where CuPy has no way to ask for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["Multiply", "peer"]

Multiply = Callable[[Any, Any], Any]  # CuPy arrays a and b to the product, enqueued; anything that DLPack can read


def peer(
    dtype: np.dtype[Any], out: np.dtype[Any], tf32: bool = False
) -> tuple[str, Callable[[Any, str], Any], Multiply]:
    """Return the peer for operands and result of these types.

    Parameters
    ----------
    tf32
        Let it round float32 operands to TF32.

    Returns
    -------
    tuple
        Its name; what brings a CuPy operand, ``"A"`` or ``"B"``, into its own kind of array, in the layout that it is
        fastest with; and the product of two of those, enqueued on the default stream.

    Raises
    ------
    LookupError
        If it needs PyTorch, which is not installed.
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
        torch.backends.cuda.matmul.allow_tf32 = True  # for the process; without it, float32 goes through CuPy
        return "cuBLAS TF32 (torch.mm)", tensor, torch.mm
    if out == dtype:
        return f"cuBLAS {dtype} (torch.mm)", tensor, torch.mm
    return f"cuBLAS {dtype} to {out} (torch.mm)", tensor, lambda a, b: torch.mm(a, b, out_dtype=torch.float32)
