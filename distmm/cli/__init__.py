"""The command line: the modules have the commands of ``distmm``."""

from __future__ import annotations

import io
import os
import signal
import sys
from types import FrameType
from typing import Any, ClassVar, NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command in the process's arguments, and exit with its code."""
    from distmm import interrupts
    from distmm.cli.app import UNEXPECTED, app

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
        sys.stdout.flush()
        if _DroppingFile.lost is not None and not code.code:
            print(f"a part of the output is lost: {_DroppingFile.lost}", file=sys.stderr)  # noqa: T201
            raise SystemExit(UNEXPECTED) from None
        raise


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # batch systems send it several times, also while Python ends
    raise SystemExit(128 + number)


class _DroppingFile(io.FileIO):
    """A file that drops data which it cannot write: its pipe was closed, its disk is full, its terminal has gone."""

    lost: ClassVar[OSError | None] = None  # why data were dropped, unless the reader has closed the pipe

    def write(self, data: Any) -> int:
        """Write data, or drop it."""
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                _DroppingFile.lost = error
            return memoryview(data).nbytes


def _outlive_pipes() -> None:
    """Let no output end a job, neither to a closed pipe, as in ``distmm multiply ... | head -1``, nor to a full disk.

    It is dropped. The exit code is that of the command's work, but 3 if the work is done and its output is not whole.
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
