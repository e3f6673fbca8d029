"""The command line: ``distmm demo``, ``multiply``, ``plan``, ``verify``, ``info`` and ``bench``, one file each."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Run the command that the arguments name; the process exits with its code."""
    from distmm.cli import broken_pipe
    from distmm.cli.app import app

    broken_pipe.outlive()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Batch systems end jobs by SIGTERM: leave as after an interrupt, removing what is half-written.
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
