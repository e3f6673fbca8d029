from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distmm_kernels.candidate import HOPPER
from distmm_kernels.candidates import CANDIDATES

CASES = Path(__file__).with_name("sanitizer_cases.py")
ROOT = CASES.parents[3]

# initcheck seems not to see what the tensor memory accelerator writes: it reported reads of results that are right.
# The kernels that are for Hopper GPUs alone use it.
BY_TMA = tuple(candidate.name for candidate in CANDIDATES if candidate.capabilities == HOPPER)

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("gpu")]


@pytest.fixture(scope="module")
def compiled_before():
    """The products once without the tool: what they compile is on disk then, and they are right."""
    done = run([])
    assert done.returncode == 0, done.stdout + done.stderr


def run(tool, without=()):
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, sys.path)]
    code = f"import sys, runpy; sys.path[:0] = {paths!r}; runpy.run_path({str(CASES)!r}, run_name='__main__')"
    return subprocess.run([*tool, sys.executable, "-c", code, *without], capture_output=True, text=True, timeout=280)


@pytest.mark.usefixtures("compiled_before")
@pytest.mark.parametrize(("tool", "without"), [("memcheck", ()), ("initcheck", BY_TMA)])
def test_no_kernel_touches_memory_that_is_not_its_own_or_was_never_written(tool, without):
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        pytest.skip("compute-sanitizer is not installed")
    # the driver's own probes for entry points of other versions are no errors of ours
    done = run([program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"], without)
    assert re.search(r"\d+ products right", done.stdout), done.stdout + done.stderr
    assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:]
    assert done.returncode == 0
