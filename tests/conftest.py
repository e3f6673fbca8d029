"""GPU tests are left out where there is no GPU, and one real 4-worker cluster serves the tests that need it."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import dask
import pytest
from distributed import Client, LocalCluster
from hypothesis import HealthCheck, settings

from tests import forked
from tests.until import until

if TYPE_CHECKING:
    from distmm_kernels.device import Device

# No example fails for the time that it takes, and each run draws the same ones.
settings.register_profile("distmm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("distmm")


# Plans find no kernels that are still being built, so that the kernel of a product does not depend on time.
os.environ["DISTMM_BUILD_AHEAD"] = "0"

SHARED = pytest.StashKey[LocalCluster]()
WITHOUT_GPU = pytest.StashKey[str]()  # why tests for GPUs are left out
WORKERS = 4
MOST_PROCESSES = 8  # each has a cluster of its own


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes for `pytest` without ``-n``: several for all tests, none for selected ones."""
    from distmm_kernels import device

    options = config.getini("addopts")
    selected = config.option.keyword or config.option.markexpr != options[options.index("-m") + 1]
    if selected or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0  # a developer looks at these: output comes at once, and debuggers work
    if device.gpus():
        return 0  # some tests fill the memory of a GPU
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


@pytest.hookimpl(trylast=True)  # of the tests that -m and -k select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # processes take whole files, in this order: the long ones first
    needs = {"gpu": 1, "multigpu": 2}
    needed = [max((n for mark, n in needs.items() if item.get_closest_marker(mark)), default=0) for item in items]
    if not any(needed):
        return
    from distmm_kernels import device

    count = len(device.gpus())
    without = [item for item, n in zip(items, needed, strict=True) if n > count]
    if without:
        # To skip 4,800 one by one takes a slow processor 45 s, and prints 239 lines.
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item, n in zip(items, needed, strict=True) if n <= count]
        most = max(n for n in needed if n > count)
        config.stash[WITHOUT_GPU] = (
            f"{len(without)} tests are left out: they need {'a GPU' if most == 1 else 'up to 2 GPUs'}, "
            f"{count} usable ({device.why_no_gpu() or 'no second one'})"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send from a process of pytest-xdist what the first process prints at the end."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["without_gpu"] = session.config.stash.get(WITHOUT_GPU, "")


def pytest_testnodedown(node: Any) -> None:
    node.config.stash[WITHOUT_GPU] = getattr(node, "workeroutput", {}).get("without_gpu", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if said := config.stash.get(WITHOUT_GPU, ""):
        terminalreporter.write_line(said)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep the objects of thousands of tests out of each later search for garbage, which takes a second with them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Four single-threaded worker processes with work stealing off, as distmm's own clusters are."""
    with dask.config.set({"distributed.scheduler.work-stealing": False}), forked.workers():
        cluster = LocalCluster(n_workers=WORKERS, threads_per_worker=1, memory_limit="2GiB", dashboard_address=":0")
    with cluster, Client(cluster, set_as_default=False) as client:
        request.config.stash[SHARED] = cluster
        yield client
        del request.config.stash[SHARED]


@pytest.fixture
def gpu() -> Device:
    """The GPU that tests run on; without one the test is skipped and says what is missing."""
    from distmm_kernels import device

    if missing := device.why_no_gpu():
        pytest.skip(missing)
    return device.current()


@pytest.fixture(autouse=True)
def shared_workers_stay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that costs the shared cluster a worker. Without this, tests that come later would fail."""
    yield
    if (cluster := request.config.stash.get(SHARED, None)) is not None:
        until(lambda: len(cluster.scheduler.workers) == WORKERS)


@pytest.fixture(autouse=True)
def levels_stay() -> Iterator[None]:
    """Restore levels of loggers: commands raise them until their process ends, and here it goes on."""
    names = ("distributed", "distributed.client", "distributed.nanny", "distmm.telemetry.scheduler", "asyncio")
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    yield
    for logger, level in levels.items():
        logger.setLevel(level)
