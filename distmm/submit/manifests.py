"""Manifests of a job for Kubernetes with the Dask operator: a DaskJob and a NetworkPolicy, or a DaskCluster alone.

Each node has one pod, so its workers share GPUs, NVLink and memory as they do outside of containers. With one pod for
each GPU they could not. All pods run without root and without capabilities. Their file system is read-only, except
``/tmp`` and the mount.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import yaml
from dask.utils import parse_bytes

from distmm import tls
from distmm.durations import seconds
from distmm.errors import InputError
from distmm.submit import dashboard_access, network_policy
from distmm.submit.schema import QUEUE_LABEL, Job
from distmm.submit.slurm_script import PATIENCE_SECONDS
from distmm.worker import gpu_worker_setup

__all__ = ["certificates", "cluster", "dump", "job", "owned", "secret", "secret_name"]

Manifest = dict[str, Any]

USER = 1000  # user of the image, see deploy/docker
COMM, DASHBOARD, WORKER_HTTP = 8786, 8787, 8788
SCHEDULER_PORTS = {"tcp-comm": COMM, "http-dashboard": DASHBOARD}
TLS_FOLDER = "/etc/distmm/tls"

# Resources of the client, which holds no block.
SMALL = {"cpu": "1", "memory": "4Gi"}

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
    for key in ("a", "b", "c"):
        path = getattr(product, key)
        if "://" not in path and PurePosixPath(job.kubernetes.mount) not in PurePosixPath(path).parents:
            raise InputError(
                f"product.{key} = {path!r} is not seen by pods: give a URL, or a path below kubernetes.mount "
                f"({job.kubernetes.mount}), where the claim is mounted"
            )
    if not job.kubernetes.claim and "://" not in product.c:
        raise InputError(
            f"product.c = {product.c!r}: C would be lost with its pod: set kubernetes.claim to a volume claim for it, "
            f"or give a URL"
        )
    address = f"{_protocol(job)}://{job.run.name}-scheduler.{job.kubernetes.namespace}.svc:{COMM}"
    # The wait includes the time to add nodes and to pull the image.
    patience = int(seconds(job.kubernetes.start_timeout)) + PATIENCE_SECONDS
    patience += QUEUE_SECONDS if job.kubernetes.queue else 0
    command = ["python", "-m", "distmm.submit.ready", address, str(job.workers.count), str(patience), "--"]
    command += ["python", "-m", "distmm", *job.command(), "--cluster", address]
    command += ["--overwrite"] if product.overwrite else []
    runner = {
        **_pod(job, "client", command, SMALL),
        # No restarts: a restart would not correct an error in the job file, and users submit a stopped job again.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.seconds("grace"),
        **_not_on_spot(job),
    }
    spec = {"job": {"spec": runner}, "cluster": {"spec": _cluster_spec(job)}}
    return [
        _policy(job),
        {"apiVersion": DASK_API, "kind": "DaskJob", "metadata": _metadata_with_queue(job), "spec": spec},
    ]


def cluster(job: Job) -> list[Manifest]:
    """Return the manifests of the job's cluster without the product: a NetworkPolicy and a DaskCluster."""
    spec = _cluster_spec(job)
    return [
        _policy(job),
        {"apiVersion": DASK_API, "kind": "DaskCluster", "metadata": _metadata_with_queue(job), "spec": spec},
    ]


def certificates(job: Job) -> tls.Certificates | None:
    """Return the paths of a job's certificates on this machine; None without TLS."""
    return tls.certificate_paths(job.run.tls, job.run.folder, job.run.name)


def secret_name(job: Job) -> str:
    """Return the name of the Secret with a job's certificates."""
    return f"{job.run.name}-tls"


def secret(job: Job, contents: dict[str, str]) -> Manifest:
    """Return the Secret with a job's certificates; `contents` are the PEM texts ``ca``, ``cert`` and ``key``."""
    metadata = _metadata(job) | {"name": secret_name(job)}
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


def _metadata(job: Job) -> Manifest:
    """Return name, labels and annotations; the operator copies those of a DaskJob to all its resources."""
    options = job.kubernetes
    labels = {**options.labels, "app.kubernetes.io/name": "distmm", "app.kubernetes.io/instance": job.run.name}
    found: Manifest = {"name": job.run.name, "namespace": options.namespace, "labels": labels}
    if options.annotations:
        found["annotations"] = dict(options.annotations)
    return found


def _metadata_with_queue(job: Job) -> Manifest:
    """Return `_metadata` with the label of the Kueue queue, which then holds back the pods until it admits them."""
    metadata = _metadata(job)
    if job.kubernetes.queue:
        metadata["labels"][QUEUE_LABEL] = job.kubernetes.queue
    return metadata


def _protocol(job: Job) -> str:
    """Return the protocol. UCX is used on request only, because a service's network may not support it."""
    return "tls" if job.run.tls != "none" else "ucx" if job.workers.transport == "ucx" else "tcp"


def _cluster_spec(job: Job) -> Manifest:
    workers, gpu = job.workers, job.workers.device == "gpu"
    no_pages = ["--no-dashboard"] if job.run.dashboard == "none" else []
    network = ["--protocol", _protocol(job)]
    scheduler = ["python", "-m", "dask", "scheduler", "--port", str(COMM), *network]
    scheduler += [*no_pages, "--dashboard-address", f":{DASHBOARD}"]
    worker = ["python", "-m", "dask", *(["cuda"] if gpu else []), "worker", "--name", "$(DASK_WORKER_NAME)", *network]
    worker += [f"{_protocol(job)}://{job.run.name}-scheduler.{job.kubernetes.namespace}.svc:{COMM}"]
    worker += ["--nthreads", str(workers.threads), "--memory-limit", str(workers.memory_each)]
    # Each worker of a pod serves HTTP on its own port (`distmm.telemetry.worker_ports`).
    worker += [*no_pages, "--dashboard-address", "127.0.0.1:0", "--preload", "distmm.telemetry.worker_ports"]
    if gpu:
        worker += gpu_worker_setup.worker_options()
    else:
        worker += ["--nworkers", str(workers.per_node)]
    options = job.kubernetes
    node = {"cpu": str(workers.cpus), "memory": str(int(parse_bytes(workers.memory)))}
    if gpu:
        node[options.gpu_resource] = str(workers.per_node)
    if options.rdma_resource:
        node[options.rdma_resource] = "1"
    small = {"cpu": str(options.scheduler_cpus), "memory": str(int(parse_bytes(options.scheduler_memory)))}
    selector = {"dask.org/cluster-name": job.run.name, "dask.org/component": "scheduler"}
    return {
        "scheduler": {
            "spec": {**_pod(job, "scheduler", scheduler, small, SCHEDULER_PORTS), **_not_on_spot(job)},
            "service": {
                "type": "ClusterIP",
                "selector": selector,
                # Ports by name: the operator's schema accepts no number here.
                "ports": [
                    {"name": name, "protocol": "TCP", "port": port, "targetPort": name}
                    for name, port in SCHEDULER_PORTS.items()
                ],
            },
        },
        "worker": {
            "replicas": workers.nodes,
            "spec": {**_pod(job, "worker", worker, node, _worker_ports(job)), **_worker_placement(job)},
        },
    }


def _worker_ports(job: Job) -> dict[str, int]:
    """Return the HTTP ports of a pod's workers by name. Kubernetes probes the first one, Prometheus reads all."""
    return {"http-dashboard" if n == 0 else f"http-{n}": WORKER_HTTP + n for n in range(job.workers.per_node)}


def _pod(
    job: Job, name: str, command: list[str], resources: dict[str, str], ports: dict[str, int] | None = None
) -> Manifest:
    """Return the spec of a pod with one container."""
    options = job.kubernetes
    threads = str(max(1, job.workers.cpus // job.workers.per_node)) if name == "worker" else "1"
    places = {what: f"{TLS_FOLDER}/{what}.pem" for what in ("ca", "cert", "key")}
    environment = {
        "HOME": "/tmp",  # for caches of compiled kernels; except the mount, only this folder is writable
        "DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "False",
        "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "100",
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        **dashboard_access.environment(job.run.dashboard),
        **tls.environment(places if job.run.tls != "none" else None),
    }
    if options.endpoint:
        environment["AWS_ENDPOINT_URL"] = options.endpoint
    if name == "worker":
        environment["DASK_DISTMM__WORKER_PORTS"] = f"{WORKER_HTTP}-{WORKER_HTTP + job.workers.per_node - 1}"
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    disk = {}
    if options.ephemeral_storage:
        disk["sizeLimit"] = str(int(parse_bytes(options.ephemeral_storage)))
        resources = {**resources, "ephemeral-storage": disk["sizeLimit"]}
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": disk},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # for UCX inside a node; the default is 64 MB
    ]
    if options.claim:
        mounts.append({"name": "matrices", "mountPath": options.mount})
        volumes.append({"name": "matrices", "persistentVolumeClaim": {"claimName": options.claim}})
    if job.run.tls != "none":
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})  # type: ignore[dict-item]
        volumes.append({"name": "tls", "secret": {"secretName": secret_name(job), "defaultMode": 0o440}})
    container: Manifest = {
        "name": name,
        "image": options.image,
        "command": [word.replace("$", "$$") if word != "$(DASK_WORKER_NAME)" else word for word in command],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if options.secret:
        container["envFrom"] = [{"secretRef": {"name": options.secret}}]
    if ports is not None:
        health = {"httpGet": {"path": "/health", "port": "http-dashboard"}}
        container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
        container["startupProbe"] = {**health, "periodSeconds": 5, "failureThreshold": 60}  # CUDA starts slowly
        container["readinessProbe"] = {**health, "periodSeconds": 5, "failureThreshold": 3}
        container["livenessProbe"] = {**health, "periodSeconds": 20, "timeoutSeconds": 10, "failureThreshold": 6}
    optional = {"serviceAccountName": options.service_account, "priorityClassName": options.priority_class}
    if name == "worker":
        optional["runtimeClassName"] = options.runtime_class
    secrets = {"imagePullSecrets": [{"name": options.pull_secret}]} if options.pull_secret else {}
    return {
        **{key: value for key, value in optional.items() if value},
        **secrets,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # else each start changes the owner of a million chunks
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _not_on_spot(job: Job) -> Manifest:
    """Return the affinity that keeps scheduler and client off spot nodes: without them the product ends."""
    if not job.kubernetes.spot:
        return {}
    label, value = job.kubernetes.spot.split("=")
    terms = [{"matchExpressions": [{"key": label, "operator": "NotIn", "values": [value]}]}]
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    }


def _worker_placement(job: Job) -> Manifest:
    """Return tolerations, affinity and node selector of the workers."""
    found: Manifest = {"tolerations": []}
    if job.workers.device == "gpu":
        taints = dict.fromkeys(("nvidia.com/gpu", job.kubernetes.gpu_resource))  # in this order, each once
        found["tolerations"] += [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
    if job.kubernetes.spot:
        label, value = job.kubernetes.spot.split("=")
        found["tolerations"].append({"key": label, "operator": "Equal", "value": value, "effect": "NoSchedule"})
        term = {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}
        prefer = [{"weight": 100, "preference": term}]
        found["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": prefer}}
    if job.kubernetes.node_label:
        label, value = job.kubernetes.node_label.split("=")
        found["nodeSelector"] = {label: value}
    return found


def _policy(job: Job) -> Manifest:
    ports = range(WORKER_HTTP, WORKER_HTTP + job.workers.per_node)
    spec = network_policy.rules(job, DASHBOARD, ports)
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": _metadata(job), "spec": spec}
