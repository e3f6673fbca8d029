from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.programs import run_to_end

FOLDER = Path(__file__).with_name("simulator")
ROOT = FOLDER.parents[3]
PLUGIN = "tests.kernels.device_code.simulator.simulated_gpu"


@pytest.mark.minutes
def test_the_cuda_kernels_are_right_on_the_simulator():
    # NUMBA_ENABLE_CUDASIM counts when Numba is imported and replaces CUDA for the whole process, so the simulator
    # gets its own: the rest of the tests, and the Dask workers that they start, keep the real driver or none
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path}
    cases = sorted(map(str, FOLDER.glob("*_cases.py")))
    options = ["-q", "-p", "no:cacheprovider", "-p", PLUGIN]
    done = run_to_end([sys.executable, "-m", "pytest", *options, *cases], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 170, done.stdout
    assert "skipped" not in done.stdout, done.stdout
