"""The schema of a job file: a table is a pydantic model, a key is a field with its type, its check and its default."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from dask.utils import parse_bytes
from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from distmm.durations import seconds
from distmm.planning.precision import Precision
from distmm.worker import gpu_worker_setup

__all__ = ["Job", "Kubernetes", "Product", "Run", "Slurm", "Table", "Workers"]


def _check(holds: Callable[[Any], object], what: str) -> AfterValidator:
    """Refuse a value for which a test does not hold or cannot be made; `what` ends "KEY = VALUE is not ..."."""

    def checked(value: Any) -> Any:
        with suppress(ValueError):
            if holds(value):
                return value
        raise ValueError(what)

    return AfterValidator(checked)


def _matching(pattern: str, what: str) -> AfterValidator:
    return _check(re.compile(pattern).fullmatch, what)


def _from(least: int, most: int = 100_000) -> AfterValidator:
    return _check(lambda value: least <= value <= most, f"a number from {least} to {most}")


def _is_safe(path: str) -> bool:
    """Whether no program or shell can read a path as an option or an expansion, and it does not lead upwards."""
    return bool(
        re.match("[^-~]", path)
        and path.isprintable()
        and not set(path) & set("\"\\'`")
        and ".." not in re.split(r"[/\\:]", path)
    )


PATH_RULE = "a path of printable characters without .., quotes, backslashes, or - or ~ at its start: write it absolute"
NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"  # a DNS label, a Slurm job name and a file name at once
NAME_RULE = "a name of at most 40 lower-case letters, digits and -, that starts with a letter"
PLAN = r"|g\d{1,6}(x\d{1,6}){2} b\d{1,12}(x\d{1,12}){2} p\d{1,6} w\d{1,6}(x\d{1,6}){0,2} l\d{1,4}"
NODES = r"[A-Za-z0-9_.,:*&|()\[\]-]{0,200}"
IMAGE = r"[a-z0-9][A-Za-z0-9._:/@-]{0,400}"

# Kubernetes' own rules: of a DNS label, of the name of an object (DNS labels with dots between them), and of the key of
# a label or annotation, which has such a name before its slash. The name of an extended resource must have one.
DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
OBJECT = rf"(?![a-z0-9.-]{{254}}){DNS_LABEL}(\.{DNS_LABEL})*"
LABEL_NAME = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = rf"({OBJECT}/)?{LABEL_NAME}"
LABEL_VALUE = rf"({LABEL_NAME})?"
RESOURCE = rf"(?!(.*\.)?kubernetes\.io/|requests\.){OBJECT}/{LABEL_NAME}"
ENDPOINT = rf"https?://{OBJECT}(:\d{{1,5}})?/?"

# Keys that are not the job file's to set: those of the operator and of distmm, and what the operator leaves out.
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
    "and ., none of dask.org, app.kubernetes.io or Istio's injection, and the queue of Kueue as kubernetes.queue"
)
ANNOTATIONS_RULE = (
    'annotations by Kubernetes\' rules, such as { "example.com/owner" = "physics" }: values of one line, none of '
    "kubectl.kubernetes.io or kopf.zalando.org, which the operator leaves out"
)

# Where a pattern allows an empty text, that means the same as leaving the key out.
Path = Annotated[str, _check(_is_safe, PATH_RULE)]
Name = Annotated[str, _matching(NAME, NAME_RULE)]
NameOrNone = Annotated[str, _matching(f"|{NAME}", NAME_RULE)]
SIZE_RULE = "a size of a megabyte or more, such as 480GB"
Size = Annotated[str, _check(lambda text: parse_bytes(text) >= 2**20, SIZE_RULE)]
SizeOrNone = Annotated[str, _check(lambda text: not text or parse_bytes(text) >= 2**20, SIZE_RULE)]
Duration = Annotated[str, _check(lambda text: seconds(text) >= 1, "a time such as 90m, 12h or 04:00:00")]
Word = Annotated[str, _matching(r"[A-Za-z0-9_.,:+-]{0,200}", "letters, digits and _ . , : + - only")]
Constraint = Annotated[str, _matching(NODES, "an expression of node features, without spaces")]
Image = Annotated[str, _matching(IMAGE, "an image such as registry/distmm:1.0 or distmm@sha256:...")]
Namespace = Annotated[str, _matching(DNS_LABEL, "the name of a namespace: at most 63 lower-case letters, digits and -")]
NamespaceOrNone = Annotated[str, _matching(f"|{DNS_LABEL}", "the name of a namespace")]
ObjectOrNone = Annotated[str, _matching(f"|{OBJECT}", "a name of lower-case letters, digits, - and .")]
Label = Annotated[str, _matching(f"|{LABEL_KEY}={LABEL_VALUE}", "a label such as pool=gpu")]
Labels = Annotated[dict[str, str], _check(_are_labels, LABELS_RULE)]
Annotations = Annotated[dict[str, str], _check(_are_annotations, ANNOTATIONS_RULE)]
Queue = Annotated[
    str, _matching(f"|{DNS_LABEL}", "the name of a LocalQueue: at most 63 lower-case letters, digits and -")
]
Resource = Annotated[str, _matching(RESOURCE, "the name of an extended resource, such as nvidia.com/gpu")]
ResourceOrNone = Annotated[
    str, _matching(f"|{RESOURCE}", "the name of an extended resource, such as rdma/hca_shared_devices_a")
]
Endpoint = Annotated[
    str, _check(_is_endpoint, "a URL of http or https with a host and, if it is not the usual one, a port")
]
Kernel = Annotated[str, _matching(r"[a-z0-9_]{0,40}", "the name of a kernel, as distmm info lists them")]
Blocks = Annotated[str, _matching(r"|\d{1,12}(x\d{1,12}x\d{1,12})?", "edges such as 8192 or 8192x4096x8192")]
Plan = Annotated[str, _matching(PLAN, "a plan as distmm plan says it, such as g2x1x1 b8192x8192x8192 p1 w1 l2")]
Interface = Annotated[str, _matching(r"[A-Za-z0-9_.-]{0,15}", "a network interface such as ib0")]


class Table(BaseModel):
    """What all tables have in common: no unknown keys, no conversion of types, no changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Product(Table):
    """``[product]``: what to compute; the options of ``distmm multiply``. Relative paths start at the job file."""

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
    """``[run]``: the job itself, whatever runs it."""

    name: Name = "distmm"
    # On this machine there are no allocations: walltime, grace and restarts mean nothing there.
    walltime: Duration = "1h"  # of one allocation; the job goes on in the next
    grace: Duration = "5m"  # the job is stopped this long before its walltime
    restarts: Annotated[int, _from(0)] = 100
    folder: Path = "."  # for logs, scheduler file and certificates; all nodes must see it
    tls: Path = "none"  # "none", "temporary", or a folder with ca.pem, cert.pem and key.pem
    dashboard: Literal["localhost", "all", "none"] = "localhost"  # who can open the pages of a submitted job


class Workers(Table):
    """``[workers]``: machines. One worker a GPU; on CPU nodes, ``per_node`` workers with one thread each."""

    nodes: Annotated[int, _from(1)] = 1
    per_node: Annotated[int, _from(1, 1024)] = 1
    device: Literal["gpu", "cpu"] = "gpu"
    cpus: Annotated[int, _from(1)] = 8  # of a node
    memory: Size = "64GB"  # of a node
    transport: Literal["auto", "ucx", "tcp"] = "auto"
    interface: Interface = ""

    @property
    def threads(self) -> int:
        """Tasks at a time on one worker."""
        return gpu_worker_setup.THREADS if self.device == "gpu" else 1

    @property
    def count(self) -> int:
        """Workers in all."""
        return self.nodes * self.per_node

    @property
    def memory_each(self) -> int:
        """Host memory of one worker, in bytes; a tenth of the node's, at most 8 GB, is for scheduler and client."""
        total = int(parse_bytes(self.memory))
        return (total - min(total // 10, 8 * 10**9)) // self.per_node


class Slurm(Table):
    """``[slurm]``: options of sbatch; empty ones are left to the site."""

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
    mount: Path = "/data"  # where pods see it
    secret: ObjectOrNone = ""  # Secret whose entries become environment variables: an object store's keys
    endpoint: Endpoint = ""  # of an object store that is not AWS: its port is opened, S3 clients are told of it
    service_account: ObjectOrNone = ""
    labels: Labels = {}  # of everything that is made
    annotations: Annotations = {}
    queue: Queue = ""  # LocalQueue of Kueue that admits the pods
    priority_class: ObjectOrNone = ""
    runtime_class: ObjectOrNone = ""  # of the workers' pods
    gpu_resource: Resource = "nvidia.com/gpu"
    rdma_resource: ResourceOrNone = ""  # one for each pod of workers, for UCX
    scheduler_cpus: Annotated[int, _from(1, 1024)] = 1
    scheduler_memory: Size = "4GiB"
    ephemeral_storage: SizeOrNone = ""  # disk of each pod's /tmp; empty: what the node has
    spot: Label = ""  # label and taint of nodes that may be taken away: workers run there too
    node_label: Label = ""  # nodes for the workers
    start_timeout: Duration = "10m"  # for pods that no node can take
    monitoring: NamespaceOrNone = ""  # namespace of a Prometheus that may read the figures of the pods


class Job(Table):
    """A checked job file.

    Attributes
    ----------
    product, run, workers, slurm, kubernetes
        Its tables, of the classes of these names.
    """

    product: Product
    run: Run = Run()
    workers: Workers = Workers()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Refuse values that exclude each other; the error's type is the key at which it is reported."""
        if self.seconds("grace") >= self.seconds("walltime"):
            facts = {"grace": self.run.grace, "walltime": self.run.walltime}
            message = "grace = {grace} leaves nothing of walltime = {walltime}; a tenth of it is usual"
            raise PydanticCustomError("run.grace", message, facts)
        if self.run.tls != "none" and self.workers.transport == "ucx":
            message = "UCX is not encrypted; leave out transport = 'ucx' (TLS over TCP is used) or tls"
            raise PydanticCustomError("run.tls", message)
        if self.kubernetes.rdma_resource and self.workers.transport != "ucx":
            message = "RDMA is for UCX, which pods use on request only: add workers.transport = 'ucx'"
            raise PydanticCustomError("kubernetes.rdma_resource", message)
        return self

    @property
    def uses_urls(self) -> bool:
        """Whether A, B or C is in an object store."""
        return any("://" in path for path in (self.product.a, self.product.b, self.product.c))

    def seconds(self, key: Literal["walltime", "grace"]) -> int:
        """Return ``[run]`` ``walltime`` or ``grace`` in seconds."""
        return int(seconds(getattr(self.run, key)))

    def command(self) -> list[str]:
        """Return the arguments of ``distmm`` that compute the product or resume it, without the cluster's options.

        ``--overwrite`` is not among them: it starts over, which is for the first start of a job only.
        """
        product = self.product
        words = ["multiply", product.a, product.b, "-o", product.c]
        words += [f"--{flag}" for flag in ("transa", "transb", "reproducible") if getattr(product, flag)]
        for option in ("precision", "check", "kernel", "blocks", "plan"):
            if value := getattr(product, option):
                words += [f"--{option}", value]
        return [*words, "--device", self.workers.device]
