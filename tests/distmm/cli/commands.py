"""Runs a command in this process."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from distmm.cli.app import app
from distmm.job import Stop


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert "Traceback" not in result.output
    return result


def run_late(*arguments: str) -> Any:
    """Run a command whose deadline has passed when the work begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stop, "reason", property(lambda stop: f"the deadline of {stop.seconds:g} s has passed"))
        return run(*arguments, "--deadline", "2h")
