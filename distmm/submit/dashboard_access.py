"""Who sees the web pages of a job's scheduler and workers: what Dask's programs are told for each ``run.dashboard``."""

from __future__ import annotations

from typing import Any

__all__ = ["INFO", "PROBED", "environment", "settings"]

# Of the scheduler's pages without bokeh: workers, tasks, logs and stacks. `dask scheduler --no-dashboard` keeps them.
INFO = "distributed.http.scheduler.info"

# What is left without pages: the probes of Kubernetes, and Prometheus.
PROBED = ["distributed.http.health", "distributed.http.scheduler.prometheus"]


def settings(dashboard: str, port: str = "8787") -> dict[str, Any]:
    """Return Dask's configuration for a value of ``run.dashboard``.

    Parameters
    ----------
    dashboard : {"localhost", "all", "none"}
    port : str
        Of localhost, where the pages are seen: that of the forward that a job's log says, or ``"{port}"``, the
        scheduler's own.

    Returns
    -------
    dict
        Keys of Dask's configuration. Dask would name the scheduler's host in links, which does not answer there.
    """
    if dashboard == "none":
        return {"distributed.scheduler.http.routes": PROBED, "distributed.dashboard.link": "off"}
    if dashboard == "localhost":
        return {"distributed.dashboard.link": f"http://localhost:{port}/status"}
    return {}


def environment(dashboard: str) -> dict[str, str]:
    """Return `settings` as the environment variables from which Dask's programs read them."""
    return {f"DASK_{key.replace('.', '__').upper()}": str(value) for key, value in settings(dashboard).items()}
