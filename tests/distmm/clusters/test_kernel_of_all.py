"""One kernel for all workers of a product, from what each of them tells; and who is asked to measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm.all_workers import everywhere, in_thread, workers_of
from distmm.clusters import cluster, view
from distmm.clusters.cluster import SUSTAINED, describe, spec
from distmm.errors import InputError
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.worker.tasks import kernel_choice
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_for
from distmm_kernels.device import Device

F4 = np.dtype("f4")
FACT: dict[str, Any] = {
    "granule": 8192,
    "prepared": 1.0,
    "copied": 0.0,
    "workspace": 1 << 20,
    "one_launch": True,
    "triangles": True,
    "unit": "tensor",
    "compiled": True,
}


def told(unmeasured: bool = False, **rates: float) -> dict[str, Any]:
    """What a worker with these kernels tells, in operations a second."""
    kernels = {name: {**FACT, "rate": rate, "cost": 1e12 / rate} for name, rate in rates.items()}
    return {"device": "cuda", "threads": 2, "memory": 10**11, "kernels": kernels, "unmeasured": unmeasured}


def test_workers_with_other_rates_do_not_choose_differently() -> None:
    fast, slow = told(tensor=2e14, library=1.5e14), told(tensor=1e13, library=3e13)
    for facts in ([fast, slow], [slow, fast]):
        made = spec("cuda", facts, F4)
        assert (made.kernel, made.rate) == ("library", 3e13 * SUSTAINED), "the slowest worker ends last"
    assert spec("cuda", [fast], F4).kernel == "tensor"


def test_only_kernels_that_all_workers_have_are_chosen() -> None:
    made = spec("cuda", [told(new=9e14, old=1e13), told(old=2e13, older=1e12)], F4)
    assert (made.kernel, made.rate) == ("old", 1e13 * SUSTAINED)
    with pytest.raises(InputError, match="no kernel multiplies float32 on all workers, which have new and old"):
        spec("cuda", [told(new=9e14), told(old=2e13)], F4)


def test_figures_that_differ_are_taken_at_their_worst() -> None:
    small, large = told(one=2e14), told(one=1e14)
    large["kernels"]["one"] |= {
        "granule": 4096,
        "prepared": 2.0,
        "copied": 1.0,
        "workspace": 1 << 29,
        "one_launch": False,
        "triangles": False,
    }
    made = spec("cuda", [small, large], F4)
    assert (made.rate, made.granule, made.prepared, made.workspace) == (1e14 * SUSTAINED, 8192, 2.0, 1 << 29)
    assert made.copied == 1.0
    assert made.promises_bits
    assert not made.one_launch
    assert not made.triangles
    large["kernels"]["one"]["granule"] = None
    assert not spec("cuda", [small, large], F4).promises_bits


def test_on_a_new_machine_the_library_multiplies_until_kernels_are_built_or_save_more_time() -> None:
    there, new = told(tensor=2e14, library=5e13), told(tensor=2e14, library=5e13)
    new["build"] = 5.0
    new["kernels"]["library"]["compiled"] = there["kernels"]["library"]["compiled"] = False
    one_second = 2e14  # of the kernel; the library takes 4
    assert spec("cuda", [new], F4, one_second).kernel == "library"
    assert spec("cuda", [there, new], F4, 3 * one_second).kernel == "library", "two workers save half as much"
    assert spec("cuda", [new], F4, 3 * one_second).kernel == "tensor"
    assert spec("cuda", [there], F4, one_second).kernel == "tensor"
    assert spec("cuda", [new], F4).kernel == "tensor", "a job's kernel does not depend on the time of the call"


@pytest.mark.gpu
def test_a_gpu_whose_kernels_are_not_built_begins_with_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from distmm_kernels import background, device

    monkeypatch.delenv("DISTMM_BUILD_AHEAD")
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    background._start.cache_clear()
    try:
        assert describe(None, F4, "gpu", flops=1e12).kernel == "cublas"
        assert describe(None, F4, "gpu").kernel != "cublas"
        assert describe(None, F4, "gpu", reproducible=True, flops=1e12).promises_bits
    finally:
        capability = device.current().compute_capability
        assert capability is not None
        started = background._start("float32", capability)
        background._start.cache_clear()
        assert started is not None
        started[0].kill()


def test_tasks_are_sent_the_kernel_that_was_chosen() -> None:
    made = spec("cuda", [told(library=3e13, tensor=1e13)], F4)
    problem = Problem(4096, 4096, 4096, F4)
    choice = KernelChoice.of(make_plan(problem, made))
    assert (choice.name, choice.planned) == (None, "library")
    named = KernelChoice.of(make_plan(problem, made, kernel="tensor"))
    assert (named.name, named.planned) == ("tensor", None)


def test_the_planned_kernel_is_used_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Device("cuda", "NVIDIA A100", 0, 80 << 30, (8, 0), 108)
    monkeypatch.setattr("distmm.worker.tasks.kernel_choice._here", lambda choice: here)

    def used(planned: str, k: int = 10) -> str:
        return kernel_for.__wrapped__(KernelChoice("cuda", F4, planned=planned), 10, k, 10, ()).name

    assert used("cublas") == "cublas"
    assert used("tiled") == "tiled"
    assert used("cublas", k=2**31) == "mma_sync_fp16x3", "it counts to 2^31"
    assert used("fp16x3") == "mma_sync_fp16x3", "the plan was made for Hopper GPUs"


def test_a_model_that_nobody_measured_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[KernelChoice] = []

    def here(*asked: Any) -> dict[str, Any]:
        return told(library=3e13) if measured else told(unmeasured=True, guessed=1e15)

    monkeypatch.setattr(cluster, "_this_process", here)
    monkeypatch.setattr(kernel_choice, "measure", measured.append)
    monkeypatch.setattr("distmm.clusters.measured._without_client", {})
    for _ in range(2):
        assert describe(None, F4, "gpu").kernel == "library"
    assert measured == [KernelChoice("cuda", F4, "highest")]


def test_no_worker_measures_before_the_kernels_of_all_are_built(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = {"there": told(unmeasured=True, guessed=1e15), "new": told(guessed=1e15) | {"build": 5.0}}
    monkeypatch.setattr(view, "ask", lambda *asked: workers)
    monkeypatch.setattr(cluster.advice, "say", lambda *of: None)
    monkeypatch.setattr(cluster, "_measure", lambda *asked: pytest.fail("kernels would be compiled for it"))
    assert describe(client, F4, "gpu").kernel == "guessed"


def test_where_it_cannot_be_measured_the_guess_holds(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    tries = []

    def fails(choice: KernelChoice) -> None:
        tries.append(choice)
        raise MemoryError("no room for 4096 x 4096")

    monkeypatch.setattr(cluster, "_this_process", lambda *asked: told(unmeasured=True, guessed=1e15))
    monkeypatch.setattr(kernel_choice, "measure", fails)
    monkeypatch.setattr("distmm.clusters.measured._without_client", {})
    for _ in range(2):
        assert describe(None, F4, "gpu").kernel == "guessed"
    assert len(tries) == 1
    assert "the rates of kernels for float32 could not be measured" in caplog.text


def test_workers_measure_beside_their_event_loops(client: Client) -> None:
    answers = everywhere(client, in_thread, kernel_choice.measure, KernelChoice("cpu", F4))
    assert answers == dict.fromkeys(workers_of(client)), "a CPU has nothing to measure"
