"""The measurement of the randomised SVD takes turns, compares the results, and says seconds and CPU seconds of both."""

from __future__ import annotations

import re

import dask
import pytest

from tests.bench import randomised_svd


def test_each_turn_and_the_medians_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with dask.config.set({"distmm.accelerate.min-flops": 0}):
        randomised_svd.main(["--rows", "640", "--columns", "64", "--rank", "5", "--turns", "2"])
    first, *turns, last = capsys.readouterr().out.splitlines()
    assert first.startswith("640 x 64 float64 in 16x4 blocks, rank 5, 0 iterations")
    assert len(turns) == 2
    assert all(re.fullmatch(r"Dask [\d.]+ \([\d.]+\), distmm [\d.]+ \([\d.]+\)", turn) for turn in turns)
    assert re.fullmatch(r"medians: .* s, [\d.]+ times; CPU .* s, [\d.]+ times", last)
