from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from rich.console import Console

from distmm.bench import ladder
from distmm.bench.ladder import _copies, run
from distmm.bench.ladder_report import Report, Row, _time
from distmm_kernels import device
from distmm_kernels.config import Problem
from distmm_kernels.select import select
from tests.kernels.reference.matrices import matrix


@pytest.fixture(scope="module")
def report():
    return run(sizes=(24, (20, 33, 17)), dtypes=("float32", "int32", "complex64"), device=device.cpu(), repeat=2)


def test_every_method_of_the_cpu_has_a_row_for_every_product(report):
    methods = ["NumPy", "plain Python", "cpu"]
    assert [row.method for row in report.rows] == methods * 2 * 3 * 2
    assert {(row.size, row.dtype, row.order) for row in report.rows} == {
        (size, dtype, order)
        for size in ("24", "20x33x17")
        for dtype in ("float32", "int32", "complex64")
        for order in "CF"
    }


def test_rates_and_residuals_are_those_of_the_product(report):
    for row in report.rows:
        flops = (8 if row.dtype == "complex64" else 2) * row.m * row.k * row.n
        assert row.gflops == pytest.approx(flops / row.seconds / 1e9)
        assert row.residual <= (0 if row.dtype == "int32" or row.method == "NumPy" else 1e-3)
        assert row.seconds_with_transfers is None
        assert row.vs_numpy == pytest.approx(1.0) if row.method == "NumPy" else row.vs_numpy > 0


def test_without_a_gpu_the_report_says_so(report):
    assert report.notes == [f"CPU only: {device.why_no_gpu() or 'the CPU was asked for'}"]
    assert report.answer() is None


def test_the_table_shows_methods_and_figures(report):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report.table())
    text = console.export_text()
    for expected in ("plain Python", "20x33x17", "complex64", "GFLOP/s", "‖C_np - C‖", "CPU only"):
        assert expected in text


def test_json_holds_every_row(report):
    read = json.loads(json.dumps(dataclasses.asdict(report)))
    assert len(read["rows"]) == len(report.rows)
    assert read["rows"][0]["method"] == "NumPy"
    assert read["versions"]["numpy"] == np.__version__


def test_rows_are_compared_with_their_peers_and_the_claim_is_answered():
    problem = Problem(1024, 1024, 1024, np.dtype("float32"))
    report = Report.of(device.cpu(), 0, 1)
    times = {"NumPy": 1.0, "naive": 0.5, "tiled": 0.2, "cublas": 0.02}
    report.add(Row.of(problem, "C", method, seconds, residual=0.0) for method, seconds in times.items())
    tiled = report.rows[2]
    assert (tiled.vs_numpy, tiled.vs_naive, tiled.vs_cublas) == pytest.approx((5.0, 2.5, 0.1))
    assert report.answer() == (
        "float32: shared memory is 2.50 times as fast as global loads at 1024 (C order); 2.50 to 2.50 over all sizes"
    )


def test_slow_methods_are_left_out_of_large_products(monkeypatch):
    monkeypatch.setattr(ladder, "PYTHON_LIMIT", 1000)
    monkeypatch.setattr(ladder, "NUMPY_INTEGER_LIMIT", 1000)
    report = run((20,), ("int64", "float64"), device=device.cpu(), repeat=1, orders=("C",))
    assert [(row.dtype, row.method) for row in report.rows] == [
        ("int64", "cpu"),
        ("float64", "NumPy"),
        ("float64", "cpu"),
    ]
    assert report.rows[0].residual == 0
    assert report.rows[0].vs_numpy is None


def test_impossible_experiments_are_refused():
    with pytest.raises(ValueError, match=r"\(3, 0, 4\): every size must be 1 or more"):
        run(sizes=((3, 0, 4),), device=device.cpu())
    with pytest.raises(TypeError, match="float16 in float32: measure that type"):
        run(sizes=(8,), dtypes=("float16",), device=device.cpu())
    with pytest.raises(ValueError, match="orders"):
        run(sizes=(8,), orders=("K",), device=device.cpu())
    with pytest.raises(ValueError, match="repeat is 0"):
        run(sizes=(8,), repeat=0, device=device.cpu())


def test_times_are_printed_in_the_unit_that_fits():
    assert [_time(t) for t in (None, 2.5, 0.0123, 1e-6, 4e-9)] == ["", "2.5 s", "12.3 ms", "1 µs", "0.004 µs"]


@pytest.mark.gpu
def test_the_gpu_experiment_has_all_four_programs(gpu):
    report = run(sizes=(100, (65, 129, 97)), dtypes=("float32", "int32"), device=gpu, repeat=2)
    methods = {row.method for row in report.rows if row.dtype == "float32"}
    assert methods >= {"NumPy", "plain Python", "cpu", "register_tiled", "naive", "tiled", "guvectorized", "cublas"}
    for row in report.rows:
        rounded = row.method.endswith(("_tf32", "_bf16"))
        assert row.residual <= (0 if row.dtype == "int32" else 10 if rounded else 1e-3)
        if row.method not in ("NumPy", "plain Python", "cpu"):
            assert row.seconds_with_transfers > 0
    assert "shared memory is" in report.answer()


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["C", "F"])
def test_rotated_operands_keep_their_order_in_buffers_of_their_own(gpu, order):
    kernel = select(Problem(1, 1, 1, np.dtype("float32")), gpu, name="tiled")
    a, b = matrix((40, 50), "float32", 0, order=order), matrix((50, 60), "float32", 1, order=order)
    operands = _copies(kernel, a, b, 3)
    assert len({x.data.ptr for pair in operands for x in pair}) == 6
    for left, right in operands:
        assert (left.strides, right.strides) == (a.strides, b.strides)


def test_loads_fall_by_the_tile():
    def found(name, k):
        return ladder.loads(name, Problem(256, k, 128, np.dtype("float32")))

    assert found("naive", 1024) == found("guvectorized", 1024) == 2048
    assert [found("tiled", k) for k in (1024, 1025, 0)] == [64, 66, 0]
    assert [found("register_tiled", k) for k in (1024, 0)] == [16, 0]
    assert found("cublas", 1024) is None
