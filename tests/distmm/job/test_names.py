"""Names of outputs: none replaces an input, and a result is known by its contents after it was moved or overwritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dask.array as da
import h5py
import numpy as np
import pytest
import zarr
from distributed import Client
from typer.testing import CliRunner

from distmm import job
from distmm.cli.app import app
from distmm.errors import InputError, Stopped
from tests.distmm.job.disturbed import HalfWay, multiply, operands, values
from tests.distmm.storage.samples import save_matrix
from tests.tables import later


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A folder with A and B; returns their product."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return operands(Path("in"))


@pytest.fixture
def contents(product: np.ndarray) -> Callable[[], dict[str, bytes]]:
    """More matrices and names of them; returns a way to read all files."""
    a = np.load("in/A.npy")
    zarr.create_group("in/G.zarr").create_array("A", data=a, chunks=(20, 30))
    with h5py.File("in/A.h5", "w") as file:
        file["x/A"] = a
    (Path("in/raw.npy")).write_bytes(a.tobytes())
    os.link("in/A.npy", "in/hard.npy")
    os.symlink("in", "other")
    return lambda: {str(path): path.read_bytes() for path in sorted(Path("in").rglob("*")) if path.is_file()}


INPUTS: list[tuple[Any, str, str]] = [
    ("in/A.npy", "in/A.npy", "A"),
    ("in/A.npy", "in/../in/A.npy", "A"),
    ("in/A.npy", "in/hard.npy", "A"),
    ("other/A.npy", "in/A.npy", "A"),
    ("in/A.npy", "other/A.npy", "A"),
    ("in/A.npy", "other/B.zarr", "B"),
    ("in/G.zarr", "in/G.zarr/A", "A"),
    ("in/G.zarr/A", "other/G.zarr/A", "A"),
    ("in/A.h5:/x/A", "other/A.h5:/x/A", "A"),
    ("in/raw.npy:120x120:float64", "in/raw.npy", "A"),
    (lambda: np.load("in/A.npy", mmap_mode="r")[::-1], "in/A.npy", "A"),
    (lambda: zarr.open_array("in/G.zarr/A"), "in/G.zarr/A", "A"),
    (lambda: da.from_zarr("in/G.zarr/A"), "in/G.zarr/A", "A"),
]


@pytest.mark.parametrize(("a", "out", "name"), INPUTS)
def test_an_input_is_not_replaced_by_its_product(
    a: Any, out: str, name: str, client: Client, contents: Callable[[], dict[str, bytes]]
) -> None:
    before, a = contents(), a if isinstance(a, str) else a()
    for beta in (0, 1):
        message = f"the product reads {name} from there, and would replace it|raw.npy: not a readable .npy file"
        with pytest.raises(InputError, match=message):
            job.multiply(a, "in/B.zarr", out, beta=beta, overwrite=True, client=client)
    assert contents() == before
    assert not list(Path().rglob("*.job"))


def test_links_are_other_names_of_the_same_inputs(client: Client, product: np.ndarray) -> None:
    os.symlink("in", "other")
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    assert multiply(client, inputs="other").kept >= 4
    assert multiply(client).kept == 16
    np.testing.assert_array_equal(values(), product)


STRANGE = [os.fsdecode(b"C\xff.npy"), "new\nline/C.h5", "x[bold]y[/z]:smile:/C.zarr"]


@pytest.mark.parametrize("out", STRANGE)
def test_names_may_have_any_characters(out: str, client: Client, product: np.ndarray) -> None:
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    for name in ("A.npy", "B.zarr"):
        os.rename(f"in/{name}", os.path.join(os.path.dirname(out), name.replace("A", os.fsdecode(b"A\xfe"))))
    a, b = (os.path.join(os.path.dirname(out), name) for name in (os.fsdecode(b"A\xfe.npy"), "B.zarr"))
    cluster = ["--cluster", client.scheduler.address]
    for arguments in (["multiply", a, b, "-o", out, *cluster], ["verify", out, *cluster], ["status", out]):
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"})
        assert result.exit_code == 0, result.output
    assert os.path.isdir(out) == out.endswith(".zarr")
    assert os.path.exists(f"{out}.report.html")
    assert os.path.basename(os.path.dirname(out)).replace("\n", "") in result.output.replace("\n", "")
    np.testing.assert_allclose(values(out), product)


def test_a_dataset_whose_name_is_not_utf_8_is_refused(client: Client, product: np.ndarray) -> None:
    with pytest.raises(InputError, match="HDF5 files have names in UTF-8"):
        multiply(client, os.fsdecode(b"C.h5:/x\xff"))
    assert os.listdir() == ["in"]


@pytest.mark.parametrize("out", [np.empty((2, 2)), None, b"C.npy"])
@pytest.mark.parametrize(
    "call",
    [
        partial(job.multiply, "A.npy", "B.npy"), partial(job.multiply, "A.npy", "B.npy", beta=1),
        partial(job.topk, "A.npy", "B.npy", 2), job.resume, job.status,
    ],
)  # fmt: skip
def test_a_result_on_disk_that_is_no_path_is_refused(call: Callable[..., Any], out: Any) -> None:
    with pytest.raises(InputError, match=rf"named by a str or a path, not by a {type(out).__name__}; "):
        call(out)


def test_a_dataset_without_a_name_is_refused(product: np.ndarray) -> None:
    for out in ("C.h5:/", "C.h5:."):
        with pytest.raises(InputError, match=r"names the root group, not a dataset; give .*C\.h5:/C"):
            job.multiply("in/A.npy", "in/B.zarr", out)


def test_all_spellings_of_a_dataset_are_one(client: Client, product: np.ndarray) -> None:
    multiply(client, "C.h5:a//./b/")
    assert multiply(client, "C.h5:/a/b").kept == 16
    np.testing.assert_array_equal(values("C.h5:/a/b"), product)


def test_an_output_without_a_dataset_keeps_the_name_of_the_matrix_that_it_replaces(
    client: Client, product: np.ndarray
) -> None:
    for name in ("/x", "/group/y"):
        with h5py.File("C.h5", "w") as file:
            file[name] = product
        with pytest.raises(Stopped):
            multiply(client, "C.h5", overwrite=True, alpha=2, stop=HalfWay("C.h5"))
        assert job.resume("C.h5", client=client).kept >= 4
        np.testing.assert_array_equal(values(f"C.h5:{name}"), 2 * product)
        assert multiply(client, f"C.h5:{name}", alpha=2).kept == 16


@pytest.mark.parametrize("complete", [True, False])
def test_a_job_of_another_dataset_is_refused(complete: bool, client: Client, product: np.ndarray) -> None:
    if complete:
        multiply(client, "C.h5:/x")
    else:
        with pytest.raises(Stopped):
            multiply(client, "C.h5:/x", stop=HalfWay("C.h5"))
    for call in (partial(multiply, client), partial(job.resume, client=client), job.status):
        with pytest.raises(
            InputError, match=r"writes the dataset /x, not /y: give .*C\.h5:/x or another file"
        ) as error:
            call("C.h5:/y")
        assert ("--overwrite" in str(error.value)) != complete  # which would lose /x
    if complete:
        os.remove("C.h5")  # the certificate of a file that is gone binds no other
    multiply(client, "C.h5:/y", overwrite=not complete)
    np.testing.assert_array_equal(values("C.h5:/y"), product)


@pytest.mark.parametrize(
    ("first", "second"),
    [("g.zarr/C.zarr", "g.zarr.C.zarr"), ("g.zarr.C.zarr", "g.zarr/C.zarr"), ("g.zarr/a/C", "g.zarr/a.C")],
)
def test_an_output_whose_files_are_those_of_another_one_is_refused(
    first: str, second: str, client: Client, product: np.ndarray
) -> None:
    os.makedirs("g.zarr/a")
    with pytest.raises(Stopped):
        multiply(client, first, stop=HalfWay(first.replace("/", ".")))
    calls = [partial(multiply, client), partial(multiply, client, overwrite=True), job.recheck, job.status]
    for call in (*calls, job.resume):
        with pytest.raises(InputError, match=rf"{second}: .* names of those of \S*{first}, such as \S*manifest.json"):
            call(second)
    job.resume(first, client=client)
    for call in calls:
        with pytest.raises(
            InputError, match=rf"{second}: .* names of those of \S*{first}, such as \S*certificate.json"
        ):
            call(second)
    assert job.recheck(first, client)
    os.rename(first, second)
    assert multiply(client, second).kept == 16
    np.testing.assert_array_equal(values(second), product)


def test_an_output_in_the_folder_of_another_job_is_refused(client: Client, product: np.ndarray) -> None:
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay())
    for call in (partial(multiply, client), lambda out: job.topk("in/A.npy", "in/B.zarr", 2, out, client=client)):
        with pytest.raises(InputError, match=r"is in the folder of the job .*C\.zarr\.job, which removes it"):
            call("C.zarr.job/D.zarr")
    job.resume("C.zarr", client=client)
    np.testing.assert_array_equal(values(), product)


def test_a_folder_that_only_has_the_name_of_a_jobs_is_not_emptied(product: np.ndarray) -> None:
    os.rename("in", "C.zarr.job")
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"contains A\.npy, which no job has left"):
            job.multiply("C.zarr.job/A.npy", "C.zarr.job/B.zarr", "C.zarr", overwrite=overwrite)
    assert sorted(os.listdir("C.zarr.job")) == ["A.npy", "B.zarr"]


def test_a_reduced_product_does_not_replace_a_part_of_itself(client: Client, product: np.ndarray) -> None:
    job.topk("in/A.npy", "in/B.zarr", 120, "T.zarr", client=client)
    before = zarr.open_group("T.zarr", mode="r")["values"][...]  # type: ignore[index]
    for reduce in (job.topk, job.threshold):
        with pytest.raises(InputError, match="the product reads B from there, and would replace it"):
            reduce("in/A.npy", "T.zarr/values", 3, "T.zarr", client=client, overwrite=True)
    np.testing.assert_array_equal(zarr.open_group("T.zarr", mode="r")["values"][...], before)  # type: ignore[index]


@pytest.mark.minutes
def test_an_output_whose_certificate_would_have_too_long_a_name_is_refused(client: Client, product: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"this name is too long.* 5 bytes shorter"):
        multiply(client, f"{'x' * 239}.npy")
    assert os.listdir() == ["in"]
    multiply(client, f"{'x' * 234}.npy")
    np.testing.assert_array_equal(values(f"{'x' * 234}.npy"), product)


@pytest.mark.minutes
@pytest.mark.parametrize("out", ["C.npy", "C.zarr", "C.h5"])
def test_a_c_that_is_overwritten_or_removed_is_not_called_complete(
    out: str, client: Client, product: np.ndarray
) -> None:
    multiply(client, out)
    assert job.status(out).state == "complete"
    shutil.copytree(out, "copy") if os.path.isdir(out) else shutil.copy(out, "copy")
    assert multiply(client, out).kept == job.resume(out, client=client).kept == 16

    def remove() -> None:
        shutil.rmtree(out) if os.path.isdir(out) else os.unlink(out)

    content = values(out)
    content[50, 50] += 1
    remove()
    found = job.status(out)
    assert (found.state, "multiply" in str(found.rows())) == ("missing", False)  # it may be a result of topk
    with pytest.raises(InputError, match="there is no unfinished job"):
        job.resume(out, client=client)
    save_matrix(Path(out), content)
    assert job.status(out).state == "changed"
    for again in (lambda: multiply(client, out), lambda: job.resume(out, client=client)):
        with pytest.raises(InputError, match=r"has changed since the job .* --overwrite"):
            again()
    remove()
    os.rename("copy", out)
    assert multiply(client, out).kept == 16  # a copy is complete, too
    np.testing.assert_array_equal(values(out), product)
    certificate = Path(f"{out}.certificate.json")
    older = {name: value for name, value in json.loads(certificate.read_text()).items() if name != "stamp"}
    certificate.write_text(json.dumps(older))
    assert job.status(out).state == "complete"
    assert multiply(client, out).kept == 16
    remove()
    save_matrix(Path(out), content)
    multiply(client, out, overwrite=True)
    assert job.status(out).state == "complete"
    np.testing.assert_array_equal(values(out), product)


@pytest.mark.parametrize("out", later(["C.npy", "C.zarr", "C.h5:/x"]))
def test_a_folder_that_is_renamed_has_its_complete_job(
    out: str, client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply(client, out)
    os.rename("../here", "../there")
    monkeypatch.chdir("../there")
    file = out.removesuffix(":/x")
    assert job.status(file).state == "complete"
    assert multiply(client, out).kept == job.resume(file, client=client).kept == 16
    assert job.recheck(file, client).outcome == "right"
    for end in ("", ".certificate.json"):
        os.rename(f"{file}{end}", f"D{file[1:]}{end}")
    assert job.resume(f"D{file[1:]}", client=client).path == os.path.abspath(f"D{file[1:]}")
    assert job.recheck(f"D{file[1:]}", client).outcome == "right"


@pytest.mark.minutes
@pytest.mark.parametrize("out", ["C.npy", "C.zarr"])
def test_a_folder_that_is_renamed_has_its_unfinished_job(
    out: str, client: Client, product: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        multiply(client, out, stop=HalfWay(out))
    os.rename("../here", "../there")
    monkeypatch.chdir("../there")
    renamed = f"D{out[1:]}"
    os.rename(f"{out}.job", f"{renamed}.job")
    assert job.resume(renamed, client=client).kept >= 4
    np.testing.assert_array_equal(values(renamed), product)
    assert job.recheck(renamed, client).outcome == "right"
    assert not os.path.exists(f"{renamed}.job")
