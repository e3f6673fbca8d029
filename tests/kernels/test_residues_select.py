"""Which sizes, types and GPUs take the kernels of residues and the float64 tensor cores. It needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

from distmm_kernels.config import Problem
from distmm_kernels.select import choose, explain, ranked, select, why_not
from tests.kernels.selection import A100, BY_MMA_SYNC, BY_NAME, GEFORCE, H200, T4, chosen, problem


@pytest.mark.parametrize(
    ("dtype", "registers", "residues"), [("int32", 1024, 2048), ("int64", 512, 1024)], ids=["int32", "int64"]
)
def test_integers_go_to_residues_from_the_size_where_these_were_faster(dtype, registers, residues):
    for size, name in ((registers, "register_tiled"), (residues, "integer_residues")):
        assert chosen(problem(dtype, k=size, n=size), H200) == name


def float64(m, k, n, batch=()):
    return Problem(m, k, n, np.dtype("float64"), batch)


@pytest.mark.parametrize("where", GEFORCE, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_where_float64_units_are_few_residues_are_chosen_before_the_library_too(dtype, where):
    for size in (1024, 2048, 8192, 16384):
        (first, time), (_, other) = ranked(problem(dtype, k=size, n=size), where, "highest")[:2]
        assert first.name == BY_MMA_SYNC[dtype]
        assert 10 * time < other or size < 2048
    assert choose(problem(dtype), where, "highest", reproducible=True).name == BY_MMA_SYNC[dtype]


def test_residues_on_an_a100_are_chosen_from_the_size_on_where_they_should_pay():
    assert chosen(float64(1024, 1024, 1024), A100) == "dmma"
    for size in (4096, 8192):
        (first, time), (_, other) = ranked(float64(size, size, size), A100, "highest")[:2]
        assert first.name == "mma_sync_residues"
        assert 1.1 < other / time < 2


@pytest.mark.parametrize("dtype", BY_MMA_SYNC)
def test_an_old_gpu_is_told_what_residues_need(dtype):
    reason = why_not(BY_NAME[BY_MMA_SYNC[dtype]], problem(dtype), T4)
    assert reason == "it needs compute capability 8.0 or more, and Tesla T4 (cuda:0) has 7.5"


@pytest.mark.parametrize("dtype", BY_MMA_SYNC)
@pytest.mark.parametrize(
    "shape", [(512,) * 3, (1024,) * 3, (4096,) * 3, (16384,) * 3, (64, 8192, 8192), (1, 8192, 1), (8192, 600, 70)]
)
def test_on_a_hopper_gpu_its_own_kernel_of_residues_comes_first(dtype, shape):
    listed = [candidate.name for candidate, _ in ranked(Problem(*shape, np.dtype(dtype)), H200, "highest")]
    assert listed.index(BY_MMA_SYNC[dtype].removeprefix("mma_sync_")) < listed.index(BY_MMA_SYNC[dtype])


def test_float64_tensor_cores_are_used_unasked_only_where_they_are_fast():
    for where in GEFORCE:
        assert chosen(float64(4096, 4096, 4096), where, "ieee") == "register_tiled"
        assert select(float64(4096, 4096, 4096), where, name="dmma").name == "dmma"
        assert (
            "not dmma: float64 tensor cores, in ascending k: used on this GPU only when asked for by name"
            in explain(float64(4096, 4096, 4096), where)
        )


# The first three are measured (the site has the page "Rates of kernels by size"); the others have more passes over
# operands and C than they save.
@pytest.mark.parametrize("shape", [(1024,) * 3, (2048,) * 3, (512,) * 3, (65536, 512, 4096),
                                   (8192, 8192, 64), (16384, 256, 16384), (65536, 4096, 512)])  # fmt: skip
def test_float64_products_that_residues_slow_down_are_not_split(shape):
    assert chosen(float64(*shape), H200) == "dmma"


def test_residues_of_a_batch_are_as_fast_as_those_of_one_matrix():
    assert chosen(float64(512, 512, 512, (16, 32)), H200) == "dmma"
    assert chosen(float64(4096, 4096, 4096, (16, 32)), H200) == "residues"
