"""Machine code of kernels, kept on disk: each kernel is compiled once a machine, not once a process.

Numba's own cache is keyed by a kernel's function, and goes stale when an intrinsic in another module changes. The key
here has everything that machine code depends on, so an entry is right or absent.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmm_kernels.launch import cache, compiler
from distmm_kernels.launch.cache import cache_folder
from distmm_kernels.launch.compiler import Binary, Source

__all__ = ["Recipe", "binary", "cache_folder"]


@dataclass(frozen=True)
class Recipe:
    """How a kernel is made.

    Attributes
    ----------
    maker
        ``module:function``, called with the parameters only where the machine code is not on disk: it returns a
        `distmm_kernels.launch.compiler.Source`. So a process that finds all its kernels on disk never imports Numba.
    parameters
        Their ``repr`` must tell them apart and be the same in every process: numbers, strings, dataclasses of them.
    """

    maker: str
    parameters: tuple[Any, ...] = ()

    def key(self, compute_capability: tuple[int, int]) -> str:
        """Return 64 hexadecimal digits that change with anything the machine code depends on."""
        facts = [
            cache.sources(),
            _versions(),
            compiler.architecture(compute_capability),
            self.maker,
            repr(self.parameters),
        ]
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def source(self) -> Source:
        """Make the kernel, in Numba's language."""
        module, function = self.maker.split(":")
        made: Source = getattr(importlib.import_module(module), function)(*self.parameters)
        return made


def binary(recipe: Recipe, compute_capability: tuple[int, int]) -> Binary:
    """Return a kernel's machine code: read from disk, or compiled now and written there for other processes."""
    path = cache_folder() / f"{recipe.key(compute_capability)}.kernel"
    found = _read(path)
    if found is None:
        found = compiler.build(recipe.source(), compute_capability)
        _write(path, found)
    return found


@functools.cache
def _versions() -> str:
    return compiler.versions()


def _read(path: Path) -> Binary | None:
    """Read a kernel from a file; None if there is none, or if its checksum is wrong: then it is compiled again."""
    content = cache.read(path)
    if content is None:
        return None
    facts, _, cubin = content.partition(b"\n")
    return Binary(cubin=cubin, **json.loads(facts))


def _write(path: Path, made: Binary) -> None:
    facts = {"threads": made.threads, "shared_bytes": made.shared_bytes, "log": made.log}
    cache.write(path, json.dumps(facts).encode() + b"\n" + made.cubin, "compiled kernels")
