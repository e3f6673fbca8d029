"""The certificate of a job: a bad block is made again, and what cannot be compared is not called right."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask
import google_crc32c
import numpy as np
import pytest
from distributed import Client, LocalCluster

import distmm
from distmm import job, verify
from distmm.checking.checksum import checksum
from distmm.checking.verdict import Verdict
from distmm.errors import UndecidedError, WrongResultError
from distmm.job.computation import Computation
from distmm.job.contents import Contents
from distmm.job.judge import Judge
from distmm.job.reduction import Entries
from distmm.job.writer import Writer
from distmm.storage import open_matrix
from distmm.transfer.counted_writes import CountedRun
from distmm_kernels.tolerance import Tolerance
from tests.distmm.checking.sketched import K, M, N, matrices
from tests.tables import later


def test_checksums_are_those_of_the_package_with_its_library_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [np.arange(999, dtype="f4").reshape(27, 37), np.arange(12, dtype="u2").reshape(3, 4).T, np.empty((0, 5))]
    expected = [google_crc32c.value(block.tobytes()) for block in blocks]
    crc32c = importlib.import_module("distmm.transfer.crc32c")
    for library in (ctypes.CDLL, lambda name: types.SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        crc32c._extend.cache_clear()
        assert [checksum(block) for block in blocks] == expected
    crc32c._extend.cache_clear()


@pytest.fixture
def spoilt(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A folder with A and B, and a way to have one of the workers' functions spoil what it makes."""
    monkeypatch.chdir(tmp_path)
    for name, values in zip("AB", matrices("float32")[:2], strict=True):
        np.save(f"{name}.npy", values)

    def spoil(kind: str, times: int) -> None:
        client.run(_spoil, kind, times, str(tmp_path))

    yield spoil
    client.run(_mend)


def _spoil(kind: str, times: int, folder: str) -> None:
    import numpy as np

    from distmm.worker.tasks import products

    real = products.multiply

    def flipped(block: np.ndarray) -> np.ndarray:
        for n in range(times):
            try:
                os.close(os.open(f"{folder}/flip.{n}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            block = np.array(block, order="C")
            block.view("u4")[3, 4] ^= np.uint32(1 << 28)
            return block
        return block

    def multiply(where: Any, choice: Any, c: Any, a: list[Any], b: list[Any], *rest: Any, **how: Any) -> Any:
        if kind == "transfer" and where.homes[0] != where.rank:
            a = [flipped(a[0]), *a[1:]]  # a copy that came from its home with one bit changed
        if kind == "digits":  # operands of TF32
            a, b = ([(x.view("u4") & np.uint32(0xFFFFE000)).view("f4") for x in blocks] for blocks in (a, b))
        out = real(where, choice, c, a, b, *rest, **how)
        if kind == "columns" and (where.i, where.j) == (1, 2):
            out = np.array(out)
            out[:, 1::2] = 0
        return flipped(out) if kind == "product" and (where.i, where.j, where.step) == (1, 2, 1) else out

    products.real_multiply = real  # type: ignore[attr-defined]
    products.multiply = multiply


def _mend() -> None:
    from distmm.worker.tasks import products

    if hasattr(products, "real_multiply"):
        products.multiply = products.real_multiply
        del products.real_multiply


def run(client: Client, plan: str = "g2x2x1 b20x100x20 p1 w1 l2", **options: Any) -> job.Summary:
    return job.multiply("A.npy", "B.npy", "C.npy", client=client, plan=plan, **options)


def blocks_done() -> dict[tuple[int, int], dict[str, Any]]:
    return {(x["i"], x["j"]): x for x in json.loads(Path("C.npy.certificate.json").read_text())["done"]}


@pytest.fixture
def lonely(client: Client) -> Iterator[Client]:
    """A cluster of one worker."""
    with (
        dask.config.set({"distributed.scheduler.work-stealing": False}),
        LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as one,
    ):
        yield one
        one.run(_mend)


@pytest.mark.parametrize(
    ("name", "left", "right"),
    later(
        [
            ("float32", 1e-22, 1e-21),
            ("float32", 1e-40, 1.0),
            ("float64", 1e-310, 1.0),
            ("float64", 1e200, 1e106),
            ("float64", 1.0, 1e306),
        ]
    ),
)
def test_a_job_and_verify_agree_on_products_near_underflow_and_overflow(
    name: str, left: float, right: float, client: Client, spoilt: Any
) -> None:
    rng = np.random.default_rng(2)
    for path, shape, scale in (("A.npy", (M, K), left), ("B.npy", (K, N), right)):
        np.save(path, (rng.standard_normal(shape) * scale).astype(name))
    summary = run(client)
    assert {block["how"] for block in blocks_done().values()} == {"sketch"}
    assert summary.recomputed == 0
    assert job.recheck("C.npy")
    assert verify(*(np.load(f"{x}.npy") for x in "ABC"))


def test_a_job_finds_that_small_columns_of_a_block_are_lost(client: Client, spoilt: Any) -> None:
    b = np.load("B.npy")
    b[:, 1::2] *= np.float32(1e-15)
    np.save("B.npy", b)
    spoilt("columns", 0)
    with pytest.raises(WrongResultError, match=r"block C\[\d, \d\] is"):
        run(client)


@pytest.mark.minutes
def test_a_job_finds_that_operands_have_lost_digits(client: Client, spoilt: Any) -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 40, 16384), dtype=np.float32)
    np.save("A.npy", a)
    np.save("B.npy", b.T)
    plan = "g2x2x1 b20x4096x20 p1 w1 l2"
    run(client, plan)
    assert max(block["residual"] for block in blocks_done().values()) < 0.3
    os.remove("C.npy")
    spoilt("digits", 0)
    with pytest.raises(WrongResultError, match=r"block C\[\d, \d\] is off by \d+ times .* same bits"):
        run(client, plan)


def test_a_block_is_made_again_on_another_worker_also_if_the_grid_has_one(client: Client, spoilt: Any) -> None:
    a = np.load("A.npy")
    a[25, 7] = np.nan
    np.save("A.npy", a)
    run(client, plan="g1x1x1 b20x100x20 p1 w1 l2")
    done = blocks_done()
    assert {at: block["how"] for at, block in done.items() if at[0] == 1} == {
        (1, j): "same bits on two workers" for j in range(4)
    }
    (first,) = {block["worker"] for at, block in done.items() if at[0] != 1}
    assert first not in {done[1, j]["worker"] for j in range(4)}


def test_one_worker_is_not_called_two(lonely: Client, spoilt: Any) -> None:
    a = np.load("A.npy")
    a[25, 7] = np.nan
    np.save("A.npy", a)
    run(lonely, plan="g1x1x1 b20x100x20 p1 w1 l2")
    assert {block["how"] for at, block in blocks_done().items() if at[0] == 1} == {"same bits twice on one worker"}


def test_a_block_that_one_worker_makes_wrong_twice_has_no_second_opinion(lonely: Client, spoilt: Any) -> None:
    lonely.run(_spoil, "product", 99, os.getcwd())
    with pytest.raises(WrongResultError, match=r"same bits twice on one worker.*a bound or this worker is wrong"):
        run(lonely, plan="g1x1x1 b20x100x20 p1 w1 l2")


def test_a_rejected_block_is_compared_with_its_own_earlier_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    plan = distmm.plan(np.ones((M, K), "f4"), np.ones((K, N), "f4"), blocks=(20, 100, 20))
    contents = Contents(None, np.dtype("f4"), (M, N))
    judge = Judge("", contents, plan, Tolerance.of(*3 * [np.dtype("f4")], K), 0, 1, 0, {})
    writer = Writer(unused, CountedRun(), unused, judge)
    spec: Any = Mock(contents=contents)
    client: Any = Mock(status="closed")
    computation = Computation(client, spec, plan, writer, unused, unused, Entries(plan))
    again: list[Writer] = []
    monkeypatch.setattr(computation, "_send", lambda wave, blocks, plan, writer: ([], again.append(writer)))
    monkeypatch.setattr(computation, "_event", lambda event, **facts: None)

    def reject(i: int, crc: int, attempt: int) -> None:
        record = {"i": i, "j": 0, "crc32c": crc, "host": "h", "worker": f"w{attempt}", "attempt": attempt}
        record["inputs"] = {"A": "0", "B": "0"}
        record |= {"residual": 9.0, "row": 0}
        future: Any = Mock(result=lambda: {**record, "bad": [record], "written": False})
        computation._take(future)

    reject(0, 1, 0)
    reject(1, 2, 0)
    reject(0, 2, 1)  # the bits of the other block, but not its own of before
    assert [w.judge.rejected[0]["crc32c"] for w in again] == [1, 2, 2]
    with pytest.raises(WrongResultError, match=r"C\[1, 0\].*same bits on worker w0 of h, the last one on worker w1"):
        reject(1, 2, 1)


@pytest.mark.parametrize("kind", later(["product", "transfer"]))
def test_a_flipped_bit_costs_one_block_that_another_worker_makes_again(kind: str, client: Client, spoilt: Any) -> None:
    spoilt(kind, 1)
    summary = run(client)
    assert os.path.exists("flip.0")
    assert summary.recomputed == 1
    np.testing.assert_allclose(np.load("C.npy"), matrices("float32")[2], rtol=1e-3, atol=1e-3)
    certificate = json.loads(Path("C.npy.certificate.json").read_text())
    assert certificate["rejected"] == 1
    assert [block["attempt"] for block in certificate["done"]].count(1) == 1
    assert job.status("C.npy").rejected == 1
    told = [event for _, event in client.get_events(job.computation.JOB_TOPIC)]
    events = [event["event"] for event in told for _ in event.get("blocks", [None])]
    events = events[len(events) - events[::-1].index("begin") :]  # those of this job
    assert events.count("rejected") == 1
    assert events.count("accepted") == len(certificate["done"])


def test_a_block_that_stays_wrong_is_not_written(client: Client, spoilt: Any) -> None:
    spoilt("product", 99)
    with pytest.raises(
        WrongResultError,
        match=r"block C\[1, 2\] is off by \S+ times the tolerance.*same bits on worker \d.*last one on worker \d.*kept",
    ):
        run(client)
    assert not os.path.exists("C.npy")
    client.run(_mend)
    assert job.resume("C.npy", client=client).kept > 0
    np.testing.assert_allclose(np.load("C.npy"), matrices("float32")[2], rtol=1e-3, atol=1e-3)


@pytest.mark.minutes
def test_blocks_with_inf_and_nan_are_confirmed_by_another_worker(client: Client, spoilt: Any) -> None:
    a = np.load("A.npy")
    a[25, 7] = np.nan
    np.save("A.npy", a)
    summary = run(client)
    certificate = json.loads(Path("C.npy.certificate.json").read_text())
    assert certificate["judged"] == {"sketch": 8, "same bits on two workers": 4}
    assert summary.recomputed == 4
    assert np.isnan(np.load("C.npy")[25]).all()


@pytest.mark.parametrize("out", later(["C.npy", "C.zarr"]))
def test_a_flipped_bit_on_the_disk_is_found_later(out: str, client: Client, spoilt: Any) -> None:
    job.multiply("A.npy", "B.npy", out, client=client, blocks=(20, 100, 20))
    assert job.recheck(out).ok
    verdict = job.recheck(out, client)
    assert verdict.ok
    assert "all 12 blocks are what was written; C agrees with A @ B" in verdict.message
    path = Path(out) if out == "C.npy" else Path(out) / "c" / "2" / "3"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for where in (client, None):
        assert "C[2, 3]: its checksum is" in job.recheck(out, where).message


@pytest.mark.parametrize(
    ("change", "message"),
    later(
        [
            ("changed", r"A.npy has changed since C\[0, 0\] was made"),
            ("gone", "A.npy"),
            ("beta", "C0 was added \\(beta = 2\\)"),
        ]
    ),
)
def test_a_c_that_cannot_be_compared_any_more_is_not_called_right(
    change: str, message: str, client: Client, spoilt: Any
) -> None:
    if change == "beta":
        np.save("C.npy", np.ones((M, N), "f4"))
    run(client, beta=2 if change == "beta" else 0)
    if change == "changed":
        np.save("A.npy", 2 * np.load("A.npy"))
    elif change == "gone":
        os.unlink("A.npy")
    verdict = job.recheck("C.npy")
    assert (verdict.outcome, verdict.ok, bool(verdict)) == ("cannot tell", False, False)
    assert re.search(
        f"C is what the job wrote, which checked each block, but it cannot be compared.*{message}", verdict.message
    )
    with pytest.raises(UndecidedError):
        verdict.raise_if_wrong()
    assert open_matrix("C.npy").shape == (M, N)


def test_a_factor_that_is_nan_is_that_of_its_job(client: Client, spoilt: Any) -> None:
    for _ in "first", "again":
        run(client, alpha=float("nan"))
    assert "has changed" not in job.recheck("C.npy").message


def test_a_c_that_was_not_checked_is_not_called_checked(client: Client, spoilt: Any) -> None:
    np.save("C.npy", np.ones((M, N), "f4"))
    run(client, beta=2, check="none")
    assert "C is what the job wrote, which did not check it, but" in job.recheck("C.npy").message


@pytest.mark.minutes
def test_a_boolean_c_is_only_known_to_be_what_was_written(client: Client, spoilt: Any) -> None:
    for name, shape in (("A.npy", (M, K)), ("B.npy", (K, N))):
        np.save(name, np.random.default_rng(0).random(shape) < 0.05)
    run(client, check="full")
    verdict = job.recheck("C.npy")
    assert verdict.outcome == "cannot tell"
    assert "which compared all of it with A and B" in verdict.message
    assert "C is boolean" in verdict.message


def test_a_full_check_that_cannot_tell_keeps_the_result(
    client: Client, spoilt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "distmm.product.verification.verdict", lambda *args, **options: Verdict("cannot tell", 0.0, "it may overflow")
    )
    with pytest.raises(UndecidedError, match="it may overflow; the result is kept as") as error:
        run(client, check="full")
    assert not os.path.exists("C.npy")
    kept = str(error.value).rpartition("kept as ")[2]
    np.testing.assert_allclose(open_matrix(kept)[...], matrices("float32")[2], rtol=1e-3, atol=1e-3)
