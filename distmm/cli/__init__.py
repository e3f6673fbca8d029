"""The command line: the modules have the commands of ``distmm``."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command in the process's arguments, and exit with its code."""
    from distmm.cli import broken_pipe
    from distmm.cli.app import app

    # `dask.array` imports xarray, and with it pandas, where they are installed: half a second, for nothing here.
    sys.modules.setdefault("xarray", None)  # type: ignore[arg-type]
    broken_pipe.outlive()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Batch systems end jobs by SIGTERM. SystemExit lets the command clean up unfinished files, as after an interrupt.
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
