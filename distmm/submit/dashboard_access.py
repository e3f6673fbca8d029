"""Access to the web pages of a job's scheduler and workers: ``run.dashboard`` as Dask's configuration."""

from __future__ import annotations

from typing import Any

# The scheduler's pages without Bokeh (workers, tasks, logs, stacks); `dask scheduler --no-dashboard` still serves them.
INFO = "distributed.http.scheduler.info"

# Routes that stay without pages: probes of Kubernetes, and Prometheus.
PROBED = ["distributed.http.health", "distributed.http.scheduler.prometheus"]


def settings(dashboard: str) -> dict[str, Any]:
    """Return Dask's configuration for a value of ``run.dashboard``.

    Parameters
    ----------
    dashboard : {"localhost", "all", "none"}

    Returns
    -------
    dict
        Keys and values of Dask's configuration. For ``"localhost"`` they replace the scheduler's host in links, since
        the pages do not answer at its address. The port is that of the ``ssh -L`` command in a job's log.
    """
    if dashboard == "none":
        return {"distributed.scheduler.http.routes": PROBED, "distributed.dashboard.link": "off"}
    if dashboard == "localhost":
        return {"distributed.dashboard.link": "http://localhost:8787/status"}
    return {}


def environment(dashboard: str) -> dict[str, str]:
    """Return `settings` as the environment variables from which Dask's programs read them."""
    return {f"DASK_{key.replace('.', '__').upper()}": str(value) for key, value in settings(dashboard).items()}
