"""Access to the web pages of a job's scheduler and workers: ``run.dashboard`` as Dask's configuration."""

from __future__ import annotations

from typing import Any

# Routes that stay without pages: probes of Kubernetes, and Prometheus. `dask scheduler --no-dashboard` alone would keep
# the pages without Bokeh (workers, tasks, logs, stacks).
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


def environment(configured: dict[str, Any]) -> dict[str, str]:
    """Return keys and values of Dask's configuration as the variables from which its programs read them."""
    names = {key: f"DASK_{key.replace('.', '__').replace('-', '_').upper()}" for key in configured}
    return {names[key]: str(value) for key, value in configured.items()}
