"""The schema of a job file: each table is a pydantic model, each key a field with type, check and default."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from dask.utils import parse_bytes
from pydantic import AfterValidator, BaseModel, ConfigDict, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from distmm.planning.precision import Precision
from distmm.units import seconds
from distmm.worker import gpu_worker_setup
from distmm.worker.tasks.probe import LEAST_MEMORY


def _check(holds: Callable[[Any], object], what: str) -> AfterValidator:
    """Refuse a value for which `holds` is false or raises ValueError; `what` completes "KEY = VALUE is not ..."."""

    def checked(value: Any) -> Any:
        with suppress(ValueError, OverflowError):
            if holds(value):
                return value
        raise ValueError(what)

    return AfterValidator(checked)


def _matching(pattern: str, what: str) -> AfterValidator:
    return _check(re.compile(pattern).fullmatch, what)


def _in_range(least: int, most: int = 100_000) -> AfterValidator:
    return _check(lambda value: least <= value <= most, f"a number from {least} to {most}")


def _is_safe(path: str) -> bool:
    """Whether the path contains no ``..``, and no program or shell reads it as an option or expands it."""
    return bool(
        re.match("(?i)(?!file:|local:)[^-~]", path)
        and path.isprintable()
        and not set(path) & set("\"\\'`")
        and ".." not in re.split(r"[/\\:]", path)
    )


PATH_RULE = "a path of printable characters without .., quotes, \\, or - ~ file: at its start: write it absolute"
NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"  # valid as DNS label, Slurm job name and file name
NAME_RULE = "a name of at most 40 lower-case letters, digits and -, that starts with a letter"
PLAN = r"|g\d{1,6}(x\d{1,6}){2} b\d{1,12}(x\d{1,12}){2} p\d{1,6} w\d{1,6}(x\d{1,6}){0,2} l\d{1,4}"
EDGE = r"[1-9]\d{0,11}"
NODES = r"[A-Za-z0-9_.,:*&|()\[\]-]{0,200}"
IMAGE = r"[a-z0-9][A-Za-z0-9._:/@-]{0,400}"

# Kubernetes' rules for a DNS label, for the name of an object (DNS labels with dots between them), and for the key of a
# label or annotation, which may start with such a name and a slash. The name of an extended resource must do so.
DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
OBJECT = rf"(?![a-z0-9.-]{{254}}){DNS_LABEL}(\.{DNS_LABEL})*"
LABEL_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = rf"({OBJECT}/)?{LABEL_NAME}"
LABEL_VALUE = rf"({LABEL_NAME})?"
RESOURCE = rf"(?!(.*\.)?kubernetes\.io/|requests\.){OBJECT}/{LABEL_NAME}"
ENDPOINT = rf"https?://{OBJECT}(:\d{{1,5}})?/?"

# Keys that a job file must not set: the operator or distmm sets them, or the operator ignores them.
OWN_LABELS = r"([a-z.]+\.)?dask\.org/.*|app\.kubernetes\.io/(name|instance)|sidecar\.istio\.io/inject"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
LOST_ANNOTATIONS = r"(kubectl\.kubernetes\.io|kopf\.zalando\.org)/.*"


def _are_labels(labels: dict[str, str]) -> bool:
    return all(
        re.fullmatch(LABEL_KEY, key)
        and re.fullmatch(LABEL_VALUE, value)
        and not re.fullmatch(OWN_LABELS, key)
        and key != QUEUE_LABEL
        for key, value in labels.items()
    )


def _is_endpoint(url: str) -> bool:
    return not url or bool(re.fullmatch(ENDPOINT, url) and urlsplit(url).port != 0)  # a port above 65535 is an error


def _are_annotations(annotations: dict[str, str]) -> bool:
    return all(
        re.fullmatch(LABEL_KEY, key) and value.isprintable() and not re.fullmatch(LOST_ANNOTATIONS, key)
        for key, value in annotations.items()
    )


LABELS_RULE = (
    'labels by Kubernetes\' rules, such as { team = "physics" }: names and values of at most 63 letters, digits, -, _ '
    "and ., none of dask.org, app.kubernetes.io or Istio's injection; set the queue of Kueue by kubernetes.queue"
)
ANNOTATIONS_RULE = (
    'annotations by Kubernetes\' rules, such as { "example.com/owner" = "physics" }: values of one line, none of '
    "kubectl.kubernetes.io or kopf.zalando.org, which the operator ignores"
)

# If a pattern allows an empty text, the empty text means the same as no key.
Path = Annotated[str, _check(_is_safe, PATH_RULE)]
Name = Annotated[str, _matching(NAME, NAME_RULE)]
SIZE_RULE = "a size of a megabyte or more, such as 480GB"
Size = Annotated[str, _check(lambda text: parse_bytes(text) >= 2**20, SIZE_RULE)]
SizeOrNone = Annotated[str, _check(lambda text: not text or parse_bytes(text) >= 2**20, SIZE_RULE)]
Duration = Annotated[str, _check(lambda text: seconds(text) >= 1, "a time such as 90m, 12h or 04:00:00")]
Word = Annotated[str, _matching(r"[A-Za-z0-9_.,:+-]{0,200}", "letters, digits and _ . , : + - only")]
Constraint = Annotated[str, _matching(NODES, "an expression of node features, without spaces")]
Image = Annotated[str, _matching(IMAGE, "an image such as registry/distmm:1.0 or distmm@sha256:...")]
Namespace = Annotated[str, _matching(DNS_LABEL, "the name of a namespace: at most 63 lower-case letters, digits and -")]
DnsLabelOrNone = Annotated[str, _matching(f"|{DNS_LABEL}", "a name of at most 63 lower-case letters, digits and -")]
ObjectOrNone = Annotated[str, _matching(f"|{OBJECT}", "a name of lower-case letters, digits, - and .")]
Label = Annotated[str, _matching(f"|{LABEL_KEY}={LABEL_VALUE}", "a label such as pool=gpu")]
Labels = Annotated[dict[str, str], _check(_are_labels, LABELS_RULE)]
Annotations = Annotated[dict[str, str], _check(_are_annotations, ANNOTATIONS_RULE)]
Resource = Annotated[str, _matching(RESOURCE, "the name of an extended resource, such as nvidia.com/gpu")]
ResourceOrNone = Annotated[
    str, _matching(f"|{RESOURCE}", "the name of an extended resource, such as rdma/hca_shared_devices_a")
]
Endpoint = Annotated[
    str, _check(_is_endpoint, "a URL of http or https with a host and, if it is not the usual one, a port")
]
Kernel = Annotated[str, _matching(r"[a-z0-9_]{0,40}", "the name of a kernel, as distmm info lists them")]
Blocks = Annotated[str, _matching(rf"|{EDGE}(x{EDGE}x{EDGE})?", "edges such as 8192 or 8192x4096x8192")]
Plan = Annotated[str, _matching(PLAN, "a plan as distmm plan says it, such as g2x1x1 b8192x8192x8192 p1 w1 l2")]
Interface = Annotated[str, _matching(r"[A-Za-z0-9_.-]{0,15}", "a network interface such as ib0")]


class Table(BaseModel):
    """Base of all tables: unknown keys and values of another type are errors, and fields cannot be changed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Product(Table):
    """``[product]``: the options of ``distmm multiply``. Relative paths start at the job file's folder."""

    a: Path
    b: Path
    c: Path
    transa: bool = False
    transb: bool = False
    overwrite: bool = False  # start over each time that the job is submitted
    precision: Precision = "highest"
    check: Literal["freivalds", "full", "none"] = "freivalds"
    kernel: Kernel = ""
    reproducible: bool = False
    blocks: Blocks = ""
    plan: Plan = ""


class Run(Table):
    """``[run]``: the job itself, on any system."""

    name: Name = "distmm"
    # walltime, grace and restarts have no effect on this machine, which has no allocations.
    walltime: Duration = "1h"  # of one allocation; the next one resumes the job
    grace: Duration = "5m"  # the job is stopped this long before its walltime
    restarts: Annotated[int, _in_range(0)] = 100
    folder: Path = "."  # for logs, scheduler file and certificates; all nodes must have access
    tls: Path = "none"  # "none", "temporary", or a folder with ca.pem, cert.pem and key.pem
    dashboard: Literal["localhost", "all", "none"] = "localhost"  # who can open the pages of a submitted job


class Workers(Table):
    """``[workers]``: the machines. A GPU node has a worker for each GPU, a CPU node ``per_node`` of one thread."""

    nodes: Annotated[int, _in_range(1)] = 1
    per_node: Annotated[int, _in_range(1, 1024)] = 1
    device: Literal["gpu", "cpu"] = "gpu"
    cpus: Annotated[int, _in_range(1)] = 8  # of a node
    memory: Size = "64GB"  # of a node
    transport: Literal["auto", "ucx", "tcp"] = "auto"
    interface: Interface = ""

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

    partition: Word = ""
    account: Word = ""
    qos: Word = ""
    reservation: Word = ""
    constraint: Constraint = ""
    gres: Word = ""  # instead of gpu:<per_node>, such as gpu:h200:8
    exclusive: bool = False


class Kubernetes(Table):
    """``[kubernetes]``: where pods run and what they mount."""

    namespace: Namespace = "default"
    image: Image = "distmm:0.1.0"
    pull_secret: ObjectOrNone = ""  # Secret for the image's registry
    claim: ObjectOrNone = ""  # PersistentVolumeClaim with the matrices
    mount: Path = "/data"  # path of the claim in pods
    secret: ObjectOrNone = ""  # Secret whose entries become environment variables: an object store's keys
    endpoint: Endpoint = ""  # of an object store other than AWS, for S3 clients and the network policy
    service_account: ObjectOrNone = ""
    labels: Labels = {}  # of all resources of the job
    annotations: Annotations = {}
    queue: DnsLabelOrNone = ""  # LocalQueue of Kueue that admits the pods
    priority_class: ObjectOrNone = ""
    runtime_class: ObjectOrNone = ""  # of the workers' pods
    gpu_resource: Resource = "nvidia.com/gpu"
    rdma_resource: ResourceOrNone = ""  # for UCX; each pod of workers requests one
    scheduler_cpus: Annotated[int, _in_range(1, 1024)] = 1
    scheduler_memory: Size = "4GiB"
    ephemeral_storage: SizeOrNone = ""  # disk of each pod's /tmp; empty: no limit
    spot: Label = ""  # label and taint of preemptible nodes, on which workers may run
    node_label: Label = ""  # label of the nodes for the workers
    start_timeout: Duration = "10m"  # limit for pods that fit no node
    monitoring: DnsLabelOrNone = ""  # namespace of a Prometheus that may read the metrics of the pods


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
