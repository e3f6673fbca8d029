from __future__ import annotations

import pytest
from rich.console import Console

from distmm_kernels import device
from distmm_kernels.bench import HEATS, Heat, Results, Run, race
from distmm_kernels.bench.race import rotation
from distmm_kernels.candidates import CANDIDATES


def test_buffers_rotate_only_while_they_fit_the_cache():
    assert rotation(8 << 20, 60 << 20) == 15
    assert rotation(200 << 20, 60 << 20) == 1
    assert rotation(1, 60 << 20) == 32


def some_results(runs=(("cuBLAS float32", 50.0, 1.0), ("fp16x3", 210.0, 4.2))):
    results = Results("some GPU", 0, 3, {"python": "3"}, copy_rate=4e12)
    for size in ((512, 512, 512), (8191, 8193, 8190)):
        for name, tflops, ratio in runs:
            flops_per_byte = 2 * size[0] * size[1] * size[2] / (4 * 3 * size[0] ** 2)
            results.runs.append(
                Run(*size, "float32", "highest", "float32", name, True, "cuBLAS float32", tflops=tflops, burst=tflops,
                    ratio=ratio, burst_ratio=ratio, error=2e-7, worst=1e-6, intensity=flops_per_byte)
            )  # fmt: skip
    return results


def test_the_table_of_a_race_shows_rates_x():
    results = some_results()
    results.note("twice")
    results.note("twice")
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(results.table())
    text = console.export_text()
    for expected in ("8191x8193x8190", "fp16x3", "whole", "cuBLAS", "4.2", "2e-07", "4 TB/s"):
        assert expected in text
    assert text.count("twice") == 1


def test_heats_name_kernels_that_multiply_their_type_as_precisely_as_they_say():
    known = {candidate.name: candidate for candidate in CANDIDATES}
    for heat in HEATS:
        for name in heat.kernels:
            assert heat.dtype in known[name].dtypes
            assert heat.dtype == "int8" or known[name].precision == heat.precision


def test_a_race_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="it takes a GPU"):
        race(device.cpu())


@pytest.mark.gpu
def test_a_race_measures_each_kernel_and_its_peer(gpu):
    heats = [
        Heat("float32", "ieee", ("register_tiled",), "float32"),
        Heat("complex64", "ieee", ("tiled",), "complex64"),
    ]
    seen = race(gpu, ((130, 70, 90),), heats, rounds=1).runs
    assert [(run.contestant, run.whole) for run in seen[:3]] == [
        ("cuBLAS float32", True),
        ("register_tiled", True),
        ("register_tiled", False),
    ]
    assert all(run.tflops > 0 and run.error < 1e-5 for run in seen)
    assert seen[0].ratio == pytest.approx(1.0)
