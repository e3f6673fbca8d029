"""cuBLASXt: float32 products of host memory on all GPUs that the process sees, in blocks of the best edge."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from experiment.cases import Case, element
from experiment.matrices import Arena, fill
from experiment.measuring_process import Task

from .samples import sampled

__all__ = ["Xt", "pinned", "program"]

EDGES = (8192, 4096, 16384)  # the best one of most sizes first
CUDA = ("13", "12")  # versions of the libraries' names


@contextmanager
def program(task: Task) -> Iterator[Callable[[Case, int], dict[str, Any]]]:
    """Yield what measures a case: A, B and C in pinned host memory."""
    arena = Arena(max(3 * case.n**2 * element(case.dtype).itemsize for case in task.cases))
    with Xt(task.workers) as xt, pinned([arena.memory]):

        def measure(case: Case, seed: int) -> dict[str, Any]:
            a, b, c = arena.matrices(case.n, element(case.dtype))
            fill(a, seed)
            fill(b, seed + 1)
            best, edge = min((xt.seconds(a, b, c, edge), edge) for edge in EDGES if edge <= max(case.n, min(EDGES)))
            return {"seconds": best, "variant": f"blocks {edge}", **sampled(a, b, c, "ieee", seed)}

        yield measure


def _library(name: str) -> ctypes.CDLL:
    """Load one of CUDA's libraries: the system's, or the one that a package of NVIDIA's carries."""
    tried = []
    for version in CUDA:
        file = f"{name}.so.{version}"
        places = [
            file,
            *(str(path) for folder in map(Path, sys.path) for path in sorted(folder.glob(f"nvidia/**/lib/{file}*"))),
        ]
        for place in places:
            try:
                return ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                tried.append(str(error))
    raise OSError(f"{name} cannot be loaded: {'; '.join(tried)}")


@contextmanager
def pinned(arrays: Sequence[np.ndarray]) -> Iterator[None]:
    """Page-lock arrays for all GPUs of this process."""
    runtime = _library("libcudart")
    portable = 1
    for array in arrays:
        status = runtime.cudaHostRegister(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), ctypes.c_uint(portable)
        )
        if status:
            raise RuntimeError(f"cudaHostRegister of {array.nbytes} bytes: error {status}")
    try:
        yield
    finally:
        for array in arrays:
            runtime.cudaHostUnregister(ctypes.c_void_p(array.ctypes.data))


class Xt:
    """cuBLASXt on several GPUs, with operands and result in host memory; a context manager."""

    def __init__(self, devices: int) -> None:
        self.library = _library("libcublas")
        self.handle = ctypes.c_void_p()
        self._call("cublasXtCreate", ctypes.byref(self.handle))
        self._call("cublasXtDeviceSelect", self.handle, devices, (ctypes.c_int * devices)(*range(devices)))

    def __enter__(self) -> Xt:
        return self

    def __exit__(self, *error: object) -> None:
        self._call("cublasXtDestroy", self.handle)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}: error {status}")

    def seconds(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, block: int) -> float:
        """Seconds of one float32 product of matrices in C order, in blocks of this edge."""
        self._call("cublasXtSetBlockDim", self.handle, block)
        m, k, n = *a.shape, b.shape[1]
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        # Column-major libraries see transposes: C^T = B^T A^T.
        sizes = [ctypes.c_size_t(size) for size in (n, m, k)]
        data = [ctypes.c_void_p(x.ctypes.data) for x in (b, a, c)]
        start = time.perf_counter()
        self._call(
            "cublasXtSgemm",
            self.handle, 0, 0, *sizes,
            ctypes.byref(one), data[0], ctypes.c_size_t(n), data[1], ctypes.c_size_t(k),
            ctypes.byref(zero), data[2], ctypes.c_size_t(n),
        )  # fmt: skip
        return time.perf_counter() - start
