"""How the peers of `distmm.matmul` are measured: JAX and cuBLASXt on all GPUs of this machine, each by its own means.

``python tests/bench/recipes.py jax --size 32768`` prints one line of JSON; JAX takes most of the GPUs' memory while it
lives, so that it needs a process of its own. cuBLASXt runs in the caller's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

JAX_SECONDS = 120  # patience with its process


def jax_in_a_process(sizes: list[int], precisions: list[str]) -> list[dict[str, Any]]:
    """Measure JAX in a new process; one result for each size and precision."""
    command = [sys.executable, __file__, "jax", "--sizes", *map(str, sizes), "--precisions", *precisions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JAX_SECONDS, check=False)
    if done.returncode:
        return [{"case": "JAX", "failed": done.stderr.strip()[-300:]}]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def jax_product(size: int, precision: str) -> dict[str, Any]:
    """Seconds of one ``A @ B``, rows of A and C and columns of B shared out over the GPUs; compiled and run before."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("gpu",))
    by_rows, by_columns = (NamedSharding(mesh, PartitionSpec(*where)) for where in (("gpu", None), (None, "gpu")))
    shape = (size, size)
    make_a = jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32), out_shardings=by_rows)
    make_b = jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32), out_shardings=by_columns)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision), out_shardings=by_rows)
    seconds = []
    for seed in range(2 if size < 65536 else 1):  # the first run loads libraries; each has inputs of its own
        a, b = make_a(jax.random.key(2 * seed)), make_b(jax.random.key(2 * seed + 1))
        jax.block_until_ready((a, b))
        compiled = multiply.lower(a, b).compile()
        start = time.perf_counter()
        jax.block_until_ready(compiled(a, b))
        seconds.append(time.perf_counter() - start)
    return {"case": f"JAX, precision {precision!r}", "size": size, "seconds": seconds[-1]}


def _library(name: str) -> ctypes.CDLL:
    """Load one of CUDA's libraries: the system's, or the one that a package of NVIDIA's carries."""
    for folder in [None, *map(Path, sys.path)]:
        found = [name] if folder is None else [str(path) for path in sorted(folder.glob(f"nvidia/**/lib/{name}*"))]
        for path in found:
            try:
                return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
    raise OSError(f"{name} is not on this machine")


@contextmanager
def pinned(arrays: list[np.ndarray], devices: int) -> Iterator[None]:
    """Page-lock arrays for all GPUs of this process."""
    runtime = _library("libcudart.so.13")
    portable = 1
    for array in arrays:
        status = runtime.cudaHostRegister(
            ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), ctypes.c_uint(portable)
        )
        if status:
            raise RuntimeError(f"cudaHostRegister of {array.nbytes} bytes: error {status}")
    yield
    for array in arrays:
        runtime.cudaHostUnregister(ctypes.c_void_p(array.ctypes.data))


class Xt:
    """cuBLASXt on several GPUs, with operands and result in host memory."""

    def __init__(self, devices: int) -> None:
        self.library = _library("libcublas.so.13")
        self.handle = ctypes.c_void_p()
        self._call("cublasXtCreate", ctypes.byref(self.handle))
        self._call("cublasXtDeviceSelect", self.handle, devices, (ctypes.c_int * devices)(*range(devices)))

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

    def close(self) -> None:
        """Free its memory on the GPUs."""
        self._call("cublasXtDestroy", self.handle)


def main() -> None:
    """Measure JAX and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=["jax"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192])
    parser.add_argument("--precisions", nargs="+", default=["highest"])
    options = parser.parse_args()
    for size in options.sizes:
        for precision in options.precisions:
            print(json.dumps(jax_product(size, precision)), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
