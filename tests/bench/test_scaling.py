"""`scaling.py` on CPU workers for real, its arithmetic, and what becomes of programs that fail or hang."""

from __future__ import annotations

import json
import math
import os
import queue
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from experiment import DISTMM, Case, Experiment, Program, Results, Row, efficiency, matrices, run, weak_size
from experiment.cases import KERNEL, TYPES, element
from experiment.measuring_process import Task, median
from experiment.run import Child, environment
from hypothesis import given
from hypothesis import strategies as st
from scaling import app
from typer.testing import CliRunner

from distmm.errors import InputError

BESIDE = (DISTMM, Program("other", "no.such.module", {"gpu": (("host",), ("float32",))}))


def case(**changes: object) -> Case:
    facts = {"program": "distmm", "scaling": "strong", "place": "resident", "dtype": "float32", "workers": 1, "n": 256}
    return Case(**{**facts, "block": 64, **changes})


# Arithmetic


@given(base=st.integers(4, 1 << 20), workers=st.integers(1, 1024), blocks=st.sampled_from([1, 2, 4]))
def test_weak_sizes_are_whole_blocks_near_the_root(base: int, workers: int, blocks: int) -> None:
    n, edge = weak_size(base, workers, blocks)
    assert n == edge * blocks
    assert abs(n - base * math.sqrt(workers)) <= max(base / 64, blocks / 2)


def test_weak_sizes_on_gpus() -> None:
    assert [weak_size(32768, p, 4) for p in (1, 2, 4, 8)] == [
        (32768, 8192), (46080, 11520), (65536, 16384), (93184, 23296),
    ]  # fmt: skip


def test_the_bound_is_that_of_the_best_grid() -> None:
    panels = [case(workers=p, n=1000, dtype="float32").bound // 4_000_000 for p in (1, 2, 4, 6, 8, 16)]
    assert panels == [0, 1, 2, 3, 4, 6]
    assert case(workers=4, n=1000, dtype="bfloat16").bound == 2 * 2_000_000


def test_efficiency_is_against_one_worker_of_the_same_program_and_scaling() -> None:
    results = Results(Experiment("cpu", (1, 2), 256, 128))
    results.rows = [
        Row(case(), seconds=8.0),
        Row(case(program="other"), seconds=1.0),
        Row(case(scaling="weak", n=128), seconds=1.0),
        Row(case(workers=2), seconds=5.0),
        Row(case(workers=2, scaling="weak", n=181), seconds=2.0),
        Row(case(workers=2, program="another"), seconds=2.0),
        Row(case(workers=2, program="other"), failure="ended"),
        Row(case(program=KERNEL, scaling=KERNEL, n=64), seconds=0.1),
    ]
    strong, weak, without, failed = (results.efficiency(results.rows[i]) for i in (3, 4, 5, 6))
    assert strong == pytest.approx(8.0 / 5.0 / 2)
    assert weak == pytest.approx((181 / 128) ** 3 / 2 / 2)
    assert (without, failed) == (None, None)
    assert results.of_kernels(results.rows[3]) == pytest.approx((256 / 64) ** 3 * 0.1 / 5.0 / 2)
    assert efficiency(3.0, 2, 2.0) == 0.75


def test_distmm_on_one_and_on_all_workers_comes_first() -> None:
    groups = Experiment("gpu", (1, 2, 4, 8), 65536, 32768, programs=BESIDE, dtypes=("float32", "bfloat16")).groups()
    assert [(g.program.name, g.workers) for g in groups] == [
        ("distmm", 1), ("distmm", 8), ("distmm", 4), ("distmm", 2),
        ("other", 8), ("other", 1), ("other", 4), ("other", 2),
    ]  # fmt: skip
    first = groups[0].cases
    assert [c.program for c in first[:3]] == [KERNEL, KERNEL, "distmm"]
    assert (first[2].scaling, first[2].place, first[2].n, first[2].block) == ("strong", "resident", 65536, 16384)
    cases = [c for g in groups for c in g.cases]
    assert len(set(cases)) == len(cases) == 2 + 4 * (8 + 2)
    assert {(c.place, c.dtype) for c in cases if c.program == "other"} == {("host", "float32")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"programs": BESIDE}, {"dtypes": ["int8"]}, {"counts": []}, {"counts": [0]}, {"size": 0}, {"repeat": 0},
        {"weak": 3}, {"places": ["disk"]},
    ],
)  # fmt: skip
def test_an_experiment_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Experiment(**{"device": "cpu", "counts": (1,), "size": 64, "weak": 64, **wrong})


def test_of_several_products_the_median_counts_and_one_wrong_one_is_wrong() -> None:
    rows = [{"seconds": seconds, "ok": seconds != 9, "moved": i} for i, seconds in enumerate([3.0, 9.0, 5.0])]
    assert median(rows) == {"seconds": 5.0, "ok": False, "moved": 2, "all_seconds": [3.0, 9.0, 5.0]}


# Matrices


@pytest.mark.parametrize("dtype", TYPES)
def test_host_matrices_are_normal_and_new_for_each_seed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "STRIP", 4096)
    arena = matrices.Arena(3 * 300 * 300 * element(dtype).itemsize)
    a, b, _ = arena.matrices(300, element(dtype))
    matrices.fill(a, 1)
    matrices.fill(b, 2)
    values, others = (x.view("f4") if x.dtype.kind == "c" else x.astype("f4") for x in (a, b))
    assert abs(values.mean()) < 0.02
    assert values.std() == pytest.approx(1, abs=0.02)
    assert abs(np.corrcoef(values.ravel(), others.ravel())[0, 1]) < 0.02
    assert len(np.unique(values[:, 0])) > 150  # strips have numbers of their own


def test_matrices_that_the_host_has_no_memory_for_are_refused() -> None:
    with pytest.raises(InputError, match=r"1e\+06 GB of host memory"):
        matrices.Arena(10**15)


# Processes


def settled(experiment: Experiment, patience: float = 60, deadline: float | None = None) -> list[Row]:
    seen: list[Row] = []
    results = run(experiment, patience, deadline, lambda _, row: seen.append(row))
    assert seen == results.rows
    return seen


def behaves(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Let children follow the protocol, and misbehave where their first case is the one of n = 96 (strong, host)."""
    code = f"""
import json, os, sys, time
task = json.loads(sys.stdin.readline())
say = lambda answer: print(json.dumps(answer), flush=True)
say({{"ready": True}})
for case in task["cases"]:
    if case["n"] == 96 and case["place"] == "host":
        {how}
    say({{"row": {{"seconds": 1.0, "ok": True}}}})
"""
    monkeypatch.setattr(Child, "command", (sys.executable, "-c", code))


SMALL = Experiment("cpu", (1,), 96, 64)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("say({'failure': 'MemoryError: full'}); sys.exit(1)", "MemoryError: full"),
        ("print('out of luck', file=sys.stderr); os.kill(os.getpid(), 9)", "ended with code -9: out of luck"),
    ],
)
def test_a_case_that_fails_is_a_row_that_says_why_and_the_others_go_on(
    how: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves(monkeypatch, how)
    rows = settled(SMALL)
    assert [row.case for row in rows] == [c for group in SMALL.groups() for c in group.cases]
    failed = [row for row in rows if row.failure]
    assert [(row.case.scaling, row.case.place) for row in failed] == [("strong", "host")]
    assert reason in str(failed[0].failure)
    assert all(row.seconds == 1.0 for row in rows if not row.failure)


class UntilItHangs(queue.Queue):
    """Answers, until the child says that it hangs: then the time is over, however long it was in coming."""

    def get(self, timeout: float) -> Any:
        answer = super().get(timeout=120)
        if answer == {"hangs": True}:
            raise queue.Empty
        return answer


def test_a_case_that_hangs_is_given_up_and_so_are_those_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    behaves(monkeypatch, "say({'hangs': True}); time.sleep(600)")
    monkeypatch.setattr(sys.modules[Child.__module__], "queue", SimpleNamespace(Queue=UntilItHangs, Empty=queue.Empty))
    rows = settled(Experiment("cpu", (1,), 96, 96), patience=60)
    by_kind = {(row.case.scaling, row.case.place): row for row in rows}
    assert "no result within 60 s" in str(by_kind["strong", "host"].failure)
    assert "not measured: distmm on 1, strong, host" in str(by_kind["weak", "resident"].failure)
    assert by_kind["strong", "resident"].seconds == 1.0


def test_nothing_is_measured_after_the_deadline() -> None:
    rows = settled(SMALL, deadline=0)
    assert len(rows) == 5
    assert {row.failure for row in rows} == {"not measured: the time given by --deadline was over"}


def test_a_child_sees_as_many_gpus_as_it_has_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(DISTMM.name, DISTMM.module, None, "gpu", 2, (), "highest", None, 1, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert environment(task)["CUDA_VISIBLE_DEVICES"] == "3,5"


@pytest.mark.minutes
def test_a_child_and_its_workers_end_with_their_parent() -> None:
    with Child(Task(DISTMM.name, DISTMM.module, None, "cpu", 1, (), "highest", None, 1, 0)) as child:
        assert child.answer(120) == {"ready": True}
        family = [psutil.Process(child.process.pid), *psutil.Process(child.process.pid).children(recursive=True)]
        assert len(family) > 2  # a nanny's worker, at least
        assert child.process.stdin is not None
        child.process.stdin.close()  # as when the parent dies
        child.process.wait(60)
        assert psutil.wait_procs(family[1:], timeout=60)[1] == []


# The command


@pytest.mark.minutes
def test_scaling_on_cpu_workers_is_measured_checked_and_consistent(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--size", "128", "--blocks", "2", "--only", "strong"]
    arguments += ["--json", str(tmp_path / "all.json"), "--plot", str(tmp_path / "all.png")]
    done = CliRunner().invoke(app, ["scaling", "--program", "distmm", *arguments])
    assert done.exit_code == 0, done.output
    assert sorted(os.listdir(tmp_path)) == ["all.json", "all.png", "all.svg"]
    facts = json.loads((tmp_path / "all.json").read_text())
    rows = facts["rows"]
    assert [row["failure"] for row in rows] == [None] * 5
    assert {(row["program"], row["place"], row["workers"]) for row in rows} == {
        (KERNEL, "resident", 1),
        *(("distmm", place, p) for p in (1, 2) for place in ("resident", "host")),
    }
    kernel = rows[0]
    for row in rows[1:]:
        assert row["tflops"] == pytest.approx(2 * row["n"] ** 3 / row["seconds"] / 1e12)
        assert row["of_kernels"] == pytest.approx(row["tflops"] / row["workers"] / kernel["tflops"])
        alone = next(x for x in rows[1:] if (x["workers"], x["place"]) == (1, row["place"]))
        assert row["efficiency"] == pytest.approx(alone["seconds"] / row["seconds"] / row["workers"])
        assert f"{row['efficiency']:.3f}" in done.output
        assert (row["ok"], row["n"]) == (True, 128)
        assert row["residual"] <= 1
    alone, both = (row for row in rows[1:] if row["place"] == "resident")
    # Operands lie where the plan wants them: each block goes once to each worker that needs it.
    assert (alone["moved"], both["moved"]) == (alone["bound"], both["bound"]) == (0, 128 * 128 * 4)
    assert both["predicted"] > 0
    assert both["note"].startswith("g")


@pytest.mark.minutes
def test_sums_of_streamed_products_are_measured_beside_the_product() -> None:
    both = ["resident", "streamed"]
    kernel, *rows = settled(Experiment("cpu", (2,), 256, 64, scalings=["strong"], places=both, dtypes=TYPES[:1]))
    assert kernel.case.program == KERNEL
    assert [(row.case.place, row.ok, row.failure) for row in rows] == [(place, True, None) for place in both]
    assert " w2x2 " in rows[1].note
    assert rows[1].moved is not None


def test_streamed_products_are_measured_in_types_that_can_be_summed_up() -> None:
    groups = Experiment("gpu", (1,), 256, 64, scalings=["strong"], places=["streamed"], dtypes=TYPES).groups()
    assert [c.dtype for group in groups for c in group.cases if c.program == "distmm"] == ["float32", "float64"]


def test_a_wrong_result_is_shown_and_has_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behaves(monkeypatch, "say({'row': {'seconds': 1.0, 'ok': False}}); continue")
    arguments = ["--device", "cpu", "--size", "96", "--weak", "64", "--gpus", "1"]
    result = CliRunner().invoke(app, ["scaling", "--program", "distmm", *arguments, "--json", str(tmp_path / "a.json")])
    assert result.exit_code == 1, result.output
    assert "WRONG" in result.output
    assert "1 results are wrong, the first of distmm on 1, strong, host, float32, n = 96" in result.output
    assert [row["ok"] for row in json.loads((tmp_path / "a.json").read_text())["rows"]].count(False) == 1


@pytest.mark.parametrize(
    "arguments",
    [["--only", "both"], ["--patience", "soon"], ["--gpus", "0"], ["--json", "no/such/a.json"]],
)
def test_bad_usage_has_exit_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["scaling", "--program", "distmm", "--device", "cpu", *arguments])
    assert result.exit_code == 2, result.output


def test_help_shows_examples() -> None:
    result = CliRunner().invoke(app, ["scaling", "--help"])
    assert result.exit_code == 0
    assert "python tests/bench/scaling.py --json" in result.output


def test_every_type_has_a_place_in_the_table() -> None:
    results = Results(Experiment("cpu", (1,), 256, 128, dtypes=TYPES))
    results.rows = [Row(case(dtype=dtype), seconds=1.0) for dtype in reversed(TYPES)]
    assert [str(cell) for cell in results.table().columns[2].cells] == list(TYPES)


@pytest.mark.multigpu
@pytest.mark.slow
def test_scaling_on_gpus_is_measured_and_right(tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda")
    arguments = ["--quick", "--only", "strong", "--gpus", "2"]
    result = CliRunner().invoke(
        app, ["scaling", "--program", "distmm", "--device", "gpu", *arguments, "--json", str(tmp_path / "a.json")]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    ours = [row for row in rows if row["program"] == "distmm"]
    assert [row["failure"] for row in ours] == [None] * 4
    assert all(row["ok"] for row in ours)
    resident = [row for row in ours if row["place"] == "resident"]
    assert [row["moved"] for row in resident] == [row["bound"] for row in resident]
    assert all(row["peak"] > 0 for row in ours)


@pytest.mark.gpu
@pytest.mark.slow
def test_float64_products_take_no_more_gpu_memory_than_planned(tmp_path: Path) -> None:
    pytest.importorskip("dask_cuda")
    arguments = ["--gpus", "1", "--only", "strong", "--dtype", "float64", "--size", "32768"]
    result = CliRunner().invoke(
        app, ["scaling", "--program", "distmm", "--device", "gpu", *arguments, "--json", str(tmp_path / "a.json")]
    )
    assert result.exit_code == 0, result.output
    rows = [row for row in json.loads((tmp_path / "a.json").read_text())["rows"] if row["scaling"] == "strong"]
    assert [(row["place"], row["failure"], row["ok"]) for row in rows] == [
        ("resident", None, True),
        ("host", None, True),
    ]
    assert all(0 < row["peak"] <= row["planned_peak"] for row in rows)


def test_help_is_plain_text() -> None:
    done = CliRunner().invoke(app, ["scaling", "--help"])
    assert done.exit_code == 0
    assert "\n  python tests/bench/scaling.py --quick --device cpu\n" in done.stdout
    assert "```" not in done.stdout
