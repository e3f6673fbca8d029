from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distmm_kernels.candidate import HOPPER, Candidate
from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.device import Device

CASES = Path(__file__).with_name("sanitizer_cases.py")
ROOT = CASES.parents[3]

KERNELS = [each for each in CANDIDATES if each.device_kind == "cuda" and not each.name.startswith("cublas")]

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("gpu")]


def run(tool: list[str], kernel: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, sys.path)]
    code = f"import sys, runpy; sys.path[:0] = {paths!r}; runpy.run_path({str(CASES)!r}, run_name='__main__')"
    return subprocess.run([*tool, sys.executable, "-c", code, kernel], capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("candidate", KERNELS, ids=lambda candidate: candidate.name)
def test_a_kernel_touches_no_memory_that_is_not_its_own_or_was_never_written(candidate: Candidate, gpu: Device) -> None:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        pytest.skip("compute-sanitizer is not installed")
    before = run([], candidate.name)  # what it compiles is on disk then, and its products are right
    assert before.returncode == 0, before.stdout + before.stderr
    if before.stdout.startswith("0 products"):
        pytest.skip(f"{candidate.name} does not run on {gpu}")
    # initcheck misreads some asynchronous copies. It does not see what the tensor memory accelerator writes. A cp.async
    # that reads the first bytes of a vector (its src-size) counts as a read of all 16 bytes: seen on an H100 with a
    # kernel of three lines that copies 8 bytes (CUDA 13.0). The kernels that use mma.sync have such copies.
    initcheck = candidate.capabilities != HOPPER and candidate.unit != "mma_sync"
    for tool in ("memcheck", "initcheck") if initcheck else ("memcheck",):
        # the driver's own probes for entry points of other versions are no errors of ours
        done = run([program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"], candidate.name)
        assert re.search(r"\d+ products right", done.stdout), done.stdout + done.stderr
        assert "ERROR SUMMARY: 0 errors" in done.stdout, done.stdout[-4000:]
        assert done.returncode == 0
