"""The schema of a job file: each table is a pydantic model, each key a field with its type and default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from dask.utils import parse_bytes
from pydantic import BaseModel, ConfigDict, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from distmm.planning.precision import Precision
from distmm.submit import values
from distmm.units import seconds
from distmm.worker import gpu_worker_setup
from distmm.worker.tasks.probe import LEAST_MEMORY


class Table(BaseModel):
    """Base of all tables: unknown keys and values of another type are errors, and fields cannot be changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Product(Table):
    """``[product]``: the options of ``distmm multiply``. Relative paths start at the job file's folder."""

    a: values.Path
    b: values.Path
    c: values.Path
    transa: bool = False
    transb: bool = False
    overwrite: bool = False  # start over each time that the job is submitted
    precision: Precision = "highest"
    check: Literal["freivalds", "full", "none"] = "freivalds"
    kernel: values.Kernel = ""
    reproducible: bool = False
    blocks: values.Blocks = ""
    plan: values.Plan = ""


class Run(Table):
    """``[run]``: the job itself, on any system."""

    name: values.Name = "distmm"
    # walltime, grace and restarts have no effect on this machine, which has no allocations.
    walltime: values.Duration = "1h"  # of one allocation; the next one resumes the job
    grace: values.Duration = "5m"  # the job is stopped this long before its walltime
    restarts: Annotated[int, values.in_range(0)] = 100
    folder: values.Path = "."  # for logs, scheduler file and certificates; all nodes must have access
    tls: values.Path = "none"  # "none", "temporary", or a folder with ca.pem, cert.pem and key.pem
    dashboard: Literal["localhost", "all", "none"] = "localhost"  # who can open the pages of a submitted job


class Workers(Table):
    """``[workers]``: the machines. A GPU node has a worker for each GPU, a CPU node ``per_node`` of one thread."""

    nodes: Annotated[int, values.in_range(1)] = 1
    per_node: Annotated[int, values.in_range(1, 1024)] = 1
    device: Literal["gpu", "cpu"] = "gpu"
    cpus: Annotated[int, values.in_range(1)] = 8  # of a node
    memory: values.Size = "64GB"  # of a node
    transport: Literal["auto", "ucx", "tcp"] = "auto"
    interface: values.Interface = ""

    @property
    def threads(self) -> int:
        """Number of tasks that a worker runs at the same time."""
        return gpu_worker_setup.THREADS if self.device == "gpu" else 1

    @property
    def count(self) -> int:
        """Total number of workers."""
        return self.nodes * self.per_node

    @property
    def memory_each(self) -> int:
        """Bytes of host memory of a worker. Scheduler and client get a tenth of the node's memory, at most 8 GB."""
        total = int(parse_bytes(self.memory))
        return (total - min(total // 10, 8 * 10**9)) // self.per_node


class Slurm(Table):
    """``[slurm]``: options of sbatch; for empty ones the site's defaults apply."""

    partition: values.Word = ""
    account: values.Word = ""
    qos: values.Word = ""
    reservation: values.Word = ""
    constraint: values.Constraint = ""
    gres: values.Word = ""  # instead of gpu:<per_node>, such as gpu:h200:8
    exclusive: bool = False


class Kubernetes(Table):
    """``[kubernetes]``: where pods run and what they mount."""

    namespace: values.Namespace = "default"
    image: values.Image = "distmm:0.1.0"
    pull_secret: values.ObjectOrNone = ""  # Secret for the image's registry
    claim: values.ObjectOrNone = ""  # PersistentVolumeClaim with the matrices
    mount: values.Path = "/data"  # path of the claim in pods
    secret: values.ObjectOrNone = ""  # Secret whose entries become environment variables: an object store's keys
    endpoint: values.Endpoint = ""  # of an object store other than AWS, for S3 clients and the network policy
    service_account: values.ObjectOrNone = ""
    labels: values.Labels = {}  # of all resources of the job
    annotations: values.Annotations = {}
    queue: values.DnsLabelOrNone = ""  # LocalQueue of Kueue that admits the pods
    priority_class: values.ObjectOrNone = ""
    runtime_class: values.ObjectOrNone = ""  # of the workers' pods
    gpu_resource: values.Resource = "nvidia.com/gpu"
    rdma_resource: values.ResourceOrNone = ""  # for UCX; each pod of workers requests one
    scheduler_cpus: Annotated[int, values.in_range(1, 1024)] = 1
    scheduler_memory: values.Size = "4GiB"
    ephemeral_storage: values.SizeOrNone = ""  # disk of each pod's /tmp; empty: no limit
    spot: values.Label = ""  # label and taint of preemptible nodes, on which workers may run
    node_label: values.Label = ""  # label of the nodes for the workers
    start_timeout: values.Duration = "10m"  # limit for pods that fit no node
    monitoring: values.DnsLabelOrNone = ""  # namespace of a Prometheus that may read the metrics of the pods


class Job(Table):
    """A checked job file. Without a product, the machines run another command of distmm (`instead`)."""

    _words: tuple[str, ...] = PrivateAttr(default=())
    product: Product | None = None
    run: Run = Run()
    workers: Workers = Workers()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse values that exclude each other; the error's type is the key at which it is reported."""
        if self.seconds("grace") >= self.seconds("walltime"):
            facts = {"grace": self.run.grace, "walltime": self.run.walltime}
            message = "grace = {grace} leaves no time of walltime = {walltime}; use about a tenth of the walltime"
            raise PydanticCustomError("run.grace", message, facts)
        if self.workers.memory_each < LEAST_MEMORY:
            facts = {"memory": self.workers.memory, "each": f"{self.workers.memory_each / 1e6:.0f}"}
            facts["least"] = f"{LEAST_MEMORY / 1e6:.0f}"
            message = "memory = {memory} of a node leaves {each} MB for each worker, which needs {least} MB by itself"
            raise PydanticCustomError("workers.memory", message, facts)
        if self.run.tls != "none" and self.workers.transport == "ucx":
            message = "UCX is not encrypted; leave out transport = 'ucx' (TLS then uses TCP) or tls"
            raise PydanticCustomError("run.tls", message)
        if self.kubernetes.rdma_resource and self.workers.transport != "ucx":
            message = "RDMA needs UCX, which pods use on request only: add workers.transport = 'ucx'"
            raise PydanticCustomError("kubernetes.rdma_resource", message)
        return self

    @property
    def uses_urls(self) -> bool:
        """Whether A, B or C is in an object store."""
        product = self.product
        return any("://" in path for path in (self._words if product is None else (product.a, product.b, product.c)))

    @property
    def overwrite(self) -> bool:
        """Whether the first start of the job discards finished blocks. Later starts resume it."""
        return "--overwrite" in self._words if self.product is None else self.product.overwrite

    def instead(self, words: Sequence[str]) -> Self:
        """Return the job with another command of distmm instead of its product."""
        found = self.model_copy(update={"product": None})
        found._words = tuple(words)
        return found

    def seconds(self, key: Literal["walltime", "grace"]) -> int:
        """Return ``[run]`` ``walltime`` or ``grace`` in seconds."""
        return int(seconds(getattr(self.run, key)))

    def command(self) -> list[str]:
        """Return the arguments of ``distmm`` to compute or resume the product, without the cluster's options.

        ``--overwrite`` is left out: only the first start of a job may discard finished blocks.
        """
        product = self.product
        if product is None:
            return [word for word in self._words if word != "--overwrite"]
        words = ["multiply", product.a, product.b, "-o", product.c]
        words += [f"--{flag}" for flag in ("transa", "transb", "reproducible") if getattr(product, flag)]
        for option in ("precision", "check", "kernel", "blocks", "plan"):
            if value := getattr(product, option):
                words += [f"--{option}", value]
        return [*words, "--device", self.workers.device]
