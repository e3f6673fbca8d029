"""The measurement of `compute` beside ``out=`` checks each C, and says seconds of all ways."""

from __future__ import annotations

import re

import pytest

from tests import forked
from tests.bench import compute


@pytest.mark.minutes
def test_each_turn_and_the_medians_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with forked.workers():
        compute.main(["--size", "600", "--depth", "64", "--workers", "1", "--turns", "2", "--pinned"])
    *turns, medians, ratio = capsys.readouterr().out.splitlines()
    assert len(turns) == 2 * 4
    assert all(re.fullmatch(r"turn [12], .*: [\d.]+ s", turn) for turn in turns)
    assert re.fullmatch(
        r"600 x 64 x 600, medians: out=, new .* s, compute\(\) .* s, out=, there .* s, dask.compute .* s", medians
    )
    assert re.fullmatch(r"compute\(\) at [\d.]+ of the rate of out= into a new array", ratio)
