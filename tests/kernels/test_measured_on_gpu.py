"""The kernels of a GPU model that nobody has measured, measured on a GPU."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from distmm_kernels import measured
from distmm_kernels.config import Problem
from distmm_kernels.select import CANDIDATES, facts, promises_bits, select

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def unknown(gpu, monkeypatch, tmp_path):
    """This GPU, as if its model were new."""
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    return dataclasses.replace(gpu, name="NVIDIA Unheard-of")


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", "highest"), ("float32", "high"), (BFLOAT16, "highest"), ("float64", "highest"),
                             ("int8", "highest"), ("complex64", "highest")],
)  # fmt: skip
def test_what_is_measured_is_kept_and_decides(unknown, dtype, precision):
    problem = Problem(8192, 8192, 8192, np.dtype(dtype))
    assert measured.kept(problem, unknown, precision) is None
    found = measured.measure(problem, unknown, precision)
    assert found.model == "NVIDIA Unheard-of"
    assert all(rate > 0 for rate in found.rates.values())
    measured._of_this_process.clear()
    assert measured.kept(problem, unknown, precision) == found
    told = facts(problem, unknown, precision, measured=tuple(found.rates.items()))
    best = next(iter(told))
    assert told[best]["rate"] == found.rates[best]
    assert found.rates[best] >= max(found.rates.values()) / 1.06
    for name in facts(problem, unknown, precision, reproducible=True, measured=tuple(found.rates.items())):
        assert promises_bits(next(each for each in CANDIDATES if each.name == name), problem)
    assert select(problem, unknown, name=best).name == best
