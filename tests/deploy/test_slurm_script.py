"""The batch script as text; `test_slurm` runs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from distmm.submit import fabric, jobfile, slurm

DEPLOY = Path(__file__).parents[2] / "deploy" / "slurm"


@pytest.fixture
def job(tmp_path: Path) -> jobfile.Job:
    text = (DEPLOY / "one_node.toml").read_text()
    (tmp_path / "job.toml").write_text(text)
    return jobfile.load(tmp_path / "job.toml")


@pytest.mark.parametrize("name", ["one_node", "sixteen_nodes"])
def test_shipped_scripts_are_what_the_renderer_gives_and_parse(name: str) -> None:
    rendered = slurm.render(jobfile.load(DEPLOY / f"{name}.toml"), python="/shared/venv/bin/python")
    assert rendered == (DEPLOY / f"{name}.sh").read_text()
    subprocess.run(["bash", "-n"], input=rendered, text=True, check=True)


def test_a_gpu_node_runs_one_process_that_starts_one_worker_a_gpu(job: jobfile.Job) -> None:
    lines = slurm.render(job).replace("\\\n", " ").splitlines()
    (workers,) = [line for line in lines if "dask cuda worker" in line]
    for part in (
        "--ntasks=1 ",
        "--gres=gpu:8",
        "--nthreads 3",
        "--memory-limit 111500000000",
        "--device-memory-limit 0",
    ):
        assert part in workers
    assert "#SBATCH --gres=gpu:8" in lines
    assert "#SBATCH --signal=B:USR1@600" in lines
    assert "#SBATCH --requeue" in lines
    assert "#SBATCH --time=240" in lines


@pytest.mark.parametrize(
    ("dashboard", "address"), [("localhost", "127.0.0.1:0"), ("all", ":0"), ("none", "127.0.0.1:0")]
)
def test_dashboards_are_seen_from_other_machines_only_if_told(dashboard: str, address: str, tmp_path: Path) -> None:
    job = jobfile.load(DEPLOY / "one_node.toml", [f"run.dashboard={dashboard}"])
    text = slurm.render(job)
    lines = text.replace("\\\n", "").splitlines()
    (scheduler,), (workers,) = (
        [line for line in lines if f"-m dask {what} " in line] for what in ("scheduler", "cuda")
    )
    assert f"--dashboard-address {address} " in scheduler
    assert ("--no-dashboard" in scheduler) == (dashboard == "none")
    assert "--dashboard-address :0 " in workers  # their figures, for Prometheus
    assert ("--no-dashboard" in workers) == (dashboard != "all")
    assert ("ROUTES='['\"'\"'distributed.http.health'" in text) == (dashboard == "none")
    assert ("DASHBOARD__LINK=http://localhost:8787/status\n" in text) == (dashboard == "localhost")


@pytest.mark.parametrize(("walltime", "minutes", "deadline"), [("90s", 2, 100), ("2m", 2, 100), ("01:30:00", 90, 5380)])
def test_the_client_plans_for_its_allocation_and_stops_no_sooner_than_slurm_warns(
    walltime: str, minutes: int, deadline: int
) -> None:
    text = slurm.render(jobfile.load(DEPLOY / "one_node.toml", [f"run.walltime={walltime}", "run.grace=20s"]))
    assert f"#SBATCH --time={minutes}\n" in text
    assert f" --deadline {deadline}s " in text
    assert f'[ "$SECONDS" -lt {deadline} ] || warned=yes' in text


def test_a_path_with_shell_characters_stays_one_word(tmp_path: Path) -> None:
    job = jobfile.load(DEPLOY / "one_node.toml", ["product.a=/data/$(touch evil) & x.npy", "run.folder=/run of $me"])
    text = slurm.render(job)
    assert "'/data/$(touch evil) & x.npy'" in text
    assert "folder='/run of $me'" in text
    assert '#SBATCH --output="/run of $me/distmm-%j.log"' in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_restart_does_not_start_over() -> None:
    text = slurm.render(jobfile.load(DEPLOY / "one_node.toml", ["product.overwrite=true"]))
    (client,) = [line for line in text.replace("\\\n", " ").splitlines() if "distmm multiply" in line]
    (option,) = re.findall(r"\$\(.*\)", client)
    for restarts, expected in (("0", "--overwrite"), ("1", "")):
        shell = subprocess.run(
            ["bash", "-c", f"echo {option}"],
            env={"SLURM_RESTART_COUNT": restarts},
            capture_output=True,
            text=True,
            check=True,
        )
        assert shell.stdout.strip() == expected


def test_certificates_reach_every_step_through_the_environment(tmp_path: Path) -> None:
    text = slurm.render(jobfile.load(DEPLOY / "one_node.toml", ["run.tls=temporary"]))
    assert "export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=True" in text
    assert "TLS__WORKER__KEY=/scratch/project/run/distmm.tls/key.pem" in text
    assert "distmm.submit.fabric gpu tls)" in text


def test_another_command_runs_in_place_of_the_product_and_resumes_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[workers]\nnodes = 2\n")  # no product
    words = ["topk", "my X.zarr", "-k", "15", "-o", "T.zarr", "--overwrite"]
    text = slurm.render(jobfile.load(tmp_path / "job.toml", words=words)).replace("\\\n", " ")
    (client,) = [" ".join(line.split()) for line in text.splitlines() if "distmm topk" in line]
    assert "topk 'my X.zarr' -k 15 " in client
    assert "-o T.zarr --deadline 3300s --cluster" in client
    assert client.count("--overwrite") == client.count("|| echo --overwrite)") == 1
    verify = slurm.render(jobfile.load(DEPLOY / "one_node.toml", words=["verify", "C.zarr"]))
    assert "--deadline" not in verify
    assert "A.zarr" not in verify


@pytest.mark.parametrize(
    ("device", "transport", "installed", "expected"),
    [
        ("gpu", "auto", True, "ucx"),
        ("gpu", "auto", False, "tcp"),
        ("cpu", "auto", True, "tcp"),
        ("gpu", "tls", True, "tls"),
        ("gpu", "tcp", True, "tcp"),
    ],
)
def test_ucx_is_used_by_gpus_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, transport: str, installed: bool, expected: str
) -> None:
    monkeypatch.setattr(fabric.importlib.util, "find_spec", lambda name: object() if installed else None)
    assert fabric.choose(device, transport, system=tmp_path) == expected


def test_infiniband_is_used_where_it_is_up(tmp_path: Path) -> None:
    for name, state in (("eth0", "up"), ("ib0", "down"), ("ib1", "up")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    assert fabric.choose("cpu", "auto", system=tmp_path) == "tcp ib1"
    assert fabric.choose("cpu", "auto", "eth0", system=tmp_path) == "tcp eth0"


def test_ucx_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fabric.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="needs distributed-ucxx on the nodes"):
        fabric.choose("gpu", "ucx", system=tmp_path)


@pytest.mark.parametrize(
    "reason", ["PartitionTimeLimit", "QOSMaxGRESPerJob", "AssocMaxWallDurationPerJobLimit", "QOSMinGRES"]
)
def test_what_no_single_job_may_have_never_starts(reason: str) -> None:
    assert slurm.NEVER.fullmatch(reason)


@pytest.mark.parametrize("reason", ["Resources", "Priority", "BeginTime", "AssocGrpGRES", "QOSMaxJobsPerUserLimit"])
def test_what_ends_with_other_jobs_is_waited_for(reason: str) -> None:
    assert not slurm.NEVER.fullmatch(reason)
