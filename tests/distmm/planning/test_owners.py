"""Tables of owners: who multiplies what, if operands are in the workers' memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distmm.errors import InputError
from distmm.planning.blocks import Blocking, cut, united
from distmm.planning.cluster_spec import ClusterSpec, Residence
from distmm.planning.families import BALANCE, candidates, of_family, of_grid
from distmm.planning.owners import FAMILIES, Family, Grid, Homes, Owners, Places
from distmm.planning.plan import Plan
from distmm.planning.problem import Problem
from distmm.planning.schedule import Schedule, parse
from distmm.planning.search import make_plan
from distmm.worker.tasks.epilogue import Epilogue
from distmm.worker.tasks.kernel_choice import KernelChoice
from tests.distmm.graph.serial import execute
from tests.distmm.planning.brute_force import BruteForce
from tests.tables import number_of

F8 = np.dtype("f8")
RESIDENCES: list[tuple[Residence, Residence]] = [("resident", "resident"), ("loaded", "resident"), ("whole", "kept")]


def homes_of(draw: st.DrawFn, rows: int, columns: int, workers: int, kinds: str = "none all some") -> Homes | None:
    kind = draw(st.sampled_from(kinds.split()))
    if kind == "none":
        return None
    ranks = st.integers(-1 if kind == "some" else 0, workers - 1)
    return tuple(tuple(draw(st.lists(ranks, min_size=columns, max_size=columns))) for _ in range(rows))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Problem, Blocking, Places, int]:
    """Draw a small product, its blocks, and where its operands are."""
    workers, b_is = draw(st.integers(2, 4)), draw(st.sampled_from(["another", "symmetric", "same", "transposed"]))
    symmetric, same = b_is == "symmetric", b_is == "same"
    m, k, n = (tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))) for _ in range(3))
    k, n = (m if same else k), (n if b_is == "another" else m)
    problem = Problem(sum(m), sum(k), sum(n), F8, symmetry="symmetric" if symmetric else None)
    a = homes_of(draw, len(m), len(k), workers, *["all"] * (b_is in ("same", "transposed")))
    places = Places(a, a, "same") if same else Places(a, homes_of(draw, len(k), len(n), workers))
    if b_is == "transposed":
        assert a is not None
        places = Places(a, tuple(zip(*a, strict=True)), "transposed")
    return problem, Blocking(m, k, n, panels=draw(st.integers(1, 3)), triangle=symmetric), places, workers


def plan_of(problem: Problem, blocking: Blocking, owners: Owners, **how: object) -> Plan:
    cluster = ClusterSpec(owners.size, 10**9, "cpu", rate=1.0, link=1e9, load=1e9)
    lookahead = how.pop("lookahead", 2)
    assert isinstance(lookahead, int)
    return Plan(problem, Schedule(blocking, owners, lookahead=lookahead), cluster, **how)  # type: ignore[arg-type]


@settings(max_examples=number_of(150))
@given(placed(), st.integers(1, 3), st.sampled_from(RESIDENCES), st.data())
def test_bytes_tasks_and_memory_are_those_of_every_block(product, lookahead, operands, data) -> None:  # type: ignore[no-untyped-def]
    problem, blocking, homes, workers = product
    owners = data.draw(st.sampled_from(list(candidates(blocking, homes, workers, one_chain=False))))
    plan = plan_of(problem, blocking, owners, lookahead=lookahead, operands=operands)
    counted = BruteForce(plan)
    assert plan.bytes_moved == counted.moved
    assert plan.schedule.tasks == counted.tasks
    assert counted.held <= plan.peak.worker


@st.composite
def unions(draw: st.DrawFn) -> tuple[Problem, Blocking, Places, int, Owners]:
    """Draw a product whose blocks are unions of chunks, and its owners."""
    problem, drawn, homes, workers = draw(placed())
    counts = [draw(st.integers(1, len(edges))) for edges in (drawn.m, drawn.k, drawn.n)]
    counts[2] = counts[0] if drawn.triangle else counts[2]
    chunks = united(drawn.m, counts[0]), united(drawn.k, counts[1]), united(drawn.n, counts[2])
    m, k, n = (tuple(map(sum, blocks)) for blocks in chunks)
    blocking = replace(drawn, m=m, k=k, n=n)
    owners = draw(st.sampled_from(list(candidates(blocking, homes, workers, False, chunks))))
    return problem, blocking, homes, workers, owners


@settings(max_examples=number_of(150))
@given(unions(), st.integers(1, 3), st.sampled_from(RESIDENCES))
def test_chunks_of_blocks_move_from_where_each_of_them_is(product, lookahead, operands) -> None:  # type: ignore[no-untyped-def]
    problem, blocking, _, _, owners = product
    plan = plan_of(problem, blocking, owners, lookahead=lookahead, operands=operands)
    counted = BruteForce(plan)
    assert plan.bytes_moved == counted.moved
    assert plan.schedule.tasks == counted.tasks
    assert counted.held <= plan.peak.worker


def test_many_small_chunks_become_few_blocks_for_each_worker() -> None:
    edges = (64,) * 64
    problem = Problem(4096, 4096, 4096, F8)
    cluster = ClusterSpec(4, 10**11, "cpu", rate=1e10, link=1e9, load=1e9)
    homes = tuple(tuple((i + 3 * j) % 4 for j in range(64)) for i in range(64))
    for at, where in ((Places(homes, homes), "resident"), (Places(), "loaded")):
        blocking = Blocking(edges, edges, edges)
        plan = make_plan(problem, cluster, blocking=blocking, homes=at, operands=(where, where), unions=True)  # type: ignore[arg-type]
        assert plan.schedule.tasks <= 256
        assert plan.schedule.cuts == (edges, edges, edges)
        apart = make_plan(problem, cluster, blocking=blocking, homes=at, operands=(where, where))  # type: ignore[arg-type]
        assert apart.schedule.chunks is None


@pytest.mark.parametrize(("chunks", "one_each"), [((2, 2, 2), True), ((4, 4, 4), False), ((64, 1, 1), True)])
def test_a_few_small_chunks_are_united_if_c_has_several_rows_and_columns_of_them(
    chunks: tuple[int, int, int], one_each: bool
) -> None:
    m, k, n = ((64,) * count for count in chunks)
    cluster = ClusterSpec(2, 10**9, "cpu", rate=1e10, link=1e9, load=1e9)
    plan = make_plan(Problem(sum(m), sum(k), sum(n), F8), cluster, blocking=Blocking(m, k, n), unions=True)
    assert (plan.schedule.chunks is None) is one_each


@settings(max_examples=number_of(60))
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=2),
    st.tuples(*[st.lists(st.integers(1, 9), min_size=1, max_size=6)] * 3),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(RESIDENCES),
)
def test_small_chunks_of_batched_products_are_united(batch, edges, workers, broadcast, operands) -> None:  # type: ignore[no-untyped-def]
    (m, k, n), of_b = map(tuple, edges), tuple(1 if broadcast else length for length in batch)[broadcast - len(batch) :]
    problem = Problem(sum(m), sum(k), sum(n), F8, tuple(batch), of_b)
    cuts = *((1,) * length for length in batch), m, k, n
    blocking = Blocking(m, k, n, cuts[:-3])
    cluster = ClusterSpec(workers, 10**9, "cpu", rate=1e10, link=1e9, load=1e9)
    plan = make_plan(problem, cluster, blocking=blocking, operands=operands, unions=True)
    products = math.prod(map(len, cuts))
    if products > 64 * workers:
        assert plan.schedule.chunks is not None
        assert plan.schedule.tasks < products
    assert plan.schedule.cuts == cuts
    counted = BruteForce(plan)
    assert (plan.bytes_moved, plan.schedule.tasks) == (counted.moved, counted.tasks)
    assert counted.held <= plan.peak.worker
    assert "<svg" in plan._repr_html_()  # its picture asks where blocks are


@settings(max_examples=number_of(60))
@given(placed())
def test_every_family_computes_the_product(product) -> None:  # type: ignore[no-untyped-def]
    problem, blocking, homes, workers = product
    rng = np.random.default_rng(0)
    a = rng.integers(-4, 5, (problem.m, problem.k)).astype(F8)
    b = a.T if problem.symmetry else rng.integers(-4, 5, (problem.k, problem.n)).astype(F8)
    for owners in candidates(blocking, homes, workers, one_chain=False):
        plan = plan_of(problem, blocking, owners)
        c = execute(plan, a, b, KernelChoice("cpu", F8), Epilogue(F8, "numpy"))
        np.testing.assert_array_equal(c, a @ b)


@settings(max_examples=number_of(100))
@given(placed(), st.sampled_from(FAMILIES))
def test_no_rank_has_much_more_than_its_share_if_work_can_be_passed_on(product, family: Family) -> None:  # type: ignore[no-untyped-def]
    _, blocking, homes, workers = product
    work = {"K": blocking.k, "R": blocking.m, "C": blocking.n}
    if blocking.triangle or family not in work:
        return
    owners = of_family(family, blocking, homes, workers)
    loads = np.bincount(np.ravel(owners.table), np.array(work[family]), workers)
    # One item more than the share is left if no single item can be passed on with a gain.
    assert loads.max() <= max(BALANCE * loads.mean(), loads.min() + max(work[family]))


@settings(max_examples=number_of(60))
@given(st.lists(st.integers(0, 1), min_size=8, max_size=8))
def test_families_are_near_the_best_of_all_assignments(ranks: list[int]) -> None:
    blocking = Blocking((3, 3), (3, 3), (3, 3))
    problem = Problem(6, 6, 6, F8)
    homes = Places((tuple(ranks[:2]), tuple(ranks[2:4])), (tuple(ranks[4:6]), tuple(ranks[6:])))
    places = list(itertools.product(range(2), repeat=3))

    def moved(who: dict[tuple[int, ...], int]) -> int:
        copies = {("A", i, p, who[i, p, j]) for i, p, j in places if homes.a[i][p] != who[i, p, j]}
        copies |= {("B", p, j, who[i, p, j]) for i, p, j in places if homes.b[p][j] != who[i, p, j]}
        sums = sum(len({who[i, p, j] for p in range(2)}) - 1 for i, j in itertools.product(range(2), repeat=2))
        return (len(copies) + sums) * 9 * F8.itemsize

    every = (dict(zip(places, each, strict=True)) for each in itertools.product((0, 1), repeat=8) if sum(each) == 4)
    best = min(map(moved, every))
    plans = [plan_of(problem, blocking, owners) for owners in candidates(blocking, homes, 2, one_chain=False)]
    balanced = []
    for plan in plans:
        who = {at: plan.grid.rank(*at) for at in places}  # type: ignore[union-attr]
        assert plan.bytes_moved == moved(who)
        balanced += [plan.bytes_moved] * (sum(who.values()) == 4)
    assert best <= min(balanced) <= 2 * best + 2 * 9 * F8.itemsize


@given(placed(), st.integers(1, 9))
@settings(max_examples=number_of(60))
def test_the_text_of_a_plan_gives_the_plan_back(product, size: int) -> None:  # type: ignore[no-untyped-def]
    _, drawn, homes, workers = product
    m, k, n = (len(edges) * size for edges in (drawn.m, drawn.k, drawn.n))
    problem = Problem(m, k, n, F8, symmetry="symmetric" if drawn.triangle else None)
    blocking = cut(problem, (size, size, size), drawn.panels)
    for owners in candidates(blocking, homes, workers, one_chain=False):
        text = str(plan_of(problem, blocking, owners))
        read = parse(text, problem, homes)
        assert str(read) == text
        if homes.known:
            assert read.grid == owners


TALL = Blocking((256,), (10_000,) * 16, (256,))  # one product takes about a second at 1e9 FLOP/s


def test_a_tall_array_that_is_stored_by_rows_stays_and_only_partial_sums_move() -> None:
    homes = (0, 1, 2, 3) * 4
    problem = Problem(256, 160_000, 256, F8)
    cluster = ClusterSpec(4, 10**9, "cpu", rate=1e9, link=1e9, load=1e9)
    of = Places((homes,), tuple((rank,) for rank in homes))
    plan = make_plan(problem, cluster, blocking=TALL, homes=of, operands=("resident", "resident"))
    assert str(plan).startswith("gk4 ")
    assert plan.bytes_moved == plan.cost.bytes_bound == 3 * 256 * 256 * 8
    assert ("workers", "4 CPU workers: panels of A and B stay") in plan.rows()
    assert not plan.keeps_bits
    again = make_plan(problem, cluster, text=str(plan), homes=of, operands=("resident", "resident"))
    assert again.bytes_moved == again.cost.bytes_bound == plan.bytes_moved


@pytest.mark.parametrize(("memory", "panels"), [(10**9, 4), (82 * 10**6, 4), (50 * 10**6, 2), (10**7, 1)])
def test_a_task_reads_no_more_panels_than_its_worker_has_room_for_if_they_are_spilled(memory: int, panels: int) -> None:
    homes = (0, 1, 2, 3) * 4
    of = Places((homes,), tuple((rank,) for rank in homes), "transposed")
    cluster = ClusterSpec(4, memory, "cpu", rate=1e12, link=1e9, load=1e9, threads=4)
    problem = Problem(256, 160_000, 256, F8)
    plan = make_plan(problem, cluster, blocking=TALL, homes=of, operands=("resident", "resident"))
    assert plan.blocking.panels == panels  # of 20 MB: a worker has one chain


def test_reproducible_products_do_not_split_k_by_homes() -> None:
    homes = ((0, 1, 2, 3) * 4,)
    problem = Problem(256, 160_000, 256, F8)
    cluster = ClusterSpec(4, 10**9, "cpu", rate=1e9, link=1e9, load=1e9)
    plan = make_plan(
        problem, cluster, blocking=TALL, homes=Places(homes), operands=("resident",) * 2, reproducible=True
    )
    assert len(plan.schedule.chains((), 0, 0)) == 1


def test_rows_stay_where_a_small_operand_is_the_other_one() -> None:
    blocking = Blocking((100,) * 16, (8,), (4,))
    homes = Places(tuple((rank,) for rank in (3, 2, 1, 0) * 4), ((2,),))
    problem = Problem(1600, 8, 4, F8)
    cluster = ClusterSpec(4, 10**9, "cpu", rate=1e9, link=1e9, load=1e9)
    plan = make_plan(problem, cluster, blocking=blocking, homes=homes, operands=("resident", "resident"))
    assert plan.bytes_moved == 3 * 8 * 4 * 8  # B, to the three others
    assert all(plan.schedule.chains((), i, 0)[0][0] == (3, 2, 1, 0)[i % 4] for i in range(16))


def test_a_product_that_does_not_fit_as_one_wave_gets_a_grid_and_waves() -> None:
    blocking = Blocking((256,) * 8, (256,) * 2, (256,) * 8)
    problem = Problem(2048, 512, 2048, F8)
    homes = Places(tuple((i % 4, i % 4) for i in range(8)))
    cluster = ClusterSpec(4, 7_000_000, "cpu", rate=1e9, link=1e9, load=1e9)
    plan = make_plan(problem, cluster, blocking=blocking, homes=homes, operands=("resident", "loaded"), result="out")
    assert isinstance(plan.grid, Grid)
    assert len(plan.waves) > 1


def test_owners_of_a_family_are_refused_for_waves_and_batches() -> None:
    for text in ("gk4 b8x100x8 p1 w2 l2", "ga4 b8x100x8 p1 w1x2 l2"):
        with pytest.raises(InputError, match="one wave"):
            parse(text, Problem(8, 1600, 8, F8))
    with pytest.raises(InputError, match="'k' or 'r'"):
        parse("gb4 b8x100x8 p1 w1 l2", Problem(8, 1600, 8, F8, symmetry="symmetric"))
    with pytest.raises(InputError, match="does not fit"):
        parse("gk0 b8x100x8 p1 w1 l2", Problem(8, 1600, 8, F8))


def test_a_grid_that_knows_homes_counts_the_bytes_from_there() -> None:
    blocking = Blocking((4, 4), (4, 4), (4, 4))
    problem = Problem(8, 8, 8, F8)
    at_home = of_grid(Grid(2, 1), blocking, Places(((0, 0), (1, 1)), ((0, 0), (1, 1))))
    elsewhere = replace(at_home, homes=Places(((1, 1), (0, 0)), ((0, 0), (1, 1))))
    assert plan_of(problem, blocking, at_home).bytes_moved == 4 * 16 * 8
    assert plan_of(problem, blocking, elsewhere).bytes_moved == 8 * 16 * 8


def test_a_block_that_is_read_as_a_and_as_b_travels_once() -> None:
    homes = ((3, 2), (1, 0))
    problem, blocking = Problem(8, 8, 8, F8), Blocking((4, 4), (4, 4), (4, 4))
    turned = tuple(zip(*homes, strict=True))
    of_pairs = (Places(homes, homes), Places(homes, homes, "same"), Places(homes, turned, "transposed"))
    apart, same, transposed = (of_grid(Grid(2, 2), blocking, each) for each in of_pairs)
    assert plan_of(problem, blocking, apart).bytes_moved == 16 * 16 * 8
    # Two ranks read a block as A, two as B, and one of them is the same rank.
    assert plan_of(problem, blocking, same).bytes_moved == 12 * 16 * 8
    # The two ranks on the diagonal need two blocks, which are not at home; the others need all four, and have one.
    assert plan_of(problem, blocking, transposed).bytes_moved == (2 * 2 + 2 * 3) * 16 * 8


def test_a_plan_for_operands_that_are_nowhere_is_not_held_against_a_worker_that_loads_everything() -> None:
    problem, cluster = Problem(1600, 1600, 1600, F8), ClusterSpec(2, 10**9, "cpu", rate=1e11, link=1e9, load=1e9)
    plan = make_plan(problem, cluster, blocking=cut(problem, [100] * 3), unions=True)
    assert plan.schedule.chunks is not None
    assert plan.cost.bytes_bound == plan.bytes_moved > 0
    assert "2-D bound" in dict(plan.rows())["moved"]
    again = make_plan(problem, cluster, text=str(plan))
    assert again.cost.bytes_bound == again.bytes_moved > 0


@pytest.mark.parametrize("prepared", [0.0, 1.0])
def test_chunks_that_a_gpu_joins_stay_as_long_as_what_is_prepared_of_them(prepared: float) -> None:
    problem = Problem(1600, 1600, 1600, F8)
    cluster = ClusterSpec(2, 10**9, "cuda", rate=1e11, link=1e9, load=1e9, prepared=prepared)
    joined = make_plan(problem, cluster, blocking=cut(problem, [100] * 3), unions=True)
    assert isinstance(joined.grid, Owners)
    assert joined.grid.chunks is not None
    whole = replace(joined, schedule=replace(joined.schedule, grid=replace(joined.grid, chunks=None)))
    assert joined.peak.worker - whole.peak.worker == 8 * joined.peak.most_prepared > 0


@pytest.mark.parametrize("shape", [(0, 40, 30), (30, 0, 40), (30, 40, 0)])
def test_products_of_empty_matrices_have_plans_whose_text_gives_them_back(shape: tuple[int, int, int]) -> None:
    problem = Problem(*shape, F8)
    m, k, n = ((10,) * (size // 10) or (0,) for size in shape)
    homes = Places(
        tuple(tuple(i % 4 for _ in k) for i, _ in enumerate(m)),
        tuple(tuple(i % 4 for _ in n) for i, _ in enumerate(k)),
    )
    cluster = ClusterSpec(4, 10**9, "cpu", rate=1e10, link=1e9, load=1e9)
    with np.errstate(invalid="raise"):
        plan = make_plan(problem, cluster, blocking=Blocking(m, k, n), homes=homes, operands=("resident",) * 2)
    assert parse(str(plan), problem, homes).blocking == plan.blocking
    with pytest.raises(InputError, match="at least 1"):
        parse("g2x2x1 b0x8x8 p1 w1 l2", Problem(8, 8, 8, F8))


def test_blocks_without_elements_always_find_room() -> None:
    cluster = ClusterSpec(1, 10**9, "cpu", rate=1e10, link=1e9, load=1e9)
    plan = make_plan(Problem(0, 40, 30, F8), cluster, text="g1x1x1 b0x40x7 p1 w2 l2", result="out")
    assert len(plan.waves) > 1
    assert plan.slots_that_fit == math.inf


def test_thin_products_leave_matrices_where_they_are() -> None:
    square, column = (tuple(tuple((7 * i + 3 * j) % 4 for j in range(n)) for i in range(8)) for n in (8, 1))
    homes = Places(square, column)
    cluster = ClusterSpec(4, 10**10, "cpu", rate=1e10, link=1e9, load=1e9)
    of_vector = Problem(2048, 2048, 1, F8), Blocking((256,) * 8, (256,) * 8, (1,))
    plan = make_plan(of_vector[0], cluster, blocking=of_vector[1], homes=homes, operands=("resident",) * 2, unions=True)
    assert plan.bytes_moved < 1.25 * plan.cost.bytes_bound


@pytest.mark.parametrize(("device", "longest"), [("cpu", 1024), ("cuda", 128)])
def test_cpus_unite_short_panels_and_gpus_round_sums_where_the_chunks_end(device: str, longest: int) -> None:
    cluster = ClusterSpec(1, 10**11, device, rate=1e10, link=1e9, load=1e9)  # type: ignore[arg-type]
    problem, edges = Problem(4096, 4096, 4096, F8), (128,) * 32
    plan = make_plan(problem, cluster, blocking=Blocking(edges, edges, edges), unions=True)
    assert {*plan.blocking.k} == {longest}


def test_many_lazy_chunks_are_united_to_few_tasks() -> None:
    cluster = ClusterSpec(4, 10**11, "cpu", rate=1e10, link=1e9, load=1e9)
    for count in (16, 64, 200):
        edges = (10,) * count
        problem = Problem(10 * count, 10 * count, 10 * count, F8)
        plan = make_plan(problem, cluster, blocking=Blocking(edges, edges, edges), unions=True)
        assert max(len(plan.blocking.m), len(plan.blocking.n)) <= 8
        assert plan.schedule.tasks <= 5000
