"""Jobs that keep the best of each row of C, or what is above a threshold: results, resume, damage, limits, refusals."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

import distmm
from distmm import job
from distmm.errors import InputError, Stopped
from distmm.job import target
from tests.distmm.job.reduced import HalfWay, arrays, best, marked, operands, same, threshold, topk
from tests.tables import later

CALLS: list[Callable[..., job.Summary]] = [topk, threshold]


@pytest.fixture
def c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns C."""
    monkeypatch.chdir(tmp_path)
    return operands(tmp_path)


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


@pytest.mark.parametrize("metric", later(["cosine", "euclidean", "inner"]))
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


@pytest.mark.minutes
@pytest.mark.parametrize(("metric", "t"), [("euclidean", 4.5), ("cosine", 0.5), ("inner", 9.0)])
def test_near_pairs_on_disk_are_those_in_memory(metric: Any, t: float, client: Client, c: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((40, 20)).astype("f4"), rng.standard_normal((50, 20)).astype("f4")
    np.save("X.npy", x)
    np.save("Y.npy", y)
    options: dict[str, Any] = {"metric": metric, "transb": True, "client": client}
    summary = job.threshold("X.npy", "Y.npy", t, "near.zarr", **options, plan="g1x2x1 b16x10x16 p1 w1 l2")
    expected = distmm.threshold(x, y, t, **options, blocks=(16, 20, 16))
    found = arrays("near.zarr")
    np.testing.assert_array_equal(found["rows"], expected.rows)
    np.testing.assert_array_equal(found["columns"], expected.columns)
    np.testing.assert_allclose(found["values"], expected.values, rtol=1e-4, atol=1e-5)
    assert found["values"].dtype == np.float32
    assert summary.entries == len(expected.rows) > 10
    assert job.recheck("near.zarr", client).outcome == "right"
    with pytest.raises(InputError, match="exists"):
        job.threshold("X.npy", "Y.npy", t, "near.zarr", transb=True, client=client)


@pytest.mark.minutes
def test_metrics_on_disk_are_not_rounded_to_float16_and_float32_that_overflows_is_refused(
    client: Client, c: np.ndarray
) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((40, 20)), rng.standard_normal((50, 20))
    options: dict[str, Any] = {"transb": True, "client": client, "plan": "g1x2x1 b16x10x16 p1 w1 l2"}
    half = [(1000 * each).astype("f2") for each in (x, y)]
    job.topk(*half, 5, "half.zarr", metric="cosine", **options)
    a, b = (each.astype(float) for each in half)
    cosines = a @ b.T / np.outer(np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1))
    found = arrays("half.zarr")
    np.testing.assert_array_equal(found["indices"], best(cosines, 5))
    np.testing.assert_allclose(found["values"], np.take_along_axis(cosines, best(cosines, 5), axis=1), rtol=1e-5)
    with pytest.raises(InputError, match=r"norms from .*e\+25 to .*e\+25, and float32 cannot .* store them as float64"):
        job.topk(*((1e25 * each).astype("f4") for each in (x, y)), 5, "single.zarr", metric="euclidean", **options)


@pytest.mark.minutes
@pytest.mark.parametrize("transa", [True, False])
def test_a_product_with_itself_needs_no_second_matrix(transa: bool, client: Client, c: np.ndarray) -> None:
    a = np.load("A.npy")
    squared = a.T @ a if transa else a @ a.T
    options: dict[str, Any] = {"transa": transa, "client": client, "plan": "g1x2x1 b16x10x16 p1 w1 l2"}
    with pytest.raises(Stopped):
        job.threshold("A.npy", None, 20, "near.zarr", stop=job.Stop(0.0), **options)
    job.topk("A.npy", None, 4, "best.zarr", **options)
    np.testing.assert_array_equal(arrays("best.zarr")["indices"], best(squared, 4))
    job.resume("near.zarr", client=client)
    np.testing.assert_array_equal(arrays("near.zarr")["values"], squared[squared >= 20])
    assert job.recheck("best.zarr", client).outcome == "right"


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["bfloat16", "int32", "float64"])
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
    np.save("nothing.npy", np.ones((0, 20), c.dtype))
    assert job.threshold("nothing.npy", "B.zarr", 6, "nothing.zarr", client=client).entries == 0
    assert {len(values) for values in arrays("out.zarr").values()} == {0}
    assert job.recheck("out.zarr").outcome == "right"


@pytest.mark.parametrize("call", later(CALLS))
def test_a_stopped_job_goes_on_with_the_missing_rows_only(
    call: Callable[..., job.Summary], client: Client, c: np.ndarray
) -> None:
    call(client, "whole.zarr")
    with pytest.raises(Stopped, match=r"enough; \d of 5 block rows of C are finished and kept.*distmm resume out.zarr"):
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
    """Run a job that kills its own process once two block rows are finished."""
    with Client(address) as client:
        topk(client, stop=HalfWay(lambda stop: os.kill(os.getpid(), signal.SIGKILL)))


@pytest.mark.minutes
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


@pytest.mark.minutes
def test_a_kill_while_block_rows_become_the_result_leaves_a_job_that_ends(
    client: Client, c: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(path: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(target, "fsync_tree", die)
        with pytest.raises(Killed):
            threshold(client)
    assert job.resume("out.zarr", client=client).kept == 5
    np.testing.assert_array_equal(arrays("out.zarr")["values"], c[c >= 6])


@pytest.mark.minutes
@pytest.mark.parametrize("damage", ["a bit", "the file", "the marker"])
def test_a_finished_block_row_that_was_damaged_meanwhile_is_made_again(
    damage: str, client: Client, c: np.ndarray
) -> None:
    with pytest.raises(Stopped):
        topk(client, stop=HalfWay())
    before = marked()
    i = min(before).split(".")[0]
    where = f"*/*/done/{i}.0.json" if damage == "the marker" else f"*/*/out.zarr/values/c/{i}/0"
    (path,) = Path("out.zarr.job").glob(where)
    content = path.read_bytes()
    path.unlink()
    if damage == "a bit":
        path.write_bytes(bytes([content[0] ^ 4]) + content[1:])
    elif damage == "the marker":
        path.write_bytes(content.replace(b'"count"', b'"counts"'))
    assert job.resume("out.zarr", client=client).kept == len(before) - 1
    np.testing.assert_array_equal(arrays("out.zarr")["indices"], best(c, 7))


@pytest.mark.minutes
def test_a_job_goes_on_with_a_copy_of_b_and_not_with_another_b(client: Client, c: np.ndarray) -> None:
    with pytest.raises(Stopped):
        topk(client, stop=HalfWay())
    before, b = len(marked()), np.asarray(zarr.open_array("B.zarr"))
    zarr.open_array("B.zarr", mode="r+")[3, 50] = 9
    with pytest.raises(InputError, match=r"B\.zarr has changed since C\[\d, 0\] was made from it"):
        job.resume("out.zarr", client=client)
    zarr.open_array("B.zarr", mode="r+")[:] = b
    assert job.resume("out.zarr", client=client).kept == before
    np.testing.assert_array_equal(arrays("out.zarr")["indices"], best(c, 7))


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_pieces_are_put_together_into_whole_chunks(lengths: list[int], lines: int) -> None:
    ends = np.cumsum(lengths, dtype=int)
    pieces = [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    parts = list(target.whole_chunks(iter(pieces), lines))
    np.testing.assert_array_equal(np.concatenate([[], *parts]), np.arange(sum(lengths)))
    assert all(len(part) % lines == 0 for part in parts[:-1])
    assert all(map(len, parts))


@pytest.mark.minutes
def test_the_best_of_rows_are_written_once_where_they_stay(client: Client, c: np.ndarray) -> None:
    with pytest.raises(Stopped):
        topk(client, stop=HalfWay())
    (draft,) = Path("out.zarr.job").glob("*/*/out.zarr")
    assert {path.name for path in draft.parent.iterdir()} == {"done", "out.zarr"}
    before = {path: path.stat().st_ino for path in draft.glob("*/c/*/*")}
    assert len(before) == 2 * len(marked())
    job.resume("out.zarr", client=client)
    now = {path.relative_to("out.zarr"): path.stat().st_ino for path in Path("out.zarr").glob("*/c/*/*")}
    assert {path.relative_to(draft): inode for path, inode in before.items()}.items() <= now.items()
    assert len(now) == 10


@pytest.mark.minutes
def test_nothing_but_a_reduced_product_is_replaced(client: Client, c: np.ndarray) -> None:
    topk(client)
    with pytest.raises(InputError, match="exists"):
        topk(client, k=3)
    Path("out.zarr/notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"contains notes\.txt"):
        topk(client, k=3, overwrite=True)
    Path("out.zarr/notes.txt").unlink()
    assert threshold(client, overwrite=True).entries == np.count_nonzero(c >= 6)
    for other in ("B.zarr", "A.npy"):
        with pytest.raises(InputError, match=r"several arrays|is not a reduced product"):
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
