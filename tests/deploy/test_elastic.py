"""Workers from Slurm for a client elsewhere: what Slurm refuses is said at once. Its programs are stand-ins here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distmm.errors import InputError
from distmm.submit import elastic
from distmm.submit.schema import Run, Slurm, Workers

WORKERS = Workers(nodes=2, device="cpu", memory="1GB", cpus=1)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs of Slurm's names: a queue of which the test says the contents."""
    folder = tmp_path / "bin"
    folder.mkdir()
    _program(folder, "sinfo", "echo all")
    _program(folder, "scancel", "exit 0")
    _program(folder, "sbatch", f"echo x >>{tmp_path}/count; echo Submitted batch job $(wc -l <{tmp_path}/count)")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(elastic, "POLL_SECONDS", 0.2)
    return folder


def _program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


def _refusal(tmp_path: Path) -> str:
    with (
        pytest.raises(InputError) as error,
        elastic.start(Run(folder=str(tmp_path)), WORKERS, Slurm(partition="nowhere"), timeout=300),
    ):
        pass
    return str(error.value)


def test_jobs_that_sbatch_refuses_end_the_wait_with_its_words(programs: Path, tmp_path: Path) -> None:
    _program(programs, "sbatch", "echo sbatch: error: invalid partition specified: nowhere >&2; exit 1")
    said = _refusal(tmp_path)
    assert said.startswith("sbatch refuses: sbatch: error: invalid partition specified: nowhere. Each node is a sep")
    assert "change the job file's [workers] and [slurm]" in said


def test_a_job_that_slurm_will_never_start_ends_the_wait_with_the_reason(programs: Path, tmp_path: Path) -> None:
    _program(programs, "squeue", "echo '1|PENDING|Resources'; echo '2|PENDING|PartitionTimeLimit'")
    assert _refusal(tmp_path).startswith("job 2 can never start: PartitionTimeLimit. ")


def test_a_job_that_ends_before_its_worker_is_there_ends_the_wait(programs: Path, tmp_path: Path) -> None:
    _program(programs, "squeue", "echo '1|RUNNING|None'; echo '2|FAILED|NonZeroExitCode'")
    assert _refusal(tmp_path).startswith(f"job 2 has ended: FAILED (NonZeroExitCode); its log is in {tmp_path}. ")
