"""What is printed after its reader has gone, as of ``distmm multiply ... | head -1``, is dropped; the work goes on."""

from __future__ import annotations

import io
import sys
from typing import Any

__all__ = ["outlive"]


class _Outliving(io.FileIO):
    """A file that takes what nobody reads any more."""

    def write(self, data: Any) -> int:
        """Write, if somebody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive() -> None:
    """Have the exit code tell how the work went, whether or not somebody has read all of the output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            stream.flush()
            file = io.BufferedWriter(_Outliving(stream.fileno(), "w", closefd=False))
            line_by_line = stream.line_buffering or name == "stderr"
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=line_by_line))
