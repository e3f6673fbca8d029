"""Runs a command in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from distmm.cli.app import app


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert "Traceback" not in result.output
    return result
