"""Clusters that cannot be connected to or started are refused, with the reason and the remedy."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster, WorkerPlugin

from distmm import clusters
from distmm.clusters import local_cluster
from distmm.errors import InputError
from tests.distmm.clusters.granted import grant


def test_more_workers_than_the_memory_holds_are_refused() -> None:
    most = local_cluster.MEMORY_LIMIT // local_cluster.LEAST_MEMORY
    with pytest.raises(InputError, match=rf"{most + 1} workers: each needs 300 MB by .*; ask for {most} or fewer"):
        local_cluster.cpu_workers("cpu", most + 1, None)  # as `local`, which would start them if it did not refuse


def test_a_start_that_fails_without_a_reason_is_told_by_its_error() -> None:
    error = RuntimeError("Nanny failed to start.")
    error.__cause__ = MemoryError()  # as Dask raises it for a fraction of the memory that is not a number
    assert str(local_cluster._not_started("workers have not started", error)) == "workers have not started: MemoryError"


def test_a_package_that_workers_do_not_import_is_not_called_unguarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("Nanny failed to start worker process")
    for name, unguarded in {"__main__.py": False, "script.py": True}.items():
        (tmp_path / name).write_text("from package import main; main()")
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / name), raising=False)
        assert ("the script that started it" in str(local_cluster._not_started("no workers", error))) == unguarded


def test_a_cluster_without_workers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Client.wait_for_workers  # the scheduler has time to answer, and nobody waits for workers
    monkeypatch.setattr(Client, "wait_for_workers", lambda client, n, timeout: wait(client, n, timeout=0.01))
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as empty,
        pytest.raises(InputError, match=r"no workers after 60 s; start some"),
        clusters.connect(empty.scheduler_address, timeout=60),
    ):
        pass


def test_a_file_that_is_no_scheduler_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    for text in ["{}", "", "[1]", '{"workers": {}}']:
        file.write_text(text)
        with pytest.raises(InputError, match="not a scheduler file"), clusters.connect(str(file)):
            pass


def test_a_cluster_that_does_not_answer_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for where in (f"tcp://127.0.0.1:{port}", "carrier://pigeon"):
        with (
            pytest.raises(InputError, match=r"no scheduler answers at .* within 0\.3 s"),
            clusters.connect(where, timeout=0.3),
        ):
            pass


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("nowhere.json", {}, "neither local"),
        (
            "tcp://127.0.0.1:1",
            {"workers": 3, "memory_limit": "1GB"},
            "workers and memory_limit can be set for a local.*: leave out workers and memory_limit",
        ),
        ("local-cpu", {"workers": 0}, "0 workers"),
        ("local-cpu", {"memory_limit": "much"}, "'much' is not a size"),
        ("local-cpu", {"memory_limit": "1e400"}, "'1e400' is not a size"),
        ("local-cpu", {"dashboard": "here"}, "no port"),
        ("local", {"device": "tpu"}, "'tpu' is not one of"),
    ],
)
def test_impossible_clusters_are_refused(where: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message), clusters.connect(where, **options):
        pass


@pytest.mark.minutes
def test_a_script_without_main_guard_is_told_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from distmm import clusters\nwith clusters.local('cpu', dashboard=None) as client: pass\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    *lines, last = done.stderr.strip().splitlines()
    assert re.fullmatch(r"distmm.errors.InputError: this script starts a cluster .* if __name__ == '__main__':", last)
    assert sum(line.startswith("Traceback") for line in lines) == 1


def test_a_gpu_asked_for_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grant(monkeypatch)
    with pytest.raises(InputError, match=r"a GPU was asked for.*no NVIDIA GPU"), clusters.local("gpu"):
        pass


@pytest.mark.parametrize(
    ("version", "second", "extra"),
    [
        (12080, (9, 0), "cuda12"),
        (13010, (9, 0), "cuda13"),
        (13010, (7, 5), "cuda13"),
        (13010, (7, 0), "cuda12"),  # the compilers of CUDA 13 know no V100
    ],
)
def test_a_gpu_without_the_extra_names_the_command_to_type(
    version: int, second: tuple[int, int], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(monkeypatch, (9, 0), second, version=version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert clusters.missing_for_gpu() == (
        f"2 GPU(s) found, but not the package(s) dask_cuda, cupy, rmm: type pip install '.[{extra}]'"
    )


def test_a_driver_that_grants_no_device_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    grant(monkeypatch)
    assert clusters.gpu_count() == 0


@pytest.mark.minutes
class Unstartable(WorkerPlugin):
    def setup(self, worker: Any) -> None:
        raise MemoryError(f"no memory for worker {worker.name}")


def test_why_a_gpu_worker_does_not_start_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(silence_logs: int, **_: Any) -> LocalCluster:
        """Start workers as LocalCUDACluster does, which does not raise their errors."""
        made = LocalCluster(
            n_workers=0, processes=True, dashboard_address=":0", silence_logs=silence_logs, plugins=[Unstartable()]
        )
        made.scale(2)
        made.sync(made._correct_state)
        return made

    grant(monkeypatch, (9, 0), (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "dask_cuda", types.SimpleNamespace(LocalCUDACluster=stand_in))
    with (
        pytest.raises(InputError, match=r"worker \d of the local cluster has not started: no memory for worker \d$"),
        clusters.local("gpu", dashboard=None, quiet=True),
    ):
        pass
