"""``distmm plan``: for a cluster, for this machine, and for machines that are not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.distmm.cli.commands import run


def test_plan_computes_nothing(where: list[str]) -> None:
    before = sorted(os.listdir("."))
    result = run("plan", "A.npy", "B.npy", *where)
    assert result.exit_code == 0
    assert "60 x 50 times 50 x 40" in result.output
    assert sorted(os.listdir(".")) == before
    # It is the plan of `multiply`, which gives blocks the same share of the memory, here and where no cluster is.
    assert re.search(r"limited by .*read at .* GB/s, and without the time in which a disk writes C", result.output)
    plan = [line for line in result.output.partition("Plan")[2].splitlines() if not line.startswith("memory")]
    multiplied = run("multiply", "A.npy", "B.npy", "-o", "C.npy", *where).output
    assert [line for line in plan if line not in multiplied] == []
    absent = run("plan", "A.npy", "B.npy", "--memory", "8GB").output
    assert "4.94 GB are free" in absent  # 0.8 (0.8 x 8 - 0.2), rounded down to 7 bits


def test_plan_for_this_machine_starts_no_cluster(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distmm.clusters.connect", None)
    monkeypatch.setattr("distmm.product.request.WORTH_MEASURING_SECONDS", 0.0)  # the files are read at 1 GB/s
    monkeypatch.setattr("distmm.job.planning.read_rate", lambda client, matrix, device, threads: 1e9)
    result = run("plan", "A.npy", "B.npy", "--device", "cpu", "--workers", "1", "--memory-limit", "2GB")
    assert (result.exit_code, "Cluster with" in result.output) == (0, False), result.output
    assert re.search(r"memory .*, 1.11 GB are free", result.output)  # 0.8 (0.8 x 2 - 0.2), rounded down to 7 bits
    assert "files read at 1 GB/s" in result.output
    assert "would do" not in result.output


def test_a_plan_of_files_and_a_small_check_start_without_what_they_do_not_need(where: list[str]) -> None:
    heavy = {"zarr", "distmm.scheduler.plugin", "distmm.telemetry.scheduler"}
    for arguments, unused in (
        (["plan", "A.npy", "B.npy", "--device", "cpu", "--workers", "1"], {"dask.array", *heavy}),
        (["verify", "A.npy", "B.npy", "P.npy"], heavy),
    ):
        code = (
            f"import sys\nfrom distmm.cli.app import app\ntry:\n    app({arguments})\n"
            f"except SystemExit as end:\n    assert (end.code, {unused} & {{*sys.modules}}) == (0, set())"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.minutes
def test_plan_says_what_does_not_fit(where: list[str]) -> None:
    np.lib.format.open_memmap("large.npy", mode="w+", dtype="float32", shape=(40_000, 40_000)).flush()
    result = run("plan", "large.npy", "large.npy", "--plan", "g1x1x1 b40000x40000x40000 p1 w1 l2", *where)
    assert result.exit_code == 2
    assert "short by" in result.output
    in_waves = run("plan", "large.npy", "large.npy", *where)
    assert in_waves.exit_code == 0
    assert "waves" in in_waves.output


def test_plan_is_for_gpus_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("A.npy", np.zeros((50, 60), "f4"))
    small = run("plan", "A.npy", "60x40:float32", "--gpus", "64", "--model", "H100", "--gpu-memory", "80GB")
    assert (small.exit_code, "Cluster with" in small.output) == (0, False), small.output
    assert re.search(r"would do +1 GPU and more", small.output), small.output
    huge = "40000x40000:float64", "40000x40000:float64", "--plan", "g1x1x1 b40000x40000x40000 p1 w1 l2"
    short = run("plan", *huge, "--workers", "1", "--threads", "4", "--memory", "8GB")
    assert short.exit_code == 2
    assert re.search(r"fits +no: short by", short.output), short.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "4"], "--gpus needs --model"),
        (["--gpus", "4", "--model", "K80"], "model 'K80' is not a GPU model that plans know: use one of V100"),
        (["--gpus", "0", "--model", "H100"], "count is 0"),
        (["--model", "H100"], "say how many with --gpus"),
        (["--threads", "4"], "give their --memory too"),
        (["--memory", "4GB", "--cluster", "tcp://127.0.0.1:1"], "--cluster is for an existing cluster"),
        (["--gpus", "4", "--model", "H100", "--memory", "4GB"], "describe CPU workers"),
        (["--gpus", "4", "--model", "H100", "--device", "cpu"], "--device is for an existing cluster"),
        (["--memory", "64"], "memory is '64': give bytes, at least a MiB, or a size with its unit, such as '80GB'"),
    ],
)
def test_descriptions_that_do_not_fit_together_are_refused(arguments: list[str], message: str) -> None:
    result = run("plan", "60x50:float32", "50x40:float32", *arguments)
    assert (result.exit_code, message in result.output) == (2, True), result.output


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (["100000000000000x100000000000000:float64"] * 2, "no array has so many elements"),
        (["3000000000x3000000000:float64", "3000000000x10:float64"], "no array has so many elements"),
        (["10x9999999999999999999999:int8", "9999999999999999999999x10:int8"], "no array has so many elements"),
        (["1000000000x10:float32", "10x10:float32", "--blocks", "1"], "at most 1048576 blocks along a dimension"),
        (["1000000000x10:int8", "10x10:int8", "--plan", "g1x1x1 b1x1x1 p1 w1 l2"], "at most 1048576 blocks along a"),
    ],
)
def test_absurd_sizes_are_wrong_usage(shapes: list[str], message: str) -> None:
    result = run("plan", *shapes, "--workers", "1", "--threads", "1", "--memory", "64GB")
    assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), result.output


def test_a_shape_without_a_type_is_not_taken_for_a_file() -> None:
    result = run("plan", "60x50", "50x40:float32")
    assert result.exit_code == 2
    assert "60x50: no such file; for a plan without one add the type, as in 60x50:float32" in " ".join(
        result.output.split()
    )
