"""The command line: the modules have the commands of ``distmm``."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command in the process's arguments, and exit with its code."""
    from distmm import interrupts
    from distmm.cli.app import app

    # `dask.array` imports xarray, and with it pandas, where they are installed: half a second, for nothing here.
    sys.modules.setdefault("xarray", None)  # type: ignore[arg-type]
    _outlive_pipes()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Batch systems end jobs by SIGTERM. SystemExit lets the command clean up unfinished files, as after an interrupt.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except SystemExit as code:
        if code.code == interrupts.INTERRUPTED:  # a second Ctrl-C while Python ends is no error either
            signal.signal(signal.SIGINT, interrupts.end)
        raise


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # batch systems send it several times, also while Python ends
    raise SystemExit(128 + number)


class _DroppingFile(io.FileIO):
    """A file that drops data after its pipe was closed."""

    def write(self, data: Any) -> int:
        """Write data, or drop it if the pipe is closed."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _outlive_pipes() -> None:
    """Make stdout and stderr ignore a closed pipe, as in ``distmm multiply ... | head -1``.

    Output to it is dropped, and the exit code is that of the command's work.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        else:
            stream.flush()
            file = io.BufferedWriter(_DroppingFile(stream.fileno(), "w", closefd=False))
            line_by_line = stream.line_buffering or name == "stderr"
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=line_by_line))
