"""Dask's own tests of its products pass with `accelerate` on, and distmm computes in them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.programs import run_to_end

ROOT = Path(__file__).resolve().parents[3]

MODULES = "dask.array.tests.test_routines", "dask.array.tests.test_linalg"

# The tests of what is replaced, without those that take long.
SELECTED = (
    "(test_matmul or tensordot or test_dot or test_vdot or test_einsum or tsqr or svd_compressed or consistent_names) "
    "and not (more_than_26 or uncertain or shapes)"
)


@pytest.mark.minutes
def test_dasks_own_tests_pass_with_it_on(tmp_path: Path) -> None:
    if importlib.util.find_spec("dask.array.tests") is None:
        pytest.skip("this Dask was installed without its tests")
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    tests = ["-p", "tests.distmm.accelerate.turned_on", "-k", SELECTED, "--pyargs", *MODULES]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OPENBLAS_NUM_THREADS": "1"}
    done = run_to_end([sys.executable, "-m", "pytest", *options, *tests], environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    ran = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", done.stdout)}
    expected = {"matmul", "tensordot", "einsum"}
    if importlib.util.find_spec("scipy") is not None:  # Dask skips its tests of linear algebra without
        expected.add("tsqr")
    assert expected <= {name for name, count in ran.items() if count}, done.stdout[-4000:]
