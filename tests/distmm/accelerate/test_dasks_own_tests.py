"""Dask's own tests of its products pass with `accelerate` on, and distmm computes in them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Of Dask's modules: the tests of what is replaced, without those that take long.
SELECTED = {
    "test_routines": "test_matmul or tensordot or test_dot or test_vdot or test_einsum and not test_einsum_chunksizes",
    "test_linalg": "tsqr or svd_compressed or linalg_consistent_names",
}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "needs"), [("test_routines", "numpy"), ("test_linalg", "scipy")])
def test_dasks_own_tests_pass_with_it_on(module: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(f"dask.array.tests.{module}", reason="this Dask was installed without its tests")
    pytest.importorskip(needs, reason="those tests of Dask need it")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", tmp_path),
            *("-p", "tests.distmm.accelerate.turned_on", "-k", SELECTED[module]),
            *("--pyargs", f"dask.array.tests.{module}"),
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    ran = {name: int(count) for name, count in re.findall(r"(\w+)=(\d+)", done.stdout)}
    expected = {"matmul", "tensordot", "einsum"} if module == "test_routines" else {"tensordot", "tsqr"}
    assert expected <= {name for name, count in ran.items() if count}, done.stdout[-4000:]
