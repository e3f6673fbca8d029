"""C in an object store: made, gone on with, replaced and verified there, against a real server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client
from typer.testing import CliRunner

from distmm import job
from distmm.cli.app import app
from distmm.errors import InputError, Stopped
from distmm.job import lock
from distmm.job.folder import Folder
from distmm.job.lock import Lock, holder
from distmm.storage import check_output, create_output, open_matrix, reopen_output, zarr_objects
from distmm.storage.object_store import Objects, within
from distmm.storage.records import records
from distmm.storage.zarr_objects import ObjectTarget
from tests.distmm.job.disturbed import Meanwhile, operands, values
from tests.distmm.job.object_server import BUCKET, HalfWay, marked, multiply, objects, store, tags, url, whole
from tests.until import until


@pytest.fixture
def c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product."""
    monkeypatch.chdir(tmp_path)
    return operands(Path("in"))


@pytest.mark.minutes
def test_a_product_becomes_an_array_with_a_certificate_and_nothing_else_is_left(
    client: Client, c: np.ndarray, stored: str
) -> None:
    summary = multiply(client, stored)
    assert (summary.blocks, summary.kept, summary.certificate) == (8, 0, f"{url(stored)}.certificate.json")
    np.testing.assert_array_equal(zarr.open_array(url(stored), mode="r")[...], c)
    assert objects(stored).keys() == whole(stored)
    before = tags(stored)
    assert multiply(client, stored).kept == 8  # sent again, it has nothing to do
    assert tags(stored) == before
    found = job.status(url(stored))
    assert (found.state, found.done) == ("complete", 8)
    verdict = job.recheck(url(stored), client)
    assert verdict.outcome == "right"
    assert "all 8 blocks are what was written" in verdict.message
    store().pipe_file(f"{BUCKET}/{stored}/c/2/1", bytes(30 * 60 * 8))
    verdict = job.recheck(url(stored), client)
    assert verdict.outcome == "wrong"
    assert "the first is C[2, 1]" in verdict.message


@pytest.mark.minutes
def test_commands_take_urls(client: Client, c: np.ndarray, stored: str) -> None:
    cluster = ["--cluster", client.scheduler.address]
    for arguments, said in (
        (["multiply", "in/A.npy", "in/B.zarr", "-o", url(stored), "--blocks", "60x60x60", *cluster], "Done"),
        (["status", url(stored)], "complete"),
        (["resume", url(stored), *cluster], "Done"),
        (["verify", url(stored), *cluster], "Right: all 4 blocks are what was written; C agrees with A @ B"),
        (["verify", "in/A.npy", "in/B.zarr", url(stored), *cluster], "Right: C agrees with A @ B"),
    ):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
        assert result.exit_code == 0, result.output
        assert said in result.output


def test_a_stopped_job_is_no_array_and_goes_on_with_the_missing_blocks_only(
    client: Client, c: np.ndarray, stored: str
) -> None:
    with pytest.raises(Stopped, match=rf"enough; \d+ of 8 blocks of C are finished.* distmm resume {url(stored)}"):
        multiply(client, stored, stop=HalfWay(stored))
    with pytest.raises(InputError, match="not a readable Zarr array"):
        open_matrix(url(stored))
    before = marked(stored)
    found = job.status(url(stored))
    assert (found.state, found.done, found.total) == ("stopped", len(before), 8)
    written = {key: tag for key, tag in tags(f"{stored}/c/").items() if f"{key.split('/c/')[1]}" in _blocks(before)}
    again: dict[str, Any] = {}
    summary = job.resume(url(stored), client=client, progress=lambda figures: again.update(marked(stored)))
    assert summary.kept == len(before)
    assert {key: again[key] for key in before} == before
    assert {key: tag for key, tag in tags(f"{stored}/c/").items() if key in written} == written
    np.testing.assert_array_equal(values(url(stored)), c)
    certificate = json.loads(objects(f"{stored}.certificate.json")[f"{stored}.certificate.json"])
    assert (len(certificate["runs"]), len(certificate["done"])) == (2, 8)


def _blocks(markers: dict[str, Any]) -> set[str]:
    return {Path(key).name.removesuffix(".json").replace(".", "/") for key in markers}


@pytest.mark.minutes
def test_blocks_that_changed_or_vanished_between_two_runs_are_made_again(
    client: Client, c: np.ndarray, stored: str
) -> None:
    with pytest.raises(Stopped):
        multiply(client, stored, stop=HalfWay(stored))
    lost, changed, *kept = sorted(_blocks(marked(stored)))
    store().rm_file(f"{BUCKET}/{stored}/c/{lost}")
    store().pipe_file(f"{BUCKET}/{stored}/c/{changed}", bytes(30 * 60 * 8))
    store().pipe_file(f"{BUCKET}/{stored}/c/3/1", b"of a run that was killed")
    assert job.resume(url(stored), client=client).kept == len(kept)
    np.testing.assert_array_equal(values(url(stored)), c)


@pytest.mark.minutes
def test_a_block_that_is_replaced_while_the_job_runs_gets_no_certificate(
    client: Client, c: np.ndarray, stored: str
) -> None:
    class Meanwhile(job.Stop):
        done = False

        @property
        def reason(self) -> str | None:
            if not self.done and (there := sorted(_blocks(marked(stored)))):
                self.done = True
                store().pipe_file(f"{BUCKET}/{stored}/c/{there[0]}", bytes(30 * 60 * 8))
            return None

    with pytest.raises(InputError, match=r"is missing or incomplete, although it was written"):
        multiply(client, stored, stop=Meanwhile())
    assert not objects(f"{stored}.certificate.json")
    assert job.resume(url(stored), client=client).kept == 7
    np.testing.assert_array_equal(values(url(stored)), c)


@pytest.mark.minutes
def test_an_object_of_an_input_that_is_lost_during_a_job_is_an_error_until_it_is_back(
    client: Client, c: np.ndarray, stored: str
) -> None:
    a, chunk = f"{stored[:-6]}A.zarr", f"{BUCKET}/{stored[:-6]}A.zarr/c/5/3"
    zarr.create_array(url(a), data=np.load("in/A.npy"), chunks=(20, 30))
    content = store().cat_file(chunk)

    def run(**options: Any) -> job.Summary:
        plan = "g1x2x1 b30x60x60 p1 w4x1 l1"
        return job.multiply(url(a), "in/B.zarr", "C.zarr", client=client, plan=plan, **options)

    with pytest.raises(InputError, match=r"cannot read .*c/5/3"):
        run(stop=Meanwhile(lambda: store().rm_file(chunk), "C.zarr"))
    with pytest.raises(InputError, match=r"missing was None, is 1 of 24 chunks are missing"):
        run()
    store().pipe_file(chunk, content)
    assert run().kept >= 4
    np.testing.assert_array_equal(values(), c)


@pytest.mark.minutes
def test_a_c_that_is_there_is_replaced_if_asked_for_and_is_gone_from_the_first_block_on(
    client: Client, c: np.ndarray, stored: str
) -> None:
    multiply(client, stored)
    with pytest.raises(InputError, match="--overwrite"):
        multiply(client, stored, alpha=2)
    np.testing.assert_array_equal(values(url(stored)), c)
    with pytest.raises(Stopped):
        multiply(client, stored, alpha=2, overwrite=True, stop=HalfWay(stored))
    assert not objects(f"{stored}/zarr.json")
    assert not objects(f"{stored}.certificate.json")
    assert multiply(client, stored, alpha=2).kept >= 2
    np.testing.assert_array_equal(values(url(stored)), 2 * c)
    assert job.recheck(url(stored), client).outcome == "right"


def test_outputs_that_an_object_store_cannot_take_are_refused_before_any_work(
    client: Client, c: np.ndarray, stored: str
) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("ftp://host/C.zarr", {}, "to object stores"),
        (f"s3://{BUCKET}", {}, f"is a bucket without an array's name; write s3://{BUCKET}/C.zarr"),
        ("s3://", {}, "write s3://bucket/C.zarr"),
        (url("C[1].zarr"), {}, "reads as a pattern"),
        (url("C.npy"), {}, rf"only Zarr arrays to object stores; write {url('C.zarr')}"),
        (url(stored), {"check": "full"}, "distmm verify A B C --check full"),
        (url(stored), {"beta": 1}, "give another name for the result, and this one as c"),
        ("s3://no-such-bucket/C.zarr", {}, "there is no bucket .* no-such-bucket"),
    ]
    for out, options, message in refused:
        with pytest.raises(InputError, match=message):
            job.multiply("in/A.npy", "in/B.zarr", out, client=client, **options)
    with pytest.raises(InputError, match="reduced products only to local"):
        job.topk("in/A.npy", "in/B.zarr", 3, url(stored), client=client)
    assert objects(stored) == {}


@pytest.mark.minutes
def test_what_a_product_reads_or_what_is_no_array_is_not_replaced(client: Client, c: np.ndarray, stored: str) -> None:
    zarr.create_array(url(stored), data=c)
    before = tags(stored)
    with pytest.raises(InputError, match="reads A from there"):
        job.multiply(f"s3a://{BUCKET}/{stored}/", "in/B.zarr", url(stored), client=client, overwrite=True)
    with pytest.raises(InputError, match="is inside the Zarr array"):
        multiply(client, f"{stored}/inside/C.zarr")
    store().pipe_file(f"{BUCKET}/{stored}/notes.txt", b"mine")
    with pytest.raises(InputError, match=r"contains notes\.txt"):
        multiply(client, stored, overwrite=True)
    assert before.items() <= tags(stored).items()
    assert job.multiply(url(stored), "in/B.zarr", url(f"{stored}/../D.zarr".replace("C.zarr/../", "")), client=client)


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_damaged_metadata_above_an_output_are_no_array(content: bytes, stored: str) -> None:
    store().pipe_file(f"{BUCKET}/{stored}/zarr.json", content)
    check_output(url(f"{stored}/inside/C.zarr"), overwrite=False)


@pytest.mark.parametrize(("one", "other", "inside"), [
    ("s3://b/C.zarr", "s3://b/C.zarr", True), ("s3a://b//C.zarr/", "s3://b/C.zarr", True),
    ("s3://b/C.zarr/x", "s3://b/C.zarr", True), ("s3://b/C.zarr2", "s3://b/C.zarr", False),
    ("gs://b/C.zarr", "s3://b/C.zarr", False), ("abfs://b/C.zarr", "az://b/C.zarr", True),
])  # fmt: skip
def test_urls_are_compared_by_their_parts(one: str, other: str, inside: bool) -> None:
    assert within(one, other) is inside


def test_a_bucket_may_be_called_like_an_array() -> None:
    assert Folder("s3://all.zarr/x/C.zarr").path == "s3://all.zarr/x/C.zarr.job"
    assert Folder("s3://all.zarr/G.zarr/C").path == "s3://all.zarr/G.zarr.C.job"


@pytest.mark.minutes
@pytest.mark.parametrize("shape", [(23, 10), (7, 10), (20, 3)])
def test_large_blocks_are_cut_into_stripes(
    shape: tuple[int, int], stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks of 10 x 4, of 32 bytes a row."""
    monkeypatch.setattr(zarr_objects, "CHUNK_BYTES", 64)
    draft = f"{url(stored)}.job/draft"
    target: Any = create_output(url(stored), shape, "f8", (10, 4), draft=draft)
    height = min(10, shape[0])
    assert target.chunks == ((2, min(4, shape[1])) if height == 10 else (1, 4))
    target = reopen_output(url(stored), draft)
    expected = np.arange(float(np.prod(shape))).reshape(shape)
    written = {}
    for i, j in np.ndindex(-(-shape[0] // 10), -(-shape[1] // 4)):
        rows, cols = slice(10 * i, min(10 * i + 10, shape[0])), slice(4 * j, min(4 * j + 4, shape[1]))
        assert target.missing({(i, j): ((rows, cols), {})}).keys() == {(i, j)}
        target[rows, cols] = expected[rows, cols]
        with pytest.raises(FileExistsError):
            target[rows, cols] = -expected[rows, cols]
        written[i, j] = (rows, cols), target.evidence(rows, cols)
        np.testing.assert_array_equal(target.written()[rows, cols], expected[rows, cols])
    assert target.missing(written) == {}
    target.output.commit()
    target.output.commit()  # after a kill
    np.testing.assert_array_equal(values(url(stored)), expected)
    target.discard(slice(0, height), slice(0, min(4, shape[1])))
    assert target.missing(written) == {(0, 0): "c/0/0"}


FIRST = slice(0, 2), slice(0, 4)


def test_an_array_that_comes_while_a_job_is_stopped_is_replaced_only_if_asked_for(stored: str) -> None:
    draft = f"{url(stored)}.job/draft"
    target: Any = create_output(url(stored), (4, 4), "f8", (2, 4), draft=draft)
    target[0:2, :] = np.ones((2, 4))
    target[2:4, :] = np.ones((2, 4))
    target.keep_only([FIRST])
    assert objects(f"{stored}/").keys() == {f"{stored}/c/0/0"}
    store().pipe_file(f"{BUCKET}/{stored}/zarr.json", b"{}")
    with pytest.raises(InputError, match="was created by another program"):
        target.keep_only([FIRST])
    with pytest.raises(InputError, match="was created by another program"):
        target.output.commit()
    reopen_output(url(stored), draft, overwrite=True).keep_only([FIRST])  # type: ignore[attr-defined]
    assert objects(f"{stored}/").keys() == {f"{stored}/c/0/0"}


def test_a_block_of_a_prime_number_of_rows_is_not_cut_into_single_ones() -> None:
    assert zarr_objects._stripe(16411, 1 << 16) == 16411
    assert zarr_objects._stripe(16384, 1 << 16) == 1024
    assert zarr_objects._stripe(3 * 1024, 1 << 16) == 1024
    assert zarr_objects._stripe(5, 1 << 30) == 1


class TestLock:
    """One job on one output."""

    @pytest.fixture
    def folder(self, stored: str) -> str:
        return f"{url(stored)}.job"

    def foreign(self, folder: str, number: int = 3, token: str = "x") -> None:
        content = {"host": "far", "pid": 7, "machine": "far away", "born": "1", "token": token}
        records(folder).write(f"{folder}/lock.{number}", json.dumps(content).encode())

    def test_it_is_taken_once_and_given_up(self, folder: str, stored: str) -> None:
        first = Lock.take(folder)
        with pytest.raises(InputError, match=rf"process {os.getpid()} on .* last seen"):
            Lock.take(folder)
        Lock.check(folder, first.token)
        first.release()
        assert holder(folder) is None
        Lock.take(folder).release()
        assert objects(stored) == {}

    def test_one_that_nobody_renews_is_taken_over_and_its_owner_finds_that_out(
        self, folder: str, stored: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.foreign(folder)
        with pytest.raises(InputError, match="process 7 on far"):
            Lock.take(folder)
        Lock.check(folder, "x")
        monkeypatch.setattr(lock, "STALE_SECONDS", -1)
        taken = Lock.take(folder)
        assert taken.number == 4
        with pytest.raises(InputError, match="taken over"):
            Lock.check(folder, "x")
        records(folder).touch(f"{folder}/lock.3")  # the owner was asleep in the middle of that
        with pytest.raises(InputError, match="taken over"):
            Lock.check(folder, "x")
        taken.release()
        with pytest.raises(InputError, match="taken over"):
            Lock.check(folder, "x")
        assert holder(folder) is None

    def test_it_is_renewed(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
        held = Lock.take(folder)
        until(lambda: records(folder).exists(f"{folder}/lock.{held.number}.beat"))
        assert records(folder).age(f"{folder}/lock.{held.number}") < 60
        held.release()
        assert records(folder).names(folder) == []

    def test_a_store_that_does_not_look_at_the_condition_is_refused(
        self, folder: str, stored: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put = Objects.put
        monkeypatch.setattr(Objects, "put", lambda self, url, content, **_: put(self, url, content))
        with pytest.raises(InputError, match="If-None-Match"):
            Lock.take(folder)
        assert objects(stored) == {}

    def test_a_put_that_was_sent_again_because_its_answer_was_lost_has_taken_it(
        self, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put = Objects.put

        def twice(self: Objects, url: str, content: bytes, is_new: bool = False) -> None:
            put(self, url, content, is_new)
            put(self, url, content, is_new)

        monkeypatch.setattr(Objects, "put", twice)
        held = Lock.take(folder)
        Lock.check(folder, held.token)
        held.release()


@pytest.mark.minutes
def test_of_two_clients_at_once_one_is_refused(client: Client, c: np.ndarray, stored: str) -> None:
    refused: list[str] = []

    class Second(job.Stop):
        @property
        def reason(self) -> str | None:
            if not refused:
                with pytest.raises(InputError) as caught:
                    multiply(client, stored)
                refused.append(str(caught.value))
            return None

    multiply(client, stored, stop=Second())
    assert f"process {os.getpid()} on" in refused[0]
    np.testing.assert_array_equal(values(url(stored)), c)


def test_a_block_is_not_written_for_a_run_that_has_lost_its_lock(stored: str) -> None:
    """It was asleep between its look at the lock and its put, and the block is another's meanwhile."""
    target: Any = create_output(url(stored), (4, 4), "f8", (4, 4), draft=f"{url(stored)}.job/draft")
    assert isinstance(target, ObjectTarget)
    target[:, :] = np.ones((4, 4))
    before = tags(stored)
    with pytest.raises(FileExistsError):
        target[:, :] = np.zeros((4, 4))
    assert tags(stored) == before
