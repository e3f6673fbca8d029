"""Jobs whose client, scheduler and workers are killed end with the bits of one that nobody disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "jobs_kills.py"


@pytest.mark.bits
@pytest.mark.slow
def test_killed_jobs_end_with_the_right_bits() -> None:
    """A few kills; the benchmark itself does as many as it is asked for."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(BENCH), "--kills", "3", "--seed", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 wrong" in done.stdout
