"""Jobs that keep the best of each row of C, or what is above a threshold: results, resume, damage, limits, refusals."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import ml_dtypes
import numpy as np
import pytest
import zarr
from distributed import Client

import distmm
from distmm import job
from distmm.checking.checksum import checksum
from distmm.errors import DoesNotFitError, InputError, Stopped, WrongResultError
from distmm.job import panels, sampled_rows
from distmm.job.entries import Entries
from distmm.worker import tasks
from distmm.worker.tasks import reductions

# Five row panels of C, 70 x 90, of six blocks each, the last ones ragged; three waves make each pair of panels.
SHAPE, PLAN = (70, 20, 90), "g1x2x1 b16x10x16 p1 w3x3 l2"


@pytest.fixture
def c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B of small whole numbers, so that many elements of C are equal; returns C."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    m, k, n = SHAPE
    a, b = rng.integers(-2, 3, (m, k)).astype("f4"), rng.integers(-2, 3, (k, n)).astype("f4")
    np.save("A.npy", a)
    zarr.create_array("B.zarr", data=b, chunks=(10, 32))
    return a @ b


def best(c: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k largest elements of each row, the first of equal ones first."""
    return np.argsort(-c, axis=1, kind="stable")[:, :k]


def arrays(out: str) -> dict[str, np.ndarray]:
    group = zarr.open_group(out, mode="r")
    return {name: np.asarray(array) for name, array in group.arrays()}


def same(one: str, other: str) -> bool:
    left, right = arrays(one), arrays(other)
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


def topk(client: Client, out: str = "out.zarr", k: int = 7, **options: Any) -> job.Summary:
    return job.topk("A.npy", "B.zarr", k, out, client=client, **{"plan": PLAN, **options})


def threshold(client: Client, out: str = "out.zarr", t: float = 6, **options: Any) -> job.Summary:
    return job.threshold("A.npy", "B.zarr", t, out, client=client, **{"plan": PLAN, **options})


CALLS: list[Callable[..., job.Summary]] = [topk, threshold]


def marked(out: str = "out.zarr") -> dict[str, int]:
    """Markers of finished panels, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(f"{out}.job").glob("*/done/*.json")}


class HalfWay(job.Stop):
    """Does something once two panels are finished: at least one of five is not sent then."""

    def __init__(self, what: Callable[[HalfWay], object] = lambda stop: stop.ask("enough")) -> None:
        super().__init__()
        self.what = what

    @property
    def reason(self) -> str | None:
        if len(marked()) >= 2:
            self.what(self)
        return super().reason


def test_the_best_of_each_row_are_numpys(client: Client, c: np.ndarray) -> None:
    summary = topk(client)
    found = arrays("out.zarr")
    np.testing.assert_array_equal(found["indices"], best(c, 7))
    np.testing.assert_array_equal(found["values"], np.take_along_axis(c, best(c, 7), axis=1))
    assert (summary.blocks, summary.kept, summary.entries, summary.shape) == (5, 0, 70 * 7, c.shape)
    assert "490 elements of 70 x 90, float32" in dict(summary.rows())["result"]
    content = json.loads(Path("out.zarr.certificate.json").read_text())
    assert (content["judged"], content["sample"]["outcome"]) == ({"sketch": 5}, "right")
    assert job.recheck("out.zarr", client).outcome == "right"
    assert job.status("out.zarr").state == "complete"
    assert sorted(os.listdir(".")) == [
        "A.npy", "B.zarr", "out.zarr", "out.zarr.certificate.json", "out.zarr.report.html",
    ]  # fmt: skip
    assert not any(client.processing().values())


@pytest.mark.parametrize("metric", ["inner", "cosine", "euclidean"])
def test_neighbours_on_disk_are_those_in_memory(metric: Any, client: Client, c: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((40, 20)).astype("f4"), rng.standard_normal((50, 20)).astype("f4")
    y[3] = 0
    summary = job.topk(
        x, y, 5, "near.zarr", metric=metric, transb=True, client=client, plan="g1x2x1 b16x10x16 p1 w1 l2"
    )
    assert summary.residual is not None
    values, indices = (each.compute() for each in distmm.nearest(x, y, 5, metric))
    found = arrays("near.zarr")
    np.testing.assert_array_equal(found["indices"], indices)
    np.testing.assert_allclose(found["values"], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["float64", "bfloat16", "int32"])
def test_other_types_are_reduced_and_checked_too(name: str, client: Client, c: np.ndarray) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    a, b = np.load("A.npy").astype(dtype), np.asarray(zarr.open_array("B.zarr")).astype(dtype)
    job.topk(a, b, 90, "all.zarr", client=client, plan="g1x2x1 b64x20x64 p1 w1 l2")
    job.threshold(a, b, 8, "some.zarr", client=client, plan="g1x2x1 b64x20x64 p1 w1 l2")
    found, some = arrays("all.zarr"), arrays("some.zarr")
    assert found["values"].dtype == some["values"].dtype == ("float32" if name == "bfloat16" else name)
    np.testing.assert_array_equal(found["indices"], best(c, 90))
    np.testing.assert_array_equal(some["values"], c[c >= 8])


def test_what_is_above_a_threshold_is_numpys_in_its_order(client: Client, c: np.ndarray) -> None:
    summary = threshold(client)
    found = arrays("out.zarr")
    rows, columns = np.nonzero(c >= 6)
    np.testing.assert_array_equal(found["rows"], rows)
    np.testing.assert_array_equal(found["columns"], columns)
    np.testing.assert_array_equal(found["values"], c[rows, columns])
    assert summary.entries == len(rows) > 100
    assert zarr.open_group("out.zarr", mode="r").attrs["distmm"]["shape"] == [70, 90]
    assert job.recheck("out.zarr").outcome == "right"
    assert threshold(client, t=1000, overwrite=True).entries == 0
    assert {len(values) for values in arrays("out.zarr").values()} == {0}
    assert job.recheck("out.zarr").outcome == "right"


@pytest.mark.parametrize("call", CALLS)
def test_a_stopped_job_goes_on_with_the_missing_panels_only(
    call: Callable[..., job.Summary], client: Client, c: np.ndarray
) -> None:
    call(client, "whole.zarr")
    with pytest.raises(Stopped, match=r"enough; \d of 5 row panels of C are finished and kept.*distmm resume out.zarr"):
        call(client, stop=HalfWay())
    before, found = marked(), job.status("out.zarr")
    assert (found.state, found.done, found.total) == ("stopped", len(before), 5)
    assert 2 <= len(before) < 5
    again: dict[str, int] = {}
    assert job.resume("out.zarr", client=client, progress=lambda _: again.update(marked())).kept == len(before)
    assert {name: again[name] for name in before} == before
    assert same("out.zarr", "whole.zarr")
    assert call(client).plan is None  # it is complete


def _killed_half_way(address: str) -> None:
    """Run a job that kills its own process once two panels are finished."""
    with Client(address) as client:
        topk(client, stop=HalfWay(lambda stop: os.kill(os.getpid(), signal.SIGKILL)))


def test_a_job_whose_process_was_killed_ends_with_the_same_bits(client: Client, c: np.ndarray) -> None:
    topk(client, "whole.zarr")
    child = multiprocessing.get_context("forkserver").Process(target=_killed_half_way, args=(client.scheduler.address,))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    before = marked()
    assert len(before) >= 2
    assert not os.path.exists("out.zarr")
    assert job.resume("out.zarr", client=client).kept >= len(before)
    assert same("out.zarr", "whole.zarr")


def test_a_kill_while_panels_become_the_result_leaves_a_job_that_ends(
    client: Client, c: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(path: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(panels, "fsync_tree", die)
        with pytest.raises(Killed):
            threshold(client)
    assert job.resume("out.zarr", client=client).kept == 5
    np.testing.assert_array_equal(arrays("out.zarr")["values"], c[c >= 6])


@pytest.mark.parametrize("damage", ["a bit", "the end", "the file"])
def test_a_finished_panel_that_was_damaged_meanwhile_is_made_again(damage: str, client: Client, c: np.ndarray) -> None:
    with pytest.raises(Stopped):
        topk(client, stop=HalfWay())
    before = marked()
    i = min(before).split(".")[0]
    (path,) = Path("out.zarr.job").glob(f"*/panels/{i}.values")
    content = path.read_bytes()
    path.unlink()
    if damage == "a bit":
        path.write_bytes(bytes([content[0] ^ 4]) + content[1:])
    elif damage == "the end":
        path.write_bytes(content[:-4])
    assert job.resume("out.zarr", client=client).kept == len(before) - 1
    np.testing.assert_array_equal(arrays("out.zarr")["indices"], best(c, 7))


@pytest.mark.parametrize("call", CALLS)
def test_a_result_that_was_altered_is_called_wrong(
    call: Callable[..., job.Summary], client: Client, c: np.ndarray
) -> None:
    call(client)
    array: Any = zarr.open_group("out.zarr")["values"]
    array[5] = array[5] + 1
    verdict = job.recheck("out.zarr", client)
    assert verdict.outcome == "wrong"
    assert "1 row panels" in verdict.message
    assert "the checksum of its values is" in verdict.message


def test_inputs_that_have_changed_leave_checksums_to_compare(client: Client, c: np.ndarray) -> None:
    topk(client)
    np.save("A.npy", np.load("A.npy") + 1)
    verdict = job.recheck("out.zarr", client)
    assert verdict.outcome == "cannot tell"
    assert "all 5 row panels are what was written" in verdict.message


def _altered(out: str, alter: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Alter a result, and its certificate with it: only the comparison with A and B can find that."""
    content = json.loads(Path(f"{out}.certificate.json").read_text())
    group: Any = zarr.open_group(out)
    values = arrays(out)
    alter(values)
    for name, new in values.items():
        group[name][:] = new
    check = panels.InResult.of(out, content)
    for marker in content["done"]:
        marker["sums"] = {name: checksum(check.lines(marker, name)) for name in values}
    Path(f"{out}.certificate.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("call", "alter", "message"),
    [
        (topk, lambda x: x["values"].__setitem__(slice(None), x["values"] + 0.5), "which is not that of A and B"),
        (topk, lambda x: x["indices"].__setitem__((slice(None), 1), x["indices"][:, 0]), "names a column twice"),
        (topk, lambda x: x["indices"].__setitem__((slice(None), 6), 90), "columns that the product has not"),
        (topk, lambda x: x["values"].__setitem__(slice(None), x["values"][:, ::-1].copy()), "not in the order"),
        (threshold, lambda x: x["values"].__setitem__(slice(None), 5), "values below the threshold"),
        (threshold, lambda x: x["columns"].__setitem__(slice(None), (x["columns"] + 1) % 90), "not that of A and B"),
    ],
)
def test_a_certificate_that_agrees_with_a_wrong_result_does_not_help(
    call: Callable[..., job.Summary], alter: Callable[[dict[str, np.ndarray]], None], message: str, client: Client,
    c: np.ndarray, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sampled_rows, "ROWS", 70)
    call(client)
    _altered("out.zarr", alter)
    verdict = job.recheck("out.zarr")
    assert verdict.outcome == "wrong"
    assert message in verdict.message


def test_a_row_that_leaves_out_a_column_is_found(
    client: Client, c: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eight best but the first of them, as a reduction with a fault would leave."""
    topk(client, k=8)
    monkeypatch.setattr(sampled_rows, "ROWS", 70)
    whole = arrays("out.zarr")
    topk(client, "short.zarr")

    def without_the_best(values: dict[str, np.ndarray]) -> None:
        for name in values:
            values[name][:] = whole[name][:, 1:]

    _altered("short.zarr", without_the_best)
    verdict = job.recheck("short.zarr")
    assert (verdict.outcome, "leaves out column" in verdict.message) == ("wrong", True)


def _largest_of_half(self: Any, block: Any, first: int, norms: Any) -> Any:
    """A reduction with a fault: it looks at the first half of each block alone."""
    return type(self).whole(self, block[:, : block.shape[1] // 2], first, norms)


def _spoil(spoilt: bool) -> None:
    if spoilt:
        tasks.Largest.whole = tasks.Largest.chunk  # type: ignore[attr-defined]
        tasks.Largest.chunk = _largest_of_half  # type: ignore[method-assign]
    else:
        tasks.Largest.chunk = tasks.Largest.whole  # type: ignore[attr-defined, method-assign]


def test_a_job_whose_reduction_is_wrong_ends_without_a_result(client: Client, c: np.ndarray) -> None:
    client.run(_spoil, True)
    try:
        with pytest.raises(WrongResultError, match=r"leaves out column \d+.*kept as .*out\.wrong\.zarr"):
            topk(client)
    finally:
        client.run(_spoil, False)
    assert sorted(os.listdir(".")) == ["A.npy", "B.zarr", "out.wrong.zarr"]


def test_elements_that_cannot_be_compared_are_said_to_be_so(client: Client, c: np.ndarray) -> None:
    a = np.load("A.npy")
    a[:, 3] = np.inf
    job.topk(a, "B.zarr", 3, "inf.zarr", client=client, plan=PLAN)
    content = json.loads(Path("inf.zarr.certificate.json").read_text())
    assert content["sample"]["outcome"] == "cannot tell"
    assert any(how.startswith("same bits") for how in content["judged"])


def test_a_threshold_that_keeps_too_much_ends_with_the_count_and_goes_on_with_a_higher_limit(
    client: Client, c: np.ndarray
) -> None:
    message = (
        r"keeps [\d,]+ of the [\d,]+ elements seen so far, of 6,300, and at most 900 may be kept: raise the "
        r"threshold, or go on with a higher limit; \d of 5 row panels of C are finished and kept in "
    )
    with pytest.raises(DoesNotFitError, match=message):
        threshold(client, t=0, most=900)
    kept = len(marked())
    assert kept >= 1
    with pytest.raises(DoesNotFitError, match="at most 900"):
        job.resume("out.zarr", client=client)
    summary = threshold(client, t=0, most=6300)
    assert summary.kept >= kept
    assert summary.entries == np.count_nonzero(c >= 0)


def _rows_hold(times: int) -> None:
    """Let a row of blocks keep so many times what a block may keep."""
    reductions.ROW = times


def test_a_row_panel_that_a_worker_cannot_hold_ends_the_job_with_the_count(client: Client, c: np.ndarray) -> None:
    before = tasks.ROW
    client.run(_rows_hold, 0)
    try:
        with pytest.raises(DoesNotFitError, match=r"row panel \d alone [\d,]+, more than a worker may hold"):
            threshold(client, t=0)
    finally:
        client.run(_rows_hold, before)
    assert threshold(client, t=0).entries == np.count_nonzero(c >= 0)


def test_the_default_limit_of_a_threshold_follows_the_free_disk(
    client: Client, c: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    take = Entries.take

    def noted(self: Entries, record: dict[str, Any]) -> None:
        seen.append(self.most)
        take(self, record)

    monkeypatch.setattr(Entries, "take", noted)
    monkeypatch.setattr("distmm.job.job.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10_000_000}))
    threshold(client)
    assert set(seen) == {4_000_000 // 20}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: job.topk("A.npy", "B.zarr", 91, "o.zarr"), "k is 91, and the product has rows of 90 elements"),
        (lambda: job.topk("A.npy", "B.zarr", 0, "o.zarr"), "k is 0"),
        (lambda: job.topk("A.npy", "A.npy", 1, "o.zarr"), r"A has shape \(70, 20\) and B \(70, 20\)"),
        (lambda: job.topk("A.npy", "B.zarr", 1, "o.npy"), r"several arrays, in a Zarr group: name it .*o\.zarr"),
        (lambda: job.topk("A.npy", "B.zarr", 1, "B.zarr/o"), "lies inside the Zarr array"),
        (lambda: job.topk("A.npy", "B.zarr", 1, "o.zarr", metric="cos"), "metric 'cos' is not one of"),  # type: ignore[arg-type]
        (lambda: job.topk("A.npy", "B.zarr", 1, "o.zarr", check="full"), "full check"),  # type: ignore[arg-type]
        (lambda: job.topk(np.ones((3, 20), "i4"), np.ones((20, 3), "i4"), 1, "o.zarr", metric="inner"), "A is int32"),
        (lambda: job.topk(np.ones((3, 20), "c8"), "B.zarr", 1, "o.zarr"), "complex64, and complex numbers have no"),
        (lambda: job.threshold("A.npy", "B.zarr", float("nan"), "o.zarr"), "t is nan: give a real number"),
        (lambda: job.threshold("A.npy", "B.zarr", 1j, "o.zarr"), "t is 1j: give a real number"),  # type: ignore[arg-type]
        (lambda: job.threshold("A.npy", "B.zarr", 1, "o.zarr", most=-1), "most is -1"),
        (lambda: job.topk(da.ones((3, 20)), "B.zarr", 1, "o.zarr"), "A is a Dask array.*store A"),
    ],
)
def test_bad_input_is_refused_before_any_work(call: Callable[[], object], message: str, c: np.ndarray) -> None:
    with pytest.raises(InputError, match=message):
        call()
    assert sorted(os.listdir(".")) == ["A.npy", "B.zarr"]


def test_nothing_but_a_reduced_product_is_replaced(client: Client, c: np.ndarray) -> None:
    topk(client)
    with pytest.raises(InputError, match="exists"):
        topk(client, k=3)
    Path("out.zarr/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes\.txt"):
        topk(client, k=3, overwrite=True)
    Path("out.zarr/notes.txt").unlink()
    assert threshold(client, overwrite=True).entries == np.count_nonzero(c >= 6)
    for other in ("B.zarr", "A.npy"):
        with pytest.raises(InputError, match=r"several arrays|is no reduced product"):
            topk(client, other, overwrite=True)


def test_what_has_changed_since_a_job_began_is_named(client: Client, c: np.ndarray) -> None:
    with pytest.raises(Stopped):
        topk(client, stop=HalfWay())
    with pytest.raises(InputError, match="reduction: k was 7, is 5"):
        topk(client, k=5)
    with pytest.raises(InputError, match="reduction: metric was None, is cosine"):
        topk(client, metric="cosine")
    with pytest.raises(InputError, match="reduction"):
        distmm.multiply("A.npy", "B.zarr", "out.zarr", client=client)
