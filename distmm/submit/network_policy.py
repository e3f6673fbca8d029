"""Who may talk to the pods of a job, and whom they may talk to: a NetworkPolicy of Kubernetes."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from distmm.submit.schema import Job

__all__ = ["rules"]

USUAL_PORTS = {"http": 80, "https": 443}


def rules(job: Job, dashboard: int, workers: range) -> dict[str, Any]:
    """Let the pods of the cluster talk to each other, to DNS, and to an object store if there is one.

    Nobody else comes in, but for a Prometheus that the job file names. A Dask scheduler runs what it is sent. The
    dashboard is reached by ``kubectl port-forward``, which needs no rule. InfiniBand is not an IP network: no policy
    holds there.

    Parameters
    ----------
    job : Job
    dashboard : int
        Port of the scheduler's pages and figures.
    workers : range
        Ports of those of a pod's workers.

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
        # 443 also where the store is another: identities of clouds are proven there.
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
    """Return the port of an object store's endpoint; without one, that of HTTPS."""
    url = urlsplit(endpoint or "https://")
    return url.port or USUAL_PORTS[url.scheme]
