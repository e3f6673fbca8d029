"""``distmm submit`` refuses what it can see before it asks Slurm for nodes. Slurm's programs are stand-ins here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from distributed import Client
from typer.testing import CliRunner

from distmm import job as jobs
from distmm.cli.app import app
from distmm.errors import Stopped
from distmm.job.job import preflight
from distmm.job.lock import locked
from distmm.product.choices import Choices
from tests.tables import later

JOB = """\
[product]
a = "A.npy"
b = "B.zarr"
c = "out/C.zarr"
[run]
folder = "run"
walltime = "10m"
grace = "1m"
[workers]
nodes = 2
device = "cpu"
memory = "2GB"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a product and a job file, and an sbatch that notes that it was called."""
    np.save(tmp_path / "A.npy", np.arange(64.0).reshape(8, 8))
    zarr.create_array(tmp_path / "B.zarr", data=np.arange(64.0).reshape(8, 8), chunks=(4, 4))
    (tmp_path / "out").mkdir()
    (tmp_path / "job.toml").write_text(JOB)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text(f"#!/bin/bash\ntouch {tmp_path}/asked\necho 7\n")
    (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


# A product of 160 TFLOP.
DEEP = ("product.a=big.npy", "product.b=big.npy", "product.transb=true")


def submit(*changes: str) -> tuple[int, str]:
    options = [word for change in changes for word in ("--set", change)]
    done = CliRunner().invoke(app, ["submit", "job.toml", "--cluster", "slurm", "--detach", *options])
    return done.exit_code, done.output


def test_a_product_that_can_be_computed_is_submitted(here: Path) -> None:
    code, said = submit()
    assert (code, (here / "asked").exists()) == (0, True), said
    assert "job 7: submitted" in said


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("mistake", "changes", "said"),
    later([
        (lambda here: None, ["product.a=Z.npy"], "Z.npy: no such file or folder"),
        (lambda here: damage(here / "A.npy"), [], "A.npy: "),
        (lambda here: np.save(here / "A.npy", np.ones((8, 5))), [], r"A.*\(8, 5\).*\(8, 8\)"),
        (lambda here: None, ["product.c=there/C.zarr"], "there is no folder .*there; make it first"),
        (lambda here: None, ["product.c=B.zarr/C.zarr"], "is inside the Zarr array"),
        (lambda here: np.save(here / "out" / "C.npy", np.ones(2)), ["product.c=out/C.npy"], "C.npy: exists"),
        (lambda here: None, ["product.c=out/C.txt"], "cannot write the format '.txt'"),
        (lambda here: None, [*DEEP, "product.blocks=2000x5000000x2000"], "GB on each of 2 workers.*short by .* GB"),
        (lambda here: None, ["workers.device=gpu"], "lacks dask_cuda.*install distmm"),
        (lambda here: None, [*DEEP, "run.walltime=70s", "run.grace=60s", "product.blocks=2000x8192x2000"],
         "a run is stopped after 10 s.*no block of C.*smaller blocks"),
    ], first=4),
)  # fmt: skip
def test_a_mistake_is_refused_before_any_node_is_asked_for(
    here: Path, mistake: Callable[[Path], object], changes: list[str], said: str
) -> None:
    # 320 GB that take no room on the disk; C has 32 MB.
    big = np.lib.format.open_memmap(here / "big.npy", mode="w+", dtype="f8", shape=(2000, 20_000_000))
    del big
    mistake(here)
    code, output = submit(*changes)
    assert code == 2, output
    assert re.search(said, output.replace("\n", " ")), output
    assert not (here / "asked").exists()


def test_a_folder_that_is_read_only_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(here / "out") and may(path, mode))
    code, said = submit()
    assert (code, "read-only for you" in said) == (2, True), said
    assert not (here / "asked").exists()


@pytest.mark.minutes
def test_a_product_that_is_complete_or_under_way_is_refused(client: Client, here: Path) -> None:
    jobs.multiply("A.npy", "B.zarr", "out/C.zarr", client=client)
    code, said = submit()
    assert (code, "there is nothing to do" in said) == (2, True), said
    assert submit("product.overwrite=true")[0] == 0
    (here / "asked").unlink()
    os.mkdir("out/D.zarr.job")
    with locked(str(here / "out" / "D.zarr.job")):
        code, said = submit("product.c=out/D.zarr")
    assert (code, "another job works on this output" in said) == (2, True), said
    assert not (here / "asked").exists()


def test_a_job_that_was_stopped_goes_on_and_refuses_other_inputs(client: Client, here: Path) -> None:
    stop = jobs.Stop()
    stop.ask("enough")
    with pytest.raises(Stopped, match="enough"):
        jobs.multiply("A.npy", "B.zarr", "out/C.zarr", client=client, stop=stop)
    assert submit()[0] == 0
    os.utime("A.npy", (1, 1))
    code, said = submit()
    assert (code, "A.npy: written since the job began" in said.replace("\n", " ")) == (0, True), said
    (here / "asked").unlink()
    np.save("A.npy", np.ones((8, 8), "f4"))
    code, said = submit()
    assert (code, "has an unfinished job that differs" in said) == (2, True), said
    assert not (here / "asked").exists()


def test_what_lies_behind_a_url_is_said_to_be_unchecked_and_nothing_is_asked_there() -> None:
    (said,) = preflight("s3://bucket/A.zarr", "B.npy", "s3://bucket/C.zarr", choices=Choices())
    assert said == "A (s3://bucket/A.zarr) and C (s3://bucket/C.zarr): behind a URL"


def test_gpus_of_a_model_are_planned_for_and_others_are_said_to_be_unknown(here: Path) -> None:
    from distmm.cli.submit import _machines
    from distmm.submit import jobfile

    known = _machines(
        jobfile.load(here / "job.toml", ["workers.device=gpu", "workers.per_node=4", "slurm.gres=gpu:h200:4"])
    )
    assert known is not None
    assert (known.workers, known.model) == (8, "H200")
    assert _machines(jobfile.load(here / "job.toml", ["workers.device=gpu"])) is None
    (said,) = preflight("A.npy", "B.zarr", "out/C.zarr", choices=Choices())
    assert said == "whether it fits: the machines are not known"
