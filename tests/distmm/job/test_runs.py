"""Each run of a job says when it began and ended, and a run that was killed says so, in the report and on the disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from distmm import job, units
from distmm.errors import Stopped
from distmm.job.manifest import add_run
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.problem import Problem
from distmm.planning.search import make_plan
from distmm.telemetry import report
from distmm.telemetry.record import Record
from tests.distmm.job.disturbed import HalfWay, Meanwhile, marked, multiply, operands

BEGUN = 1_800_000_000.0


def table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of runs in a report."""
    plan = make_plan(Problem(8, 8, 8, np.dtype("f4")), ClusterSpec(1, 10**9, "cpu", 1e9, 1e9))
    text = unescape(report.html(Record("C", plan, BEGUN), runs=runs))
    found = re.findall(r"<h2>Runs</h2><table>(.*?)</table>", text, re.DOTALL)
    return [
        re.findall(r"<t[hd]>(.*?)</t[hd]>", row)
        for table in found
        for row in re.findall(r"<tr>.*?</tr>", table, re.DOTALL)
    ]


def test_a_killed_run_lasted_at_least_until_its_last_block() -> None:
    manifest = {"runs": [{"started": BEGUN, "ended": BEGUN + 60}]}
    add_run(manifest, {"started": BEGUN + 100, "host": "node1", "batch_job": "Slurm job 7", "workers": 4}, [])
    blocks = [{"time": BEGUN + 50}, {"time": BEGUN + 225.0}, {"time": BEGUN + 130}]
    add_run(manifest, {"started": BEGUN + 300, "host": "node2"}, blocks)
    add_run(manifest, {"started": BEGUN + 400}, blocks)
    manifest["runs"][-1]["ended"] = BEGUN + 407
    head, first, second, third, last = table(manifest["runs"])
    assert head[1:6] == ["started", "ended", "duration", "host", "batch job"]
    assert first[1:4] == [units.date(BEGUN), units.date(BEGUN + 60), "60 s"]
    written = f"did not end: killed, or cut off from its disk; last block written {units.date(BEGUN + 225)}"
    assert second[1:] == [units.date(BEGUN + 100), written, "at least 2 min 05 s", "node1", "Slurm job 7", "4", "0"]
    assert third[2:4] == ["did not end: killed, or cut off from its disk; no block written", "unknown"]
    assert last[1:4] == [units.date(BEGUN + 400), units.date(BEGUN + 407), "7 s"]


def test_a_job_of_one_run_has_no_table() -> None:
    assert table([{"started": BEGUN}]) == []


def test_a_run_that_writes_its_report_ends_now() -> None:
    before = time.time()
    *_, last = table([{"started": BEGUN, "ended": BEGUN + 1}, {"started": before}])
    assert last[2] in {units.date(before + second) for second in range(100)}


def _killed_half_way(address: str) -> None:
    with Client(address) as client:
        multiply(client, stop=Meanwhile(lambda: os.kill(os.getpid(), signal.SIGKILL), "C.zarr"))


@pytest.mark.minutes
def test_the_report_shows_the_end_of_each_run(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    operands(Path("in"))
    child = multiprocessing.get_context("forkserver").Process(target=_killed_half_way, args=(client.scheduler.address,))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(Stopped):
        multiply(client, stop=HalfWay(enough=len(marked()) + 1))
    killed, stopped = json.loads(Path("C.zarr.job/manifest.json").read_text())["runs"]
    times = [json.loads(path.read_text())["time"] for path in Path("C.zarr.job").glob("*/*/done/*.json")]
    last = max(each for each in times if each < stopped["started"])  # workers may write after the client's end
    assert ("ended" in killed, killed["last_block"]) == (False, last)
    assert stopped["started"] < stopped["ended"]
    job.resume("C.zarr", client=client)
    *before, complete = json.loads(Path("C.zarr.certificate.json").read_text())["runs"]
    assert before == [killed, stopped]
    assert stopped["ended"] < complete["started"] < complete["ended"]
    text = Path("C.zarr.report.html").read_text()
    (found,) = re.findall(r"<h2>Runs</h2><table>(.*?)</table>", text, re.DOTALL)
    rows = [re.findall(r"<td>(.*?)</td>", unescape(row)) for row in found.split("</tr>")]
    assert rows[1][2].endswith(f"last block written {units.date(last)}")
    assert rows[2][2] == units.date(stopped["ended"])
    assert [len(row) for row in rows[1:4]] == [8, 8, 8]
    assert re.fullmatch(r"[-\d]+ [:\d]+ [+\d]+", rows[3][2])
