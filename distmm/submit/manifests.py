"""Manifests of a job for Kubernetes with the Dask operator: the values for the template ``manifests.yaml``.

They are a NetworkPolicy and a DaskJob, or a DaskCluster without a product. All pods run without root and without
capabilities. Their file system is read-only, except ``/tmp`` and the mount.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import yaml
from dask.utils import parse_bytes

from distmm import templates
from distmm.errors import InputError
from distmm.submit import dashboard_access, tls
from distmm.submit.schema import Job
from distmm.submit.slurm import PATIENCE_SECONDS
from distmm.submit.values import QUEUE_LABEL
from distmm.units import seconds
from distmm.worker import gpu_worker_setup

Manifest = dict[str, Any]

USER = 1000  # user of the image, see deploy/docker
COMM, DASHBOARD, WORKER_HTTP = 8786, 8787, 8788
TLS_FOLDER = "/etc/distmm/tls"

# Seconds that a client waits until a queue admits its workers: such a wait is normal.
QUEUE_SECONDS = 7 * 24 * 3600

DASK_API = "kubernetes.dask.org/v1"


def job(job: Job) -> list[Manifest]:
    """Return the manifests of a product: its NetworkPolicy, and the DaskJob.

    Raises
    ------
    InputError
        For a matrix that pods cannot see, because it is neither a URL nor below ``kubernetes.mount``, and for keys that
        have no effect on Kubernetes.
    """
    product = job.product
    if job.workers.interface:
        raise InputError(
            f"workers.interface = {job.workers.interface!r}: the cluster chooses the networks of pods; "
            f"leave it out, and request another network by kubernetes.annotations"
        )
    for key in ("walltime", "restarts"):
        if key in job.run.model_fields_set:
            raise InputError(
                f"run.{key} = {getattr(job.run, key)!r}: pods have no walltime, and no restarts after it; leave it "
                f"out. A deleted pod has run.grace to stop, and you can submit the job again to resume it"
            )
    for key in ("a", "b", "c") if product is not None else ():
        path = getattr(product, key)
        if "://" not in path and PurePosixPath(job.kubernetes.mount) not in PurePosixPath(path).parents:
            raise InputError(
                f"product.{key} = {path!r} is not seen by pods: give a URL, or a path below kubernetes.mount "
                f"({job.kubernetes.mount}), where the claim is mounted"
            )
    if product is not None and not job.kubernetes.claim and "://" not in product.c:
        raise InputError(
            f"product.c = {product.c!r}: C would be lost with its pod: set kubernetes.claim to a volume claim for it, "
            f"or give a URL"
        )
    # The wait includes the time to add nodes and to pull the image.
    patience = int(seconds(job.kubernetes.start_timeout)) + PATIENCE_SECONDS
    patience += QUEUE_SECONDS if job.kubernetes.queue else 0
    address = _address(job)
    command = ["python", "-m", "distmm.submit.ready", address, str(job.workers.count), str(patience), "--"]
    command += ["python", "-m", "distmm", *job.command(), "--cluster", address]
    return _rendered(job, command + (["--overwrite"] if job.overwrite else []))


def cluster(job: Job) -> list[Manifest]:
    """Return the manifests of the job's cluster without the product: a NetworkPolicy and a DaskCluster."""
    return _rendered(job, [])


def certificate_folder(job: Job) -> str:
    """Return the folder of a job's temporary certificates on this machine.

    It is in the user's own data: the folder of the job file may be a checkout that others get.
    """
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return f"{data}/distmm/{job.kubernetes.namespace}"


def secret_name(job: Job) -> str:
    """Return the name of the Secret with a job's certificates."""
    return f"{job.run.name}-tls"


def secret(job: Job, contents: dict[str, str]) -> Manifest:
    """Return the Secret with a job's certificates; `contents` are the PEM texts ``ca``, ``cert`` and ``key``."""
    metadata = {"name": secret_name(job), "namespace": job.kubernetes.namespace, "labels": _labels(job)}
    if job.kubernetes.annotations:
        metadata["annotations"] = job.kubernetes.annotations
    data = {f"{what}.pem": text for what, text in contents.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}


def owned(manifest: Manifest, job: Job, uid: str) -> Manifest:
    """Return a manifest with the DaskJob of this uid as its owner; Kubernetes deletes both together."""
    owner = {"apiVersion": DASK_API, "kind": "DaskJob", "name": job.run.name, "uid": uid}
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}


def dump(manifests: list[Manifest]) -> str:
    """Return manifests as YAML for ``kubectl apply -f``."""
    return str(yaml.dump_all(manifests, Dumper=_NoAliases, sort_keys=False))


class _NoAliases(yaml.SafeDumper):
    """Writes repeated values in full: anchors are hard to read in manifests."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _labels(job: Job) -> dict[str, str]:
    """Return the labels of all resources; the operator copies those of a DaskJob to what it makes."""
    return {
        **job.kubernetes.labels, "app.kubernetes.io/name": "distmm", "app.kubernetes.io/instance": job.run.name,
    }  # fmt: skip


def _address(job: Job) -> str:
    return f"{_protocol(job)}://{job.run.name}-scheduler.{job.kubernetes.namespace}.svc:{COMM}"


def _protocol(job: Job) -> str:
    """Return the protocol. UCX is used on request only, because a service's network may not support it."""
    return "tls" if job.run.tls != "none" else "ucx" if job.workers.transport == "ucx" else "tcp"


def _rendered(job: Job, client_command: list[str]) -> list[Manifest]:
    """Fill in the template. Without a command for a client it gives a DaskCluster."""
    run, options, gpu = job.run, job.kubernetes, job.workers.device == "gpu"
    labels, places = _labels(job), {what: f"{TLS_FOLDER}/{what}.pem" for what in ("ca", "cert", "key")}
    text = templates.filled(
        Path(__file__).with_name("manifests.yaml"),
        job=job,
        dask_api=DASK_API,
        user=USER,
        labels=labels,
        queue_labels=labels | ({QUEUE_LABEL: options.queue} if options.queue else {}),
        variables=dashboard_access.environment(
            dashboard_access.settings(run.dashboard) | tls.settings(places if run.tls != "none" else None)
        )
        | (gpu_worker_setup.ENVIRONMENT if gpu else {}),
        bytes_of=lambda size: int(parse_bytes(size)),
        tls_folder=TLS_FOLDER,
        secret_name=secret_name(job),
        address=_address(job),
        protocol=_protocol(job),
        client_command=[word.replace("$", "$$") for word in client_command],  # Kubernetes replaces $(VARIABLES)
        gpu_options=gpu_worker_setup.worker_options(),
        scheduler_ports={"tcp-comm": COMM, "http-dashboard": DASHBOARD},
        # Kubernetes probes the first one, Prometheus reads all.
        worker_ports={f"http-{n}" if n else "http-dashboard": WORKER_HTTP + n for n in range(job.workers.per_node)},
        # Port 443 is open even if the store has another port: clouds authenticate there.
        store_ports=sorted({443, _port(options.endpoint)}) if job.uses_urls or options.endpoint else [],
    )
    return list(yaml.safe_load_all(text))


def _port(endpoint: str) -> int:
    """Return the port of an object store's endpoint; the port of HTTPS without an endpoint."""
    url = urlsplit(endpoint or "https://")
    return url.port or {"http": 80, "https": 443}[url.scheme]
