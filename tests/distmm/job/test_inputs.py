"""Inputs that change while a job goes on: no C is certified that was made from two versions of A, of B or of C0."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import fsspec
import ml_dtypes
import numpy as np
import pytest
import zarr
from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from distmm import job
from distmm.checking.checksum import checksum, checksum_of_input
from distmm.errors import InputError, Stopped
from distmm.job.inputs import NO_PANEL, fold
from distmm.storage import open_matrix
from tests.distmm.job.disturbed import PLAN, HalfWay, Meanwhile, marked, operands, values
from tests.tables import later


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A and B in each format, in a folder; returns their product."""
    monkeypatch.chdir(tmp_path)
    expected = operands(Path("in"))
    a, b = np.load("in/A.npy"), values("in/B.zarr")
    np.save("in/B.npy", b)
    for name, x in (("A", a), ("B", b)):
        zarr.create_array(f"in/{name}-plain.zarr", data=x, chunks=(20, 30), compressors=None)
        zarr.create_array(f"in/{name}-packed.zarr", data=x, chunks=(20, 30))
    return expected


def write_zarr(path: str) -> None:
    """Other elements in the same chunks."""
    stored = zarr.open_array(path, mode="r+")
    stored[...] = 2 * stored[...]


def replace_npy(path: str) -> None:
    """Another file of the same size and time."""
    before = os.stat(path)
    np.save("other.npy", 2 * np.load(path))
    os.utime("other.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.rename("other.npy", path)


def write_npy(path: str) -> None:
    """Other elements in the same file, and its time put back."""
    before = os.stat(path)
    mapped = np.lib.format.open_memmap(path, mode="r+")
    mapped *= 2
    mapped.flush()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def copy_again(path: str) -> None:
    """The same elements in other files, as if they were restored from a backup."""
    whole = Path(path)
    for file in [whole] if whole.is_file() else (file for file in whole.rglob("*") if file.is_file()):
        shutil.copy(file, "copy")
        os.rename("copy", file)


CHANGES: list[tuple[str, Callable[[str], None]]] = [
    ("A-plain.zarr", write_zarr),
    ("A-packed.zarr", write_zarr),
    ("A.npy", replace_npy),
    ("A.npy", write_npy),
    ("B-plain.zarr", write_zarr),
    ("B-packed.zarr", write_zarr),
    ("B.npy", replace_npy),
    ("B.npy", write_npy),
]


def multiply(client: Client, changed: str, **options: Any) -> job.Summary:
    a, b = (changed, "B.npy") if changed.startswith("A") else ("A.npy", changed)
    return job.multiply(f"in/{a}", f"in/{b}", "C.zarr", client=client, plan=PLAN, **options)


def not_certified() -> bool:
    return not os.path.lexists("C.zarr") and not os.path.exists("C.zarr.certificate.json")


@pytest.mark.parametrize(("name", "change"), later([*CHANGES[:4:3], *CHANGES[5:7]]))
def test_an_input_that_is_changed_before_the_job_goes_on_is_refused(
    name: str, change: Callable[[str], None], client: Client, product: np.ndarray
) -> None:
    with pytest.raises(Stopped):
        multiply(client, name, stop=HalfWay())
    change(f"in/{name}")
    before = marked()
    with pytest.raises(InputError, match=rf"{name} has changed since C\[\d, \d\] was made from it: .*--overwrite"):
        job.resume("C.zarr", client=client)
    assert marked() == before
    assert not_certified()
    multiply(client, name, overwrite=True)
    np.testing.assert_allclose(values(), 2 * product)


@pytest.mark.parametrize(
    ("check", "name", "change"),
    later([(["freivalds", "none"][n % 2], *change) for n, change in enumerate(CHANGES)], first=2),
)
def test_an_input_that_is_changed_during_a_run_ends_it(
    check: Any, name: str, change: Callable[[str], None], client: Client, product: np.ndarray
) -> None:
    with pytest.raises(InputError, match=f"{name} has changed since|{name[0]} has changed while"):
        multiply(client, name, check=check, stop=Meanwhile(lambda: change(f"in/{name}"), "C.zarr"))
    assert not_certified()


def test_blocks_tell_of_a_change_that_the_file_system_does_not(
    client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmm.storage.flat.FlatMatrix.stamp", lambda _: None)
    change = Meanwhile(lambda: write_npy("in/B.npy"), "C.zarr")
    with pytest.raises(InputError, match=r"B has changed while it was multiplied: its columns for C\["):
        multiply(client, "B.npy", stop=change)
    with pytest.raises(InputError, match="B has changed while it was multiplied"):  # its blocks are on the disk
        job.resume("C.zarr", client=client)
    assert not_certified()


def as_if_misread(name: str) -> int:
    """Have the marker of one block say that A or B was another one, as if it had been read wrong.

    Returns the number of blocks in its row or column.
    """
    index = "i" if name == "A" else "j"
    markers = {path: json.loads(path.read_text()) for path in Path("C.zarr.job").glob("*/*/done/*.json")}
    path, marker = next(
        (path, one) for path, one in markers.items() if sum(o[index] == one[index] for o in markers.values()) > 1
    )
    marker["inputs"][name] = f"{int(marker['inputs'][name], 16) ^ 1:016x}"
    path.write_text(json.dumps(marker))
    return sum(one[index] == marker[index] for one in markers.values())


@pytest.mark.minutes
@pytest.mark.parametrize(("first", "name"), [("B-packed.zarr", "A"), ("A.npy", "B"), ("A.npy", "A")])
def test_blocks_whose_input_was_read_wrong_once_are_made_again(
    first: str, name: str, client: Client, product: np.ndarray
) -> None:
    with pytest.raises(Stopped):
        multiply(client, first, stop=HalfWay(enough=5))  # so that two have a row in common, and two a column
    before, doubtful = len(marked()), as_if_misread(name)
    assert multiply(client, first).kept == before - doubtful
    np.testing.assert_allclose(values(), product)
    assert job.recheck("C.zarr").ok
    assert job.status("C.zarr").rejected == doubtful


def test_markers_that_disagree_about_a_file_that_was_written_are_not_dropped(
    client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        multiply(client, "A.npy", stop=HalfWay())
    as_if_misread("A")
    os.link("in/A.npy", "another name")  # nothing but the stamp is another one
    before = marked()
    with pytest.raises(InputError, match=r"A has changed while it was multiplied: .* continue with distmm resume"):
        multiply(client, "A.npy")
    assert marked() == before
    assert not_certified()


def test_arrays_of_a_program_that_change_meanwhile_end_the_run(client: Client, product: np.ndarray) -> None:
    a, b = np.load("in/A.npy"), np.load("in/B.npy")
    with pytest.raises(InputError, match="B has changed while it was multiplied"):
        job.multiply(a, b, "C.zarr", client=client, plan=PLAN, stop=Meanwhile(lambda: b.__imul__(2), "C.zarr"))
    assert not_certified()


def test_a_dask_array_that_is_another_one_each_time_ends_the_run(client: Client, product: np.ndarray) -> None:
    def other(block: np.ndarray) -> np.ndarray:
        return block + np.random.default_rng().standard_normal(block.shape)

    a = np.load("in/A.npy")
    b = da.from_array(np.load("in/B.npy"), chunks=(60, 30)).map_blocks(other, dtype=a.dtype)
    with pytest.raises(InputError, match=r"B has changed .* has to be persisted or stored first"):
        job.multiply(a, b, "C.zarr", client=client, plan=PLAN)
    assert not_certified()
    b = b.persist(scheduler=client)
    job.multiply(a, b, "C.zarr", client=client, plan=PLAN, overwrite=True)
    np.testing.assert_allclose(values(), a @ b.compute(scheduler=client))


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["A-plain.zarr", "B-packed.zarr", "A-packed.zarr", "B-plain.zarr"])
def test_a_chunk_that_disappears_is_an_error_until_it_is_back(name: str, client: Client, product: np.ndarray) -> None:
    chunk = f"in/{name}/c/5/3"
    with pytest.raises(
        InputError, match=r"cannot read .*FileNotFoundError.*resume C\.zarr, after the cause is removed"
    ):
        multiply(client, name, stop=Meanwhile(lambda: os.rename(chunk, "away"), "C.zarr"))
    with pytest.raises(InputError, match=r"missing was None, is 1 of \d+ chunks are missing, .*: c/5/3"):
        job.resume("C.zarr", client=client)  # would read it as zeros
    assert not_certified()
    os.rename("away", chunk)
    job.resume("C.zarr", client=client)
    np.testing.assert_allclose(values(), product)


@pytest.mark.parametrize("packed", [True, False])
def test_chunks_that_were_never_written_are_zeros(packed: bool, tmp_path: Path) -> None:
    codecs = {} if packed else {"compressors": None}
    stored = zarr.create_array(tmp_path / "A.zarr", shape=(70, 50), chunks=(20, 30), dtype="f8", **codecs)
    stored[:20] = 1
    stored[65:, 40:] = 2
    matrix = open_matrix(tmp_path / "A.zarr")
    np.testing.assert_array_equal(matrix[...], stored[...])
    os.unlink(tmp_path / "A.zarr/c/3/1")
    np.testing.assert_array_equal(matrix[:60], stored[:60])
    with pytest.raises(InputError, match=r"cannot read \[50:70, 30:50\].*c/3/1"):
        matrix[50:, 30:]


def test_a_shard_that_disappears_is_an_error(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "A.zarr", data=np.ones((70, 50)), chunks=(10, 10), shards=(20, 30))
    matrix = open_matrix(tmp_path / "A.zarr")
    os.unlink(tmp_path / "A.zarr/c/3/1")
    np.testing.assert_array_equal(matrix[:60], 1)
    with pytest.raises(InputError, match="c/3/1"):
        matrix[50:, 30:]


@pytest.mark.parametrize(("name", "change"), later([CHANGES[1], CHANGES[7], CHANGES[3]], first=2))
def test_a_complete_c_is_not_the_product_of_inputs_that_have_changed_since(
    name: str, change: Callable[[str], None], client: Client, product: np.ndarray
) -> None:
    multiply(client, name)
    copy_again(f"in/{name}")
    assert multiply(client, name).kept == 16
    assert job.recheck("C.zarr").ok
    change(f"in/{name}")
    with pytest.raises(InputError, match=rf"{name} has changed since C\[0, 0\] was made from it: .*--overwrite"):
        multiply(client, name)
    verdict = job.recheck("C.zarr")
    assert verdict.outcome == "cannot tell"
    assert f"{name} has changed since" in verdict.message
    np.testing.assert_allclose(values(), product)


@pytest.mark.minutes
@pytest.mark.parametrize("name", ["A.npy", "B-plain.zarr", "B.npy", "A-packed.zarr"])
def test_inputs_that_only_look_changed_are_read_again(name: str, client: Client, product: np.ndarray) -> None:
    with pytest.raises(Stopped):
        multiply(client, name, stop=HalfWay())
    before = open_matrix(f"in/{name}").stamp()
    copy_again(f"in/{name}")
    assert open_matrix(f"in/{name}").stamp() != before
    summary = multiply(client, name, stop=Meanwhile(lambda: copy_again(f"in/{name}"), "C.zarr"))
    assert summary.kept >= 4
    np.testing.assert_allclose(values(), product)


@pytest.mark.minutes
@pytest.mark.parametrize(("order", "transposed"), [("C", True), ("F", False), ("F", True), ("C", False)])
def test_checksums_follow_the_order_of_the_elements_on_the_disk(
    order: Any, transposed: bool, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = np.random.default_rng(0).standard_normal((2, 120, 120))
    np.save("A.npy", np.asarray(a.T if transposed else a, order=order))
    np.save("B.npy", b)
    with pytest.raises(Stopped):
        job.multiply("A.npy", "B.npy", "C.zarr", transa=transposed, client=client, plan=PLAN, stop=HalfWay())
    record = json.loads(next(Path("C.zarr.job").glob("*/*/done/*.json")).read_text())
    rows = a[30 * record["i"] : 30 * (record["i"] + 1)]
    by_columns = transposed != (order == "F")
    panels = [checksum(part.T if by_columns else part) for part in (rows[:, :60], rows[:, 60:])]
    assert record["inputs"]["A"] == f"{fold(fold(NO_PANEL, panels[:1]), panels[1:])[0]:016x}"
    shutil.copy2("A.npy", "copy")
    os.rename("copy", "A.npy")
    job.resume("C.zarr", client=client)  # reads A again
    np.testing.assert_allclose(values(), a @ b)


@pytest.mark.minutes
@pytest.mark.parametrize("out", ["C.npy", "C.zarr"])
def test_a_c_that_is_changed_before_it_has_been_added_ends_the_run(
    out: str, client: Client, product: np.ndarray
) -> None:
    zarr.save_array("C.zarr", product) if out == "C.zarr" else np.save(out, product)
    change = Meanwhile(lambda: (write_zarr if out == "C.zarr" else write_npy)(out), out)
    with pytest.raises(InputError, match=rf"{out} has changed since C\[\d, \d\] was made from it"):
        job.multiply("in/A.npy", "in/B.npy", out, beta=1, overwrite=True, client=client, plan=PLAN, stop=change)
    np.testing.assert_allclose(values(out), 2 * product)


@pytest.mark.parametrize("shards", [None, (4, 4)])
def test_objects_of_a_store_are_stamped_and_listed_too(shards: tuple[int, int] | None) -> None:
    url = f"memory://stamped-{shards}/A.zarr"
    store = zarr.storage.FsspecStore.from_url(url)
    stored = zarr.create_array(store, shape=(8, 8), dtype="f8", chunks=(2, 4), shards=shards)
    stored[2:] = 1
    matrix = open_matrix(url)
    before, missing = matrix.stamp(), matrix.missing()
    assert before == matrix.stamp() is not None
    assert missing == ("2 of 8 chunks are missing, and read as 0.0" if shards is None else None)
    stored[2, 0] = 2
    assert matrix.stamp() != before
    np.testing.assert_array_equal(matrix[:4, :4], stored[:4, :4])
    fsspec.filesystem("memory").rm(f"{store.path}/c/1/1")
    np.testing.assert_array_equal(matrix[:2, :4], stored[:2, :4])
    with pytest.raises(InputError, match="c/1/1"):
        matrix[...]
    assert open_matrix(url).fingerprint() != matrix.fingerprint()


blocks = st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["i1", "f2", "f4", "f8", "c16", "?"]))


@given(blocks, st.data())
def test_a_checksum_depends_on_the_elements_and_not_on_their_order_in_memory(
    kind: tuple[int, int, str], data: st.DataObject
) -> None:
    m, k, dtype = kind
    bits = data.draw(st.binary(min_size=m * k * np.dtype(dtype).itemsize, max_size=m * k * np.dtype(dtype).itemsize))
    block = np.frombuffer(bits, "u1").reshape(m, -1).view(dtype if dtype != "?" else "u1")
    assert checksum_of_input(block) == checksum_of_input(np.asfortranarray(block)) == checksum(block)
    turned = checksum(block.T)
    assert checksum_of_input(block, False, True) == checksum_of_input(np.asfortranarray(block), False, True) == turned
    by_rows = checksum_of_input(block, True)
    assert by_rows == checksum_of_input(np.asfortranarray(block), True)
    at = data.draw(st.integers(0, len(bits) - 1))
    other = bytearray(bits)
    other[at] ^= 1 << data.draw(st.integers(0, 7))
    changed = np.frombuffer(bytes(other), "u1").reshape(m, -1).view(block.dtype)
    assert checksum_of_input(changed, False) != checksum(block)
    assert checksum_of_input(changed, True) != by_rows


def test_empty_blocks_have_checksums() -> None:
    assert {checksum_of_input(np.empty(shape), rows) for shape in [(0, 3), (3, 0)] for rows in (True, False)} == {0}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["i1", "f2", "bfloat16", "f4", "f8", "c16"])
@pytest.mark.parametrize("columns_first", [True, False])
def test_a_gpu_makes_the_checksums_that_numpy_makes(dtype: str, columns_first: bool) -> None:
    import cupy

    block = (
        np.random.default_rng(0)
        .integers(0, 100, (301, 203))
        .astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    )
    expected = checksum_of_input(block, True, columns_first)
    assert checksum_of_input(cupy.asarray(block), True, columns_first) == expected
    assert checksum_of_input(cupy.asarray(np.asfortranarray(block)), True, columns_first) == expected
