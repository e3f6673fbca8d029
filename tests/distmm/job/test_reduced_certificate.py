"""The certificate of a reduced product: checksums and sampled rows find what was altered, or reduced wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

from distmm import job
from distmm.checking.checksum import checksum
from distmm.errors import InputError, WrongResultError
from distmm.job import sampled_rows
from distmm.job.contents import Contents
from distmm.product.operand import Operand
from distmm.worker.tasks import products
from distmm.worker.tasks.reductions import Largest
from tests.distmm.job.reduced import PLAN, SHAPE, arrays, best, operands, threshold, topk
from tests.tables import later


@pytest.fixture(scope="module")
def made(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with A, B and results of both kinds, which tests copy."""
    folder = tmp_path_factory.mktemp("made")
    operands(folder)
    before = os.getcwd()
    os.chdir(folder)
    try:
        topk(client, "topk.zarr")
        topk(client, "more.zarr", k=8)
        threshold(client, "threshold.zarr")
        threshold(client, "distances.zarr", t=8.5, metric="euclidean")
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of the results, of which all rows are sampled."""
    for path in made.iterdir():
        if path.name.partition(".")[0] in ("topk", "threshold", "distances"):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampled_rows, "ROWS", 70)
    return made


def altered(out: str, alter: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Alter a result, and its certificate with it: only the comparison with A and B can find that."""
    content = json.loads(Path(f"{out}.certificate.json").read_text())
    group: Any = zarr.open_group(out)
    values = arrays(out)
    alter(values)
    for name, new in values.items():
        group[name][:] = new
    units = Contents.described(content).complete(out, content)
    assert units is not None
    for marker in content["done"]:
        marker["sums"] = {name: checksum(units.read(marker, name)) for name in values}
    Path(f"{out}.certificate.json").write_text(json.dumps(content))


@pytest.mark.parametrize("out", later(["topk.zarr", "threshold.zarr", "distances.zarr"], first=2))
def test_a_result_that_was_altered_is_called_wrong(out: str, client: Client, copied: Path) -> None:
    assert job.recheck(out, client).outcome == "right"
    array: Any = zarr.open_group(out)["values"]
    array[5] = array[5] + 1
    verdict = job.recheck(out, client)
    assert verdict.outcome == "wrong"
    assert re.search(r"1 block rows of .* are damaged, the first is .*: the checksum of its values is", verdict.message)


def test_a_result_that_is_another_one_is_called_wrong(copied: Path) -> None:
    shutil.rmtree("topk.zarr")
    shutil.copytree("threshold.zarr", "topk.zarr")
    verdict = job.recheck("topk.zarr")
    assert (verdict.outcome, "is not what the job wrote" in verdict.message) == ("wrong", True)
    shutil.rmtree("threshold.zarr/rows")
    assert job.recheck("threshold.zarr").outcome == "wrong"


def test_a_damaged_certificate_is_refused(copied: Path) -> None:
    path = Path("topk.zarr.certificate.json")
    whole = json.loads(path.read_text())
    no_count = [{name: value for name, value in row.items() if name != "count"} for row in whole["done"]]
    neither = [{name: value for name, value in row.items() if name != "sums"} for row in no_count]
    for change, message in (
        ({"done": no_count}, "count or sums is missing"),
        ({"done": neither}, "count is missing"),
        ({"spec": {**whole["spec"], "reduction": {"kind": "topk"}}}, "is not a reduction that this version of distmm"),
    ):
        path.write_text(json.dumps({**whole, **change}))
        with pytest.raises(InputError, match=message):
            job.recheck("topk.zarr")


def scaled(values: dict[str, np.ndarray]) -> None:
    values["values"] += 0.5


def doubled(values: dict[str, np.ndarray]) -> None:
    values["indices"][:, 1] = values["indices"][:, 0]


def beyond(values: dict[str, np.ndarray]) -> None:
    values["indices"][:, 6] = 90


def turned(values: dict[str, np.ndarray]) -> None:
    values["values"] = values["values"][:, ::-1].copy()


def below(values: dict[str, np.ndarray]) -> None:
    values["values"][:] = 5


def farther(values: dict[str, np.ndarray]) -> None:
    values["values"][:] = 9


def nearer(values: dict[str, np.ndarray]) -> None:
    values["values"] -= 0.25


def shifted(values: dict[str, np.ndarray]) -> None:
    values["columns"] = (values["columns"] + 1) % 90


@pytest.mark.parametrize(
    ("out", "alter", "message"),
    [
        ("topk.zarr", scaled, "which is not the value of C"),
        ("topk.zarr", doubled, "has a column twice"),
        ("topk.zarr", beyond, "has columns that are not in the product"),
        ("topk.zarr", turned, "is not in the order of its values"),
        ("threshold.zarr", below, "has values beyond the threshold"),
        ("threshold.zarr", shifted, "A and B: among 70 of 70 rows"),
        ("distances.zarr", farther, "has values beyond the threshold"),
        ("distances.zarr", nearer, "which is not the value of C"),
        ("distances.zarr", shifted, "A and B: among 70 of 70 rows"),
    ],
)
def test_a_certificate_that_agrees_with_a_wrong_result_does_not_help(
    out: str, alter: Callable[[dict[str, np.ndarray]], None], message: str, copied: Path
) -> None:
    altered(out, alter)
    verdict = job.recheck(out)
    assert (verdict.outcome, message in verdict.message) == ("wrong", True), verdict.message


def test_a_row_that_leaves_out_its_best_column_is_found(copied: Path) -> None:
    more = arrays(str(copied / "more.zarr"))

    def without_the_best(values: dict[str, np.ndarray]) -> None:
        for name in values:
            values[name] = more[name][:, 1:]

    altered("topk.zarr", without_the_best)
    verdict = job.recheck("topk.zarr")
    assert (verdict.outcome, "leaves out column" in verdict.message) == ("wrong", True), verdict.message


@pytest.mark.parametrize(
    ("columns", "width", "read"), [((40, 90), 32, (10, 32)), ((64, 90), 64, (10, 64)), ((4, 16), 16, (10, 16))]
)
def test_what_is_computed_again_reads_each_chunk_of_b_once(
    columns: tuple[int, int], width: int, read: tuple[int, int], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are 10 x 32 elements. The third case takes parts of chunks, as if they were very wide."""
    regions: list[tuple[slice, slice]] = []
    region = Operand.region

    def noted(operand: Operand, *at: slice) -> np.ndarray:
        if operand.name == "B":
            regions.append((at[0], at[1]))
        return region(operand, *at)

    monkeypatch.setattr(Operand, "region", noted)
    monkeypatch.setattr(sampled_rows, "COLUMNS", columns)
    monkeypatch.setattr(sampled_rows, "PIECE", 3 * 8 * width)
    assert job.recheck("topk.zarr").outcome == "right"
    _, k, n = SHAPE
    height, width = read
    starts = [(top, left) for left in range(0, n, width) for top in range(0, k, height)]
    assert regions == [(slice(i, min(k, i + height)), slice(j, min(n, j + width))) for i, j in starts]


def test_a_threshold_that_leaves_out_an_element_is_found(copied: Path) -> None:
    """One of a row is replaced by another one of the same row, twice: the count of lines stays."""

    def one_less(values: dict[str, np.ndarray]) -> None:
        at = (
            int(np.flatnonzero(np.diff(values["rows"]) > 0)[3]) + 1
        )  # the first element of a row moves to the row before
        values["rows"][at] -= 1

    altered("threshold.zarr", one_less)
    assert job.recheck("threshold.zarr").outcome == "wrong"


def _largest_of_half(self: Any, block: Any, first: int, norms: Any) -> Any:
    """A reduction with a fault: it looks at the first half of each block alone."""
    return type(self).whole(self, block[:, : block.shape[1] // 2], first, norms)


def _spoil(spoilt: bool) -> None:
    if spoilt:
        Largest.whole = Largest.chunk  # type: ignore[attr-defined]
        Largest.chunk = _largest_of_half  # type: ignore[method-assign]
    else:
        Largest.chunk = Largest.whole  # type: ignore[attr-defined, method-assign]


def test_a_job_whose_reduction_is_wrong_ends_without_a_result(client: Client, copied: Path) -> None:
    operands(Path())
    client.run(_spoil, True)
    try:
        with pytest.raises(WrongResultError, match=r"leaves out column \d+.*kept as .*out\.wrong\.zarr"):
            topk(client)
    finally:
        client.run(_spoil, False)
    # The report says what was found; C has not got its name.
    assert sorted(name for name in os.listdir() if name.startswith("out")) == ["out.wrong.zarr", "out.zarr.report.html"]


def _flip(flipped: str) -> None:
    """Have one block of C, once, come wrong from the worker that makes it."""
    real = products.multiply

    def multiply(where: Any, *arguments: Any, **how: Any) -> Any:
        out = real(where, *arguments, **how)
        if (where.i, where.j, where.step) == (1, 2, 1):
            with suppress(FileExistsError):
                os.close(os.open(flipped, os.O_CREAT | os.O_EXCL))
                out = np.array(out)
                out[3, 4] += 100
        return out

    products.real_multiply = real  # type: ignore[attr-defined]
    products.multiply = multiply


def _mend() -> None:
    products.multiply = products.real_multiply  # type: ignore[attr-defined]


@pytest.mark.minutes
def test_a_block_row_with_a_wrong_block_is_made_again(client: Client, made: Path, copied: Path, tmp_path: Path) -> None:
    c = operands(Path())
    client.run(_flip, str(tmp_path / "flipped"))
    try:
        summary = topk(client)
    finally:
        client.run(_mend)
    assert os.path.exists("flipped")
    assert summary.recomputed == 1
    np.testing.assert_array_equal(arrays("out.zarr")["indices"], best(c, 7))
    content = json.loads(Path("out.zarr.certificate.json").read_text())
    assert [row["attempt"] for row in content["done"]] == [0, 1, 0, 0, 0]
    assert content["rejected"] == 1


@pytest.mark.minutes
def test_inputs_that_have_changed_leave_checksums_to_compare(client: Client, copied: Path) -> None:
    operands(Path())
    topk(client)
    np.save("A.npy", np.load("A.npy") + 1)
    verdict = job.recheck("out.zarr", client)
    assert verdict.outcome == "cannot tell"
    assert "all 5 block rows are what was written" in verdict.message


@pytest.mark.minutes
def test_elements_that_cannot_be_compared_are_said_to_be_so(client: Client, copied: Path) -> None:
    operands(Path())
    a = np.load("A.npy")
    a[:, 3] = np.inf
    job.topk(a, "B.zarr", 3, "inf.zarr", client=client, plan=PLAN)
    content = json.loads(Path("inf.zarr.certificate.json").read_text())
    assert content["sample"]["outcome"] == "cannot tell"
    assert any(how.startswith("same bits") for how in content["judged"])
