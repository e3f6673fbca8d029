"""Compile a Python function with Numba to machine code for one architecture. This needs no GPU.

`distmm_kernels.device_code.emit` compiles and nvJitLink links. Link-time optimisation is necessary: without it, ptxas
ignores ``setmaxnreg`` and serialises ``wgmma``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SERIALISED = r"C75(0[89]|1[0-5])\b"
"""Warnings of ptxas: it serialises ``wgmma``, which is right but several times slower."""


@dataclass(frozen=True)
class Source:
    """A kernel before compilation.

    Attributes
    ----------
    function
        The Python function that Numba compiles.
    signature
        A Numba signature that returns nothing: TMA descriptors first, then arguments of 8 bytes each (`types.uint64`,
        `types.int64`, arrays).
    threads
        Threads of one block.
    blocks
        Thread blocks that must fit on one multiprocessor at the same time. This limits the registers of a thread; 0: no
        such limit.
    shared_bytes
        Dynamic shared memory of one block.
    specific
        Whether the kernel has instructions of one architecture only, such as wgmma. Its machine code then runs on that
        compute capability only. Other code also runs on later compute capabilities of the same major number.
    """

    function: Callable[..., None]
    signature: Any
    threads: int
    blocks: int = 1
    shared_bytes: int = 0
    specific: bool = False


@dataclass(frozen=True)
class Binary:
    """A kernel as machine code, with what a launch needs.

    Attributes
    ----------
    cubin
        Machine code for one architecture, with exactly one kernel.
    log
        The output of ptxas: registers, spills, warnings; without times, so that the same kernel has the same bytes.
    """

    cubin: bytes
    threads: int
    shared_bytes: int
    log: str


def architecture(compute_capability: tuple[int, int], specific: bool = False) -> str:
    """Return the name of the target: ``sm_90``, or ``sm_90a`` with the instructions of that architecture only."""
    major, minor = compute_capability
    return f"sm_{major}{minor}{'a' if specific else ''}"


@functools.cache
def versions() -> str:
    """Return the versions of all packages and libraries that compile a kernel."""
    from importlib.metadata import version

    from cuda.bindings import nvjitlink, nvvm

    numba = ", ".join(f"{name} {version(name)}" for name in ("numba-cuda", "numba", "llvmlite"))
    return f"{numba}, nvvm {nvvm.version()} {nvvm.ir_version()}, nvjitlink {nvjitlink.version()}"


def build(source: Source, compute_capability: tuple[int, int]) -> Binary:
    """Compile and link a kernel (0.3 to 3 seconds).

    Raises
    ------
    RuntimeError
        If it does not link, or if ptxas serialises its ``wgmma`` instructions.
    """
    from distmm_kernels.device_code import emit

    target = architecture(compute_capability, source.specific)
    numba_target = (*compute_capability, "a") if source.specific else compute_capability
    code = emit.compile_to_ltoir(source.function, source.signature, numba_target, source.threads, source.blocks)
    cubin, log = _link(code, source.function.__name__, target)
    if re.search(SERIALISED, log):
        raise RuntimeError(f"{source.function.__name__} for {target} would wait for each tensor-core product: {log}")
    return Binary(cubin, source.threads, source.shared_bytes, log)


def _link(code: bytes, name: str, target: str) -> tuple[bytes, str]:
    from cuda.bindings import nvjitlink

    options = [f"-arch={target}", "-lto", "-O3", "-verbose", "-Xptxas=-v"]
    handle = nvjitlink.create(len(options), options)

    def read(what: str) -> bytes:
        content = bytearray(getattr(nvjitlink, f"get_{what}_size")(handle))
        getattr(nvjitlink, f"get_{what}")(handle, content)
        return bytes(content)

    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), name)
        nvjitlink.complete(handle)
        cubin, log = read("linked_cubin"), read("info_log")
    except nvjitlink.nvJitLinkError as error:
        log = read("error_log")
        raise RuntimeError(f"{name} does not link for {target}: {log.decode(errors='replace')}") from error
    finally:
        nvjitlink.destroy(handle)
    lines = log.decode(errors="replace").strip("\0 \n").splitlines()
    return cubin, "\n".join(line for line in lines if "Compile time" not in line)
