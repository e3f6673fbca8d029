"""What identifies a kernel in the tasks of a product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dask.base import tokenize

from distmm.graph import product_graph
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.worker.tasks import warm_up
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_facts
from distmm.worker.tasks.products import multiply
from distmm_kernels import background, select
from distmm_kernels.device import Device

F4 = np.dtype("f4")
GPUS = ClusterSpec(workers=2, memory=10**12, device="cuda", rate=1e14, link=5e10, prepared=1.0)


def test_the_budget_of_prepared_operands_is_no_part_of_a_kernels_identity() -> None:
    problem = Problem(4096, 4096, 4096, F4)
    plan = make_plan(problem, GPUS, text="g2x1x1 b1024x1024x1024 p1 w1 l2")
    tight = make_plan(
        problem,
        replace(GPUS, memory=10**8),
        text="g2x1x1 b1024x1024x1024 p1 w2x2 l2",
    )
    assert plan.peak.most_prepared != tight.peak.most_prepared
    first, second = KernelChoice.of(plan), KernelChoice.of(tight)
    assert first == second
    assert tokenize(first) == tokenize(second)


def test_tasks_on_gpus_know_their_budget() -> None:
    plan = make_plan(Problem(2048, 2048, 2048, F4), GPUS, text="g2x1x1 b1024x1024x1024 p1 w1 l2")
    names = ("a", "b", None)
    tasks = product_graph.ProductLayer("c-1", plan, names, Epilogue(F4, "numpy"))
    assert {task.kwargs["most_prepared"] for task in tasks.values() if task.func is multiply} == {
        plan.peak.most_prepared
    }


@pytest.mark.parametrize(
    ("dtype", "kernel", "granule"),
    [
        ("int8", "hopper", 1),
        ("bool", "hopper", 1),
        ("u2", "integer_residues", 1),
        ("f2", "hopper", 8192),
        (ml_dtypes.bfloat16, "hopper", 8192),
        ("f4", "fp16x3", 8192),
    ],
)
def test_plans_cut_k_where_the_bits_of_floats_stay_and_integers_anywhere(dtype: Any, kernel: str, granule: int) -> None:
    facts = kernel_facts(KernelChoice("cuda", np.dtype(dtype)), absent=("NVIDIA H200", (9, 0)))["kernels"]
    assert next(iter(facts)) == kernel
    assert facts[kernel]["granule"] == granule


@pytest.mark.parametrize("joins", [False, True])
def test_warming_up_loads_what_tasks_of_one_panel_and_of_several_launch(
    monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    launched: list[Any] = []

    class Kernel:
        def prepare_a(self, block: np.ndarray) -> str:
            return "a"

        def prepare_b(self, block: np.ndarray) -> str:
            return "b"

        def joined(self, panels: list[Any]) -> list[Any]:
            return [("a a", "b b")] if joins else panels

        def multiply(self, a: str, b: str, c: str | None, dtype: Any = None) -> str:
            launched.append((a, b, c, dtype))
            return "c"

    monkeypatch.setattr(warm_up, "kernel_for", lambda *_: Kernel())
    warm_up.warm(KernelChoice("cuda", np.dtype("f2")))
    chain = [(None, None), ("c", None), ("c", np.dtype("f2"))]  # a first step, one between, and a last one
    want = [("a", "b", *step) for step in chain]
    assert launched == want + [("a a", "b b", *step) for step in chain] * joins


@pytest.mark.parametrize("building", [False, True])
def test_facts_say_whether_kernels_are_still_being_built(
    building: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DISTMM_CACHE_DIR", str(tmp_path))
    here = Device("cuda", "NVIDIA A40", 0, 48 << 30, (8, 6), 84)
    monkeypatch.setattr("distmm.worker.tasks.kernel_choice._here", lambda choice: here)
    monkeypatch.setattr(background, "begin", lambda *of: building)
    facts = kernel_facts(KernelChoice("cuda", F4))
    assert facts["unmeasured"]
    assert bool(facts["build"]) == building


def test_facts_of_kernels_are_found_once_and_a_caller_may_change_them() -> None:
    select.facts.cache_clear()
    choice, absent = KernelChoice("cuda", F4), ("NVIDIA H200", (9, 0))
    first = kernel_facts(choice, absent=absent)
    for facts in first["kernels"].values():
        facts["rate"] = 0.0
    assert all(facts["rate"] > 0 for facts in kernel_facts(choice, absent=absent)["kernels"].values())
    assert select.facts.cache_info().misses == 1
    assert kernel_facts(choice, True, absent)["kernels"].keys() != first["kernels"].keys()  # asked otherwise
