"""A record sums up events; on real clusters the scheduler's plugin makes the events."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Scheduler, wait

from distmm import gemm, matmul, nearest, plan, threshold, topk, units
from distmm.all_workers import workers_of
from distmm.graph.dask_tasks import GATHERED
from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import client as telemetry
from distmm.telemetry import heartbeats
from distmm.telemetry.activity import MOST_POINTS, Device
from distmm.telemetry.job_events import JOB_TOPIC
from distmm.telemetry.record import Record
from distmm.telemetry.scheduler import KEPT, Telemetry
from tests.bench.experiment.moved_bytes import moved_bytes
from tests.distmm.scheduler.known import known
from tests.until import until


@pytest.fixture
def current(client: Client) -> Iterator[Client]:
    with client.as_current():
        yield client


def record(m: int = 100, k: int = 100, n: int = 60, batch: tuple[int, ...] = (), **options: object) -> Record:
    """Make the record of a product with blocks of 50 x 40 x 30, submitted at time 1000."""
    problem = Problem(m, k, n, np.dtype("f4"), batch, batch)
    made = make_plan(problem, ClusterSpec(2, 10**9, "cuda", 1e12, 1e9), blocking=cut(problem, (50, 40, 30)))
    made = replace(made, schedule=replace(made.schedule, blocking=replace(made.blocking, panels=1)))
    return Record("C-1", made, 1000.0, **options)  # type: ignore[arg-type]


def run_all(r: Record, worker: str = "w", seconds: float = 2.0) -> None:
    """Add a run of every step that is not done, one after another, from time 1001 on."""
    at = 1001.0
    for chain in range(r.chains):
        for step in range(r.steps):
            r.want(chain, step, worker)
    for chain, step in np.argwhere(r.expected & ~r.done):
        r.step(int(chain), int(step), worker, at, at + seconds)
        at += seconds


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize(("m", "k", "n"), [(100, 100, 60), (101, 83, 61), (50, 40, 30), (1, 1, 1)])
def test_the_operations_of_all_steps_are_those_of_the_product(m: int, k: int, n: int, batch: tuple[int, ...]) -> None:
    r = record(m, k, n, batch)
    assert r.step_flops.shape == (r.chains, r.steps)
    assert r.step_flops.sum() == r.plan.problem.flops


def test_chains_are_numbered_like_the_blocks_of_the_plan() -> None:
    r = record(101, 83, 61, (2, 3))
    indices = [r.chain(*index) for index in r.plan.blocking.c_indices()]
    assert indices == list(range(r.chains))
    assert r.block(indices[-1]) == "C[1, 2, 2, 2]" or r.block(indices[-1]).startswith("C[")


def test_rate_and_time_left_count_from_the_first_step() -> None:
    r = record()
    assert (r.figures(1000.5).state, r.figures(1000.5).left) == ("waiting", math.inf)
    for chain in range(r.chains):
        for step in range(r.steps):
            r.want(chain, step, "w")
    half = r.steps * r.chains // 2
    flops = 0.0
    for chain, step in np.argwhere(r.wanted)[:half]:
        r.step(int(chain), int(step), "w", 1010.0, 1012.0)
        flops += r.step_flops[chain, step]
    f = r.figures(1011.5)
    assert (f.done, f.total, f.state, f.seconds) == (half, r.wanted.sum(), "running", 11.5)
    f = r.figures(1013.0)
    assert f.rate == flops / 3
    assert f.left == pytest.approx((r.plan.problem.flops - flops) / (flops / 2) - 1)
    run_all(r)
    f = r.figures(2000.0)
    assert (f.state, f.left, f.blocks_done) == ("complete", 0.0, r.chains)


def test_a_lost_result_counts_until_it_is_there_again() -> None:
    r = record()
    run_all(r)
    r.lose(1100.0, "w")
    r.repeat(1100.0, 0, 0, finished=True)
    r.repeat(1100.1, 1, 0, finished=True)
    r.repeat(1100.1, 2, 0, finished=False)
    f = r.figures(1101.0)
    assert (f.state, f.again, f.interrupted, f.blocks_done) == ("running", 2, 1, r.chains - 3)
    assert [str(incident) for incident in r.incidents] == [
        "worker w lost",
        "2 x step lost, computed again",
        "run interrupted, repeated",
    ]
    for chain in range(3):
        r.step(chain, 0, "v", 1102.0, 1103.0)
    assert r.figures(1200.0).state == "complete"
    assert r.owners[0] == "v"
    # Work that was done twice counts twice for the workers, and once for the product.
    assert sum(lane.flops for lane in r.lanes.values()) > r.figures(1200.0).flops == r.plan.problem.flops


def test_a_resumed_job_has_only_the_missing_blocks_to_do() -> None:
    r = record(title="/data/C.zarr", kept=[0, 1])
    f = r.figures(1000.0)
    assert (f.blocks_done, f.resumed, f.total) == (2, 2, (r.chains - 2) * r.steps)
    assert not r.complete
    run_all(r)
    assert r.complete
    r.check(1200.0, 2, passed=False)
    assert r.figures(1200.0).refuted == 1
    r.check(1201.0, 2, passed=True)
    assert (r.figures(1201.0).refuted, r.refutations) == (0, 1)


def test_failed_and_cancelled_products_come_to_an_end() -> None:
    r = record()
    r.want(0, 0, "w")
    r.ended = "cancelled"
    assert r.figures(1002.0).state == "cancelled"
    for _ in range(2):
        r.fail(1001.0, "load", "A[0, 0]", "OSError: gone")
    r.fail(1001.5, "write", "C[0, 0]", "OSError: full")
    f = r.figures(1002.0)
    assert (f.state, f.failed, f.error) == ("failed", 2, "A[0, 0]: OSError: gone")
    assert [str(incident) for incident in r.incidents] == ["A[0, 0]: OSError: gone", "C[0, 0]: OSError: full"]


def test_a_failed_product_stays_failed_until_what_failed_is_tried_again() -> None:
    r = record()
    r.want(0, 0, "w")
    r.fail(1001.0, "load", "A[0, 0]", "OSError: gone")
    run_all(r)
    assert r.figures(1100.0).state == "failed"  # a block cannot be written, though all are made
    r.failures.pop("load")
    f = r.figures(1102.0)
    assert (f.state, f.failed, f.error) == ("complete", 1, "")


def test_runs_that_overlap_count_once_as_busy_time() -> None:
    r = record()
    for start in (1001.0, 1001.5, 1002.0, 1010.0):
        r.want(0, 0, "w")
        r.step(0, 0, "w", start, start + 1.0)
    assert r.lanes["w"].seconds["multiply"] == 3.0
    assert r.lanes["w"].busy_rate == 4 * r.step_flops[0, 0] / 3


def test_samples_are_thinned_and_the_peak_is_kept() -> None:
    r = record()
    for second in range(10 * MOST_POINTS):
        device = Device(second, 10**6, 0.5)
        r.lane("w").sample(1000.0 + second, 10**6 if second == 777 else 5, 9, received=2, device=device)
    lane = r.lanes["w"]
    assert MOST_POINTS / 2 <= len(lane.blocks.points) <= MOST_POINTS
    assert lane.peak_blocks == 10**6
    assert lane.received == 2 * 10 * MOST_POINTS
    gaps = np.diff([at for at, _ in lane.blocks.points[:-1]])
    assert gaps.max() <= 2 * gaps.min()


def test_a_record_of_thousands_of_tasks_travels_in_a_few_megabytes() -> None:
    problem = Problem(400_000, 400_000, 400_000, np.dtype("f2"))
    made = make_plan(problem, ClusterSpec(64, int(140e9), "cuda", 7e14, 5e10))
    r = Record("C", made, 0.0)
    run_all(r, seconds=1e-3)
    assert r.complete
    assert len(pickle.dumps(r)) < 8e6


@pytest.mark.usefixtures("blocks_are_chunks")
def test_figures_of_a_real_product_are_exact(current: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "LINGER_SECONDS", 600)  # heartbeats that come late are counted too
    A, B = (da.random.default_rng(seed).random((6 * 48, 6 * 48), chunks=48) for seed in (1, 2))
    made = plan(A, B, client=current)
    C = matmul(A, B, client=current)
    assert telemetry.read(current, C.name) is None
    kept = current.persist(C)
    wait(kept)
    r = telemetry.read(current, C.name)
    assert r is not None
    f = r.figures(time.time())
    assert (f.state, f.done, f.total, f.blocks_done) == ("complete", made.schedule.tasks, made.schedule.tasks, 36)
    assert f.flops == made.problem.flops
    assert f.moved == f.bound == made.bytes_moved
    assert sum(lane.steps for lane in r.lanes.values()) == made.schedule.tasks
    assert {r.owners[r.chain((), i, j)] for i in range(6) for j in range(6)} == set(r.lanes)
    assert len(r.activities) + len(r.transfers) > made.schedule.tasks
    assert all(transfer.stop >= transfer.start >= r.submitted for transfer in r.transfers)
    # Memory is sampled with each heartbeat, and once more by `read`.
    assert all(lane.blocks.points for lane in r.lanes.values())


@pytest.mark.minutes
@pytest.mark.usefixtures("blocks_are_chunks")
def test_products_at_the_same_time_do_not_count_one_anothers_bytes(current: Client) -> None:
    rng = da.random.default_rng(1)
    A, *others = (rng.random((6 * 48, 6 * 48), chunks=48) for _ in range(3))
    products = [matmul(A, B, client=current) for B in others]
    planned = [plan(A, B, client=current).bytes_moved for B in others]
    before = moved_bytes(current)
    wait(current.persist(products))  # blocks of A travel once for both
    records = [telemetry.read(current, C.name) for C in products]
    moved = [record.figures(time.time()).moved for record in records if record is not None]
    assert sum(moved) == moved_bytes(current) - before
    for bytes_, most in zip(moved, planned, strict=True):
        assert 0 < bytes_ <= most
    for C, bytes_ in zip(products, moved, strict=True):
        assert metric(current, "distmm_moved_bytes", C.name) == bytes_
    names = {units.shortened(record.title) for record in records if record is not None}
    for record in filter(None, records):  # all tasks of the other product have its name
        assert set(record.others) <= names - {units.shortened(record.title)}


def metric(client: Client, series: str, label: str) -> float:
    """Return what Prometheus would read."""

    def read(dask_scheduler: Scheduler) -> float:
        readings = dask_scheduler.plugins[Telemetry.name].readings()
        return next(value for name, of, value in readings if (name, of) == (series, label))

    return float(client.run_on_scheduler(read))


@pytest.mark.usefixtures("blocks_are_chunks")
def test_memory_counts_what_the_plan_counts(current: Client) -> None:
    A, B = (da.random.default_rng(seed).random((6 * 48, 6 * 48), chunks=48).persist() for seed in (1, 2))
    wait([A, B])
    C = matmul(A, B, client=current)
    kept = current.persist(C)
    wait(kept)
    r = telemetry.read(current, C.name)
    assert r is not None
    assert r.resident == {A.name, B.name}
    peak = max(lane.peak_blocks for lane in r.lanes.values())
    assert C.nbytes / 4 <= peak <= r.plan.peak.worker
    names = {address: str(worker["name"]) for address, worker in current.scheduler_info(-1)["workers"].items()}
    for address, keys in current.has_what().items():  # Dask may have put all of A and B on a few workers
        if names[address] in r.lanes:
            others = sum(key[0] in r.resident for key in keys) * 48 * 48 * 8
            assert r.lanes[names[address]].others >= others
    del kept


def test_the_operands_own_tasks_and_those_of_others_are_told_apart(current: Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    def nap(number: int) -> None:
        until(gate.exists)

    naps = current.map(nap, range(4), pure=False)  # of someone else, on each worker
    until(lambda: len(current.processing()) == 4 and all(current.processing().values()))
    made = da.ones((64, 64), chunks=32).map_blocks(np.copy, dtype="f8", meta=np.empty((0, 0)))
    C = matmul(made + made.T, da.ones((64, 64), chunks=32), client=current)  # `made` is no operand, but A is made of it
    kept = current.persist(C)
    until(lambda: telemetry.figures(current, C.name))
    gate.touch()
    wait([*naps, kept])
    r = telemetry.read(current, C.name)
    assert r is not None
    # not by their seconds: a worker that the machine lets wait counts as silent, and its work then as nobody's
    assert sum(activity.kind == "operands" for activity in r.activities) >= 4
    assert set(r.others) == {"nap"}
    assert sum(lane.seconds["other"] for lane in r.lanes.values()) > 0


@pytest.mark.minutes
def test_what_is_done_with_c_is_named(current: Client) -> None:
    rng = np.random.default_rng(1)
    X, Y = (da.from_array(rng.random((64, 32)), chunks=16) for _ in range(2))

    def verb() -> str:
        def newest(dask_scheduler: Scheduler) -> str:
            record = list(dask_scheduler.plugins[Telemetry.name].records.values())[-1]
            return f"{record.figures(0.0).verb}: {record.shape}"

        return str(current.run_on_scheduler(newest))

    computes: dict[str, Callable[[], object]] = {
        "topk": lambda: topk(X, Y.T, 3, client=current).compute(),
        "nearest": lambda: nearest(X, Y, 3, client=current).compute(),
        "threshold": lambda: threshold(X, Y.T, 12.0, client=current),
    }
    for name, compute in computes.items():
        compute()
        assert verb() == f"{name}: {name} of 64 x 32 times 32 x 64, float64"
    current.compute(matmul(X, Y.T, client=current), sync=True)
    assert verb() == ": 64 x 32 times 32 x 64, float64"


def test_the_same_product_again_is_a_new_record(current: Client) -> None:
    A = da.ones((64, 64), chunks=32)
    C = matmul(A, A, client=current)
    token = C.name.rpartition("-")[2]
    for _ in range(2):
        current.compute(C.sum(), sync=True)
        until(lambda: not any(token in str(key) for key in known(current)))
    f = telemetry.figures(current, C.name)
    assert f is not None
    assert (f.state, f.again, f.done) == ("complete", 0, f.total)


def test_waves_that_a_job_names_are_one_record(current: Client) -> None:
    A = da.ones((64, 64), chunks=32)
    current.compute(matmul(A, A, client=current).sum(), sync=True)  # this product installs telemetry
    C = gemm(2, A, A, client=current)
    current.log_event(JOB_TOPIC, {"event": "begin", "job": "j7", "path": "/data/C.zarr", "kept": [[0, 1], [1, 0]]})
    current.log_event(JOB_TOPIC, {"event": "wave", "job": "j7", "product": C.name})
    for i in (0, 1):
        current.compute(C.blocks[i, i], sync=True)
    f = telemetry.figures(current, "j7")
    assert f is not None
    assert (f.state, f.blocks_done, f.resumed) == ("complete", 4, 2)
    assert telemetry.figures(current, C.name) is None


def test_a_failing_product_says_why(current: Client) -> None:
    def fail(block: np.ndarray) -> np.ndarray:
        if block.size:
            return block.astype(object)  # no kernel multiplies these
        return block

    A = da.ones((64, 64), chunks=32)
    C = matmul(A.map_blocks(fail, dtype="f8"), A, client=current)
    result = current.compute(C)
    wait(result)
    assert result.status == "error"
    r = telemetry.read(current, C.name)
    assert r is not None
    assert r.figures(time.time()).state == "failed"
    assert any("step 0" in str(incident) for incident in r.incidents)
    current.cancel([result], force=True)  # later tests share the cluster


@pytest.mark.minutes
def test_old_records_go_and_the_counters_stay(current: Client) -> None:
    def counters(dask_scheduler: Scheduler) -> tuple[int, float]:
        plugin = dask_scheduler.plugins[Telemetry.name]
        readings = list(plugin.readings())
        return len(plugin.records), sum(value for name, _, value in readings if name == "distmm_flops")

    A = da.ones((32, 32), chunks=16)
    current.compute(matmul(A, A, client=current), sync=True)
    _, before = current.run_on_scheduler(counters)
    for factor in range(KEPT + 2):
        current.compute(gemm(factor + 3, A, A, client=current), sync=True)
    held, after = current.run_on_scheduler(counters)
    assert held == KEPT
    assert after - before == (KEPT + 2) * 2 * 32**3


@pytest.mark.parametrize("options", [{}, {"title": "C.zarr", "kept": [0, 3]}])
def test_the_count_of_steps_to_do_is_that_of_the_arrays(options: dict[str, object]) -> None:
    r = record(**options)
    rng = np.random.default_rng(1)
    for number in range(400):
        chain, step = int(rng.integers(r.chains)), int(rng.integers(r.steps))
        match number % 3 if number < 200 else 1:
            case 0:
                r.want(chain, step, "w", 1000.0)
            case 1:
                r.step(chain, step, "w", 1001.0, 1002.0)
            case 2:
                r.repeat(1003.0, chain, step, bool(r.done[chain, step]))
        missing = r.expected & ~r.done
        assert (r.count, r.to_do) == (r.expected.sum(), missing.sum())
    assert r.made == (not missing.any())


def test_gathered_chunks_are_memory_of_the_product(current: Client) -> None:
    arrays = [da.random.default_rng(seed).random((160, 160), chunks=4) for seed in (1, 2)]
    apart = zip(arrays, workers_of(current), strict=False)  # so one worker at least reads chunks of another one
    A, B = (current.persist(x, workers=[address]) for x, address in apart)
    wait([A, B])
    C = matmul(A, B, client=current)
    kept = current.persist(C)
    wait(kept)
    r = telemetry.read(current, C.name)
    assert r is not None
    assert r.plan.schedule.gathers(r.plan.problem, "cpu") == ["A", "B"]
    assert any(name.startswith(GATHERED) for name in r.arrays)
    assert not any(name.startswith(GATHERED) for name in r.resident)
    del kept
