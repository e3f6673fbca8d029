"""A job that stops, at a deadline or because something broke, keeps what is finished and goes on from there."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

from distmm import job
from distmm.errors import InputError, Stopped
from distmm.job import commit, folder, lock
from distmm.planning.plan import Plan
from distmm.storage.output import Output
from distmm.units import seconds
from tests.distmm.job.disturbed import BLOCKS, PLAN, SIZE, HalfWay, marked, mend, multiply, operands, values
from tests.tables import later


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product."""
    monkeypatch.chdir(tmp_path)
    return operands(Path("in"))


def stopped(client: Client, out: str = "C.zarr") -> dict[str, int]:
    """Begin a job and stop it half-way; return its markers with their times."""
    with pytest.raises(Stopped, match=r"enough; \d+ of 16 blocks of C are finished and kept"):
        multiply(client, out, stop=HalfWay(out))
    assert not os.path.exists(out)
    before = marked(out)
    assert 4 <= len(before) <= 8
    return before


@pytest.mark.bits
def test_a_stopped_job_goes_on_with_the_missing_blocks_only(client: Client, here: np.ndarray) -> None:
    multiply(client, "whole.zarr")
    before = stopped(client)
    found = job.status("C.zarr")
    assert (found.state, found.done, found.total, found.runs) == ("stopped", len(before), 16, 1)
    assert found.report == os.path.abspath("C.zarr.report.html")
    assert ("report", found.report) in found.rows()
    assert "written in this run" in Path(found.report).read_text()
    keep: dict[str, int] = {}
    summary = job.resume("C.zarr", client=client, progress=lambda figures: keep.update(marked()) or None)
    assert (summary.blocks, summary.kept) == (16, len(before))
    assert {name: keep[name] for name in before} == before
    np.testing.assert_array_equal(values(), values("whole.zarr"))
    np.testing.assert_allclose(values(), here)
    assert not any(client.processing().values())
    certificate = json.loads(Path("C.zarr.certificate.json").read_text())
    assert (len(certificate["runs"]), len(certificate["done"])) == (2, 16)
    text = Path("C.zarr.report.html").read_text()
    rows = re.findall(
        r"<tr><td>(\d)</td><td>[-+: \d]+</td><td>[-+: \d]+</td><td>[.\d]+ m?s</td><td>([^<]*)</td><td>[^<]*</td>"
        r"<td>(\d+)</td><td>(\d+)</td></tr>",
        text,
    )
    here_, workers = certificate["runs"][0]["host"], str(certificate["runs"][0]["workers"])
    assert rows == [("1", here_, workers, "0"), ("2", here_, workers, str(len(before)))]
    assert sorted(os.listdir(".")) == [
        "C.zarr", "C.zarr.certificate.json", "C.zarr.report.html",
        "in", "whole.zarr", "whole.zarr.certificate.json", "whole.zarr.report.html",
    ]  # fmt: skip
    assert job.status("C.zarr").state == "complete"


@pytest.mark.minutes
@pytest.mark.parametrize("out", ["C.h5", "C.npy"])
def test_the_same_call_goes_on_too_and_is_idempotent(out: str, client: Client, here: np.ndarray) -> None:
    before = stopped(client, out)
    assert multiply(client, out).kept == len(before)
    np.testing.assert_allclose(values(out), here)
    again = multiply(client, out)
    assert (again.kept, again.plan) == (16, None)
    with pytest.raises(InputError, match="exists"):
        multiply(client, out, alpha=2)


def test_a_deadline_stops_the_job(client: Client, here: np.ndarray) -> None:
    with pytest.raises(Stopped, match=r"the deadline of 0 s has passed; 0 of 16"):
        multiply(client, stop=job.Stop(0))
    multiply(client)
    np.testing.assert_allclose(values(), here)


@pytest.mark.parametrize(
    ("text", "expected"), [("90", 90), ("55m", 3300), ("1h30m", 5400), ("01:30:00", 5400), ("2:05", 125)]
)
def test_times_are_read_as_people_and_slurm_write_them(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "5x", "m5", "1:2:3:4"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no time"):
        seconds(text)


@pytest.mark.minutes
def test_what_has_changed_is_named(client: Client, here: np.ndarray) -> None:
    stopped(client)
    with pytest.raises(InputError, match=r"alpha was 1, is 2; .*--overwrite"):
        multiply(client, alpha=2)
    with pytest.raises(InputError, match="precision was highest, is high"):
        multiply(client, precision="high")
    with pytest.raises(InputError, match="dtype was float64, is float32"):
        multiply(client, dtype="float32")
    with pytest.raises(InputError, match="A: transposed was False, is True"):
        multiply(client, transa=True)
    with pytest.raises(InputError, match=r"blocks were \[30, 60, 30\], are \[60, 60, 60\]"):
        job.multiply("in/A.npy", "in/B.zarr", "C.zarr", client=client, blocks=(60, 60, 60))
    shutil.rmtree("in/B.zarr")
    zarr.create_array("in/B.zarr", data=np.zeros((SIZE, SIZE)), chunks=(60, 60))
    with pytest.raises(InputError, match="B: chunks was"):
        job.resume("C.zarr", client=client)
    multiply(client, overwrite=True)
    np.testing.assert_array_equal(values(), 0 * here)


@pytest.mark.minutes
def test_a_job_keeps_the_plan_that_it_is_given_and_its_blocks_for_good(client: Client, here: np.ndarray) -> None:
    with pytest.raises(InputError, match="does not fit a product"):
        job.multiply("in/A.npy", "in/B.zarr", "C.zarr", client=client, plan="g2x2x1 b30x20")
    assert not os.path.exists("C.zarr.job")
    stopped(client)
    manifest = json.loads(Path("C.zarr.job/manifest.json").read_text())
    assert (manifest["blocks"], manifest["plan"]) == ([30, 60, 30], PLAN)
    with pytest.raises(InputError, match=r"plan was g1x4x1 b30x60x30 .*, is g1x4x1 b60x60x30 .*--overwrite"):
        job.multiply("in/A.npy", "in/B.zarr", "C.zarr", client=client, plan="g1x4x1 b60x60x30 p1 w4x1 l1")
    # Another grid with the same blocks, as for another cluster.
    done = job.multiply("in/A.npy", "in/B.zarr", "C.zarr", client=client, plan="g2x2x1 b30x60x30 p2 w1 l2")
    assert done.kept >= 4
    np.testing.assert_allclose(values(), here)
    runs = json.loads(Path("C.zarr.certificate.json").read_text())["runs"]
    assert [run["plan"].split(" w")[0] for run in runs] == ["g1x4x1 b30x60x30 p1", "g2x2x1 b30x60x30 p2"]


@pytest.mark.minutes
def test_a_plan_that_splits_k_is_kept_whole(client: Client, here: np.ndarray) -> None:
    plan = "g1x2x2 b30x60x30 p1 w4x1 l2"
    with pytest.raises(Stopped):
        job.multiply("in/A.npy", "in/B.zarr", "C.zarr", client=client, plan=plan, stop=HalfWay())
    with pytest.raises(InputError, match=r"plan was g1x2x2 b30x60x30 p1 .*, is g1x2x2 b30x60x30 p2"):
        job.multiply("in/A.npy", "in/B.zarr", "C.zarr", client=client, plan=plan.replace("p1", "p2"))
    with pytest.raises(InputError, match=r"plan was g1x2x2 .*, is g2x2x1"):
        job.multiply("in/A.npy", "in/B.zarr", "C.zarr", client=client, plan="g2x2x1 b30x60x30 p1 w1 l2")
    job.resume("C.zarr", client=client)
    np.testing.assert_allclose(values(), here)


@pytest.mark.minutes
def test_a_job_of_arrays_is_gone_on_with_where_they_are(client: Client, here: np.ndarray) -> None:
    a, b = np.load("in/A.npy"), values("in/B.zarr")
    again = "the same call in the Python program that has the arrays"
    with pytest.raises(Stopped, match=f"continue with: {again}$"):
        job.multiply(a, b, "C.zarr", client=client, plan=PLAN, stop=HalfWay())
    assert job.status("C.zarr").continue_with == again
    with pytest.raises(InputError, match="was an array in a Python program"):
        job.resume("C.zarr", client=client)
    assert job.multiply(a, b, "C.zarr", client=client).kept >= 4
    np.testing.assert_allclose(values(), here)


def test_a_finished_block_that_was_damaged_meanwhile_is_made_again(client: Client, here: np.ndarray) -> None:
    before = stopped(client)
    i, j, _ = next(iter(before)).split(".")
    (chunk,) = Path("C.zarr.job").glob(f"*/*/C.zarr/c/{i}/{j}")
    content = bytearray(chunk.read_bytes())
    content[17] ^= 8
    chunk.write_bytes(content)
    assert job.resume("C.zarr", client=client).kept == len(before) - 1
    np.testing.assert_allclose(values(), here)


@pytest.mark.minutes
@pytest.mark.parametrize("moment", ["before the certificate has", "before C has its name", "before the folder goes"])
def test_a_kill_while_c_gets_its_name_leaves_a_job_that_ends(
    moment: str, client: Client, here: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Killed

    def never_beside_c(path: str, *rest: Any) -> None:
        die() if path.endswith("C.zarr.certificate.json") else folder.write_json(path, *rest)

    clear = folder.Folder.clear

    def with_c_in_its_place(job: folder.Folder) -> None:
        die() if os.path.exists(job.target) else clear(job)

    where, name, instead = {
        "before C has its name": (Output, "commit", die),
        "before the certificate has": (commit, "write_json", never_beside_c),
        "before the folder goes": (folder.Folder, "clear", with_c_in_its_place),
    }[moment]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, instead)
        with pytest.raises(Killed):
            multiply(client)
    summary = job.resume("C.zarr", client=client)
    np.testing.assert_allclose(values(), here)
    assert summary.blocks == 16
    assert sorted(set(os.listdir(".")) - {"C.zarr.report.html"}) == ["C.zarr", "C.zarr.certificate.json", "in"]


@pytest.mark.minutes
def test_a_truncated_chunk_ends_in_a_clear_message(client: Client, here: np.ndarray) -> None:
    chunk = Path("in/B.zarr/c/0/0")
    content = chunk.read_bytes()
    c = mend(
        client, lambda: chunk.write_bytes(content[:50]), lambda: chunk.write_bytes(content),
        r"B\.zarr: cannot read \[\d+:\d+, \d+:\d+\]",
    )  # fmt: skip
    np.testing.assert_allclose(c, here)


@pytest.mark.parametrize("moved", later(["in/B.zarr", "in", "in/B.zarr/zarr.json"]))
def test_inputs_that_are_moved_away_end_in_a_clear_message(moved: str, client: Client, here: np.ndarray) -> None:
    c = mend(client, lambda: os.rename(moved, "away"), lambda: os.rename("away", moved), "cannot read")
    np.testing.assert_allclose(c, here)


def no_cluster() -> Any:
    raise AssertionError("a cluster starts")


def test_a_second_job_on_one_output_is_refused_before_its_cluster_starts(client: Client, here: np.ndarray) -> None:
    stopped(client)
    held = lock.Lock.take("C.zarr.job")
    assert job.status("C.zarr").state == "running"
    for call in (partial(job.multiply, "in/A.npy", "in/B.zarr"), job.resume):
        with pytest.raises(InputError, match=rf"another job works on this output: process {os.getpid()}"):
            call("C.zarr", connect=no_cluster)
    held.release()
    job.resume("C.zarr", client=client)


def test_a_manifest_of_another_format_is_refused(client: Client, here: np.ndarray) -> None:
    stopped(client)
    manifest = Path("C.zarr.job/manifest.json")
    content = json.loads(manifest.read_text())
    for bad, message in [
        (json.dumps({**content, "format": 99}), "reads 5"),
        ("[1]", "is damaged, or of another version: Input should be a valid dictionary"),
        ("{", "is damaged, or of another version: Expecting property name.*; compute C again with --overwrite"),
    ]:
        manifest.write_text(bad)
        with pytest.raises(InputError, match=message):
            job.resume("C.zarr", client=client)
    with pytest.raises(InputError, match="no unfinished job"):
        job.resume("D.zarr", client=client)


@pytest.mark.minutes
def test_the_plan_is_made_anew_for_the_cluster_that_is_there(client: Client, here: np.ndarray) -> None:
    stopped(client)
    plans: list[Plan] = []
    job.resume("C.zarr", client=client, announce=lambda plan, flops: plans.append(plan))
    assert plans[0].block_shape == BLOCKS
    assert str(plans[0]) != PLAN


@pytest.mark.parametrize("shape", [(30, 0, 40), (0, 20, 0), (0, 0, 0)])
def test_a_job_without_elements_is_resumed(client: Client, tmp_path: Path, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    files = [str(tmp_path / name) for name in ("A.npy", "B.npy", "C.npy")]
    np.save(files[0], np.ones((m, k)))
    np.save(files[1], np.ones((k, n)))
    stop = job.Stop()
    stop.ask("enough")
    with pytest.raises(Stopped, match="enough"):
        job.multiply(*files, client=client, blocks=(16, 16, 7), stop=stop)
    job.resume(files[2], client=client)
    np.testing.assert_array_equal(np.load(files[2]), np.zeros((m, n)))
