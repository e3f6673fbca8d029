"""Output whose reader has gone, as in ``distmm multiply ... | head -1``, is dropped, and the work goes on."""

from __future__ import annotations

import io
import sys
from typing import Any

__all__ = ["outlive"]


class _Outliving(io.FileIO):
    """A file that accepts and drops what nobody reads any more."""

    def write(self, data: Any) -> int:
        """Write, if somebody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive() -> None:
    """Let stdout and stderr outlive their readers, so that the exit code tells how the work went."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            stream.flush()
            file = io.BufferedWriter(_Outliving(stream.fileno(), "w", closefd=False))
            line_by_line = stream.line_buffering or name == "stderr"
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=line_by_line))
