"""Output to a closed pipe, as in ``distmm multiply ... | head -1``: it is dropped, and the command still finishes."""

from __future__ import annotations

import io
import sys
from typing import Any


class _DroppingFile(io.FileIO):
    """A file that drops data after its pipe was closed."""

    def write(self, data: Any) -> int:
        """Write data, or drop it if the pipe is closed."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def outlive() -> None:
    """Make stdout and stderr ignore a closed pipe, so that the exit code is that of the command's work."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            stream.flush()
            file = io.BufferedWriter(_DroppingFile(stream.fileno(), "w", closefd=False))
            line_by_line = stream.line_buffering or name == "stderr"
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=line_by_line))
