"""The command line: output, exit codes, and no traceback for bad input."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

from distmm.cli import session
from distmm.cli.app import app
from distmm.storage import open_matrix
from tests.distmm.cli.commands import run, run_late
from tests.tables import later

RUN = [sys.executable, "-c", "from distmm.cli import main; main()"]
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("how", later([["--blocks", "32x16x32"], ["--plan", "g2x2x1 b32x16x32 p1 w2x1 l2"]]))
def test_multiply_prints_plan_and_summary_and_writes_c(where: list[str], how: list[str]) -> None:
    result = run("multiply", "A.npy", "B.npy", "-o", "C.zarr", *how, *where)
    assert result.exit_code == 0, result.output
    assert [
        w for w in ("Plan", "blocks", "32 x 16 x 32", "Done", "FLOP/s", "error", "C.zarr") if w not in result.output
    ] == []
    assert re.search(r"error +at most [\d.e-]+ of the tolerance for rounding \(up to 1 is right\)", result.output)
    assert re.search(r"time +about [\d.e-]+ s, limited by \w+", result.output)
    assert how[0] == "--blocks" or how[1] in result.output
    np.testing.assert_allclose(open_matrix("C.zarr")[...], np.load("P.npy"), atol=1e-4)


def test_a_deadline_has_exit_code_75_and_the_same_command_goes_on(where: list[str]) -> None:
    command = ["multiply", "A.npy", "B.npy", "-o", "C.zarr", *where]
    result = run_late(*command)
    assert (result.exit_code, "the deadline of 7200 s has passed; 0 of" in result.output) == (75, True), result.output
    assert run(*command).exit_code == 0
    assert run("status", "C.zarr").output.count("complete") == 1
    again = run(*command)
    assert (again.exit_code, "nothing was left to compute" in again.output) == (0, True)
    assert "FLOP/s" not in again.output
    assert run("resume", "C.zarr", *where).exit_code == 0


def test_a_cluster_that_does_not_answer_names_the_option_that_waits_longer(where: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_one = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        result = run("verify", "A.npy", "B.npy", "P.npy", "--cluster", silent_one, "--connect-timeout", "0.3")
    assert (result.exit_code, "within 0.3 s" in result.output, "--connect-timeout" in result.output) == (2, True, True)


@pytest.mark.parametrize("command", [["multiply", "A.npy", "B.npy", "-o", "C.zarr"], ["resume", "C.zarr"]])
def test_a_deadline_without_time_is_refused_before_a_cluster_starts(command: list[str], where: list[str]) -> None:
    result = run(*command, "--deadline", "0", *where)
    assert (result.exit_code, "a deadline of 0 s leaves no time" in result.output) == (2, True), result.output
    assert "Cluster with" not in result.output


def test_alpha_beta_and_type_are_options(where: list[str]) -> None:
    product = np.load("P.npy").astype("f8")
    assert (
        run("multiply", "A.npy", "B.npy", "-o", "C.npy", "--dtype", "float64", "--alpha", "-2", *where).exit_code == 0
    )
    assert np.load("C.npy").dtype == np.float64
    result = run("multiply", "A.npy", "B.npy", "-o", "C.npy", "--dtype", "float64", "--beta", "0.5", *where)
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(np.load("C.npy"), 0 * product, atol=1e-4)


def test_verify_reads_the_certificate(where: list[str]) -> None:
    assert run("multiply", "A.npy", "B.npy", "-o", "C.npy", *where).exit_code == 0
    right = run("verify", "C.npy", *where)
    assert (right.exit_code, "blocks are what was written" in right.output) == (0, True), right.output
    spoilt = np.load("C.npy", mmap_mode="r+")
    spoilt[17, 23] *= -1
    spoilt.flush()
    wrong = run("verify", "C.npy", *where)
    assert (wrong.exit_code, "C[0, 0]: its checksum is" in wrong.output) == (1, True), wrong.output


@pytest.mark.minutes
def test_the_best_of_rows_and_what_is_above_a_threshold_go_to_disk(where: list[str]) -> None:
    command = ["topk", "A.npy", "B.npy", "-k", "3", "-o", "T.zarr", *where]
    stopped = run_late(*command)
    assert (stopped.exit_code, "the deadline of 7200 s has passed; 0 of" in stopped.output) == (75, True), (
        stopped.output
    )
    result = run(*command)
    assert (result.exit_code, "Plan" in result.output, "block rows" in result.output) == (0, True, True), result.output
    c = np.load("P.npy")
    values = np.asarray(zarr.open_group("T.zarr", mode="r")["values"])
    np.testing.assert_allclose(values, -np.sort(-c, axis=1)[:, :3], atol=1e-4)
    right = run("verify", "T.zarr", *where)
    assert (right.exit_code, "block rows are what was written" in right.output) == (0, True), right.output
    assert run("status", "T.zarr").output.count("complete") == 1
    above = run("threshold", "A.npy", "B.npy", "-t", "0", "--most", "5", "-o", "S.zarr", *where)
    assert (above.exit_code, "elements seen so far, of" in above.output) == (2, True), above.output
    assert run("threshold", "A.npy", "B.npy", "-t", "0", "--most", "5000", "-o", "S.zarr", *where).exit_code == 0
    assert len(np.asarray(zarr.open_group("S.zarr", mode="r")["rows"])) == np.count_nonzero(c >= 0)
    assert run("topk", "A.npy", "-k", "1", "--metric", "cosine", "-o", "I.zarr", *where).exit_code == 0
    indices = np.asarray(zarr.open_group("I.zarr", mode="r")["indices"])
    np.testing.assert_array_equal(indices[:, 0], np.arange(len(c)))  # each row is its own nearest one
    near = run("threshold", "A.npy", "B.npy", "-t", "0.2", "--metric", "cosine", "-o", "N.zarr", *where)
    assert near.exit_code == 0, near.output
    cosines = c / np.outer(np.linalg.norm(np.load("A.npy"), axis=1), np.linalg.norm(np.load("B.npy"), axis=0))
    assert len(np.asarray(zarr.open_group("N.zarr", mode="r")["rows"])) == np.count_nonzero(cosines >= 0.2) > 0


def test_verify_does_not_call_c_right_when_a_has_changed(where: list[str]) -> None:
    assert run("multiply", "A.npy", "B.npy", "-o", "C.npy", *where).exit_code == 0
    np.save("A.npy", np.load("A.npy") + 1)
    found = run("verify", "C.npy", *where)
    assert (found.exit_code, "Right" in found.output) == (4, False), found.output
    assert "cannot tell: C is what the job wrote" in found.output
    assert "A.npy has changed since C[0, 0] was made from it" in found.output


@pytest.mark.parametrize("shards", later([None, ((20, 20),)]))
def test_missing_chunks_of_an_input_are_shown_and_certified(shards: tuple[int, int] | None, where: list[str]) -> None:
    a = np.load("A.npy")
    zarr.create_array("A.zarr", data=a, chunks=(10, 10), shards=shards)
    count = sum(path.is_file() for path in Path("A.zarr/c").rglob("*"))
    assert "note" not in run("plan", "A.zarr", "B.npy", *where).output
    Path("A.zarr/c/1/1").unlink()
    message = f"1 of {count} chunks are missing, and read as 0.0"
    for command in (["plan", "A.zarr", "B.npy"], ["multiply", "A.zarr", "B.npy", "-o", "C.npy"]):
        result = run(*command, *where)
        assert (result.exit_code, message in result.output) == (0, True), result.output
    assert list(json.loads(Path("C.npy.certificate.json").read_text())["missing"].values()) == [message]
    assert f"A.zarr: {message}" in result.output.partition("Done")[2]
    for again in (["resume", "C.npy"], ["verify", "A.zarr", "B.npy", "C.npy"], ["verify", "C.npy"]):
        result = run(*again, *where)
        assert (result.exit_code, message in result.output) == (0, True), result.output


@pytest.mark.parametrize("check", ["freivalds", "full"])
def test_verify_tells_right_from_wrong_by_its_exit_code(check: str, where: list[str]) -> None:
    right = run("verify", "A.npy", "B.npy", "P.npy", "--check", check, *where)
    assert (right.exit_code, right.stdout.startswith("Right: ")) == (0, True), right.output
    spoilt = np.load("P.npy")
    spoilt[17, 23] += 100
    np.save("W.npy", spoilt)
    wrong = run("verify", "A.npy", "B.npy", "W.npy", "--check", check, *where)
    assert wrong.exit_code == 1
    assert "[17, 23]" in wrong.output


def test_verify_of_small_matrices_starts_no_cluster(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("multiply", "A.npy", "B.npy", "-o", "C.npy", *where).exit_code == 0
    assert run("topk", "A.npy", "B.npy", "-k", "3", "-o", "T.zarr", *where).exit_code == 0
    monkeypatch.setattr("distmm.clusters.connect", None)
    for paths in (["A.npy", "B.npy", "P.npy"], ["C.npy"], ["T.zarr"]):
        right = run("verify", *paths)
        assert (right.exit_code, right.output.startswith("Right: ")) == (0, True), right.output
    monkeypatch.setattr("distmm.cli.verify.SMALL", 60 * 50 + 50 * 40 + 60 * 40 - 1)
    assert run("verify", "C.npy").exit_code == 3  # it needs the cluster


def test_verify_finds_swapped_columns_and_repeats_a_check_by_its_seed(where: list[str]) -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((20, 30), "f4"), rng.standard_normal((30, 1024), "f4")
    c = a @ b
    signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (1024, 16))  # +-1 cannot tell equal ones apart
    same = [(i, j) for i, j in zip(*np.nonzero(signs @ signs.T == 16), strict=True) if i < j]
    c[:, same[0]] = c[:, same[0][::-1]]
    for name, matrix in (("U", a), ("V", b), ("S", c)):
        np.save(f"{name}.npy", matrix)
    first = run("verify", "U.npy", "V.npy", "S.npy", *where)
    assert first.exit_code == 1, first.output
    (seed,) = re.findall(r"\(seed (\d+)\)", first.output)
    again = run("verify", "U.npy", "V.npy", "S.npy", "--seed", seed, *where)
    assert (again.exit_code, again.output) == (1, first.output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["multiply", "A.npy", "A.npy", "-o", "C.npy"], "(60, 50)"),
        (["multiply", "A.npy", "B.npy", "-o", "P.npy"], "exists"),
        (["multiply", "A.npy", "B.npy", "-o", "no x/C.npy"], "/no x')"),
        (["multiply", "A.npy", "nothing.npy", "-o", "C.npy"], "no such file"),
        (["multiply", "A.npy", "B.npy", "-o", "C.npy", "--device", "gpu"], "GPU"),
        (["multiply", "A.npy", "B.npy", "-o", "C.npy", "--workers", "2"], "local cluster only"),
        (["verify", "A.npy", "B.npy", "A.npy"], "(60, 40)"),
        (["verify", "A.npy", "B.npy", "P.npy", "--check", "none"], "verifies nothing"),
        (["verify", "P.npy"], "there is no certificate"),
        (["topk", "A.npy", "B.npy", "-k", "0", "-o", "T.zarr"], "k is 0"),
        (["topk", "A.npy", "B.npy", "-k", "3", "-o", "T.npy"], "name it"),
        (["topk", "A.npy", "A.npy", "-k", "3", "-o", "T.zarr"], "must equal"),
        (["threshold", "A.npy", "B.npy", "-t", "nan", "-o", "T.zarr"], "t is nan"),
        (["threshold", "A.npy", "B.npy", "-t", "-1", "--metric", "euclidean", "-o", "T.zarr"], "no Euclidean distance"),
        (["verify", "A.npy", "B.npy"], "give C"),
        (["resume", "P.npy"], "no unfinished job"),
        (["multiply", "A.npy", "B.npy", "-o", "C.npy", "--deadline", "soon"], "is no time"),
        (["verify", "A.npy", "B.npy", "P.npy", "--connect-timeout", "1e400"], "--connect-timeout"),
        (["multiply", "A.npy", "B.npy", "-o", "C.npy", "--dtype", "words"], "is not a type"),
        (["multiply", "A.npy", "B.npy", "-o", "C.npy", "--dtype", "bfloat16"], "no type bfloat16"),
        (["multiply", "A.npy", "B.npy", "-o", "pipe.npy", "--overwrite"], "is a pipe"),
        (["multiply", "pipe.npy", "B.npy", "-o", "C.npy"], "is a pipe"),
    ],
)
def test_bad_input_is_refused_with_exit_code_2(arguments: list[str], message: str, where: list[str]) -> None:
    os.mkfifo("pipe.npy")
    before = sorted(os.listdir("."))
    result = run(*arguments, *where)
    assert (result.exit_code, message in result.output) == (2, True), result.output
    assert sorted(os.listdir(".")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["multiply", "A.npy"],
        ["multiply", "A.npy", "B.npy"],
        ["topk", "A.npy", "B.npy", "-o", "T.zarr"],
        ["topk", "A.npy", "B.npy", "-k", "3", "--metric", "near", "-o", "T.zarr"],
        ["multiply", "A.npy", "B.npy", "-o", "C.npy", "--blocks", "12xx"],
        ["multiply", "A.npy", "B.npy", "-o", "C.npy", "--blocks", "0"],
        ["multiply", "A.npy", "B.npy", "-o", "C.npy", "--precision", "lowest"],
        ["plan", "A.npy", "B.npy", "--cluster", "somewhere"],
        ["plan", "A.npy", "B.npy", "--cluster", "local-cpu", "--memory-limit", "much"],
        ["demo", "--size", "0"],
        ["demo", "--dtype", "words"],
        ["demo", "--dtype", "bool"],
        ["bench", "kernels", "--size", "1x2"],
        ["bench", "kernels", "--dtype", "words"],
        ["bench", "kernels", "--json", "no/such/folder.json"],
        ["bench", "kernels", "--part", "race", "--device", "cpu"],
        ["info", "--size", "0"],
    ],
)
def test_bad_usage_has_exit_code_2(arguments: list[str], where: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_debug_may_stand_anywhere_and_shows_the_traceback(where: list[str]) -> None:
    for arguments in (["--debug", "plan", "x.npy", "B.npy"], ["plan", "x.npy", "B.npy", "--debug"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "Traceback" in result.output
        assert "no such file" in result.output


def test_unexpected_errors_are_one_line_and_exit_code_3(where: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("distmm.job.spec.open_matrix", broken)
    result = run("plan", "A.npy", "B.npy")
    assert result.exit_code == 3
    assert result.output.splitlines() == ["unexpected error: ZeroDivisionError: by nothing (--debug shows where)"]


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["multiply"],
        ["topk"],
        ["threshold"],
        ["resume"],
        ["status"],
        ["plan"],
        ["verify"],
        ["demo"],
        ["info"],
        ["bench", "kernels"],
    ],
)
def test_help_shows_an_example_of_each_command(command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert f"distmm {' '.join(command)}".strip() + " " in result.output


@pytest.mark.parametrize("command", later([[], ["multiply"], ["threshold"], ["submit"], ["bench", "kernels"]], first=3))
def test_help_on_a_narrow_terminal_is_whole(command: list[str]) -> None:
    done = subprocess.run(
        [*RUN, *command, "--help"], env=environment() | {"COLUMNS": "60"}, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if not line.startswith("  distmm ")]  # examples are not wrapped
    assert [line for line in lines if len(line) > 60] == []
    assert [cut for cut in ("…", "<bool>", "**", "```", "..") if cut in done.stdout.replace("]...", "")] == []


@pytest.mark.minutes
def test_a_table_in_a_file_has_a_line_for_each_value() -> None:
    plan = run("plan", "100000x100000:float32", "100000x200000:float32", "--memory", "400GB", "--workers", "4")
    assert plan.exit_code == 0, plan.output
    _, *lines = plan.output.splitlines()
    assert [line for line in lines if line.startswith(" ")] == []
    assert next(line for line in lines if line.startswith("time ")).endswith("writes C")


def test_a_table_on_a_narrow_terminal_has_all_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    path, words = f"/a/{'long/' * 20}C.zarr", "about 0.016 s, limited by the scheduler, without the time of the disk"
    lines = session.table([("time", words), ("C", path)], "Done").splitlines()
    assert lines[0] == "Done"
    assert " ".join(line[6:] for line in lines[1:]) == f"{words} {path}"
    assert len(lines) > 3
    assert [line for line in lines[:-1] if len(line) > 40] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["multiply", "--help"]])
def test_help_and_version_load_no_numerical_library(arguments: list[str]) -> None:
    code = (
        "import sys; from distmm.cli.app import app; app(sys.argv[1:], standalone_mode=False)\n"
        "print('modules:', *sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(), capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.partition("modules:")[2].split())
    assert "typer" in loaded
    heavy = {"dask", "distributed", "numpy", "zarr", "h5py", "numba", "cupy", "matplotlib", "distmm_kernels"}
    assert heavy & loaded == set()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "COLUMNS": "200"}


@pytest.mark.minutes
def test_the_demo_does_the_main_job_from_a_bare_start(tmp_path: Path) -> None:
    command = [*RUN, "demo", "--size", "150", "--device", "cpu", "--workers", "2", "--dir", "here"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert re.search(r"Cluster with 2 workers, dashboard http://127.0.0.1:\d+/distmm$", done.stderr, re.MULTILINE)
    assert [
        word for word in ("Plan", "151 x 135 times 135 x 163", "Done", "FLOP/s", "C.zarr") if word not in done.stdout
    ] == []
    a, b, c = (open_matrix(tmp_path / "here" / f"{name}.zarr")[...] for name in "ABC")
    np.testing.assert_allclose(c, a @ b, atol=1e-3)
    assert os.listdir(tmp_path) == ["here"]


def test_the_demo_refuses_matrices_that_no_disk_holds(tmp_path: Path) -> None:
    result = run("demo", "--size", str(10**20), "--dir", str(tmp_path), "--device", "cpu", "--workers", "1")
    assert (result.exit_code, "short by" in result.output) == (2, True)


def test_the_demo_touches_no_folder_that_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "A.zarr").write_text("mine")
    result = run("demo", "--size", "10", "--dir", str(tmp_path))
    assert result.exit_code == 2
    assert "is not empty, and no demo made it" in result.output
    assert os.listdir(tmp_path) == ["A.zarr"]


def test_a_place_that_cannot_take_the_examples_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("examples", "slurm", "--write", str(tmp_path / "file"))
    assert (done.exit_code, "/file/slurm/one_node.sh: cannot be written" in done.stderr) == (2, True), done.output
