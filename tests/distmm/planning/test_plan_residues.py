"""What plans count for float64 products by residues, against what the kernel says that it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmm.clusters.cluster import spec
from distmm.planning import memory
from distmm.planning.blocks import Blocking, even_edges
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_facts
from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.emulation import integers
from distmm_kernels.emulation.residues import SHORTEST, STRETCH, Layout
from distmm_kernels.gemm import guarded, hopper
from distmm_kernels.gemm import residue_products as residues
from distmm_kernels.gemm.residues import split_steps
from distmm_kernels.tiles import slices

F8 = np.dtype("f8")
PREPARED = {candidate.name: candidate.prepared for candidate in CANDIDATES}
WORKSPACE = {candidate.name: candidate.workspace for candidate in CANDIDATES}


def told(kernel: str, dtype: str) -> dict[str, object]:
    """What a worker with an H200 tells where this kernel is asked for."""
    choice = KernelChoice("cuda", np.dtype(dtype), name=kernel)
    return {"threads": 2, "memory": 120 << 30, **kernel_facts(choice, absent=("NVIDIA H200", (9, 0)))}


SPEC = spec("cuda", [told("residues", "f8")], F8)


def test_the_planner_counts_what_residues_of_operands_and_of_c_take() -> None:
    assert WORKSPACE["residues"] == residues.WORKSPACE
    without = replace(SPEC, prepared=0.0, workspace=0)
    for m, k, n, cut in ((4096, 8192, 2048, 1), (2048, 2049, 640, 1), (640, 20_480, 999, 1), (7, 4161, 5, 1),
                         (3000, 16_384 + 4161, 2000, 8192), (40_000, 8 * 8192, 40_000, 8192)):  # fmt: skip
        edges = tuple(min(cut, k - first) for first in range(0, k, cut)) if cut > 1 else (k,)
        plan = make_plan(Problem(m, k, n, F8), SPEC, blocking=Blocking((m,), edges, (n,)))
        plan = replace(plan, schedule=replace(plan.schedule, blocking=replace(plan.blocking, panels=1)))
        planned = plan.peak.worker - replace(plan, cluster=without).peak.worker
        of_step = sum(Layout.of(1, rows, split_steps(edges[0], SHORTEST)).end for rows in (m, n))
        squares = max(8 * rows * -(-edges[0] // STRETCH) for rows in (m, n))  # of one operand, while it is split
        of_task = of_step if len(edges) > 1 else 0  # of the next step, whose first task begins early
        takes = of_step + of_task + squares + residues.WORKSPACE  # one chain: one task at work
        assert takes <= planned <= 1.08 * takes, (m, k, n)


@given(rows=st.integers(1, 5000), k=st.integers(1, 40_000))
def test_no_operand_has_more_residues_than_the_planner_counts(rows: int, k: int) -> None:
    steps = split_steps(k, SHORTEST)
    planned = 8 * rows * k * PREPARED["residues"] * memory._padding((k,))
    takes = Layout.of(1, rows, steps).end + 8 * rows * -(-steps // STRETCH)
    # the factors lie at a multiple of 256 bytes, and without residues there are a factor and a weight for each row
    assert takes <= planned + 256 + 12 * rows * (steps == 0)


@given(rows=st.integers(1, 5000), k=st.integers(integers.SHORTEST, 40_000))
def test_no_operand_of_integers_has_more_residues_than_the_planner_counts(rows: int, k: int) -> None:
    for bits, system in integers.SYSTEMS.items():
        planned = bits // 8 * rows * k * PREPARED["integer_residues"] * memory._padding((k,))
        assert Layout.of(1, rows, k, moduli=len(system.moduli), scaled=False).end <= planned + 256


def test_plans_count_what_residues_of_integers_and_counts_of_bools_take() -> None:
    assert WORKSPACE["integer_residues"] == residues.WORKSPACE
    assert hopper.WORKSPACE == residues.WORKSPACE
    for dtype, kernel in (("i4", "integer_residues"), ("i8", "integer_residues"), ("?", "hopper"), ("u1", "hopper")):
        made = spec("cuda", [told(kernel, dtype)], np.dtype(dtype))
        assert made.workspace == (slices.WORKSPACE if dtype == "u1" else residues.WORKSPACE)
        assert made.rate > 7e13
        assert (made.kernel, made.prepared) == (kernel, PREPARED[kernel])


def test_plans_count_what_guarded_granules_take() -> None:
    for name in ("residues", "complex_residues", "fp16x3", "tf32x3", "complex_fp16x3"):
        assert WORKSPACE[name] == guarded.WORKSPACE > slices.WORKSPACE


def test_plans_count_the_sums_of_slices() -> None:
    for candidate in CANDIDATES:
        if candidate.name in ("hopper", "hopper_tf32", "hopper_bf16"):
            assert min(map(candidate.workspace_of, candidate.dtypes)) == slices.WORKSPACE


def test_plans_of_many_tasks_count_a_workspace_for_each_at_work() -> None:
    edges = even_edges(32_768, 8192)
    plan = make_plan(Problem(32_768, 32_768, 32_768, F8), SPEC, blocking=Blocking(edges, edges, edges))
    assert plan.peak.worker - replace(plan, cluster=replace(SPEC, workspace=0)).peak.worker == 2 << 29


@pytest.mark.parametrize(("n", "k"), [(20_000, 20_000), (65_536, 65_536), (30_000, 300_000)])
def test_plans_of_float64_cut_k_at_the_granules_of_residues(n: int, k: int) -> None:
    plan = make_plan(Problem(n, k, n, F8), SPEC, multiples=(128, 64, 128))
    assert len(plan.blocking.k) > 1
    assert all(edge % 8192 == 0 for edge in plan.blocking.k[:-1])
    assert plan.keeps_bits
