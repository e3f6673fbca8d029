"""Other processes compile the usual kernels of a type, for the first products of it on a machine.

Numba compiles one kernel at a time in a process, in 1 to 3 s, and a first product needs two to eight of them. So a
first product, or its plan, starts a process that builds all kernels of that type, once on a machine. A product takes a
kernel that is built, waits for one that is being compiled, and compiles others itself. Until the usual kernels are
built, plans weigh this time against a library's product.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypeAlias

from distmm_kernels import ahead
from distmm_kernels.candidate import AMPERE
from distmm_kernels.launch.binary import is_kept
from distmm_kernels.launch.cache import bound, cache_folder, sources

BUILD_SECONDS = 5.0
"""Seconds in which a first product compiles its kernels: float32 4.3, float64 7 (H200 and 16 cores, 2026-11-30)."""

PATIENCE = 120.0
"""Seconds after which products compile what is missing: on a busy machine the processes hardly get a core."""

MOST_PROCESSES = 8
"""Processes that compile at the same time on half of the cores; each takes about 200 MB."""

NICE = 19
"""Niceness of these processes. They also get the scheduling class SCHED_IDLE of Linux, unless that is forbidden."""

MOST_TYPES = 100
"""Marks of built types in the cache folder. Each version of the package has its own; the oldest ones are removed."""


Started: TypeAlias = tuple[subprocess.Popen[bytes], float]

_starting = threading.Lock()  # threads that make the first products start one process
_done: list[Started] = []  # processes that need not be waited for: further calls look at no file


def begin(dtype: str, capability: tuple[int, int] | None) -> bool:
    """Start to build the kernels of a type, before a product needs them; not if ``DISTMM_BUILD_AHEAD`` is 0.

    A CPU has no compute capability, and needs none.

    Returns
    -------
    bool
        Whether kernels of most products are missing, and are being built, by whichever program has started that.
    """
    forbidden = os.environ.get("DISTMM_BUILD_AHEAD") == "0"
    if forbidden or not capability or capability < AMPERE[0] or dtype not in ahead.TYPES:
        return False
    with _starting:
        started = _start(dtype, capability)
    if started is None or started in _done:
        return False
    process, since = started
    too_long = time.monotonic() > since + PATIENCE
    nobody_builds = process.poll() is not None and not _is_locked(_mark(dtype, capability))
    last_ones_first = reversed(ahead.usual(capability, dtype))  # a call during the build looks at one file
    if too_long or nobody_builds or all(is_kept(recipe, capability) for recipe in last_ones_first):
        _done.append(started)
    return started not in _done


@functools.cache
def _start(dtype: str, capability: tuple[int, int]) -> Started | None:
    """Start a process that builds the kernels of a type, unless they are there; return it, and when it was started."""
    folder, usual = os.environ.get("DISTMM_KERNELS_DIR"), ahead.usual(capability, dtype)
    if _is_built(_mark(dtype, capability)) or (folder and all(is_kept(recipe, capability) for recipe in usual)):
        return None
    code = f"from distmm_kernels import background; background.build({dtype!r}, {capability})"
    path, none = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, subprocess.DEVNULL
    try:
        process = subprocess.Popen([sys.executable, "-c", code], env=path, stdin=none, stdout=none, stderr=none)
    except OSError:  # without it, products compile all their kernels
        return None
    threading.Thread(target=process.wait, name="distmm-compile", daemon=True).start()
    return process, time.monotonic()


def build(dtype: str, capability: tuple[int, int]) -> None:
    """Build the kernels of a type, and end with the process that has started this one.

    If another process builds this type, it does nothing; if another type, it waits. It does not say that kernels are
    built if it ends early.

    Raises
    ------
    OSError
        Where kernels cannot be kept.
    """
    starter, mark = os.getppid(), _mark(dtype, capability)
    mark.parent.mkdir(parents=True, exist_ok=True)
    processes = max(1, min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // 2))
    # A call of a BLAS waits for the slowest of its threads. Beside builders of niceness 10 on half of 16 cores, NumPy's
    # product of n = 1024 took 30 ms instead of 1. A process in SCHED_IDLE gives up its core at once.
    os.nice(NICE)
    with contextlib.suppress(OSError):  # a sandbox may also lack the call
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with open(mark, "a") as of_type, open(mark.with_name("building"), "a") as of_all:
        try:
            fcntl.flock(of_type, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        if _is_built(mark):
            return
        ahead.preloaded()
        fcntl.flock(of_all, fcntl.LOCK_EX)
        for _ in ahead.build(capability, [dtype], processes):
            if os.getppid() != starter:
                return
        of_type.write("built\n")
    bound(mark.parent, mark.suffix, MOST_TYPES)


def _mark(dtype: str, capability: tuple[int, int]) -> Path:
    """Return the file that is locked while kernels of a type are built by these sources, and then is not empty."""
    return cache_folder() / f"{sources()}.{dtype}-{capability[0]}{capability[1]}.built"


def _is_locked(mark: Path) -> bool:
    with contextlib.suppress(OSError), open(mark) as of_type:  # as below
        try:
            fcntl.flock(of_type, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_built(mark: Path) -> bool:
    try:
        return mark.stat().st_size > 0
    except OSError:  # there is none, or another user's folder hides it
        return False
