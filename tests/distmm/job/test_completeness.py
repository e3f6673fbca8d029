"""Nothing gets C's name before all of it is there, as it was written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm import job
from distmm.errors import InputError, Stopped
from distmm.job.computation import Computation
from distmm.job.folder import Folder
from distmm.job.manifest import write_manifest
from distmm.job.records import read_manifest
from tests.distmm.job.disturbed import BLOCKS, PLAN, SIZE, HalfWay, marked, multiply, operands, values
from tests.tables import later


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product."""
    monkeypatch.chdir(tmp_path)
    return operands(Path("in"))


def edit(path: Path, **facts: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def copied_marker(work: Path) -> None:
    shutil.copy(work / "done" / "0.0.json", work / "done" / "2.3.json")


def marker_of_another_job(work: Path) -> None:
    edit(work / "done" / "2.3.json", job="0123456789abcdef")


def empty_marker(work: Path) -> None:
    (work / "done" / "2.3.json").write_text("")


def missing_marker(work: Path) -> None:
    (work / "done" / "2.3.json").unlink()


def marker_too_many(work: Path) -> None:
    shutil.copy(work / "done" / "2.3.json", work / "done" / "9.9.json")
    edit(work / "done" / "9.9.json", i=9, j=9)


def no_chunks(work: Path) -> None:
    shutil.rmtree(work / "C.zarr" / "c")


def short_chunk(work: Path) -> None:
    os.truncate(work / "C.zarr" / "c" / "2" / "3", 100)


def other_type(work: Path) -> None:
    edit(work / "C.zarr" / "zarr.json", data_type="int64")


def other_shape(work: Path) -> None:
    edit(work / "C.zarr" / "zarr.json", shape=[SIZE, SIZE - 1])


def other_manifest(work: Path) -> None:
    edit(work.parent.parent / "manifest.json", seed=5)


def long_file(work: Path) -> None:
    with open(work / "C.npy", "ab") as file:
        file.write(b"more")


def other_header(work: Path) -> None:
    content = (work / "C.npy").read_bytes()
    (work / "C.npy").write_bytes(content.replace(b"<f8", b"<i8", 1))


@pytest.mark.parametrize(
    ("out", "damage", "named"),
    later(
        [
            ("C.zarr", copied_marker, "done/2.3.json"),
            ("C.npy", marker_too_many, "done/9.9.json"),
            ("C.zarr", short_chunk, "C.zarr/c/2/3"),
            ("C.zarr", marker_of_another_job, "done/2.3.json"),
            ("C.zarr", empty_marker, "done/2.3.json"),
            ("C.zarr", missing_marker, "done/2.3.json"),
            ("C.zarr", no_chunks, "C.zarr/c/0/0"),
        ]
    ),
)
def test_what_is_lost_at_the_last_moment_is_named_and_made_again(
    out: str, damage: Callable[[Path], None], named: str, client: Client, product: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Computation, "run", damaged_at_the_end(damage, out))
        with pytest.raises(InputError, match=rf"{named}: is .*; continue with: distmm resume"):
            multiply(client, out)
    assert not os.path.exists(out)
    lost = {no_chunks: 16, marker_too_many: 0}.get(damage, 1)
    assert job.resume(out, client=client).kept == 16 - lost
    np.testing.assert_allclose(values(out), product)
    assert job.recheck(out).ok


@pytest.mark.minutes
@pytest.mark.parametrize(
    ("out", "damage", "named"),
    [
        ("C.zarr", other_type, "C.zarr: has been changed since distmm created it: metadata was"),
        ("C.npy", other_header, "C.npy: has been changed since distmm created it: head was"),
        ("C.zarr", other_shape, "C.zarr: has been changed since distmm created it: metadata was"),
        ("C.zarr", other_manifest, "manifest.json: has been changed since distmm wrote it"),
        ("C.npy", long_file, "C.npy: has been changed since distmm created it: bytes was"),
    ],
)
def test_what_has_become_another_matrix_is_refused_then_and_later(
    out: str, damage: Callable[[Path], None], named: str, client: Client, product: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Computation, "run", damaged_at_the_end(damage, out))
        with pytest.raises(InputError, match=named):
            multiply(client, out)
    with pytest.raises(InputError, match=r"has been changed since distmm (created|wrote) it.*--overwrite"):
        job.resume(out, client=client)
    assert not os.path.exists(out)
    multiply(client, out, overwrite=True)
    np.testing.assert_allclose(values(out), product)


def damaged_at_the_end(damage: Callable[[Path], None], out: str) -> Callable[..., None]:
    """`Computation.run`, and after all blocks are written the damage."""
    run = Computation.run

    def damaged(self: Computation, missing: Any) -> None:
        run(self, missing)
        (done,) = Path(f"{out}.job").glob("*/*/done")
        damage(done.parent)

    return damaged


def test_a_block_of_zeros_whose_chunk_is_lost_is_made_again(client: Client, product: np.ndarray) -> None:
    np.save("in/A.npy", np.zeros((SIZE, SIZE)))
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    i, j, _ = next(iter(marked())).split(".")
    (chunk,) = Path("C.zarr.job").glob(f"*/*/C.zarr/c/{i}/{j}")
    before = len(marked())
    chunk.unlink()
    assert job.resume("C.zarr", client=client).kept == before - 1
    assert Path(f"C.zarr/c/{i}/{j}").stat().st_size == 8 * BLOCKS[0] * BLOCKS[2]


def test_an_id_that_names_a_folder_elsewhere_is_refused(client: Client, product: np.ndarray) -> None:
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    folder = Folder.of("C.zarr")
    write_manifest(folder, {**read_manifest(folder), "id": "../../elsewhere"})
    with pytest.raises(InputError, match="has been changed since distmm wrote it"):
        job.resume("C.zarr", client=client)


@pytest.mark.minutes
def test_a_job_of_an_earlier_format_is_refused_and_can_be_replaced(client: Client, product: np.ndarray) -> None:
    os.makedirs("C.zarr.job/done")
    Path("C.zarr.job/manifest.json").write_text(json.dumps({"format": 1, "blocks": list(BLOCKS), "plan": PLAN}))
    Path("C.zarr.job/done/0.0.json").write_text("{}")
    for call in (lambda: multiply(client), lambda: job.resume("C.zarr", client=client), lambda: job.status("C.zarr")):
        with pytest.raises(
            InputError, match="has format 1, but this version of distmm reads 5: finish the job with the version"
        ):
            call()
    multiply(client, overwrite=True)
    np.testing.assert_allclose(values(), product)
    assert not os.path.exists("C.zarr.job")
