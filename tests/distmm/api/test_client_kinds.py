"""Clients and clusters as users have them: in this process, asynchronous, named by an address, without workers."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import distmm
from distmm.all_workers import workers_of
from distmm.errors import InputError
from tests import forked
from tests.until import until

EDGE = 400  # of float64 matrices: more bytes than `lending.SMALLEST`


def environment(**more: str) -> dict[str, str]:
    """Variables of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def test_workers_in_this_process_read_and_write_its_arrays() -> None:
    a, b = np.random.default_rng(1).integers(-9, 9, (2, EDGE, EDGE)).astype("f8")
    c = np.empty((EDGE, EDGE))
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        assert distmm.matmul(a, b, out=c, client=client) is c
        np.testing.assert_array_equal(c, a @ b)
        np.testing.assert_array_equal(distmm.matmul(a, b, client=client).compute(), a @ b)
        assert distmm.verify(a, b, c)


@pytest.mark.minutes
def test_a_worker_that_joins_out_of_reach_names_the_remedy_which_works(tmp_path: Path) -> None:
    a, b = np.random.default_rng(2).integers(-9, 9, (2, EDGE, EDGE)).astype("f8")
    preload = "from distmm.transfer import process_memory\nprocess_memory.can_read = lambda *at: False\n"
    (tmp_path / "elsewhere.py").write_text(preload)
    with forked.workers():
        cluster = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0")
    with cluster, Client(cluster, set_as_default=False) as client, client.as_current():
        (first,) = workers_of(client)
        C, later = distmm.matmul(a, b, client=client) + 0, distmm.matmul(a, b, client=client)
        command = [sys.executable, "-m", "distributed.cli.dask_worker", cluster.scheduler_address, "--no-nanny"]
        command += ["--nthreads", "1", "--no-dashboard", "--preload", str(tmp_path / "elsewhere.py")]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL) as newcomer:
            try:
                until(lambda: len(workers_of(client)) == 2)
                client.retire_workers([first])
                with pytest.raises(InputError, match=r"out of reach of this worker.*Call distmm again"):
                    C.compute()
                for product in (later, distmm.matmul(a, b, client=client)):
                    np.testing.assert_array_equal(product.compute(), a @ b)
            finally:
                newcomer.terminate()


def test_an_asynchronous_client_is_refused() -> None:
    a, out = np.eye(8), np.empty((8, 8))

    async def products() -> None:
        async with (
            LocalCluster(n_workers=0, processes=False, dashboard_address=":0", asynchronous=True) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            for call in (
                lambda: distmm.matmul(a, a, client=client),
                lambda: distmm.plan(a, a, client=client),
                lambda: distmm.matmul(a, a, out=out),  # the current one
                lambda: distmm.verify(a, a, a),
            ):
                with pytest.raises(InputError, match=r"client is asynchronous.*distributed\.Client\(address\)"):
                    call()
            with dask.config.set(scheduler=client.get):  # Dask does not see that the method's client is asynchronous
                assert distmm.matmul(a, a).shape == (8, 8)
                with pytest.raises(InputError, match=r"client is asynchronous.*distributed\.Client\(address\)"):
                    distmm.matmul(a, a, out=out)

    asyncio.run(products())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_the_client_of_the_process_that_this_one_was_forked_from_is_refused() -> None:
    """Its event loop does not run in the new process, where a call would wait for ever."""
    eye, context = np.eye(8), multiprocessing.get_context("fork")
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        with dask.config.set(scheduler="threads"):
            lazy = distmm.matmul(eye, eye)

        def products() -> None:
            for call in (
                lambda: distmm.matmul(eye, eye),  # with the current client
                lambda: distmm.matmul(eye, eye, client=client),
                lambda: distmm.verify(eye, eye, eye),
                lazy.compute,
            ):
                with pytest.raises(InputError, match=r"forked from.*distributed\.Client\('inproc.*scheduler='threads'"):
                    call()
            with dask.config.set(scheduler="threads"):
                np.testing.assert_array_equal(lazy.compute(), eye)

        child = context.Process(target=products)
        child.start()
        child.join(timeout=30)
        child.kill()
    assert child.exitcode == 0


@pytest.mark.parametrize("setting", ["nonsense", 3])
def test_a_setting_that_is_no_scheduler_is_refused_with_its_value(setting: Any) -> None:
    with dask.config.set(scheduler=setting):
        eye = np.eye(3)
        for call in (partial(distmm.matmul, eye, eye, out=eye.copy()), partial(distmm.verify, eye, eye, eye)):
            with pytest.raises(InputError, match=rf"setting scheduler={setting!r}: .*correct a wrong setting"):
                call()


@pytest.mark.parametrize("given", ["tcp://127.0.0.1:8786", 5])
def test_what_is_no_client_is_refused(given: Any) -> None:
    for call in (distmm.matmul, distmm.plan):
        with pytest.raises(InputError, match=rf"client is {given!r}: give .*distributed\.Client\({given!r}\)"):
            call(np.eye(3), np.eye(3), client=given)


def test_clients_that_are_closed_and_clusters_without_workers_are_refused() -> None:
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        cluster.adapt(minimum=0, maximum=1)
        client = Client(cluster, set_as_default=False)
        with client, pytest.raises(InputError, match=r"no workers.*wait_for_workers\(1\).*adapt\(minimum=1\)"):
            distmm.matmul(np.eye(3), np.eye(3), client=client)
        with pytest.raises(InputError, match="client is closed: give one that is connected"):
            distmm.matmul(np.eye(3), np.eye(3), client=client)


@pytest.mark.minutes
def test_arrays_with_query_planning_are_refused_with_the_setting() -> None:
    code = "import numpy, distmm; distmm.matmul(numpy.eye(3), numpy.eye(3))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(DASK_ARRAY__QUERY_PLANNING="True"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "InputError" in done.stderr
    assert "array.query-planning" in done.stderr
    assert "DASK_ARRAY__QUERY_PLANNING=False" in done.stderr
