"""Numbers of waves that the search leaves out, because the operands that stay for the next waves do not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distmm.planning import candidates
from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec, Residence, Result
from distmm.planning.memory import staying
from distmm.planning.owners import Grid
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import LOOKAHEAD, Schedule
from distmm.planning.search import TILE, make_plan

F4 = np.dtype("f4")
CPU = ClusterSpec(workers=4, memory=4 * 10**9, device="cpu", rate=3e10, link=1e9)


@pytest.mark.parametrize("memory", [40_000, 70_000, 100_000])
@pytest.mark.parametrize("shape", [(160, 160, 160), (320, 96, 160), (96, 320, 224)])
@pytest.mark.parametrize("operands", [("loaded", "loaded"), ("resident", "loaded"), ("loaded", "resident")])
def test_no_number_of_waves_that_is_left_out_fits(
    shape: tuple[int, int, int], memory: int, operands: tuple[Residence, Residence]
) -> None:
    problem, spec = Problem(*shape, F4), replace(CPU, workers=2, memory=memory)
    stay = staying(operands, "host", False)
    tried = [cuts for few in candidates.waves(problem, spec, False, stay) for cuts in few]
    left_out = set(candidates.WAVES[:6]) - set(tried)
    assert left_out or memory > 40_000
    for cuts in left_out:
        for s in candidates.free(problem, spec, (TILE, TILE, TILE), cuts, candidates.STEPS, LOOKAHEAD, operands):
            assert Plan(problem, s, spec, operands=operands, result="host").shortfall


@pytest.mark.parametrize("memory", [30_000, 60_000, 90_000])
@pytest.mark.parametrize(("edge", "k"), [(160, 160), (320, 96), (96, 320)])
@pytest.mark.parametrize("result", ["host", "workers"])
def test_no_number_of_waves_of_a_symmetric_product_that_is_left_out_fits(
    edge: int, k: int, memory: int, result: Result
) -> None:
    problem, spec = Problem(edge, k, edge, F4, symmetry="symmetric"), replace(CPU, workers=2, memory=memory)
    operands: tuple[Residence, Residence] = ("loaded", "loaded")
    stays = result == "workers"
    tried = [w for few in candidates.waves(problem, spec, stays, staying(operands, result, False)) for w in few]
    left_out = {cuts for cuts in candidates.WAVES[:6] if cuts[0] == cuts[1]} - set(tried)
    assert left_out or memory > 30_000
    for cuts in left_out:
        for s in candidates.free(problem, spec, (TILE, TILE, TILE), cuts, candidates.STEPS, LOOKAHEAD, operands):
            assert Plan(problem, s, spec, operands=operands, result=result).shortfall


def test_a_product_whose_operands_do_not_fit_beside_each_other_is_refused_after_one_wave() -> None:
    problem, gpus = Problem(200_000, 200_000, 200_000, F4), replace(CPU, workers=2, device="cuda", memory=75 * 10**9)
    assert list(candidates.waves(problem, gpus, False, (True, True))) == [[(1, 1)]]
    assert make_plan(problem, replace(gpus, host_memory=2 * 10**11), result="host").shortfall


def test_the_memory_of_thousands_of_waves_is_that_of_one_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(4096, 4096, 4096, F4)
    schedule = Schedule(cut(problem, (32, 512, 32)), Grid(2, 2), (1, 64, 64))
    plan = Plan(problem, schedule, CPU, result="host")
    assert schedule.wave_count == 64**2
    monkeypatch.setattr(Schedule, "waves", property(lambda _: pytest.fail("all waves were listed")))
    # All of B stays for the next waves, and the share of a wave of A.
    assert plan.peak.worker > 4096 * 4096 * 4 / 4
