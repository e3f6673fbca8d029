"""Rates of a GPU model that nobody has measured: which kernels are, and what is kept of it on disk."""

from __future__ import annotations

import dataclasses
import json
import stat
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from distmm_kernels import measured, rates
from distmm_kernels.config import NARROW, PRECISIONS, SUPPORTED, Problem
from distmm_kernels.device import Device, cpu
from distmm_kernels.launch import cache
from distmm_kernels.measured import Measurement
from distmm_kernels.select import WORTH, facts, promises_bits, ranked
from tests.tables import for_each

H200 = Device("cuda", "NVIDIA H200", 0, 140 << 30, (9, 0), 132)
A100 = dataclasses.replace(H200, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
RTX = dataclasses.replace(H200, name="NVIDIA GeForce RTX 4090", compute_capability=(8, 9))
T4 = dataclasses.replace(H200, name="Tesla T4", compute_capability=(7, 5))
FLOAT32 = Problem(8192, 8192, 8192, np.dtype("float32"))


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measured, "_of_this_process", {})
    return tmp_path


def keep(device=A100, problem=FLOAT32, precision="highest", **rates):
    """Keep what a GPU that is not here might have measured."""
    found = Measurement(device.name, problem.dtype.name, precision, "2026-11-24", rates)
    path = measured._path(problem.dtype.name, device, precision)
    cache.write(path, json.dumps(dataclasses.asdict(found)).encode(), "measured rates")
    return path, found


def measured_facts(problem, device, rates, reproducible=False):
    """Facts of kernels with these measured rates."""
    return facts(problem, device, "highest", reproducible=reproducible, measured=tuple(rates.items()))


def test_models_in_the_file_and_cpus_are_not_measured():
    assert measured.is_shipped(H200)
    assert measured.is_shipped(cpu())
    assert not any(measured.is_shipped(device) for device in (A100, RTX, T4))
    assert rates.rates_of(A100) is rates.rates_of(H200)


@for_each([A100, RTX, T4], PRECISIONS, SUPPORTED + NARROW)
def test_what_is_measured_has_kernels_with_and_without_a_promise_of_bits(device, precision, dtype):
    problem = Problem(8192, 8192, 8192, dtype)
    found = measured.worth_measuring(problem, device, precision)
    assert 1 <= len(found) <= 6, "it is to take a second"
    assert any(promises_bits(candidate, problem) for candidate in found)
    assert ranked(problem, device, precision)[0][0] in found
    assert ranked(problem, device, precision, reproducible=True)[0][0] in found


def test_kernels_that_are_thought_not_worth_it_on_a_gpu_are_measured_there():
    assert "mma_sync_fp16x3" in [each.name for each in measured.worth_measuring(FLOAT32, RTX, "highest")]
    told = measured_facts(FLOAT32, RTX, {"mma_sync_fp16x3": 9e13, "register_tiled": 6e13, "cublas": 7e13})
    assert list(told) == ["mma_sync_fp16x3", "cublas", "register_tiled"]
    assert told["mma_sync_fp16x3"]["rate"] == 9e13


@pytest.mark.parametrize("device", [A100, RTX])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float64", "mma_sync_residues"),
        ("complex128", "mma_sync_complex_residues"),
        ("int32", "mma_sync_integer_residues"),
        ("int64", "mma_sync_integer_residues"),
    ],
)
def test_residues_are_measured_and_decided_upon_where_no_model_is_known(device, dtype, name):
    problem = Problem(8192, 8192, 8192, np.dtype(dtype))
    assert name in [each.name for each in measured.worth_measuring(problem, device, "highest")]
    chain = "complex_chain" if dtype == "complex128" else "register_tiled"
    assert next(iter(measured_facts(problem, device, {name: 3e13, chain: 2e13}))) == name
    assert next(iter(measured_facts(problem, device, {name: 1e12, chain: 2e13}))) != name


def test_measured_rates_decide_and_a_promise_of_bits_is_worth_a_little():
    ours, theirs = 6e13, 6.2e13
    told = measured_facts(FLOAT32, A100, {"register_tiled": ours, "cublas": theirs})
    assert list(told) == ["register_tiled", "cublas"]
    told = measured_facts(FLOAT32, A100, {"register_tiled": ours, "cublas": 1.01 * WORTH * ours})
    assert list(told) == ["cublas", "register_tiled"]
    told = measured_facts(FLOAT32, A100, {"register_tiled": ours, "cublas": 9e14}, reproducible=True)
    assert list(told) == ["register_tiled"]
    expected = 2 * 8192**3 / ours
    assert told["register_tiled"]["cost"] == pytest.approx(expected)


def test_rates_grow_with_the_size_as_on_the_model_that_is_known_and_less_on_a_slower_gpu():
    h100 = dataclasses.replace(H200, name="NVIDIA H100 PCIe")
    assert measured.rates_for(FLOAT32, h100, "highest") is None
    known = dict(zip(rates.SIZES, rates.rates_of(H200).kernels["fp16x3"]["float32"], strict=True))
    found = []
    for slower in (1, 1.1, 2, 64):
        keep(h100, fp16x3=known[4096] / slower, register_tiled=known[4096] / slower)
        measured._of_this_process.clear()
        told = measured.rates_for(FLOAT32, h100, "highest")
        assert told.keys() == {"fp16x3", "register_tiled"}
        found.append(slower * told["fp16x3"] / known[4096])
    assert found[0] == pytest.approx(known[8192] / known[4096])
    assert found[-1] == pytest.approx(1)  # products of 4096 take as long there as those of 16384 on an H200
    assert found[0] > found[1] > found[2] > 1
    keep(h100, fp16x3=known[4096])
    measured._of_this_process.clear()
    small = measured.rates_for(dataclasses.replace(FLOAT32, m=512, k=512, n=512), h100, "highest")
    assert small["fp16x3"] == pytest.approx(known[512])


def test_what_was_measured_is_found_again_by_type_precision_and_model():
    _, found = keep(cublas=1e13)
    assert measured.kept(FLOAT32, A100, "highest") == found
    assert measured.kept(FLOAT32, A100, "high") is None
    assert measured.kept(Problem(1, 1, 1, np.dtype("float64")), A100, "highest") is None
    assert measured.kept(FLOAT32, T4, "highest") is None
    keep(precision="high", cublas_tf32=2e13)
    assert [each.precision for each in measured.all_kept(A100)] == ["high", "highest"]
    assert measured.all_kept(T4) == []


@pytest.mark.parametrize("damage", [b"", b"short", None, -1, 0])
def test_a_damaged_file_is_as_none(damage):
    path, _ = keep(cublas=1e13)
    content = path.read_bytes()
    if isinstance(damage, int):
        content = content[:damage] + bytes([content[damage] ^ 1]) + content[damage + 1 or len(content) :]
    elif damage is None:
        content = content[:-5]
    else:
        content = damage
    path.write_bytes(content)
    assert measured.kept(FLOAT32, A100, "highest") is None
    assert measured.all_kept(A100) == []


def test_another_version_of_the_package_measures_anew(monkeypatch):
    keep(cublas=1e13)
    monkeypatch.setattr(cache, "sources", lambda: "one character more")
    assert measured.kept(FLOAT32, A100, "highest") is None
    assert measured.all_kept(A100) == []


def test_writers_at_the_same_time_leave_a_whole_file(folder):
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda n: keep(cublas=float(n + 1), register_tiled=1e13)[1], range(40)))
    assert measured.kept(FLOAT32, A100, "highest") in written
    (path,) = folder.iterdir()
    assert path.suffix == ".rates"
    plain = folder / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode), "others may read it"


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(file))
    with pytest.warns(RuntimeWarning, match=r"measured rates cannot be kept .* DISTMM_CACHE_DIR"):
        keep(cublas=1e13)
    assert measured.kept(FLOAT32, A100, "highest") is None
