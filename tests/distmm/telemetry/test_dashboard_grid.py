"""The grid of C: what its cells say of blocks that are mirrored, from disk, rejected, computed again, or of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from distmm.planning.blocks import cut
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import theme
from distmm.telemetry.dashboard_grid import MOST_CELLS, Blocks, legend
from distmm.telemetry.record import Record


def record(problem: Problem, edges: tuple[int, ...], **options: object) -> Record:
    """Make the record of a product on two workers, all of whose steps have come."""
    r = Record(
        "C",
        make_plan(problem, ClusterSpec(2, 10**9, "cuda", 1e9, 1e9), blocking=cut(problem, edges)),
        1000.0,
        **options,
    )  # type: ignore[arg-type]
    for chain in np.flatnonzero(~r.mirrored & ~r.resumed):
        for step in range(r.steps):
            r.want(int(chain), step, f"w{chain % 2}")
    return r


def cells(r: Record) -> tuple[Blocks, dict[str, dict[str, object]]]:
    """Return the pane that shows a record, and its cells by the names of their blocks."""
    pane = Blocks()
    pane.update(r)
    data = {name: list(values) for name, values in pane.source.data.items()}
    return pane, {name: {key: data[key][at] for key in data} for at, name in enumerate(data["name"])}


def make(r: Record, i: int, j: int) -> int:
    chain = r.chain((), i, j)
    for step in range(r.steps):
        r.step(chain, step, r.owners[chain], 1001.0, 1002.0)
    return chain


def test_mirrored_blocks_are_told_apart_and_follow_their_source() -> None:
    r = record(Problem(90, 60, 90, np.dtype("f4"), symmetry="symmetric"), (30, 30, 30))
    chain = make(r, 2, 0)
    r.repeat(1002.0, chain, 0, finished=True)
    make(r, 2, 0)
    _, found = cells(r)
    images = {name for name, cell in found.items() if "mirrored" in str(cell["state"])}
    assert images == {"C[0, 1]", "C[0, 2]", "C[1, 2]"}
    image, source = found["C[0, 2]"], found["C[2, 0]"]
    for same in ("fill", "alpha", "owner", "edge"):
        assert image[same] == source[same]
    assert image["state"] == "mirrored, lost and computed again"
    assert (image["alpha"], image["fill"]) == (1.0, r.color(str(source["owner"])))
    assert found["C[0, 1]"]["alpha"] == pytest.approx(0.1)


def test_blocks_from_disk_rejected_and_computed_again_are_told_apart() -> None:
    r = record(Problem(60, 30, 60, np.dtype("f4")), (15, 30, 15), title="C.zarr", kept=[0])
    for j, checks in ((1, [False]), (2, [False, True]), (3, [True])):
        chain = make(r, 0, j)
        for passed in checks:
            r.check(1003.0, chain, passed)
    r.repeat(1003.0, make(r, 1, 0), 0, finished=True)
    _, found = cells(r)
    assert [found[f"C[0, {j}]"]["state"] for j in range(4)] == [
        "from disk", "failed its check", "rejected and computed again", "",
    ]  # fmt: skip
    assert found["C[1, 0]"]["state"] == "lost and computed again"
    assert (found["C[0, 0]"]["fill"], found["C[0, 0]"]["owner"]) == (theme.NOBODY, "an earlier run")
    edges = [found[name]["edge"] for name in ("C[0, 0]", "C[0, 1]", "C[0, 2]", "C[1, 0]")]
    assert edges == [theme.NOBODY, theme.WRONG, theme.REJECTED, theme.AGAIN]
    words = legend(r)
    again = ("rejected and computed again", "lost and computed again")
    for state in ("from disk", "failed its check", *again):
        assert state in words
    for worker in ("w0", "w1"):
        assert f"worker {worker}" in words
        assert r.color(worker) in words


def test_the_matrices_of_a_batch_stand_apart() -> None:
    r = record(Problem(60, 30, 40, np.dtype("f4"), (2, 3), (2, 3)), (1, 1, 20, 30, 20))
    pane, found = cells(r)
    assert len(found) == r.chains
    for b in np.ndindex(2, 3):
        mine = [found[f"C[{b[0]}, {b[1]}, {i}, {j}]"] for i in range(3) for j in range(2)]
        (left, right), (top, bottom) = ((min(at), max(at)) for at in ([c[x] for c in mine] for x in "xy"))  # type: ignore[type-var]
        assert (right - left, bottom - top) == (1, 2)  # type: ignore[operator]
        others = [cell for cell in found.values() if cell not in mine]
        assert not [c for c in others if left - 1 <= c["x"] <= right + 1 and top - 1 <= c["y"] <= bottom + 1]  # type: ignore[operator]
    assert not pane.root.xaxis[0].visible
    pane.update(record(Problem(60, 30, 60, np.dtype("f4")), (30, 30, 30)))
    assert pane.root.xaxis[0].visible
    assert (pane.root.x_range.end, pane.root.y_range.start) == (1.5, 1.5)


@pytest.mark.parametrize(("batch", "edge"), [((), 100), ((6000,), 1), ((40, 50), 2)])
def test_large_grids_have_a_bounded_number_of_cells(batch: tuple[int, ...], edge: int) -> None:
    problem = Problem(edge, 1, edge, np.dtype("f4"), batch, batch)
    plan = make_plan(
        problem, ClusterSpec(2, 10**9, "cuda", 1e9, 1e9), blocking=cut(problem, (*(1 for _ in batch), 1, 1, 1))
    )
    r = Record("C", plan, 1000.0)
    assert r.chains > MOST_CELLS
    pane = Blocks()
    pane.update(r)
    assert 0 < len(pane.source.data["x"]) <= MOST_CELLS
    assert max(pane.source.data["x"]) < pane.root.x_range.end
    assert max(pane.source.data["y"]) < pane.root.y_range.start
