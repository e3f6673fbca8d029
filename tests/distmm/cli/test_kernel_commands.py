"""The commands about kernels: ``distmm info``, ``distmm compile`` and ``distmm bench kernels``."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.distmm.cli.commands import run


def test_info_shows_devices_versions_and_the_kernel_for_each_type() -> None:
    result = run("info", "--size", "64x32x16")
    assert result.exit_code == 0
    words = ("CPU", "numpy", np.__version__, "numba-cuda", "64 x 32 times 32 x 16", "float32", "complex128")
    assert [word for word in words if word not in result.output] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--arch", "hopper"), "'hopper' is no architecture: use one as in 90a, 80 or sm_89"),
        (("--arch", "75"), "no kernels of float32 are built ahead for compute capability 7.5: give 8.0 or a later one"),
        (("--arch", "90a", "--dtype", "bool"), "no kernels of bool are built ahead"),
    ],
)
def test_compile_refuses_architectures_and_types_that_have_no_kernels(arguments: tuple[str, ...], said: str) -> None:
    result = run("compile", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.compile
def test_compile_says_how_many_kernels_are_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from distmm_kernels import ahead

    some = ahead.recipes((8, 9), "float32")[-2:]
    monkeypatch.setattr(ahead, "recipes", lambda *_: some)
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    for _ in range(2):  # the second time they are there
        result = run("compile", "--arch", "sm_89", "--processes", "2")
        assert result.exit_code == 0
        assert "2 kernels for sm_89, " in result.output
        assert str(tmp_path) in result.output
        assert len(list(tmp_path.iterdir())) == 2


def test_info_says_where_rates_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from distmm_kernels import device, measured
    from distmm_kernels.config import Problem
    from distmm_kernels.launch import cache

    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    shipped = device.Device("cuda", "NVIDIA H200", 0, 1 << 37, (9, 0), 132)
    new = device.Device("cuda", "NVIDIA B200", 1, 1 << 37, (10, 0), 148)
    monkeypatch.setattr(device, "gpus", lambda: (shipped, new))
    monkeypatch.setattr(device, "current", device.cpu)  # these GPUs are not there

    def told() -> str:
        return " ".join(run("info", "--size", "64").output.split())

    assert "NVIDIA H200 shipped with distmm, measured on NVIDIA H200, 2026-" in told()
    assert "NVIDIA B200 not measured yet, the first product of a type does it; until then as NVIDIA H200" in told()
    found = measured.Measurement("NVIDIA B200", "float64", "high", "2027-01-31", {"dmma": 3.1e13, "cublas": 3.4e13})
    path = measured._path("float64", new, "high")
    cache.write(path, json.dumps(dataclasses.asdict(found)).encode(), "measured rates")
    assert measured.kept(Problem(1, 1, 1, np.dtype("f8")), new, "high") == found
    measured._of_this_process.clear()
    assert "NVIDIA B200, float64 high measured here, 2027-01-31: cublas 34 TFLOP/s, dmma 31 TFLOP/s" in told()
    assert "not measured yet" not in told()


def test_bench_names_types_that_there_are() -> None:
    result = run("bench", "kernels", "--dtype", "words", "--device", "cpu")
    assert (result.exit_code, "'words' is not a type: use float32" in " ".join(result.output.split())) == (2, True)


def test_bench_prints_a_table_that_is_never_cut_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result = run(
        "bench", "kernels", "--size", "16", "--size", "16x24x8", "--dtype", "float32", "--repeat", "1",
        "--device", "cpu", "--json", str(tmp_path / "bench.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [
        word for word in ("NumPy", "plain Python", "loads per element", "x naive") if word not in result.output
    ] == []
    assert [cut for cut in ("…", "...") if cut in result.output] == []
    assert len(json.loads((tmp_path / "bench.json").read_text())["ladder"]["rows"]) >= 4
    assert sorted(os.listdir(tmp_path)) == ["bench.json"]
