"""Following a Slurm job whose controller is away, and one that Slurm has forgotten. Its program is a stand-in here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distmm.cli.app import app
from distmm.errors import InputError
from distmm.submit import patience, slurm

# Answers from the files 1, 2, ... one after the other; the last one again and again. An empty one: no answer.
SCONTROL = """\
#!/bin/bash
count=$(($(cat {folder}/count 2>/dev/null || echo 0) + 1))
[ -e {folder}/$count ] && echo $count >{folder}/count || count=$((count - 1))
if [ -s {folder}/$count ]; then cat {folder}/$count; else
    echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1; fi
grep -q Invalid {folder}/$count && {{ cat {folder}/$count >&2; exit 1; }}
exit 0
"""
FORGOTTEN = "slurm_load_jobs error: Invalid job id specified"


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the answers of scontrol."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL.format(folder=tmp_path))
    program.chmod(0o755)
    (program.parent / "sbatch").symlink_to(program)  # a machine with Slurm has it
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.01)
    (tmp_path / "distmm-7.log").write_text("Plan\nDone\n")
    return tmp_path


def _answers(folder: Path, *answers: str) -> None:
    for number, answer in enumerate(answers, 1):
        (folder / str(number)).write_text(answer)


def _job(folder: Path, state: str, code: str = "0:0") -> str:
    log = folder / "distmm-7.log"
    return f"JobId=7 JobState={state} Reason=None ExitCode={code} NodeList=n1 StdOut={log}"


def test_a_controller_that_is_away_for_a_while_ends_nothing(controller: Path) -> None:
    _answers(controller, _job(controller, "RUNNING"), "", "", "", _job(controller, "COMPLETED"))
    done = CliRunner().invoke(app, ["submit", "--follow", "7"])
    assert done.exit_code == 0, done.output
    *first, silence, back, last = done.output.splitlines()
    assert silence.startswith(
        "Slurm does not answer; asking again for 10 min: scontrol --oneliner show job 7: slurm_load"
    )
    assert first == ["Plan", "Done", "job 7: running on n1"]
    assert (back, last) == ("Slurm answers again", "job 7: completed")


def test_a_controller_that_stays_away_ends_the_wait_and_leaves_the_job(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_SECONDS", 0.1)
    _answers(controller, _job(controller, "RUNNING"), "")
    with pytest.raises(InputError, match=r"has not answered .*the job may still run.*distmm submit --follow 7"):
        slurm.follow("7", lambda line: None)


@pytest.mark.parametrize(("left", "code"), [("0", 0), ("2", 2), (None, 75)])
def test_the_end_of_a_job_that_slurm_has_forgotten_meanwhile_is_known_from_its_own_file(
    controller: Path, left: str | None, code: int
) -> None:
    _answers(controller, _job(controller, "RUNNING"), "", FORGOTTEN)
    if left is not None:
        (controller / "distmm-7.exit").write_text(f"{left}\n")
    assert slurm.follow("7", lambda line: None) == code


def test_a_number_that_slurm_does_not_know_is_refused(controller: Path) -> None:
    _answers(controller, FORGOTTEN)
    with pytest.raises(InputError, match="Slurm knows no job 7, or no longer"):
        slurm.follow("7", lambda line: None)


def test_following_needs_no_job_file_and_submitting_does() -> None:
    assert "leave out job.toml" in CliRunner().invoke(app, ["submit", "job.toml", "--follow", "7"]).output
    assert "give a job file" in CliRunner().invoke(app, ["submit"]).output
