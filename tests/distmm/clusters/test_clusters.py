"""Local clusters, and connections to running clusters."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

from distmm import clusters
from distmm.all_workers import workers_of
from distmm.clusters import cluster, local_cluster
from distmm.errors import InputError
from distmm.worker import gpu_worker_setup
from distmm_kernels import background
from tests.distmm.clusters.granted import grant


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Client]:
    with clusters.local("cpu", workers=2, memory_limit="1GB", dashboard=None) as client:
        yield client


def test_a_local_cpu_cluster_has_the_workers_threads_and_memory_asked_for(two_workers: Client) -> None:
    workers = workers_of(two_workers).values()
    cores = max(1, local_cluster.CPU_COUNT // 2)
    threads = cores if cores <= local_cluster.MOST_CPU_TASKS else 1
    assert [(w["nthreads"], w["memory_limit"]) for w in workers] == [(threads, 10**9)] * 2


def test_a_plan_before_the_workers_start_has_the_figures_of_the_workers(two_workers: Client) -> None:
    described = clusters.cpu_workers("cpu", 2, "1GB")
    assert described is not None
    for dtype in (np.dtype("f4"), np.dtype("i8")):
        before, there = described.spec(dtype, None, "highest"), cluster.describe(two_workers, dtype)
        assert replace(before, memory=0) == replace(there, memory=0)
        assert there.memory <= before.memory  # less where the libraries of a worker take more than is counted for them


def test_without_dashboard_there_are_probes_and_metrics_but_no_pages(two_workers: Client) -> None:
    port = two_workers.run_on_scheduler(lambda dask_scheduler: dask_scheduler.http_server.port)

    def status(path: str) -> int:
        with (
            contextlib.suppress(urllib.error.HTTPError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as a,
        ):
            return int(a.status)
        return 404

    assert [status(path) for path in ("health", "metrics", "info/main/workers.html", "status")] == [200, 200, 404, 404]


def test_our_schedulers_do_not_steal_and_outlive_dead_workers(two_workers: Client) -> None:
    def settings(dask_scheduler: Any) -> tuple[bool, int]:
        return "stealing" in dask_scheduler.extensions, dask_scheduler.allowed_failures

    assert two_workers.run_on_scheduler(settings) == (False, 100)


def test_dasks_own_monitoring_leaves_the_cores_to_the_products(two_workers: Client) -> None:
    def every_ms(dask_worker: Any) -> tuple[float, float]:
        return tuple(dask_worker.periodic_callbacks[name].callback_time for name in ("tick", "profile"))

    assert set(two_workers.run(every_ms).values()) == {(200, 100)}
    ticks = two_workers.run_on_scheduler(lambda dask_scheduler: dask_scheduler.periodic_callbacks["tick"].callback_time)
    assert ticks == 200


@pytest.mark.minutes
def test_a_dead_worker_comes_back_however_long_its_start_takes() -> None:
    soon = dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"})  # no worker starts as fast
    with soon, clusters.local("cpu", workers=1, memory_limit="1GB", dashboard=None, quiet=True) as client:
        (before,) = client.run(os.getpid).values()
        os.kill(before, signal.SIGKILL)
        while before in (now := client.run(os.getpid, on_error="ignore").values()) or not now:
            client.wait_for_workers(1, timeout=60)


@pytest.mark.parametrize(
    ("cores", "workers", "threads", "expected"),
    [
        (1, None, None, (1, 1, "1")),
        (2, None, None, (1, 2, "1")),
        (4, None, None, (1, 4, "1")),
        (64, None, None, (4, 1, "16")),
        (64, 8, None, (8, 1, "8")),
        (64, 16, None, (16, 4, "1")),
        (2, 4, None, (4, 1, "1")),
        (16, 4, 1, (4, 1, "4")),
    ],
)
def test_the_cores_are_shared_by_workers_their_tasks_and_the_kernels_of_these(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int | None, threads: int | None,
    expected: tuple[int, int, str],
) -> None:  # fmt: skip
    monkeypatch.setattr(local_cluster, "CPU_COUNT", cores)
    for name in clusters.BLAS_THREADS:
        monkeypatch.delenv(name, raising=False)
    _, arguments, config = local_cluster._cpu(workers, 10**9, threads)
    kernel = {config[f"distributed.nanny.pre-spawn-environ.{name}"] for name in clusters.BLAS_THREADS}
    assert (arguments["n_workers"], arguments["threads_per_worker"], *kernel) == expected


def test_the_configuration_of_cpu_clusters_reaches_their_workers(two_workers: Client) -> None:
    cores = max(1, local_cluster.CPU_COUNT // 2)
    kernel = os.environ.get("OPENBLAS_NUM_THREADS", "1" if cores <= local_cluster.MOST_CPU_TASKS else str(cores))
    assert set(two_workers.run(lambda: os.environ["OPENBLAS_NUM_THREADS"]).values()) == {kernel}


def _faults_of_temporary_arrays() -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(20):
        np.ones(1 << 17)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_tasks_of_cpu_workers_get_the_pages_of_their_last_small_arrays_again(two_workers: Client) -> None:
    pages_of_one = (1 << 20) // resource.getpagesize()
    assert two_workers.submit(_faults_of_temporary_arrays, pure=False).result() < 3 * pages_of_one


@pytest.mark.minutes
def test_the_configuration_of_our_clusters_ends_with_them() -> None:
    before = dask.config.get("distributed.scheduler.work-stealing")
    with clusters.local("cpu", workers=1, dashboard=None):
        assert dask.config.get("distributed.scheduler.work-stealing") is False
    assert dask.config.get("distributed.scheduler.work-stealing") == before


@pytest.mark.minutes
def test_a_dashboard_port_in_use_is_replaced_without_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with clusters.local("cpu", workers=1, dashboard=f":{port}") as client:
            assert client.dashboard_link.startswith("http://127.0.0.1:")
            assert f":{port}/" not in client.dashboard_link


# The port is taken after it has been found free.
TAKEN = """
import socket
from distmm import clusters
from distmm.clusters import local_cluster
if __name__ == "__main__":
    local_cluster._free_address = lambda address: address
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with clusters.local("cpu", workers=1, dashboard=f"127.0.0.1:{port}") as client:
            print(f":{port}/" in client.dashboard_link)
"""


@pytest.mark.minutes
def test_a_dashboard_port_that_another_process_takes_meanwhile_is_replaced_without_a_warning(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TAKEN)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_connecting_by_address_and_by_scheduler_file(two_workers: Client, tmp_path: Path) -> None:
    address = two_workers.scheduler.address
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": address}))
    for where in (address, str(file)):
        with clusters.connect(where) as client:
            assert client.submit(sum, [1, 2]).result() == 3


def test_local_clusters_have_names() -> None:
    with clusters.connect("local-cpu", workers=1, dashboard=None) as client:
        assert len(workers_of(client)) == 1


def test_arguments_of_local_cuda_cluster_with_the_class_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def stand_in(**arguments: Any) -> LocalCluster:
        seen.update(arguments, stealing=dask.config.get("distributed.scheduler.work-stealing"))
        return LocalCluster(n_workers=1, processes=False, dashboard_address=":0")

    grant(monkeypatch, (9, 0), (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "dask_cuda", types.SimpleNamespace(LocalCUDACluster=stand_in))
    begun: list[tuple[str, tuple[int, int]]] = []
    monkeypatch.setattr(background, "begin", lambda dtype, capability: bool(begun.append((dtype, capability))))
    with clusters.local("auto", memory_limit="8GB", dashboard=None):
        pass
    assert begun[0] == (
        "float32",
        (9, 0),
    )  # CPU workers, which stand for those with GPUs here, have no compute capability
    assert seen == {
        "n_workers": 2,
        "threads_per_worker": gpu_worker_setup.THREADS,
        "memory_limit": 8 * 10**9,
        "rmm_pool_size": 0.8,
        "rmm_allocator_external_lib_list": "cupy",
        "device_memory_limit": 0,
        "preload": ["distmm.worker.gpu_memory"],
        "dashboard_address": "127.0.0.1:0",
        "scheduler_kwargs": {"dashboard": False},
        "silence_logs": logging.WARNING,
        "stealing": False,
    }
    with dask.config.set({"distmm.gpu-pool": "4GB"}), clusters.local("gpu", dashboard=None):
        assert seen["rmm_pool_size"] == "4GB"
    for pool in (True, 0, 1, 1.5, "much", "-1GB", None):
        with (
            dask.config.set({"distmm.gpu-pool": pool}),
            pytest.raises(InputError, match=r"has distmm\.gpu-pool: .*, which is neither a share .* nor a size"),
            clusters.local("gpu", dashboard=None),
        ):
            pass
    with (
        pytest.raises(InputError, match="3 workers: each needs its own GPU, and this process has 2"),
        clusters.local("gpu", workers=3),
    ):
        pass


def test_dasks_arrays_are_imported_while_the_workers_start(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from distmm import clusters\n"
        "if __name__ == '__main__':\n"
        "    before = 'dask.array' in sys.modules\n"
        "    with clusters.local('cpu', workers=1, dashboard=None, quiet=True):\n"
        "        print(before, 'dask.array' in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["False", "True"]


@pytest.mark.gpu
@pytest.mark.skipif(clusters.missing_for_gpu() is not None, reason=str(clusters.missing_for_gpu()))
def test_a_gpu_cluster_gives_each_worker_one_device() -> None:
    with clusters.local("gpu", dashboard=None) as client:
        workers = workers_of(client)
        assert len(workers) == clusters.gpu_count()
        assert {w["nthreads"] for w in workers.values()} == {gpu_worker_setup.THREADS}
