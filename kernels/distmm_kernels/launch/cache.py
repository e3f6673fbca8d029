"""Cache files of this machine: compiled kernels, and measured rates. Readers see a complete file or none."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

# Seconds to wait for another process that makes the same file. Few kernels take as long to compile. The other process
# may be stopped, or get no core on a busy machine (`distmm_kernels.background`).
PATIENCE = 10.0


def cache_folder() -> Path:
    """Return the folder of the files: ``DISTMM_CACHE_DIR``, or ``distmm`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if folder := os.environ.get("DISTMM_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "distmm"


@functools.cache
def sources() -> str:
    """Return a digest of all modules of this package, since a kernel's maker may import any of them.

    The package calls this when it is imported (5 ms), before any other of its modules is. A digest made later could be
    that of an upgrade, while this process compiles the old code.
    """
    return _digest()


def _digest() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _is_replaced() -> bool:
    """Whether the package's files have changed since the import, so that modules of both versions may be in use."""
    return _digest() != sources()


def read(path: Path) -> bytes | None:
    """Read what `write` has written; None if there is no such file, its checksum is wrong, or the package changed."""
    if _is_replaced():
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # another user's file, or a read-only folder
        os.utime(path)
    digest, _, rest = content.partition(b"\n")
    return rest if hashlib.sha256(rest).hexdigest().encode() == digest else None


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time make a file: the others wait, and then find it.

    A process waits no longer than `PATIENCE`, and not at all in a folder without locks. Then it makes its own.
    """
    lock = path.with_suffix(".lock")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(lock, "a"))
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        yield
        with contextlib.suppress(OSError):  # a read-only folder
            if path.exists():  # so whoever takes a lock of this name from now on finds the file
                lock.unlink()


def write(path: Path, content: bytes, what: str) -> None:
    """Write a temporary file and rename it, so that other processes see a complete file or none.

    Parameters
    ----------
    what
        Name of the content, for the warning if it cannot be written.
    """
    why = ": the files of distmm_kernels have changed since this process imported it. Start the process again"
    if not _is_replaced():
        try:
            _replace(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            return
        except OSError as error:
            why = (
                f" in {path.parent} ({error}), so each process makes its own: set DISTMM_CACHE_DIR to a writable folder"
            )
    warnings.warn(f"{what} cannot be kept{why}", RuntimeWarning, stacklevel=3)


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_suffix(f".{uuid.uuid4().hex}")
    try:
        # not tempfile, whose files have mode 0600: other users may share the folder, so the umask decides the mode
        with open(name, "xb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def bound(folder: Path, suffix: str, most: int) -> None:
    """Remove the files with this suffix that were written or read longest ago, if there are more than ``most``.

    Kernels of earlier versions of the package are never read again.
    """
    with contextlib.suppress(OSError):  # another process removes the same files
        files = sorted(folder.glob(f"*{suffix}"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(0, len(files) - most)]:
            path.unlink()
