"""The NetworkPolicy of a job: the connections that its pods may accept and open."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from distmm.submit.schema import Job

__all__ = ["rules"]

USUAL_PORTS = {"http": 80, "https": 443}


def rules(job: Job, dashboard: int, workers: range) -> dict[str, Any]:
    """Allow connections among the pods of the cluster, to DNS, and to an object store if the job uses one.

    All other incoming connections are refused, because a Dask scheduler executes any code that it receives. Exceptions
    are the Prometheus of ``kubernetes.monitoring``, and the web pages for ``run.dashboard = "all"``. Users open the
    dashboard with ``kubectl port-forward``, which needs no rule. Policies do not apply to InfiniBand, which is not an
    IP network.

    Parameters
    ----------
    job : Job
    dashboard : int
        Port of the scheduler's web server.
    workers : range
        Ports of the web servers of a pod's workers.

    Returns
    -------
    dict
        The ``spec`` of the NetworkPolicy.
    """
    own = {"podSelector": {"matchLabels": {"dask.org/cluster-name": job.run.name}}}
    egress: list[dict[str, Any]] = [
        {"to": [own]},
        {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]},
    ]
    if job.uses_urls or job.kubernetes.endpoint:
        # Port 443 is open even if the store has another port: clouds authenticate there.
        ports = sorted({443, _port(job.kubernetes.endpoint)})
        egress.append({"ports": [{"protocol": "TCP", "port": port} for port in ports]})
    ingress: list[dict[str, Any]] = [{"from": [own]}]
    pages = [{"protocol": "TCP", "port": dashboard}, {"protocol": "TCP", "port": workers[0], "endPort": workers[-1]}]
    if job.run.dashboard == "all":
        ingress.append({"ports": pages})
    elif job.kubernetes.monitoring:
        namespace = {"matchLabels": {"kubernetes.io/metadata.name": job.kubernetes.monitoring}}
        ingress.append({"from": [{"namespaceSelector": namespace}], "ports": pages})
    return {**own, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}


def _port(endpoint: str) -> int:
    """Return the port of an object store's endpoint; the port of HTTPS without an endpoint."""
    url = urlsplit(endpoint or "https://")
    return url.port or USUAL_PORTS[url.scheme]
