"""What plans count for complex products on tensor cores, against what the kernels say that they take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from distmm.clusters.cluster import spec as spec_of
from distmm.planning import memory
from distmm.planning.blocks import Blocking
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.worker.tasks.kernel_choice import KernelChoice, kernel_facts
from distmm_kernels.candidates import CANDIDATES
from distmm_kernels.emulation import splits
from distmm_kernels.emulation.formats import FP16_PAIR
from distmm_kernels.emulation.residues import SHORTEST, STRETCH, Layout
from distmm_kernels.gemm import residue_products as residues
from distmm_kernels.gemm.residues import split_steps
from distmm_kernels.layout.vectors import row_pitch

GRANULES = {candidate.name: candidate.granule for candidate in CANDIDATES}
PREPARED = {candidate.name: candidate.prepared for candidate in CANDIDATES}
WORKSPACE = {candidate.name: candidate.workspace for candidate in CANDIDATES}


def spec(kernel: str, dtype: str):
    choice = KernelChoice("cuda", np.dtype(dtype), name=kernel)
    fact = {"threads": 2, "memory": 120 << 30, **kernel_facts(choice, absent=("NVIDIA H200", (9, 0)))}
    return spec_of("cuda", [fact], np.dtype(dtype))


def of_halves(rows: int, k: int, by_rows: bool) -> int:
    """Bytes of A, ``(rows, k)``, or of B, which is copied to a real matrix of twice its size, beside the block."""
    if by_rows:
        return splits.Layout.of(FP16_PAIR, 1, rows, 2 * k, True).end + 8 * rows * row_pitch(k, 8)  # a copy, in F order
    return splits.Layout.of(FP16_PAIR, 1, 2 * rows, 2 * k, False).end + 8 * k * row_pitch(2 * rows, 4)


@example(rows=513, k=40_000, by_rows=False)  # 1026 columns in rows of 1088
@given(rows=st.integers(1, 5000), k=st.integers(1, 40_000), by_rows=st.booleans())
def test_no_operand_of_complex64_takes_more_than_the_planner_counts(rows: int, k: int, by_rows: bool) -> None:
    gaps = max(memory._padding((rows,)), memory._padding((k,)))
    planned = 8 * rows * k * PREPARED["complex_fp16x3"] * gaps
    # tables of each granule's rows, 384 words past them, and parts at multiples of 256 bytes: little for large blocks
    tables = 12 * (2 * rows + 388) * (-(-2 * k // 8192)) + 1024
    padding = 16 * 16 * max(rows, k)  # rows of halves and copies begin at vectors
    assert of_halves(rows, k, by_rows) <= planned + tables + padding


@given(rows=st.integers(1, 5000), k=st.integers(1, 40_000))
def test_no_operand_of_complex128_has_more_residues_than_the_planner_counts(rows: int, k: int) -> None:
    steps = split_steps(k, SHORTEST // 2)
    planned = 16 * rows * k * PREPARED["complex_residues"] * memory._padding((k,))
    takes = Layout.of(1, rows, steps, parts=2).end + 8 * rows * -(-2 * steps // STRETCH)
    assert takes <= planned + 256 + 12 * rows * (steps == 0)


@pytest.mark.parametrize(("m", "k", "n"), [(4096, 8192, 2048), (2048, 2049, 640), (7, 4161, 5)])
def test_the_planner_counts_what_residues_of_complex_operands_and_of_c_take(m: int, k: int, n: int) -> None:
    cluster = spec("complex_residues", "c16")
    assert WORKSPACE["complex_residues"] == residues.WORKSPACE
    plan = make_plan(Problem(m, k, n, np.dtype("c16")), cluster, blocking=Blocking((m,), (k,), (n,)))
    without = replace(plan, cluster=replace(cluster, prepared=0.0, workspace=0))
    planned = plan.peak.worker - without.peak.worker
    takes = sum(Layout.of(1, rows, split_steps(k, SHORTEST // 2), parts=2).end for rows in (m, n)) + residues.WORKSPACE
    takes += max(8 * rows * -(-2 * k // STRETCH) for rows in (m, n))
    assert takes <= planned <= 1.08 * takes


@pytest.mark.parametrize(("m", "k", "n"), [(4096, 8192, 2048), (640, 2049, 2048)])
def test_the_planner_counts_what_halves_of_complex_operands_take(m: int, k: int, n: int) -> None:
    cluster = spec("complex_fp16x3", "c8")
    plan = make_plan(Problem(m, k, n, np.dtype("c8")), cluster, blocking=Blocking((m,), (k,), (n,)))
    without = replace(plan, cluster=replace(cluster, prepared=0.0, workspace=0))
    assert of_halves(m, k, True) + of_halves(n, k, False) <= plan.peak.worker - without.peak.worker


@pytest.mark.parametrize(("kernel", "dtype"), [("complex_fp16x3", "c8"), ("complex_residues", "c16")])
def test_plans_cut_k_at_the_granules_of_complex_kernels(kernel: str, dtype: str) -> None:
    plan = make_plan(Problem(65_536, 65_536, 65_536, np.dtype(dtype)), spec(kernel, dtype), multiples=(128, 64, 128))
    assert len(plan.blocking.k) > 1
    assert all(edge % GRANULES[kernel] == 0 for edge in plan.blocking.k[:-1])
    assert plan.keeps_bits
