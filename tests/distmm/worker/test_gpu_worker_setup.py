"""Local clusters, the scripts of `distmm.submit` and the files of `deploy/` start GPU workers with the same options."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

from distmm.config import DEFAULTS
from distmm.submit.schema import Workers
from distmm.worker import gpu_worker_setup
from distmm.worker.gpu_memory import dask_setup

DEPLOY = Path(__file__).parents[3] / "deploy"


def test_local_clusters_and_the_command_line_set_workers_up_alike() -> None:
    arguments, options = gpu_worker_setup.cluster_arguments(), gpu_worker_setup.worker_options()
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given == {
        "--rmm-pool-size": str(arguments["rmm_pool_size"]),
        "--set-rmm-allocator-for-libs": arguments["rmm_allocator_external_lib_list"],
        "--device-memory-limit": str(arguments["device_memory_limit"]),
        "--preload": arguments["preload"][0],
    }
    assert Workers(device="gpu").threads == arguments["threads_per_worker"] == gpu_worker_setup.THREADS


def test_the_default_of_a_local_cluster_is_the_pool_of_the_other_workers() -> None:
    assert DEFAULTS["gpu-pool"] == gpu_worker_setup.POOL_FRACTION


def test_the_preload_is_a_module_with_a_setup_for_dask() -> None:
    assert dask_setup.__module__ == gpu_worker_setup.PRELOAD


@pytest.mark.parametrize("name", ["README.md", "slurm/one_node.sh", "slurm/sixteen_nodes.sh"])
def test_commands_of_deploy_start_such_workers(name: str) -> None:
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    words = shlex.split(re.search(r"(?:dask cuda worker|dask_cuda)\b.*", text)[0], comments=True)
    wanted = (*gpu_worker_setup.worker_options(), "--nthreads", str(gpu_worker_setup.THREADS))
    for option, value in zip(wanted[::2], wanted[1::2], strict=True):
        assert words[words.index(option) + 1] == value


def lists(node: object) -> list[list[object]]:
    below = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return [found for each in below for found in lists(each)] + ([node] if isinstance(node, list) else [])


@pytest.mark.parametrize("name", ["kubernetes/cluster.yaml", "kubernetes/job.yaml"])
def test_manifests_of_deploy_start_such_workers(name: str) -> None:
    wanted = (*gpu_worker_setup.worker_options(), "--nthreads", str(gpu_worker_setup.THREADS))
    manifests = yaml.safe_load_all((DEPLOY / name).read_text())
    commands = [found for manifest in manifests for found in lists(manifest) if "--rmm-pool-size" in found]
    assert commands
    for words in commands:
        pairs = {(option, str(value)) for option, value in itertools.pairwise(words)}  # a preload for pages' ports, too
        assert set(zip(wanted[::2], wanted[1::2], strict=True)) <= pairs
