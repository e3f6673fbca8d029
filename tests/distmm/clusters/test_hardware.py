"""Plans for clusters that are not there: does it fit, how long, how many would do."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import distmm
from distmm.clusters import cluster
from distmm.clusters.gpu_models import MODELS, share_of_measured
from distmm.errors import DoesNotFitError, InputError
from distmm.planning import candidates, search
from distmm.planning.blocks import Blocking
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.few_workers import MOST_SERVED, TOLERANCE, few_workers
from distmm.product import request
from distmm.worker.tasks.probe import probe
from distmm_kernels.device import Device
from distmm_kernels.rates import _MODELS, rates_of
from tests.tables import for_each


def shaped(*shape: int, dtype: str = "f4") -> np.ndarray:
    """A shape and a type, without memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def gpu(model: str) -> Device:
    return Device("cuda", model, 0, 0, MODELS[model].capability, 0)


def rows(plan: distmm.Plan) -> dict[str, str]:
    return dict(plan.rows())


@pytest.mark.minutes
def test_a_plan_says_whether_it_fits_and_how_many_gpus_would_do() -> None:
    a = da.zeros((200_000, 200_000), chunks=20_000, dtype="f4")  # C takes 160 GB
    few, many = (distmm.plan(a, a, cluster=distmm.gpus(n, "H100", memory="80GB")) for n in (1, 64))
    assert few.cluster.memory == many.cluster.memory == pytest.approx(64e9, rel=0.02)
    assert (few.cluster.workers, many.cluster.workers, many.grid.size) == (1, 64, 64)
    assert rows(few)["fits"].startswith("no: short by ")
    assert rows(many)["fits"] == "yes"
    fewest = int(few.fewest or 0)
    assert rows(few)["would do"] == f"{fewest} GPUs and more"
    with pytest.raises(DoesNotFitError, match=f"use {fewest} GPUs, or write C"):
        few.validate()
    many.validate()
    distmm.plan(a, a, cluster=distmm.gpus(fewest, "H100", memory="80GB")).validate()


def test_where_no_number_of_workers_does_the_plan_says_so() -> None:
    plan = distmm.plan(shaped(10**6, 10**6), cluster=distmm.cpus(2, memory="1GB"), blocks=(10**6, 10**6))
    assert rows(plan)["would do"] == "no number of these CPU workers"
    with pytest.raises(DoesNotFitError, match="no number of these workers would do"):
        plan.validate()


def test_cpu_workers_have_the_threads_and_memory_described() -> None:
    spec = distmm.plan(shaped(1000, 1000), cluster=distmm.cpus(8, threads=16, memory="64GB", link="10GB")).cluster
    assert (spec.device, spec.workers, spec.threads, spec.link) == ("cpu", 8, 16, 1e10)
    assert 50e9 < spec.memory < 0.8 * 64e9
    assert spec.rate == 16 * 7e10


@pytest.mark.minutes
@for_each(MODELS, ["f2", "f4", "f8", "i1", "i8", "c8", "c16"])
def test_every_model_has_a_kernel_for_every_type(model: str, dtype: str) -> None:
    plan = distmm.plan(shaped(5000, 5000, dtype=dtype), cluster=distmm.gpus(2, model))
    assert plan.cluster.device == "cuda"
    assert plan.cluster.memory < MODELS[model].memory
    assert plan.cost.seconds > 0


def test_the_models_that_were_measured_are_those_of_the_rates_file() -> None:
    by_driver = {model.measured: model for model in MODELS.values() if model.measured}
    assert set(by_driver) == {model for model, rates in _MODELS.items() if rates.capability}
    assert all(model.capability == _MODELS[name].capability for name, model in by_driver.items())


@pytest.mark.parametrize("model", ["h100", "H200"])
def test_a_measured_model_has_its_measured_rates(model: str) -> None:
    spec = distmm.plan(shaped(10**5, 10**5), cluster=distmm.gpus(2, model)).cluster
    rates = _MODELS[MODELS[model.upper()].measured or ""].kernels["fp16x3"]["float32"]
    assert (spec.kernel, spec.link, spec.load) == ("fp16x3", cluster.LINKS["cuda"], cluster.LOADS["cuda"])
    assert spec.rate == pytest.approx(cluster.SUSTAINED * rates[-1])


def test_other_models_have_the_rates_of_the_h200_by_their_peaks() -> None:
    h200 = MODELS["H200"]
    units, sums = ("plain", "fp64_tensor", "tensor", "mma_sync"), ("f4", "f8", "c8", "c16", "i4", "i8")
    assert all(share_of_measured(h200, unit, of) == 1 for unit in units for of in sums)
    rates = {name: rates_of(gpu("H200")).kernels[name]["float32"][-1] for name in ("fp16x3", "register_tiled")}
    slower = distmm.plan(shaped(10**5, 10**5), cluster=distmm.gpus(2, "L40S")).cluster
    assert slower.rate == pytest.approx(cluster.SUSTAINED * rates["register_tiled"] * 91.6 / 67)
    assert slower.link == slower.load == 2.5e10


@pytest.mark.parametrize(("dtype", "kernel"), [("f8", "mma_sync_residues"), ("c16", "mma_sync_complex_residues")])
def test_float64_on_absent_gpus_is_planned_with_the_rate_of_one_that_was_scaled_once(dtype: str, kernel: str) -> None:
    rate = rates_of(gpu("H200")).kernels[kernel][{"f8": "float64", "c16": "complex128"}[dtype]][-1]
    for model in ("A100", "A10", "L40S", "B200"):
        planned = distmm.plan(shaped(20_000, 20_000, dtype=dtype), cluster=distmm.gpus(2, model)).cluster
        assert planned.kernel == kernel
        assert planned.rate == pytest.approx(
            cluster.SUSTAINED * rate * share_of_measured(MODELS[model], "mma_sync", dtype)
        )


@pytest.mark.minutes
def test_a_slow_network_makes_the_plan_slower() -> None:
    a = shaped(10**5, 10**5)
    fast, slow = (distmm.plan(a, a, cluster=distmm.gpus(16, "H100", link=link)) for link in (None, "1GB"))
    assert slow.cost.seconds > fast.cost.seconds


@pytest.mark.parametrize(
    ("describe", "message"),
    [
        (lambda: distmm.gpus(4, "H1000"), r"model 'H1000' is not a GPU model .* use one of V100, .*H100, .*B200"),
        (lambda: distmm.gpus(4, "H1000", memory="80GB"), "model 'H1000' is not a GPU model"),
        (lambda: distmm.gpus(4, 100), "model 100 is not a GPU"),
        (lambda: distmm.gpus(0, "H100"), "count is 0: give a whole number from 1 to 100,000"),
        (lambda: distmm.gpus(10**6, "H100"), "count is 1000000"),
        (lambda: distmm.gpus(2.5, "H100"), "count is 2.5"),
        (lambda: distmm.gpus(True, "H100"), "count is True"),
        (lambda: distmm.gpus(4, "H100", memory="much"), "memory is 'much': give bytes, at least a MiB, or a size with"),
        (lambda: distmm.gpus(4, "H100", link=0), "link is 0"),
        (lambda: distmm.gpus(4, "H100", link="25"), "link is '25'"),
        (lambda: distmm.cpus(4, memory=64), "memory is 64"),
        (lambda: distmm.cpus(4, memory="1e400"), "memory is '1e400'"),
        (lambda: distmm.cpus(4, threads=0, memory="4GB"), "threads is 0"),
        (lambda: distmm.cpus(4, memory="-4GB"), "memory is '-4GB'"),
    ],
)
def test_descriptions_of_nothing_are_refused(describe: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        describe()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"cluster": 64}, r"cluster is 64: describe one with distmm\.gpus"),
        ({"cluster": distmm.gpus(2, "H100"), "client": "tcp://host"}, "cluster and a client are given"),
        ({"cluster": distmm.gpus(2, "H100"), "device": "cpu"}, "cluster and device='cpu' are given"),
        ({"cluster": distmm.gpus(2, "A100"), "kernel": "hopper_tf32"}, "needs compute capability 9.0, and A100"),
        ({"cluster": distmm.cpus(2, memory="4GB"), "kernel": "tiled"}, "kernel 'tiled' does not multiply"),
    ],
)
def test_wishes_that_contradict_the_description_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.plan(shaped(100, 100), **how)


@given(*[st.integers(1, MOST_SERVED)] * 2)
def test_the_search_finds_nearly_the_fewest_workers_that_are_enough(fewest: int, most: int) -> None:
    asked: list[int] = []

    def fits(workers: int) -> bool:
        asked.append(workers)
        return workers >= fewest

    found = few_workers(fits, most)
    assert len(asked) <= 7
    assert (found is None) == (fewest > most)
    if found is not None:
        square = next(n for n in range(fewest, most + 1) if n == most or is_nearly_square(n))
        assert fewest <= found <= max(square, (1 + TOLERANCE) * fewest)


def is_nearly_square(workers: int) -> bool:
    return any(workers % rows == 0 and workers <= rows * (2 * rows + 5) for rows in range(1, 65))


def test_numbers_of_workers_without_a_nearly_square_grid_are_not_tried() -> None:
    tried: list[int] = []
    assert few_workers(lambda workers: bool(tried.append(workers)), 500) is None
    assert len(tried) > 3
    assert all(map(is_nearly_square, tried))


def test_numbers_of_gpus_without_a_nearly_square_grid_do_not_end_the_search() -> None:
    plan = distmm.plan(shaped(10**5, 10**5, dtype="f8"), cluster=distmm.gpus(64, "H100", memory="32GB"))
    assert plan.fits
    assert (plan.fewest or 64) <= 12  # 43 GPUs have one grid, in which too much of A is on each


def test_plans_that_stream_c_count_among_those_that_would_do() -> None:
    x = da.zeros((400_000, 400_000), chunks=10_000, dtype="f4")
    few, enough = (distmm.plan(x, x, cluster=distmm.gpus(count, "H100")) for count in (12, 16))
    assert (few.fits, enough.fits, enough.streamed) == (False, True, True)
    assert (few.fewest or 0) <= 16


def test_whether_other_numbers_of_workers_would_do_is_asked_of_chunks_that_are_not_united(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, unions = [], candidates.unions_of

    def noted(blocking: Blocking, where: ClusterSpec) -> Any:
        asked.append(where.workers)
        return unions(blocking, where)

    monkeypatch.setattr(candidates, "unions_of", noted)
    A = da.ones((40_000, 40_000), chunks=1024, dtype="f8")
    plan = distmm.plan(A, A, cluster=distmm.gpus(1, "H100", memory="2GB"))
    assert not plan.fits
    assert plan.fewest is not None
    assert {*asked} == {1}, "unions of many chunks take a minute to compare, and save tasks alone"


def test_how_few_gpus_would_do_is_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    plans = search._plans

    def counted(*about: Any) -> Any:
        searches.append(1)
        return plans(*about)

    monkeypatch.setattr(search, "_plans", counted)
    first = distmm.plan(shaped(30_001, 30_001), cluster=distmm.gpus(9, "H100"))
    once = len(searches)
    assert once > 0
    assert distmm.plan(shaped(30_001, 30_001), cluster=distmm.gpus(9, "H100")).fewest == first.fewest
    assert len(searches) == once


def test_chunks_that_no_worker_holds_are_not_tried_on_more_workers_than_there_is_work_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    planned = request._planned_for

    def noting(asked: Any, spec: Any, **how: Any) -> Any:
        tried.append(spec.workers)
        return planned(asked, spec, **how)

    monkeypatch.setattr(request, "_planned_for", noting)
    tall = da.zeros((1000, 200_000), chunks=(50, 200_000), dtype="f4")  # 20 products of one block of C, 160 GB
    plan = distmm.plan(tall.T, tall, cluster=distmm.gpus(2, "H100"))
    assert plan.fewest == math.inf
    assert 2 < max(tried) <= 20


def test_the_search_ends_where_no_number_is_enough() -> None:
    assert few_workers(lambda workers: False) is None


@pytest.mark.parametrize(
    ("threads", "blas", "cores"), [(1, "8", 8), (4, "1", 4), (2, None, 2), (2, "2,1", 2), (4, "64", 16)]
)
def test_a_cpu_worker_has_the_rate_of_the_cores_that_its_kernels_use(
    monkeypatch: pytest.MonkeyPatch, threads: int, blas: str | None, cores: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if blas is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", blas)
    manager = SimpleNamespace(memory_limit=8 * 10**9, memory_pause_fraction=0.8)
    worker = SimpleNamespace(state=SimpleNamespace(nthreads=threads), memory_manager=manager)
    facts = probe("none", np.dtype("f8"), "highest", None, False, worker)
    spec = cluster.spec("cpu", [facts], np.dtype("f8"))
    assert spec.rate == cores * facts["kernels"]["cpu"]["rate"]
    assert spec.threads == threads


def test_workers_without_free_host_memory_are_not_taken_for_unlimited_ones() -> None:
    full = replace(distmm.gpus(2, "H200", host_memory="1GB"), host_memory=0)
    assert full.spec(np.dtype("f4"), None, "highest").host_memory == 0
