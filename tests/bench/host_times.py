"""Host time of a product by each kernel on this GPU: microseconds of a call, and the first product of a new process.

``python tests/bench/host_times.py``
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import distmm_kernels
from distmm_kernels import device as devices
from distmm_kernels.config import FLOAT8, NARROW, SUPPORTED, Problem
from distmm_kernels.device import Device
from distmm_kernels.select import CANDIDATES, select, why_not

__all__ = ["call_microseconds", "first_milliseconds"]

CALLS = 1000
EDGE = 256


def call_microseconds(name: str, dtype: np.dtype[Any], device: Device) -> float:
    """Return the host time of one `multiply` of prepared operands that does not wait for the device."""
    import cupy

    kernel = select(Problem(EDGE, EDGE, EDGE, dtype), device, name=name)
    with cupy.cuda.Device(device.index):
        a, b = (cupy.ones((EDGE, EDGE), np.float32).astype(dtype) for _ in range(2))
        a, b = kernel.prepare_a(a), kernel.prepare_b(b)
        kernel.multiply(a, b, None)
        fastest = float("inf")
        for _ in range(5):  # after some hundred calls the launch queue is full, and calls wait for the device
            start = time.perf_counter()
            for _ in range(CALLS // 5):
                kernel.multiply(a, b, None, wait=False)
            fastest = min(fastest, time.perf_counter() - start)
            cupy.cuda.Device().synchronize()
    return 1e6 * fastest / (CALLS // 5)


# CuPy and its context come first, and are not timed: every program on the GPU needs them
_FIRST = """
import sys, time
import cupy, ml_dtypes, numpy as np
name, dtype, n = sys.argv[1], np.dtype(sys.argv[2]), int(sys.argv[3])
a = cupy.ones((n, n), np.float32).astype(dtype)
cupy.cuda.Device().synchronize()
start = time.perf_counter()
from distmm_kernels.config import Problem
from distmm_kernels.device import current
from distmm_kernels.select import select
kernel = select(Problem(n, n, n, dtype), current(), name=name)
kernel.multiply(kernel.prepare_a(a), kernel.prepare_b(a), None)
print(time.perf_counter() - start)
"""


def first_milliseconds(name: str, dtype: np.dtype[Any], device: Device) -> float:
    """Return the time of the first product in a new process with a CUDA context.

    Call `call_microseconds` before: it compiles the kernel.
    """
    root = str(Path(distmm_kernels.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    command = [sys.executable, "-c", _FIRST, name, dtype.name, str(EDGE)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return 1e3 * float(done.stdout.split()[-1])


if __name__ == "__main__":
    here, types = devices.current(), {dtype.name: dtype for dtype in SUPPORTED + NARROW if dtype not in FLOAT8}
    for each in CANDIDATES:
        kind = types.get(min(each.dtypes))  # CuPy has no 8-bit floats
        if kind is None:
            continue
        if why_not(each, Problem(EDGE, EDGE, EDGE, kind), here) is None and each.device_kind == "cuda":
            call, first = call_microseconds(each.name, kind, here), first_milliseconds(each.name, kind, here)
            print(f"{each.name} {kind}: {call:.1f} us a call, first product {first:.0f} ms")  # noqa: T201
