"""Jobs whose client, scheduler and workers are killed end with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.programs import run_to_end

BENCH = Path(__file__).resolve().parents[2] / "bench" / "jobs_kills.py"


@pytest.mark.bits
@pytest.mark.slow
@pytest.mark.minutes
def test_killed_jobs_end_with_the_right_bits(tmp_path: Path) -> None:
    """A few kills; the benchmark itself does as many as it is asked for."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    done = run_to_end([sys.executable, str(BENCH), "--kills", "3", "--seed", "5"], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong" in done.stdout
