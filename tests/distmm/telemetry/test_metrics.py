"""Prometheus series: scraped by a real Prometheus, asked with the queries of the dashboard and the alerts we ship."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import dask.array as da
import pytest
from distributed import Client, wait

from distmm import matmul, plan
from distmm.telemetry import metrics
from distmm.telemetry.events import TOPIC, Device
from distmm.telemetry.worker import WorkerTelemetry

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"


# A GPU where there is none: 60 of 80 GB in use, busy half of the time. A lambda travels to workers by value.
GPU = lambda worker: Device(60 * 10**9, 80 * 10**9, 0.5)  # noqa: E731


def wait_for_late_heartbeats() -> None:
    from distmm.telemetry import scheduler

    scheduler.LINGER_SECONDS = 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A scheduler and two workers started as users do, with the preload: their /metrics are theirs alone."""
    folder = tmp_path_factory.mktemp("cluster")
    file = folder / "scheduler.json"
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    dask += ["--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file)]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1"]
    worker += ["--memory-limit", "2GiB", "--host", "127.0.0.1", "--no-nanny"]
    commands = [[*dask, "--preload", "distmm.telemetry.preload"], [*worker, "--name", "0"], [*worker, "--name", "1"]]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = {**os.environ, "PYTHONPATH": path, "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "False"}
    with (folder / "log").open("w") as log, ExitStack() as started:
        for command in commands:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            started.callback(process.wait, 120)
            started.callback(process.terminate)
        deadline = time.monotonic() + 120
        while not file.exists() or not file.read_text():
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        with Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            client.register_plugin(WorkerTelemetry(GPU))
            client.run_on_scheduler(wait_for_late_heartbeats)
            with client.as_current():
                yield client


def product(client: Client, edge: int) -> tuple[str, Any]:
    """Multiply on two workers; return the product's name and its plan."""
    A, B = (da.random.default_rng(seed).random((8 * edge,) * 2, chunks=edge) for seed in (1, 2))
    C = matmul(A, B, client=client)
    wait(client.persist(C))
    return C.name, plan(A, B, client=client)


@pytest.fixture
def query(cluster: Client, prometheus: str, tmp_path: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """A Prometheus with the shipped configuration, every second, and a function that asks it."""
    scheduler = urllib.parse.urlsplit(cluster.dashboard_link).netloc
    text = (MONITORING / "prometheus.yml").read_text()
    assert text.count("scheduler:8787") == 2
    (tmp_path / "prometheus.yml").write_text(re.sub(r"\b15s\b", "1s", text.replace("scheduler:8787", scheduler)))
    (tmp_path / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    arguments = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [prometheus, *arguments, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log
        ) as process,
    ):

        def wait_for(true: Callable[[], object]) -> Any:
            deadline = time.monotonic() + 120
            while not (value := true()):
                said = (tmp_path / "log").read_text()
                assert process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.1)
            return value

        def ask(expression: str) -> list[dict[str, Any]]:
            path = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            with urllib.request.urlopen(path) as answer:
                return json.load(answer)["data"]["result"]

        def ready() -> bool:
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(f"http://{address}/-/ready"):
                return True
            return False

        try:
            listens = re.compile(r'"Listening on" address=(\S+)')
            address = wait_for(lambda: listens.search((tmp_path / "log").read_text()))[1]
            wait_for(ready)
            wait_for(lambda: len(ask("up == 1")) == 3)  # the scheduler and two workers that it told of
            yield ask
        finally:
            process.terminate()


def expressions() -> list[str]:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_prometheus_answers_every_query_of_the_dashboard(
    cluster: Client, query: Callable[[str], list[dict[str, Any]]]
) -> None:
    name, made = product(cluster, 96)
    settle(query, {f'distmm_blocks_done{{product="{name}"}}': 64})
    product(cluster, 48)  # rates and increases need a second value
    deadline = time.monotonic() + 120
    silent = expressions()
    while silent:
        silent = [expression for expression in silent if not query(expression)]
        assert time.monotonic() < deadline, silent
        time.sleep(0.5)

    shown = {
        "sum(distmm_flops_total)": made.problem.flops + 2 * (8 * 48) ** 3,
        f'distmm_blocks{{product="{name}"}}': 64,
        f'distmm_blocks_done{{product="{name}"}}': 64,
        f'distmm_bytes_moved{{product="{name}"}}': made.bytes_moved,
        f'distmm_bytes_bound{{product="{name}"}}': made.bytes_moved,
        "sum(distmm_received_bytes_total)": made.bytes_moved * 5 // 4,  # the second product's blocks are 1/4 as large
        'count(distmm_gpu_utilization_ratio{worker=~"[01]"} == 0.5)': 2,
        "count(distmm_gpu_memory_used_bytes / distmm_gpu_memory_bytes == 0.75)": 2,
        "distmm_products_total": 2,
        "count(distmm_kernel_seconds_total > 0)": 2,
        "distmm_resumes_total": 0,
    }
    settle(query, shown)
    assert query('ALERTS{alertstate="firing"}') == []  # pending ones may be: a product this small is slow, then still


def settle(query: Callable[[str], list[dict[str, Any]]], shown: dict[str, int]) -> None:
    """Wait until each expression has one value, this one: what has just happened is scraped a second later."""
    deadline = time.monotonic() + 120
    while True:
        found = {expression: [float(result["value"][1]) for result in query(expression)] for expression in shown}
        if found == {expression: [value] for expression, value in shown.items()}:
            return
        wrong = {expression: values for expression, values in found.items() if values != [shown[expression]]}
        assert time.monotonic() < deadline, wrong
        time.sleep(0.5)


def test_what_a_job_says_of_itself_is_counted(cluster: Client, query: Callable[[str], list[dict[str, Any]]]) -> None:
    cluster.log_event(TOPIC, {"event": "begin", "job": "a1", "path": "/data/C.zarr", "kept": [[0, 0], [0, 1]]})
    cluster.log_event(TOPIC, {"event": "certificate-failure", "job": "", "i": 0, "j": 2})  # damaged on disk
    alert = 'count(ALERTS{alertname="DistmmCertificateFailure", alertstate="firing"})'
    settle(query, {"distmm_resumes_total": 1, "distmm_certificate_failures_total": 1, alert: 1})


def test_shipped_rules_hold(promtool: str) -> None:
    for arguments in (["check", "config", "prometheus.yml"], ["check", "rules", "alerts.yml"]):
        subprocess.run([promtool, *arguments], cwd=MONITORING, check=True, capture_output=True)
    done = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yml"], cwd=MONITORING, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_dashboard_and_alerts_use_series_that_exist_and_all_of_them() -> None:
    known = {name + "_total" * (kind == "counter") for name, (kind, *_) in metrics.SERIES.items()}
    shown = set(re.findall(r"distmm_\w+", " ".join(expressions())))
    alerts = set(re.findall(r"distmm_\w+", (MONITORING / "alerts.yml").read_text()))
    assert shown == known
    assert alerts <= known
