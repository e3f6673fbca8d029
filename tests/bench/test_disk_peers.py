"""The peers of the disk job at tiny sizes, and what becomes of those that fail, hang, or are wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from experiment.cases import element
from experiment.matrices import fill
from rich.console import Console

from distmm.storage import create_output
from tests.bench.disk_peers import compare
from tests.bench.disk_peers.usage import Usage

MIB = 1 << 20


def measured(folder: Path, *names: str, dtype: str = "float32", patience: float = 200) -> list[compare.Row]:
    """Multiply two matrices of 3 x 3 chunks, one of which is smaller."""
    for seed, name in enumerate("AB"):
        matrix = np.empty((150, 150), element(dtype))
        fill(matrix, seed)
        output = create_output(folder / f"{name}.zarr", matrix.shape, matrix.dtype, (64, 64))
        for i in range(0, 150, 64):
            for j in range(0, 150, 64):
                output[i : i + 64, j : j + 64] = matrix[i : i + 64, j : j + 64]
        output.output.commit()
    product = compare.Product(folder, "cpu", 1, 1 << 30, 64)
    return [compare.measure(product, name, lambda: patience, lambda path: None, lambda text: None) for name in names]


@pytest.mark.minutes
def test_dask_is_measured_and_right_in_the_type_it_has_instead_of_bfloat16(tmp_path: Path) -> None:
    (row,) = measured(tmp_path, "dask.array", dtype="bfloat16")
    assert row.ok, row.notes
    assert row.seconds is not None
    assert row.seconds > 0
    assert row.peak > 0
    assert row.notes == ("float32 instead of bfloat16: NumPy multiplies types of two bytes without BLAS",)
    assert sorted(os.listdir(tmp_path)) == ["A.zarr", "B.zarr"]


@pytest.mark.minutes
def test_cubed_is_measured_and_right(tmp_path: Path) -> None:
    pytest.importorskip("cubed")
    (row,) = measured(tmp_path, "cubed")
    assert row.ok, row.notes
    assert row.seconds is not None
    assert row.peak > 0
    assert row.notes == ()


def test_a_peer_that_is_not_installed_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(compare.PEERS["cpu"]["cubed"], packages=("a_package_that_nobody_has",))
    monkeypatch.setitem(compare.PEERS["cpu"], "cubed", absent)
    (row,) = measured(tmp_path, "cubed")
    assert (row.seconds, row.ok) == (None, None)
    assert row.notes == ("a_package_that_nobody_has is not installed",)


def behaves(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Let peers follow the protocol, and do something else than to multiply."""
    code = f"""
import json, os, sys, time
task = json.loads(sys.stdin.readline())
say = lambda answer: print(json.dumps(answer), flush=True)
say({{"ready": True}})
{how}
"""
    monkeypatch.setattr(compare.PeerChild, "command", (sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("how", "patience", "reason"),
    [
        ("say({'failure': 'KilledWorker: out of memory'})", 200, "KilledWorker: out of memory"),
        ("print('no luck', file=sys.stderr); os.kill(os.getpid(), 9)", 200, "its process ended with code -9: no luck"),
        ("say({'row': {'seconds': 1.0}})", 200, "C.zarr: no such file or folder"),
        ("time.sleep(600)", 0.1, "not finished after 0.1 s (--patience)"),
    ],
)
def test_a_peer_that_fails_is_a_row_that_says_why_and_the_next_one_runs(
    how: str, patience: float, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves(monkeypatch, how)
    rows = measured(tmp_path, "dask.array", "dask.array", patience=patience)
    assert [reason in row.notes[0] for row in rows] == [True] * 2
    assert [(row.seconds, row.ok) for row in rows] == [(None, None)] * 2


def test_a_wrong_result_is_shown_and_so_is_the_reason_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaves(monkeypatch, "import shutil; shutil.copytree(task['a'], task['c']); say({'row': {'seconds': 3.0}})")
    (row,) = measured(tmp_path, "dask.array")
    assert (row.seconds, row.ok) == (3.0, False)
    assert "C is not A @ B" in row.notes[0]
    out = io.StringIO()
    rows = [compare.Row("distmm", 2.0, ok=True), row, compare.Row("cubed", notes=("cubed is not installed",))]
    Console(file=out, width=200).print(compare.table(rows, "peers"))
    text = out.getvalue()
    assert "right" in text
    assert "WRONG" in text
    assert "1.50" in text
    assert "cubed: cubed is not installed" in text


# Grandchildren: one that has ended has written 8 MiB, one that runs has 64 MiB in memory.
FAMILY = """
import subprocess, sys
wrote = "import os, sys; f = open(sys.argv[1], 'wb'); f.write(bytes(8 << 20)); f.flush(); os.fsync(f.fileno())"
holds = "import sys; held = b'x' * (64 << 20); print('held', flush=True); sys.stdin.read()"
subprocess.run([sys.executable, "-c", wrote, sys.argv[1]], check=True)
subprocess.run([sys.executable, "-c", holds], check=True)
"""


def test_memory_and_writes_of_all_descendants_are_counted(tmp_path: Path) -> None:
    before = psutil.Process().io_counters().write_bytes
    with open(tmp_path / "probe", "wb") as file:
        file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
    counted = psutil.Process().io_counters().write_bytes > before  # not in a file system in memory
    command = (sys.executable, "-c", FAMILY, str(tmp_path / "file"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with Usage(process.pid) as usage:
            assert process.stdout.readline() == b"held\n"
        process.stdin.close()
    assert usage.peak > 64 * MIB
    assert (usage.written >= 8 * MIB) == counted
