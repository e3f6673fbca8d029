"""The private parts of Dask's dashboard and Bokeh's server that distmm uses are there; without them products still run.

If a test here fails with a new Dask or Bokeh, compare `distmm/telemetry/dashboard_server.py` with that version first.
"""

from __future__ import annotations

import inspect
import logging
import re
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
from bokeh.server.tornado import BokehTornado
from distributed import Client, LocalCluster
from distributed.dashboard import core
from distributed.dashboard import scheduler as of_dask
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.http.routing import RoutingApplication
from distributed.http.scheduler.info import IndividualPlots

from distmm import matmul
from distmm.telemetry import client as telemetry
from distmm.telemetry import dashboard_server, faults
from tests import forked
from tests.bench.experiment.moved_bytes import moved_bytes


def test_dask_and_bokeh_have_the_parts_that_are_used() -> None:
    wanted = ["applications", "server", "prefix", "template_variables"]
    assert list(inspect.signature(core.BokehApplication).parameters) == wanted
    assert {"app_paths", "prefix", "initialize", "start"} <= set(dir(BokehTornado))
    assert {"add_application", "add_handlers"} <= set(dir(RoutingApplication))
    assert {"write", "get"} <= set(dir(IndividualPlots))
    assert "scheduler" in inspect.signature(of_dask.template_variables).parameters
    assert "simple.html" in env.list_templates()
    assert BOKEH_THEME is not None


def test_a_product_runs_on_a_scheduler_whose_dashboard_has_changed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(*arguments: object) -> None:
        raise AttributeError("no such part")

    with (
        caplog.at_level(logging.WARNING, faults.__name__),
        forked.workers(),
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as one,
        Client(one, set_as_default=False) as client,
    ):
        monkeypatch.setattr(faults, "_logged", set())
        monkeypatch.setattr(core, "BokehApplication", changed)
        monkeypatch.setattr(RoutingApplication, "add_handlers", changed)
        telemetry.install(client)
        values = np.arange(64.0).reshape(8, 8)
        product = client.compute(matmul(values, values, client=client)).result()
        assert moved_bytes(client) == 0
    np.testing.assert_array_equal(product, values @ values)
    for part in ("the page of the dashboard", "the list of workers for Prometheus"):
        assert f"{part} failed, and products run without it" in caplog.text
    assert "no such part" in caplog.text


def test_no_other_module_uses_private_parts_of_the_dashboard() -> None:
    modules = r"(import|from) (distributed\.dashboard|distributed\.http\.scheduler|bokeh\.server)"
    private = re.compile(rf"{modules}|http_application")
    package = Path(dashboard_server.__file__).parents[1]
    users = {path.name for path in package.rglob("*.py") if private.search(path.read_text())}
    assert users == {"dashboard_server.py"}


def test_a_cluster_without_dashboard_computes_all_the_same() -> None:
    with (
        LocalCluster(
            n_workers=1, processes=False, threads_per_worker=1, dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False},
        ) as one,
        Client(one, set_as_default=False) as client,
    ):  # fmt: skip
        C = client.compute(matmul(da.ones((8, 8), chunks=4), da.ones((8, 8), chunks=4), client=client), sync=True)
    np.testing.assert_array_equal(C, np.full((8, 8), 8.0))
