"""Machine code of kernels, kept on disk: each kernel is compiled once a machine, not once a process.

Numba's own cache is keyed by a kernel's function, and goes stale when an intrinsic in another module changes. The key
here has everything that machine code depends on, so an entry is right or absent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distmm_kernels.launch import compiler
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
        facts = [_sources(), _versions(), compiler.architecture(compute_capability), self.maker, repr(self.parameters)]
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


def cache_folder() -> Path:
    """Return where compiled kernels lie: ``DISTMM_CACHE_DIR``, or ``distmm`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if folder := os.environ.get("DISTMM_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distmm"


@functools.cache
def _sources() -> str:
    """Return a digest of all modules of this package, since a kernel's maker may import any of them."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _versions() -> str:
    return compiler.versions()


def _read(path: Path) -> Binary | None:
    """Read a kernel from a file; None if there is none, or if its checksum is wrong: then it is compiled again."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, _, rest = content.partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return None
    facts, _, cubin = rest.partition(b"\n")
    return Binary(cubin=cubin, **json.loads(facts))


def _write(path: Path, made: Binary) -> None:
    """Write to a temporary file and rename it, so that readers and other writers see all of it or nothing."""
    facts = {"threads": made.threads, "shared_bytes": made.shared_bytes, "log": made.log}
    content = json.dumps(facts).encode() + b"\n" + made.cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            # tempfile's files have mode 0600; in a folder that users share, others must read these: the umask decides
            with open(name, "xb") as file:
                file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {path.parent} ({error}), so each process compiles its own: "
            "set DISTMM_CACHE_DIR to a writable folder",
            RuntimeWarning,
            stacklevel=3,
        )
