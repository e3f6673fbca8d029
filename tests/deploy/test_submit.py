"""``distmm submit``: on this machine, as text, and what it says of a wrong job file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from distmm.cli.app import app
from distmm.storage import open_matrix

ROOT = Path(__file__).parents[2]

JOB = """\
[product]
a = "A.npy"
b = "B.npy"
c = "C.npy"
transb = true
[workers]
per_node = 2
device = "cpu"
memory = "2GB"
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.mark.minutes
def test_a_job_runs_on_this_machine(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, rng = job_file.parent, np.random.default_rng(6)
    a, b = (rng.integers(-9, 9, shape).astype(float) for shape in ((60, 50), (40, 50)))  # floats need no compiler
    np.save(folder / "A.npy", a)
    np.save(folder / "B.npy", b)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    done = CliRunner().invoke(app, ["submit", str(job_file)])  # a process of its own
    said = capfd.readouterr().err
    assert done.exit_code == 0, said
    assert np.array_equal(open_matrix(folder / "C.npy")[:, :], a @ b.T)
    assert "Cluster with 2 workers" in said


def test_a_dry_run_prints_what_would_run(job_file: Path) -> None:
    done = CliRunner().invoke(app, ["submit", str(job_file), "--dry-run"])
    assert done.exit_code == 0
    for part in ("-m distmm multiply", f"{job_file.parent}/A.npy", "--transb", "--workers 2 --memory-limit 900000000"):
        assert part in done.output
    assert "not checked by --dry-run: whether the matrices are there" in done.stderr
    done = CliRunner().invoke(app, ["submit", str(job_file), "--dry-run", "--cluster", "slurm"])
    assert done.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=distmm\n")


def test_a_wrong_job_file_is_bad_input_with_its_line(job_file: Path) -> None:
    job_file.write_text(JOB.replace("per_node = 2", "per_node = -2"))
    done = CliRunner().invoke(app, ["submit", str(job_file)])
    assert done.exit_code == 2
    assert f"{job_file}:7: per_node = -2 is not a number from 1 to 1024" in done.output


@pytest.mark.parametrize(("cluster", "program"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_a_missing_program_is_named_with_what_to_do(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, cluster: str, program: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for words in ([str(job_file), "--cluster", cluster], ["--follow", "77" if cluster == "slurm" else "team/product"]):
        done = CliRunner().invoke(app, ["submit", *words])
        assert done.exit_code == 2
        assert f"there is no {program} here" in done.output
