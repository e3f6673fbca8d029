"""Planned peaks next to those that RMM measured on two H200 on 2026-11-26 (tests/bench/README.md)."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import distmm
from distmm.planning import memory
from distmm.planning.blocks import Blocking
from distmm.planning.cluster_spec import ClusterSpec, Residence, Result
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm_kernels.tiles import hopper_tiles

BF16, F4 = np.dtype(ml_dtypes.bfloat16), np.dtype("f4")
HOST: tuple[tuple[Residence, Residence], Result] = (("loaded", "loaded"), "out")
RESIDENT: tuple[tuple[Residence, Residence], Result] = (("resident", "resident"), "workers")


@pytest.mark.parametrize(
    ("dtype", "n", "place", "text", "measured", "most"),
    [
        (F4, 65536, RESIDENT, "g1x2x1 b16384x16384x16384 p1 w1 l2", 25_772_466_176, 1.11),
        (BF16, 65536, RESIDENT, "g1x2x1 b16384x16384x16384 p4 w1 l2", 8_589_934_592, 1.03),
        (F4, 46080, RESIDENT, "g1x2x1 b11520x11520x11520 p4 w1 l2", 21_769_781_248, 1.13),
        (BF16, 46080, RESIDENT, "g1x2x1 b11520x11520x11520 p4 w1 l2", 4_246_732_800, 1.05),
        (F4, 65536, HOST, "g2x1x1 b16384x8192x16384 p1 w1x2 l3", 17_717_805_056, 1.26),
        (BF16, 65536, HOST, "g2x1x1 b16384x16384x8192 p1 w1x2 l3", 11_811_160_064, 1.25),
        (F4, 46080, HOST, "g2x1x1 b11520x8192x11520 p1 w1x2 l3", 10_664_724_480, 1.37),
        (BF16, 46080, HOST, "g2x1x1 b23040x8192x11520 p1 w1x2 l3", 6_511_656_960, 1.57),
    ],
)
def test_plans_count_all_that_two_gpus_took_and_little_more(
    dtype: np.dtype, n: int, place: tuple[tuple[Residence, Residence], Result], text: str, measured: int, most: float
) -> None:
    operands, result = place
    spec = replace(distmm.gpus(2, "H200").spec(dtype, None, "highest"), threads=3)
    plan = make_plan(Problem(n, n, n, dtype), spec, text=text, operands=operands, result=result)
    assert 1 <= plan.peak.worker / measured <= most


@pytest.mark.parametrize(
    ("dtype", "k", "batch", "panels", "sums"),
    [
        (BF16, (512,) * 4, (), 4, 0),
        (BF16, (512, 512, 512, 100), (), 4, 0),
        (BF16, (512, 100, 512, 512), (), 4, 2),  # panels of other lengths are launches of their own
        (BF16, (512,) * 4, ((1,),), 4, 2),
        (BF16, (128,) * 40, (), 40, 2),
        (BF16, (2048,), (), 1, 0),
        (F4, (512,) * 4, (), 4, 1),
        (F4, (2048,), (), 1, 1),  # alpha makes another block
    ],
)
def test_sums_beside_c_are_counted_unless_a_task_is_one_launch(
    dtype: np.dtype, k: tuple[int, ...], batch: tuple[tuple[int, ...], ...], panels: int, sums: int
) -> None:
    assert memory.MOST_PANELS == hopper_tiles.MOST_PANELS
    spec = ClusterSpec(1, 10**11, "cuda", 1e14, 1e11, threads=3, one_launch=dtype == BF16)
    problem = Problem(2048, sum(k), 2048, dtype, *(((1,), (1,)) if batch else ()))
    plan = make_plan(problem, spec, blocking=Blocking((256,) * 8, k, (256,) * 8, batch, panels), operands=RESIDENT[0])
    plan = replace(plan, schedule=replace(plan.schedule, blocking=replace(plan.blocking, panels=panels)))
    assert plan.schedule.steps == 1
    assert plan.peak.worker - 2048**2 * dtype.itemsize == 3 * sums * 4 * 256**2
