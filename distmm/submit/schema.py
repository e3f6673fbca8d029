"""What a job file may say: a table a class, a key a field, each with its check and its default."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dask.utils import parse_bytes, parse_timedelta

__all__ = ["GPU_OPTIONS", "GPU_THREADS", "Job", "Kubernetes", "Product", "Run", "Slurm", "Workers"]

# Tasks at a time on a GPU: one product runs, the next is queued behind it without a gap, and the third brings blocks.
GPU_THREADS = 3

# Of ``dask cuda worker``: a pool of most of the GPU's memory, which a worker that replaces another one waits for.
GPU_OPTIONS = (
    *("--rmm-pool-size", "0.8"),
    *("--set-rmm-allocator-for-libs", "cupy"),
    *("--device-memory-limit", "0"),
    *("--preload", "distmm.worker.gpu_memory"),
)

Check = Callable[[Any], str | None]  # says what a value should have been, None for a good one


def _matching(pattern: str, what: str) -> Check:
    return lambda value: None if re.fullmatch(pattern, value) else what


def _one_of(*choices: str) -> Check:
    return lambda value: None if value in choices else f"one of {', '.join(choices)}"


def _at_least(least: int, most: int = 100_000) -> Check:
    return lambda value: None if least <= value <= most else f"a number from {least} to {most}"


def _path(value: str) -> str | None:
    """Refuse what could be read as an option or an expansion, and ways out of the folder that is named."""
    if not value or value[0] in "-~" or not value.isprintable() or set(value) & set("\"\\'`"):
        return "a path of printable characters without quotes or backslashes, that starts with neither - nor ~"
    return "a path without .. (write it as an absolute path)" if ".." in re.split(r"[/\\:]", value) else None


def _parsed(parse: Callable[[str], float], least: float, what: str) -> Check:
    def check(value: str) -> str | None:
        try:
            return None if parse(value) >= least else what
        except ValueError:
            return what

    return check


PLAN = r"|g\d{1,6}(x\d{1,6}){2} b\d{1,12}(x\d{1,12}){2} p\d{1,6} w\d{1,6}(x\d{1,6}){0,2} l\d{1,4}"
NAME = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"  # a DNS label, a Slurm job name and a file name at once
_name = _matching(NAME, "a name of at most 40 lower-case letters, digits and -, that starts with a letter")
_size = _parsed(parse_bytes, 2**20, "a size of a megabyte or more, such as 480GB")
_duration = _parsed(parse_timedelta, 1, "a time such as 90m or 12h")
_word = _matching(r"[A-Za-z0-9_.,:+-]{1,200}", "letters, digits and _ . , : + - only")
_constraint = _matching(r"[A-Za-z0-9_.,:*&|()\[\]-]{1,200}", "an expression of node features, without spaces")
_image = _matching(r"[a-z0-9][A-Za-z0-9._:/@-]{0,400}", "an image such as registry/distmm:1.0 or distmm@sha256:...")
_label = _matching(r"([A-Za-z0-9.-]+/)?[A-Za-z0-9._-]+=[A-Za-z0-9._-]*", "a label such as pool=gpu")


def key(check: Check | None = None, default: Any = None) -> Any:
    """Define one key of a table; without a default it is required."""
    metadata = {"check": check}
    return field(metadata=metadata) if default is None else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Product:
    """``[product]``: what to compute; the options of ``distmm multiply``. Relative paths start at the job file."""

    a: str = key(_path)
    b: str = key(_path)
    c: str = key(_path)
    transa: bool = key(default=False)
    transb: bool = key(default=False)
    overwrite: bool = key(default=False)  # start over each time that the job is submitted
    precision: str = key(_one_of("highest", "high", "medium", "ieee"), "highest")
    check: str = key(_one_of("freivalds", "full", "none"), "freivalds")
    kernel: str = key(_matching(r"[a-z0-9_]{0,40}", "the name of a kernel, as distmm info lists them"), "")
    blocks: str = key(_matching(r"|\d{1,12}(x\d{1,12}x\d{1,12})?", "edges such as 8192 or 8192x4096x8192"), "")
    plan: str = key(_matching(PLAN, "a plan as distmm plan says it, such as g2x1x1 b8192x8192x8192 p1 w1 l2"), "")


@dataclass(frozen=True)
class Run:
    """``[run]``: the job itself, whatever runs it."""

    name: str = key(_name, "distmm")
    # On this machine there are no allocations: walltime, grace and restarts say nothing there.
    walltime: str = key(_duration, "1h")  # of one allocation; the job goes on in the next
    grace: str = key(_duration, "5m")  # the job is stopped this long before its walltime
    restarts: int = key(_at_least(0), 100)
    folder: str = key(_path, ".")  # for logs, scheduler file and certificates; all nodes must see it
    tls: str = key(_path, "none")  # "none", "temporary", or a folder with ca.pem, cert.pem and key.pem
    dashboard: str = key(_one_of("localhost", "all", "none"), "localhost")  # who can open the pages of a submitted job


@dataclass(frozen=True)
class Workers:
    """``[workers]``: machines. One worker a GPU; on CPU nodes, ``per_node`` workers with one thread each."""

    nodes: int = key(_at_least(1), 1)
    per_node: int = key(_at_least(1, 1024), 1)
    device: str = key(_one_of("gpu", "cpu"), "gpu")
    cpus: int = key(_at_least(1), 8)  # of a node
    memory: str = key(_size, "64GB")  # of a node
    transport: str = key(_one_of("auto", "ucx", "tcp"), "auto")
    interface: str = key(_matching(r"[A-Za-z0-9_.-]{0,15}", "a network interface such as ib0"), "")

    @property
    def threads(self) -> int:
        """Tasks at a time on one worker."""
        return GPU_THREADS if self.device == "gpu" else 1

    @property
    def count(self) -> int:
        """Workers in all."""
        return self.nodes * self.per_node

    @property
    def memory_each(self) -> int:
        """Host memory of one worker, in bytes; a tenth of the node's, at most 8 GB, is for scheduler and client."""
        total = int(parse_bytes(self.memory))
        return (total - min(total // 10, 8 * 10**9)) // self.per_node


@dataclass(frozen=True)
class Slurm:
    """``[slurm]``: options of sbatch; empty ones are left to the site."""

    partition: str = key(_word, "")
    account: str = key(_word, "")
    qos: str = key(_word, "")
    reservation: str = key(_word, "")
    constraint: str = key(_constraint, "")
    gres: str = key(_word, "")  # instead of gpu:<per_node>, such as gpu:h200:8
    exclusive: bool = key(default=False)


@dataclass(frozen=True)
class Kubernetes:
    """``[kubernetes]``: where pods run and what they mount."""

    namespace: str = key(_name, "default")
    image: str = key(_image, "distmm:0.1.0")
    claim: str = key(_name, "")  # PersistentVolumeClaim with the matrices
    mount: str = key(_path, "/data")  # where pods see it
    secret: str = key(_name, "")  # Secret whose entries become environment variables: an object store's keys
    service_account: str = key(_name, "")
    spot: str = key(_label, "")  # label and taint of nodes that may be taken away: workers run there too
    node_label: str = key(_label, "")  # nodes for the workers
    start_timeout: str = key(_duration, "10m")  # for pods that no node can take


@dataclass(frozen=True)
class Job:
    """A checked job file.

    Attributes
    ----------
    product, run, workers, slurm, kubernetes
        Its tables, of the classes of these names.
    """

    product: Product
    run: Run = field(default_factory=Run)
    workers: Workers = field(default_factory=Workers)
    slurm: Slurm = field(default_factory=Slurm)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)

    def seconds(self, key: str) -> int:
        """Return ``[run]`` ``walltime`` or ``grace`` in seconds."""
        return int(parse_timedelta(getattr(self.run, key)))

    def command(self) -> list[str]:
        """Return the arguments of ``distmm`` that compute the product, or go on with it, without those that say where.

        ``--overwrite`` is not among them: it starts over, which is for the first start of a job only.
        """
        product = self.product
        words = ["multiply", product.a, product.b, "-o", product.c]
        words += [f"--{flag}" for flag in ("transa", "transb") if getattr(product, flag)]
        for option in ("precision", "check", "kernel", "blocks", "plan"):
            if value := getattr(product, option):
                words += [f"--{option}", value]
        return [*words, "--device", self.workers.device]
