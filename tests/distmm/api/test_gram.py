"""Symmetric products: half of the work, each block read and sent once, and C symmetric to the bit."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.errors import InputError
from distmm.graph.dask_tasks import PlacedTask, ProductTask, unfused
from distmm.planning.blocks import Blocking, even_edges
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.grid_layout import GridLayout
from distmm.planning.owners import Grid
from distmm.planning.problem import Problem, Symmetry
from distmm.planning.schedule import Schedule
from distmm.planning.search import make_plan
from distmm.product.choices import Choices
from distmm.product.operand import wrap
from distmm.product.operand_pair import symmetry_of
from distmm_kernels.symmetric import DIAGONAL_TILE
from tests.distmm.api.symmetric import mirrored, sample, truth
from tests.tables import later, number_of

F4 = np.dtype("f4")
GPUS = ClusterSpec(workers=4, memory=10**11, device="cuda", rate=2e14, link=5e10, host_memory=10**11)


@settings(max_examples=number_of(40))
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(["f8", "f4", "f2", "i4", "u1", "?", "c8", "c16"]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_it_is_numpys_product_and_symmetric_to_the_bit(
    batch: list[int],
    shape: tuple[int, int],
    dtype: str,
    chunks: tuple[int, int],
    trans: bool,
    hermitian: bool,
    lazy: bool,
) -> None:
    a = sample((*batch, *shape), dtype)
    edges = chunks[::-1] if trans else chunks
    given = {"A": da.from_array(a, chunks=(*[1] * len(batch), *chunks))} if lazy else {"A": a, "blocks": edges}
    with dask.config.set(scheduler="synchronous"), np.errstate(over="ignore", invalid="ignore"):
        C = distmm.gram(**given, trans=trans, hermitian=hermitian)
        c, expected = C.compute(), truth(a, trans, hermitian)
    assert C.dtype == c.dtype == expected.dtype
    assert C.chunks[-1] == C.chunks[-2] == even_edges(expected.shape[-1], edges[0])
    np.testing.assert_array_equal(c, mirrored(c, hermitian))
    if c.dtype.kind in "iub":
        np.testing.assert_array_equal(c, expected)
    else:
        np.testing.assert_allclose(c, expected, rtol=1e-2 if dtype == "f2" else 1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", ["f4", "c8"])
@pytest.mark.parametrize("chunks", [(700, 300), (301, 128)])
def test_blocks_on_the_diagonal_are_symmetric_whatever_the_kernel_adds_first(
    dtype: str, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from distmm_kernels.gemm.cpu import CpuKernel

    accumulate = CpuKernel._accumulate

    def uneven(self: CpuKernel, a: Any, b: Any, c: Any, d: np.ndarray) -> None:
        accumulate(self, a, b, c, d)
        d *= 1 + 1e-3 * np.random.default_rng(1).random(d.shape, dtype="f4")

    monkeypatch.setattr(CpuKernel, "_accumulate", uneven)
    a = sample((700, 300), dtype)
    assert chunks[0] > DIAGONAL_TILE
    c = distmm.gram(da.from_array(a, chunks=chunks)).compute(scheduler="synchronous")
    np.testing.assert_array_equal(c, mirrored(c))
    np.testing.assert_allclose(c, truth(a), rtol=1e-2, atol=100)


def test_scalars_are_those_of_syrk_and_herk() -> None:
    a, z = sample((20, 30)), sample((20, 30), "c16")
    with dask.config.set(scheduler="synchronous"):
        np.testing.assert_allclose(distmm.gram(a, alpha=-2.5, blocks=(8, 8)).compute(), -2.5 * (a @ a.T))
        half = distmm.gram(np.arange(6).reshape(2, 3), alpha=0.5)
        assert half.dtype == np.float64
        for more in ({"alpha": 2.0, "trans": True}, {"alpha": 2j, "hermitian": False}):
            c = distmm.gram(z, blocks=(8, 8), **more).compute()
            np.testing.assert_allclose(c, more["alpha"] * truth(z, "trans" in more, "hermitian" not in more))
        np.testing.assert_array_equal(np.diag(distmm.gram(z, alpha=1 / 3).compute()).imag, np.zeros(20))
    with pytest.raises(InputError, match=r"alpha is 2j, and a Hermitian product needs a real alpha: .*hermitian=False"):
        distmm.gram(z, alpha=2j)


def test_what_is_no_symmetric_product_is_refused() -> None:
    a = np.ones((6, 4))
    with pytest.raises(InputError, match=r"shape \(4,\): give a matrix, to multiply it by its own transpose"):
        distmm.gram(a[0])
    with pytest.raises(InputError, match="two positive edges, those of m and k"):
        distmm.gram(a, blocks=(2, 2, 2))
    with pytest.raises(InputError, match="positive"):
        distmm.gram(a, blocks=(0, 2))
    with pytest.raises(InputError, match="cut alike along m and n"):
        distmm.gram(a, plan="g1x1x1 b2x4x3 p1 w1 l2")
    with pytest.raises(InputError, match="as many waves down as across, not w1x2"):
        distmm.gram(a, plan="g1x1x1 b2x4x2 p1 w1x2 l2")
    with pytest.raises(InputError, match=r"make a new plan with distmm.plan\(A\)"):
        distmm.gram(a, plan=distmm.plan(a, a.T))
    with pytest.raises(InputError, match="square"):
        Problem(3, 4, 5, F4, symmetry="symmetric")


# The plan


@settings(max_examples=6)
@given(
    st.integers(1, 10**6),
    st.integers(1, 10**6),
    st.sampled_from([1, 2, 3, 8, 60]),
    st.sampled_from(["f2", "f4", "c16"]),
    st.sampled_from([(), (5,), (3, 40)]),
    st.sampled_from(["workers", "host", "out"]),
    st.sampled_from(["symmetric", "hermitian"]),
)
def test_plans_make_every_block_of_one_triangle_and_their_text_gives_them_back(
    m: int, k: int, workers: int, dtype: str, batch: tuple[int, ...], result: Any, symmetry: Symmetry
) -> None:
    problem = Problem(m, k, m, np.dtype(dtype), batch, batch, symmetry)
    spec = replace(GPUS, workers=workers)
    plan = make_plan(problem, spec, result=result)
    blocking = plan.blocking
    made = [index for wave in plan.waves for index in blocking.c_indices(wave)]
    assert len(made) == len(set(made)) == sum(wave.c_blocks for wave in plan.waves)
    assert set(made) == set(blocking.c_indices())
    images = {(b, j, i) for b, i, j in made}
    assert len(set(made) | images) == blocking.c_blocks
    assert sum(map(blocking.mirrored, plan.waves)) == blocking.c_blocks - len(made)
    elements = sum(blocking.m[i] * blocking.n[j] for _, i, j in made if not batch)
    assert batch or elements == blocking.c_elements
    below = sum(blocking.m[i] * blocking.n[j] / (1 + (i == j)) for _, i, j in made if not batch)
    assert batch or below == blocking.multiplied(triangles=True)
    assert blocking.multiplied(triangles=False) == blocking.c_elements
    layout, whole = plan.layout, blocking.whole
    if plan.grid.size == 1 and len(blocking.k) == 1 and not batch:
        assert layout.multiplied(whole, triangles=True) == below * k
    assert layout.multiplied(whole, triangles=True) <= layout.multiplied(whole, triangles=False)
    parts = blocking.parts(plan.grid.layers)
    assert plan.schedule.tasks == len(made) * (sum(map(len, parts)) + len(parts) - 1)
    assert make_plan(problem, spec, text=str(plan), result=result) == plan


@settings(max_examples=number_of(60))
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from([(), (3,), (2, 1)]),
    st.sampled_from(["symmetric", "hermitian"]),
)
def test_bytes_are_those_of_the_blocks_that_leave_home(
    shape: tuple[int, int, int], cuts: int, rows: int, panels: int, batch: tuple[int, ...], symmetry: Symmetry
) -> None:
    grid = Grid(*shape)
    problem = Problem(rows * 3 - 1, panels * 2 - 1, rows * 3 - 1, F4, batch, batch, symmetry)
    edges = even_edges(problem.m, 3)
    blocking = Blocking(edges, even_edges(problem.k, 2), edges, tuple((1,) * x for x in batch), triangle=True)
    layout = GridLayout(problem, Schedule(blocking, grid))
    layers = len(blocking.parts(grid.layers))
    for wave in blocking.waves((1, cuts, cuts), (grid.rows, grid.columns)):
        needs: set[tuple[Any, ...]] = set()
        homes, owned, images = {}, Counter[int](), Counter[int]()
        for b, i, j in blocking.c_indices(wave):
            size = blocking.m[i] * blocking.m[j] * 4
            images[grid.owner(i, j, b)] += size * (i != j and symmetry == "hermitian")
            for layer, steps in enumerate(blocking.parts(grid.layers)):
                owner = grid.owner(i, j, b, layer)
                owned[owner] += size
                for p in (p for step in steps for p in step):
                    for row, use in ((i, "A"), (j, "B")):
                        needs.add((owner, use, b, row, p))
                        homes[b, row, p] = grid.owner(row, p, b, layer)
        received, sent, at_home, both = (Counter[int]() for _ in range(4))
        for owner, _, _, row, p in needs:
            both[owner] += blocking.m[row] * blocking.k[p] * 4
        for owner, b, row, p in {(owner, b, row, p) for owner, _, b, row, p in needs}:
            size = blocking.m[row] * blocking.k[p] * 4
            both[owner] -= size
            received[owner] += size * (owner != homes[b, row, p])
            sent[homes[b, row, p]] += size * (owner != homes[b, row, p])
        for (_, row, p), home in homes.items():
            at_home[home] += blocking.m[row] * blocking.k[p] * 4
        traffic = layout.operand_bytes(wave)
        for counted, figures in (
            (received, traffic.received),
            (sent, traffic.sent),
            (at_home, sum(traffic.homes)),
            (both, traffic.both),
            (owned, layout.c_bytes(wave, 4, layers)),
            (images, layout.mirror_bytes(wave, 4)),
        ):
            assert [counted[rank] for rank in range(grid.size)] == list(figures)


@pytest.mark.parametrize("workers", later([1, 2, 4, 16, 64, 256], first=3))
def test_the_planner_cuts_finely_enough_that_no_worker_waits_long(workers: int) -> None:
    m = 65536 * int(workers**0.5)
    problem = Problem(m, m, m, F4, symmetry="symmetric")
    spec = replace(GPUS, workers=workers, memory=10**12)
    plan, whole = make_plan(problem, spec), make_plan(replace(problem, symmetry=None), spec)
    layout = plan.layout
    owned = layout.c_bytes(plan.blocking.whole, 1, 1)
    assert owned.max() <= 1.25 * owned.mean()  # with one block of C a worker it would be twice the mean
    assert plan.cost.seconds < 0.8 * whole.cost.seconds
    assert plan.bytes_moved < whole.bytes_moved or workers == 1
    assert plan.bytes_moved <= plan.cost.bytes_bound


def test_a_plan_says_and_shows_that_one_triangle_is_multiplied() -> None:
    plan = make_plan(Problem(640, 320, 640, F4, symmetry="symmetric"), GPUS, text="g2x2x1 b64x64x64 p1 w1 l2")
    rows = dict(plan.rows())
    assert rows["product"].startswith("640 x 320 times its transpose, float32")
    assert "55 of 100 blocks of C (its lower triangle)" in rows["blocks"]
    html = plan._repr_html_()
    picture = ET.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    titles = {title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")}
    assert {"C[1, 0]: worker 2", "C[0, 1]: C[1, 0] transposed, worker 2"} <= titles
    texts = [text for text in picture.iter("{http://www.w3.org/2000/svg}text") if text.text in ("A", "B", "C")]
    assert [text.text for text in texts] == ["A", "B", "C"]
    assert {text.get("fill") for text in texts} == {"currentColor"}  # light on a dark page


# The graph


def test_one_triangle_has_chains_and_the_other_one_mirrors_them() -> None:
    A = da.ones((64, 96), chunks=16)
    C = distmm.gram(A, plan="g2x2x1 b16x16x16 p2 w1 l2")
    layer = C.dask.layers[C.name]
    tasks = dict(layer)
    products = [task for task in tasks.values() if isinstance(task, ProductTask)]
    images = [task for task in tasks.values() if isinstance(task, PlacedTask) and not isinstance(task, ProductTask)]
    assert (len(products), len(images)) == (10 * 3, 6)
    assert len(layer) == len(tasks) == 36
    assert layer.get_output_keys() == set(da.core.flatten(C.__dask_keys__()))
    for task in images:
        _, j, i = task.key
        assert j < i
        assert task.dependencies == {(C.name, i, j)}
        assert task.placement.rank == Grid(2, 2).owner(i, j)
    assert {key[0] for task in products for key in task.operands()} == {A.name}
    (optimized,) = dask.optimize(C + 1)
    kept = [unfused(task) for task in optimized.__dask_graph__().values()]
    placements = Counter(task.placement for task in kept if isinstance(task, PlacedTask))
    assert placements == Counter(task.placement for task in tasks.values())


class Reads:
    """An array-like that notes every region that is read."""

    shape, dtype, ndim = (20, 12), np.dtype("f8"), 2

    def __init__(self) -> None:
        self.values, self.regions = sample(self.shape), Counter[Any]()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        self.regions[tuple((s.start, s.stop) for s in index)] += 1
        return self.values[index]


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_each_block_is_read_once(trans: bool, scheduler: str) -> None:
    a = Reads()
    c = distmm.gram(a, trans=trans, blocks=(5, 4)).compute(scheduler=scheduler)
    np.testing.assert_allclose(c, truth(a.values, trans))
    assert set(a.regions.values()) == {1}
    assert len(a.regions) == (20 // 4) * -(-12 // 5) if trans else (20 // 5) * (12 // 4)


def test_a_tall_matrix_on_gpus_times_its_transpose_is_a_symmetric_product() -> None:
    def found(a: da.Array, b: da.Array, transa: bool = False, **choices: Any) -> Symmetry | None:
        left, right = (replace(x, kind="cupy") for x in (wrap(a, "A", transa), wrap(b, "B")))
        return symmetry_of(left, right, Choices.of(**choices))

    tall, wide = da.ones((60, 8), chunks=(10, 8)), da.ones((8, 60), chunks=(8, 10))
    square = da.ones((8, 8), chunks=8)
    assert found(tall.T, tall) == found(wide, wide.T) == found(tall, tall, transa=True) == "symmetric"
    assert symmetry_of(wrap(tall.T, "A"), wrap(tall, "B"), Choices.of()) is None  # NumPy finds that out by itself
    others = {
        "blocks of one's own": found(tall.T, tall, blocks=(4, 10, 8)),
        "a plan's text": found(tall.T, tall, plan="g1x1x1 b8x10x8 p1 w1 l2"),
        "a plan that is not": found(tall.T, tall, plan=distmm.plan(tall.T, tall)),
        "reproducible bits": found(tall.T, tall, reproducible=True),
        "several blocks of C": found(tall, tall.T),
        "another array": found(tall.T, tall + 1),
        "itself": found(square, square),
        "both transposed": found(square.T, square.T),
        "a vector": found(tall[:, 0], tall),
    }
    assert others == dict.fromkeys(others)
    assert found(tall.T, tall, plan=distmm.plan(tall.T)) == "symmetric"


@pytest.mark.gpu
def test_a_tall_cupy_array_times_its_transpose_is_its_gram_matrix() -> None:
    import cupy

    x = np.random.default_rng(2).integers(-4, 5, (600, 40)).astype("f4")
    tall = da.from_array(x, chunks=(100, 40)).map_blocks(cupy.asarray)
    plan = distmm.plan(tall.T, tall)
    assert plan.problem.symmetry == "symmetric"
    for c in (
        distmm.matmul(tall.T, tall),
        distmm.matmul(tall.T, tall, plan=plan),
        distmm.gemm(2, tall, tall, transa=True) / 2,
    ):
        np.testing.assert_array_equal(c.compute().get(), x.T @ x)
    added = distmm.gemm(1, tall.T, tall, 1, cupy.arange(1600, dtype="f4").reshape(40, 40)).compute()
    np.testing.assert_array_equal(added.get(), x.T @ x + np.arange(1600, dtype="f4").reshape(40, 40))
