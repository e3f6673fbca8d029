"""Jobs whose client, scheduler and workers are killed end with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.apart import Ended

BENCH = Path(__file__).resolve().parents[2] / "bench" / "jobs_kills.py"


def program(folder: Path) -> tuple[list[str], dict[str, str]]:
    """A few kills; the benchmark itself does as many as it is asked for."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}
    return [sys.executable, str(BENCH), "--kills", "3", "--seed", "5"], environment


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.apart(program=program)
def test_killed_jobs_end_with_the_right_bits(ended: Ended) -> None:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 wrong" in ended.stdout
