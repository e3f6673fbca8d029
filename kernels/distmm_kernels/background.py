"""Other processes compile the usual kernels of a type while a first product of it compiles its own.

Numba compiles one kernel at a time in a process, in 1 to 3 s, and a first product needs two to eight of them. So the
first kernel that a process misses starts a process that builds all kernels of that type, once on a machine. Nobody
waits for it: a product takes a kernel that is built, waits for one that is being compiled, and compiles others itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from distmm_kernels import ahead, device
from distmm_kernels.candidate import AMPERE
from distmm_kernels.launch.binary import Recipe
from distmm_kernels.launch.cache import cache_folder, sources

MOST_PROCESSES = 8
"""Processes that compile at the same time; each takes about 200 MB."""

NICE = 10
"""They leave the cores to others that want them."""


def begin_for(recipe: Recipe, capability: tuple[int, int]) -> None:
    """Start to build the kernels of the first type in `ahead.TYPES` that has this one."""
    if capability >= AMPERE[0]:
        dtype = next((each for each in ahead.TYPES if recipe in ahead.recipes(capability, each)), None)
        if dtype is not None:
            begin(dtype)


@functools.cache
def begin(dtype: str) -> None:
    """Start to build the kernels of a type for this machine's GPUs, unless this was done, or a folder has them."""
    if os.environ.get("DISTMM_KERNELS_DIR") or _mark(dtype).exists():
        return
    command = [sys.executable, "-c", f"from distmm_kernels import background; background.build({dtype!r})"]
    path, none = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, subprocess.DEVNULL
    with contextlib.suppress(OSError):  # without it, products compile all their kernels
        process = subprocess.Popen(command, env=path, stdin=none, stdout=none, stderr=none)
        threading.Thread(target=process.wait, name="distmm-compile", daemon=True).start()


def build(dtype: str) -> None:
    """Build the kernels of a type for this machine's GPUs, as the process that `begin` starts; end with that process.

    It does nothing if another process builds them. It does not say that they are built if it ends early.

    Raises
    ------
    OSError
        Where kernels cannot be kept.
    """
    starter, mark = os.getppid(), _mark(dtype)
    mark.parent.mkdir(parents=True, exist_ok=True)
    processes = min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
    os.nice(NICE)
    with _only_one(mark.with_suffix(".building")) as only:
        capabilities = {each.compute_capability for each in device.gpus()} if only else ()
        for capability in capabilities:
            if capability is None or capability < AMPERE[0]:
                continue
            for _ in ahead.build(capability, [dtype], processes):
                if os.getppid() != starter:
                    return
        if only:
            mark.touch()


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[bool]:
    """Yield whether no other process is within this block."""
    with open(lock, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _mark(dtype: str) -> Path:
    """Return the file that says that the kernels of a type are built, by these sources."""
    return cache_folder() / f"{sources()}.{dtype}.built"
