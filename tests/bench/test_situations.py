"""The command that measures what users have, with small matrices on CPU workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*arguments):
    return subprocess.run(
        [sys.executable, HERE / "situations.py", "--device", "cpu", "--workers", "2", "--turns", "1", *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.mark.minutes
def test_each_situation_has_rows_with_distmm_and_its_peer(tmp_path):
    table = tmp_path / "table.json"
    ran = run("--scale", "0.01", "--json", str(table))
    rows = json.loads(table.read_text())
    assert not [row for row in rows if "error" in row], ran.stdout + ran.stderr
    assert len({row["name"].split(",")[0] for row in rows}) == 12
    assert all(row["seconds"]["distmm"] > 0 for row in rows)
    assert all(line in ran.stdout for line in ("tall, X.T @ X: distmm", "small, NumPy out=, n = 48: distmm"))


def test_a_situation_that_does_not_end_is_a_row_that_says_so():
    ran = run("--scale", "0.01", "--patience", "0.2", "tall")
    assert "tall: no end in 0 s" in ran.stdout


def test_an_unknown_situation_is_refused_with_the_known_ones():
    ran = run("talk")
    assert ran.returncode == 2
    assert "no situation talk: there are tall, svd" in ran.stderr
