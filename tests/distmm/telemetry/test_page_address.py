"""The address of the page of products, as commands print it."""

from __future__ import annotations

import urllib.request

import dask
import pytest
from distributed import Client, LocalCluster

from distmm.submit import dashboard_access
from distmm.telemetry import client as telemetry


@pytest.fixture(scope="module")
def idle() -> Client:
    """A client of a scheduler with a dashboard and without workers, on which no product has run."""
    with (
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster.scheduler_address, set_as_default=False) as client,
    ):
        yield client


def test_the_page_is_where_its_address_says_before_the_first_product(idle: Client) -> None:
    address = telemetry.page_address(idle)
    assert address is not None
    assert address.startswith("http://127.0.0.1:")
    assert address.endswith("/distmm")
    with urllib.request.urlopen(address, timeout=60) as answer:
        assert answer.status == 200


def test_a_dashboard_on_the_localhost_of_another_machine_comes_with_its_tunnel(
    idle: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_page_at", lambda dask_scheduler: ("n7", "127.0.0.1", 40123))
    tunnel = "http://localhost:40123/distmm after ssh -N -L 40123:127.0.0.1:40123 n7"
    assert telemetry.page_address(idle) == tunnel
    monkeypatch.setattr(telemetry, "_page_at", lambda dask_scheduler: ("n7", "0.0.0.0", 40123))
    assert telemetry.page_address(idle) == idle.dashboard_link.replace("/status", "/distmm")


@pytest.mark.parametrize(("login", "jump"), [("login", "-J login "), ("gpu3", ""), ("", "")])
def test_a_slurm_job_says_how_to_see_its_page_from_another_machine(
    idle: Client, monkeypatch: pytest.MonkeyPatch, login: str, jump: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_SUBMIT_HOST", login)
    monkeypatch.setattr(telemetry, "_page_at", lambda dask_scheduler: ("gpu3", "127.0.0.1", 4242))
    tunnel = f"http://localhost:8787/distmm after ssh -N -L 8787:127.0.0.1:4242 {jump}gpu3"
    assert telemetry.page_address(idle) == tunnel


def test_an_address_that_was_set_is_kept(idle: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "_page_at", lambda dask_scheduler: ("n7", "127.0.0.1", 40123))
    with dask.config.set({"distributed.dashboard.link": "http://localhost:8787/status"}):
        assert telemetry.page_address(idle) == "http://localhost:8787/distmm"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with dask.config.set({"distributed.dashboard.link": "http://localhost:8787/status"}):  # as in batch scripts
        assert "8787:127.0.0.1:40123" in str(telemetry.page_address(idle))
    with dask.config.set({"distributed.dashboard.link": "/user/me/proxy/{port}/status"}):  # JupyterHub in a Slurm job
        assert telemetry.page_address(idle) == idle.dashboard_link.replace("/status", "/distmm")
        assert "proxy" in idle.dashboard_link


def test_a_scheduler_without_pages_has_no_address() -> None:
    with (
        dask.config.set({"distributed.scheduler.http.routes": dashboard_access.PROBED}),
        LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0", scheduler_kwargs={"dashboard": False}) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert telemetry.page_address(client) is None
