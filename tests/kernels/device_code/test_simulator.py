from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("simulator_cases.py")


def test_the_cuda_kernels_are_right_on_the_simulator():
    # NUMBA_ENABLE_CUDASIM counts when Numba is imported and replaces CUDA for the whole process, so the simulator
    # gets its own: the rest of the tests, and the Dask workers that they start, keep the real driver or none
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CASES.parents[3], env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 140, done.stdout
    assert "skipped" not in done.stdout, done.stdout
