"""Steps of a measurement: what is kept of those that fail, and of those for which time is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.steps import Steps


def broken() -> int:
    raise ValueError("no such luck")


def test_a_step_that_fails_is_kept_with_its_reason_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(path=str(tmp_path / "figures.json"), size=7)
    assert steps.run("first", broken) is None
    assert steps.failed
    known = json.loads((tmp_path / "figures.json").read_text())
    assert known["size"] == 7
    assert known["steps"][0]["failure"] == "ValueError: no such luck"
    assert steps.run("second", lambda: 5) == 5
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" s  ")[1].split(":")[0] for line in said] == ["first ...", "first", "second ...", "second"]


def test_after_the_deadline_no_step_begins_and_those_left_out_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps(deadline=0, path=str(tmp_path / "figures.json"))
    assert steps.run("late", broken) is None
    assert not steps.failed
    known = json.loads((tmp_path / "figures.json").read_text())
    assert known["steps"] == [{"step": "late", "left out": "the time given by --deadline was over after 0 s"}]
    assert "late: left out" in capsys.readouterr().out
