"""Prometheus series: a real Prometheus scrapes them and answers the queries of our dashboard and alerts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import pytest
from distributed import Client, wait

from distmm import matmul, plan
from distmm.telemetry import metrics
from distmm.telemetry.activity import Device
from distmm.telemetry.job_events import JOB_TOPIC
from distmm.telemetry.worker import WorkerTelemetry
from tests.scraping import scraping
from tests.until import until

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"


# Stands for a GPU: 60 of 80 GB in use, busy half of the time. A lambda is pickled by value: workers import no tests.
GPU = lambda worker: Device(60 * 10**9, 80 * 10**9, 0.5)  # noqa: E731


def wait_for_late_heartbeats() -> None:
    from distmm.telemetry import heartbeats

    heartbeats.LINGER_SECONDS = 600


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A scheduler and two workers, started by commands with our preload: no other test adds to their metrics."""
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
        until(lambda: file.exists() and file.read_text(), (folder / "log").read_text)
        with Client(scheduler_file=str(file), set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            client.register_plugin(WorkerTelemetry(GPU))
            client.run_on_scheduler(wait_for_late_heartbeats)
            with client.as_current():
                yield client


def product(client: Client, edge: int) -> tuple[str, Any]:
    """Multiply on two workers; return the product's name and its plan."""
    A, B = (da.random.default_rng(seed).random((4 * edge,) * 2, chunks=edge) for seed in (1, 2))
    C = matmul(A, B, client=client)
    wait(client.persist(C))
    return C.name, plan(A, B, client=client)


@pytest.fixture(scope="module")
def query(
    cluster: Client, prometheus: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """A Prometheus with the shipped configuration that scrapes every second; yields a function that queries it."""
    scheduler, folder = urllib.parse.urlsplit(cluster.dashboard_link).netloc, tmp_path_factory.mktemp("prometheus")
    text = (MONITORING / "prometheus.yml").read_text()
    assert text.count("scheduler:8787") == 2
    (folder / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text())
    configuration = re.sub(r"\b15s\b", "1s", text.replace("scheduler:8787", scheduler))
    with scraping(prometheus, configuration, folder) as ask:
        until(lambda: len(ask("up == 1")) == 3)  # the scheduler, and two workers that it named
        yield ask


def expressions() -> list[str]:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    selected = '{cluster=~"$cluster"}'
    for expression in found:  # each series is that of the clusters which are chosen
        assert re.findall(r"distmm_\w+", expression) == re.findall(r"(distmm_\w+)" + re.escape(selected), expression)
    return [expression.replace("$cluster", ".*") for expression in found]


@pytest.mark.minutes
@pytest.mark.usefixtures("blocks_are_chunks")
def test_prometheus_answers_every_query_of_the_dashboard(
    cluster: Client, query: Callable[[str], list[dict[str, Any]]]
) -> None:
    name, made = product(cluster, 96)
    settle(query, {f'distmm_blocks_done{{product="{name}"}}': 16})
    product(cluster, 48)  # rates and increases need a second value
    for expression in expressions():
        until(lambda asked=expression: query(asked), expression)

    shown = {
        "sum(distmm_flops_total)": made.problem.flops + 2 * (4 * 48) ** 3,
        f'distmm_blocks{{product="{name}"}}': 16,
        f'distmm_blocks_done{{product="{name}"}}': 16,
        f'distmm_moved_bytes{{product="{name}"}}': made.bytes_moved,
        f'distmm_bound_bytes{{product="{name}"}}': made.bytes_moved,
        "sum(distmm_received_bytes_total)": made.bytes_moved * 5 // 4,  # the second product's blocks are 1/4 as large
        'count(distmm_gpu_utilization_ratio{worker=~"[01]"} == 0.5)': 2,
        "count(distmm_gpu_memory_used_bytes / distmm_gpu_memory_bytes == 0.75)": 2,
        "distmm_products_total": 2,
        "count(distmm_kernel_seconds_total > 0)": 2,
        "distmm_resumes_total": 0,
        f'distmm_workers_planned{{product="{name}"}}': 2,
        f'distmm_workers{{product="{name}"}}': 0,  # it is over
        f'distmm_stalled{{product="{name}"}}': 0,
        "count by (cluster) (up)": 3,  # scheduler and workers are of one cluster
        f'count(up{{cluster="{urllib.parse.urlsplit(cluster.dashboard_link).netloc}"}})': 3,
    }
    settle(query, shown)
    # Alerts may be pending: a product this small is slow, and then nothing runs.
    assert query('ALERTS{alertstate="firing"}') == []


def settle(query: Callable[[str], list[dict[str, Any]]], shown: dict[str, int]) -> None:
    """Wait until each expression has exactly the value in `shown`: Prometheus scrapes once a second."""

    def wrong() -> dict[str, list[float]]:
        found = {expression: [float(result["value"][1]) for result in query(expression)] for expression in shown}
        return {expression: values for expression, values in found.items() if values != [shown[expression]]}

    until(lambda: not wrong(), lambda: str(wrong()))


@pytest.mark.minutes
def test_what_a_job_says_of_itself_is_counted(cluster: Client, query: Callable[[str], list[dict[str, Any]]]) -> None:
    cluster.log_event(JOB_TOPIC, {"event": "begin", "job": "a1", "path": "/data/C.zarr", "kept": [[0, 0], [0, 1]]})
    # Without the name of a job: a block that was found damaged on disk.
    cluster.log_event(JOB_TOPIC, {"event": "rejected", "job": "", "blocks": [[0, 2]]})
    alert = 'count(ALERTS{alertname="DistmmCertificateFailure", alertstate="firing"})'
    settle(
        query,
        {"distmm_resumes_total": 1, "distmm_rejections_total": 1, alert: 1},
    )


@pytest.mark.minutes
def test_a_read_that_fails_is_counted_and_fires_an_alert(
    cluster: Client, query: Callable[[str], list[dict[str, Any]]]
) -> None:
    settle(query, {"distmm_failures_total": 0})  # an increase needs a value before it
    A = da.from_delayed(dask.delayed(int)("no number", dask_key_name="unreadable"), (8, 8), "f8").rechunk(4)
    C = cluster.persist(matmul(A, da.ones((8, 8), chunks=4), client=cluster))
    alert = 'count(ALERTS{alertname="DistmmFailed", alertstate="firing"})'
    settle(query, {"distmm_failures_total": 1, f'distmm_running{{product="{C.name}"}}': 0, alert: 1})


def test_the_shipped_configuration_and_rules_pass_promtool(promtool: str) -> None:
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
