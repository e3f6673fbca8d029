"""Machine code of kernels, kept on disk: each kernel is compiled once on a machine, not in each process.

Numba's own cache uses the kernel's function as the key. Its entries become stale when an intrinsic in another module
changes. Here the key has everything that the machine code depends on, so no entry is stale.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmm_kernels.launch import cache, compiler
from distmm_kernels.launch.cache import cache_folder
from distmm_kernels.launch.compiler import Binary, Source

MOST_FILES = 1000
"""Kernels in the folder; each takes 50 to 300 KB. A version of this package has some hundreds."""


@dataclass(frozen=True)
class Recipe:
    """How a kernel is made: the function that makes its source, and the function's arguments.

    Attributes
    ----------
    maker
        ``module:function``, which returns a `distmm_kernels.launch.compiler.Source`. It is called with the parameters
        if the machine code is not on disk. So a process never imports Numba if all its kernels are on disk.
    parameters
        Numbers, strings, or dataclasses of them. Different parameters must have different ``repr``, and the ``repr``
        must be the same in every process.
    """

    maker: str
    parameters: tuple[Any, ...] = ()

    def key(self, compute_capability: tuple[int, int]) -> str:
        """Return 64 hexadecimal digits that change with anything the machine code depends on."""
        facts = [
            cache.sources(),
            compiler.versions(),
            compiler.architecture(compute_capability),
            self.maker,
            repr(self.parameters),
        ]
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def source(self) -> Source:
        """Call the maker: return the kernel as a Python function for Numba."""
        module, function = self.maker.split(":")
        return getattr(importlib.import_module(module), function)(*self.parameters)


def binary(recipe: Recipe, compute_capability: tuple[int, int]) -> Binary:
    """Return a kernel's machine code: read from disk, or compiled now and written to disk.

    Of several processes that need it at the same time, as the workers of a host do, one compiles it.
    """
    found = kept(recipe, compute_capability)
    if found is not None:
        return found
    path = _places(recipe, compute_capability)[0]
    with cache.alone(path):
        found = _read(path)
        if found is None:
            found = compiler.build(recipe.source(), compute_capability)
            facts = {"threads": found.threads, "shared_bytes": found.shared_bytes, "log": found.log}
            cache.write(path, json.dumps(facts).encode() + b"\n" + found.cubin, "compiled kernels")
            cache.bound(path.parent, path.suffix, MOST_FILES)
    return found


def kept(recipe: Recipe, compute_capability: tuple[int, int]) -> Binary | None:
    """Return a kernel's machine code if it is in the cache, or in ``DISTMM_KERNELS_DIR``, which is only read."""
    return next(filter(None, map(_read, _places(recipe, compute_capability))), None)


def is_kept(recipe: Recipe, compute_capability: tuple[int, int]) -> bool:
    """Whether there is a file for `kept`, which is not read; False if another user's folder hides it."""
    return any(map(os.path.exists, _places(recipe, compute_capability)))  # the method of a Path would raise


def _places(recipe: Recipe, compute_capability: tuple[int, int]) -> list[Path]:
    """Return the files that may have the kernel: that of the cache, and one that is only read."""
    name, folders = f"{recipe.key(compute_capability)}.kernel", (cache_folder(), os.environ.get("DISTMM_KERNELS_DIR"))
    return [Path(folder) / name for folder in folders if folder]


def _read(path: Path) -> Binary | None:
    """Read a kernel from a file; None if there is no file or its checksum is wrong. Then the kernel is compiled."""
    content = cache.read(path)
    if content is None:
        return None
    facts, _, cubin = content.partition(b"\n")
    return Binary(cubin=cubin, **json.loads(facts))
