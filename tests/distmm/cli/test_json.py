"""What commands print with ``--json`` is what the schema of the reference says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import zarr
from distributed import Client
from typer.testing import CliRunner

from distmm.cli.app import app
from distmm.job.records import continuation
from tests.distmm.cli.commands import run_late

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "deploy/site/pages/reference/json_output.schema.json").read_text())


def printed(command: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Return what a command prints on stdout, which is right by its schema."""
    done = CliRunner().invoke(app, [command, *arguments, "--json"])
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(found, {**SCHEMA, "$ref": f"#/$defs/{command}"})
    return found


@pytest.fixture
def where(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of the tests' cluster; the current folder holds A.zarr, B.npy and their product P.npy."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((60, 50)).astype("f4"), rng.standard_normal((50, 40)).astype("f4")
    monkeypatch.chdir(tmp_path)
    zarr.create_array("A.zarr", data=a, chunks=(30, 50), compressors=None)
    np.save("B.npy", b)
    np.save("P.npy", a @ b)
    return ["--cluster", client.scheduler.address]


@pytest.mark.minutes
def test_plans_for_scripts() -> None:
    large = ["100000x100000:float32", "100000x100000:float32", "--workers", "2"]
    found = printed("plan", *large, "--memory", "400GB")
    assert (found["m"], found["workers"], found["fits"], found["shortfall_bytes"]) == (100000, 2, True, 0)
    assert printed("plan", *large, "--memory", "400GB", "--plan", found["plan"])["plan"] == found["plan"]
    small = printed("plan", *large, "--memory", "1GB", "--blocks", "50000", code=2)
    assert not small["fits"]
    assert small["shortfall_bytes"] > 0


def test_the_state_of_a_failed_job_is_failed_until_it_goes_on(where: list[str]) -> None:
    chunk = Path("A.zarr/c/1/0")
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:100])
    multiply = ["multiply", "A.zarr", "B.npy", "-o", "C.zarr", "--blocks", "30", *where]
    failed = CliRunner().invoke(app, multiply)
    assert failed.exit_code == 2
    assert failed.output.count("has 100 bytes, not 6000") == 1
    found = printed("status", "C.zarr", code=1)
    assert (found["state"], found["continue_with"]) == ("failed", f"distmm resume {Path.cwd()}/C.zarr")
    assert "chunk c/1/0 has 100 bytes, not 6000" in found["error"]
    table = CliRunner().invoke(app, ["status", "C.zarr"])
    assert (table.exit_code, "has 100 bytes" in table.output, "ended" in table.output) == (1, True, True)
    chunk.write_bytes(whole)
    assert CliRunner().invoke(app, ["resume", "C.zarr", *where]).exit_code == 0
    assert printed("status", "C.zarr")["error"] is None


def test_verdicts_for_scripts(where: list[str]) -> None:
    assert printed("verify", "A.zarr", "B.npy", "P.npy")["outcome"] == "right"
    np.save("P.npy", np.load("P.npy") + 1)
    wrong = printed("verify", "A.zarr", "B.npy", "P.npy", code=1)
    assert (wrong["outcome"], wrong["residual"] > 1) == ("wrong", True)


def test_this_machine_for_scripts() -> None:
    found = printed("info", "--size", "64")
    assert found["devices"][-1]["kind"] == "cpu"
    assert found["versions"]["numpy"] == np.__version__
    assert "float32" in found["kernels"]


def test_submitted_jobs_for_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "A.npy", np.eye(8))
    tables = '[product]\na = "A.npy"\nb = "A.npy"\nc = "C.npy"\n[workers]\ndevice = "cpu"\nmemory = "2GB"\n'
    (tmp_path / "job.toml").write_text(tables)
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\necho "$DISTMM_SUBMITTED_BY" >{tmp_path}/told\necho 7\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = printed("submit", str(tmp_path / "job.toml"), "--cluster", "slurm", "--detach", "--set", "run.grace=2m")
    assert (found["cluster"], found["id"], found["exit_code"]) == ("slurm", "7", None)
    again = f"distmm submit {tmp_path}/job.toml --cluster slurm --set run.grace=2m"
    assert (tmp_path / "told").read_text().strip() == again
    printed("submit", str(tmp_path / "job.toml"), "--cluster", "slurm", "--detach", "--python", "/nodes/python3")
    again = f"distmm submit {tmp_path}/job.toml --cluster slurm --python /nodes/python3"
    assert (tmp_path / "told").read_text().strip() == again


@pytest.mark.parametrize("option", ["--dry-run", "--only-cluster"])
def test_what_is_printed_and_not_submitted_is_no_json(option: str) -> None:
    done = CliRunner().invoke(app, ["submit", str(ROOT / "deploy/slurm/one_node.toml"), option, "--json"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{option} prints what would be submitted" in done.stderr


def test_a_job_under_slurm_names_its_number_and_the_submit_that_goes_on(
    where: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("DISTMM_SUBMITTED_BY", "distmm submit /scratch/job.toml --cluster slurm")
    stopped = run_late("multiply", "A.zarr", "B.npy", "-o", "C.zarr", *where)
    again = "distmm submit /scratch/job.toml --cluster slurm (the last run was Slurm job 4711)"
    assert (stopped.exit_code, f"continue with: {again}" in stopped.output) == (75, True)
    monkeypatch.delenv("SLURM_JOB_ID")  # as on the login node
    found = printed("status", "C.zarr")
    assert (found["state"], found["continue_with"]) == ("stopped", again)
    assert continuation({"batch_job": "Slurm job 8"}, "C.zarr").startswith("distmm submit JOB.toml --cluster slurm (")
    assert continuation({}, "/a b/C.zarr") == "distmm resume '/a b/C.zarr'"
