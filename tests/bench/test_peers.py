"""Programs measured beside distmm: their figures, their checks, and what becomes of those that are not there."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import pytest
from experiment import Experiment, run
from experiment.cases import TYPES, element
from peers import PROGRAMS, jax_product
from peers.samples import sampled
from scaling import app
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of one product by each peer for CPUs, by the program's name."""
    file = tmp_path_factory.mktemp("peers") / "all.json"
    arguments = ["--device", "cpu", "--size", "128", "--blocks", "2", "--only", "strong", "--workers", "2"]
    arguments += ["--program", "dask.array.matmul", "--program", "NumPy"]
    done = CliRunner().invoke(app, ["scaling", *arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())["rows"]
    return {row["program"]: row for row in found}


@pytest.mark.minutes
def test_peers_are_measured_and_checked_in_one_run(rows: dict[str, dict[str, Any]]) -> None:
    assert {name: row["place"] for name, row in rows.items()} == {"dask.array.matmul": "resident", "NumPy": "host"}
    for row in rows.values():
        assert (row["failure"], row["ok"], row["n"], row["workers"]) == (None, True, 128, 2)
        assert row["seconds"] > 0


@pytest.mark.minutes
def test_dasks_own_product_is_measured_on_the_same_cluster(rows: dict[str, dict[str, Any]]) -> None:
    row = rows["dask.array.matmul"]
    assert row["moved"] >= row["bound"] == 128 * 128 * 4


@pytest.mark.minutes
def test_a_program_that_is_not_there_is_a_row_that_says_so() -> None:
    chosen = [program for program in PROGRAMS if program.name in ("JAX", "cuBLASXt")]
    experiment = Experiment("gpu", (1,), 64, 64, programs=chosen, scalings=["strong"])
    found = run(experiment, 60, None, lambda results, row: None).rows
    assert [row.case.program for row in found] == ["cuBLASXt", "JAX"]
    assert all((row.seconds is None) == bool(row.failure) for row in found)


def test_jax_multiplies_float32_in_each_of_its_ways() -> None:
    ways = [program.name for program in PROGRAMS if program.name.startswith("JAX")]
    assert ways == ["JAX", "JAX:TF32_TF32_F32_X3", "JAX:BF16_BF16_F32_X6", "JAX:BF16_BF16_F32_X9"]


@pytest.mark.parametrize("users", [None, "--xla_gpu_autotune_level=4"])
def test_jax_takes_cublas_unless_the_user_says_else(users: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in jax_product.SETTINGS:
        monkeypatch.setenv(name, users or "")
        if users is None:
            monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "jax", None)  # it need not be there, and is not imported
    with pytest.raises(ImportError), jax_product.program(None):
        pass
    found = {name: os.environ[name] for name in jax_product.SETTINGS}
    assert found == (jax_product.SETTINGS if users is None else dict.fromkeys(found, users))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu", "--program", "JAX"], ["JAX cannot be measured on the CPU"]),
        (["--program", "BLIS"], [program.name for program in PROGRAMS]),
        (["--device", "cpu", "--only", "both"], ["--only both"]),
    ],
)
def test_bad_usage_has_exit_code_2_and_says_what_there_is(arguments: list[str], words: list[str]) -> None:
    done = CliRunner().invoke(app, ["scaling", *arguments])
    assert done.exit_code == 2
    assert all(word in done.output for word in words), done.output


@pytest.mark.parametrize("name", TYPES)
def test_the_check_by_samples_finds_a_wrong_matrix(name: str) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((200, 200), "f4").astype(element(name)) for _ in range(2))
    assert sampled(a, b, a @ b, "highest", 1)["ok"]
    assert not sampled(a, b, (a @ b * 1.5).astype(a.dtype), "highest", 1)["ok"]
