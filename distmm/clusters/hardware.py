"""Descriptions of clusters for plans without a cluster: a number of GPUs of a model, or of CPU workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from dask.utils import parse_bytes

from distmm import units
from distmm.clusters import cluster
from distmm.clusters.gpu_models import model_named, share_of_measured
from distmm.errors import InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.precision import Precision
from distmm.planning.problem import accumulator_dtype
from distmm.planning.schedule import MOST_WORKERS
from distmm.worker.gpu_worker_setup import POOL_FRACTION, THREADS
from distmm.worker.tasks import kernel_choice
from distmm.worker.tasks.probe import PAUSE_FRACTION, WORKER_BYTES

# Bytes/s of copies from pinned memory over 16 lanes of PCI Express 5. Each earlier generation has half of the next.
PCIE_5 = cluster.LOADS["cuda"]

# A smaller size, such as "64", lacks its unit.
LEAST_SIZE = 1 << 20

Size = int | str  # bytes, or text such as "80GB"


@dataclass(frozen=True)
class Hardware:
    """A description of a cluster's workers, which may not exist; `gpus` and `cpus` make it.

    Attributes
    ----------
    workers : int
        Number of GPUs, or of CPU workers.
    memory : int
        Bytes of each GPU, or of each CPU worker.
    model : str or None
        GPU model; None for CPU workers.
    threads : int
        Tasks that a worker runs at the same time; on CPUs its cores.
    link : float or None
        Bytes/s between workers; None: the rate of such workers on one host.
    host_memory : int or None
        Bytes of host memory for each GPU; None: no limit.
    cores : int or None
        Cores of a CPU worker, if its kernels use more cores than it has threads.
    here : bool
        Whether `distmm.clusters.local` would start these workers on this machine. Their plan is then the one that it
        would be with them: the rates of files are measured, and the smallest number of workers is not searched.
    """

    workers: int
    memory: int
    model: str | None = None
    threads: int = 1
    link: float | None = None
    host_memory: int | None = None
    cores: int | None = None
    here: bool = False

    def spec(
        self, dtype: np.dtype, kernel: str | None, precision: Precision, reproducible: bool = False
    ) -> ClusterSpec:
        """Return the cluster specification for a plan.

        Parameters
        ----------
        dtype : numpy.dtype
            Result type of the product.
        kernel : str or None
            Name of the kernel to use.
        precision : Precision
            Least accuracy of float32 products.
        reproducible : bool
            Without `kernel`: use only kernels with reproducible bits.

        Returns
        -------
        ClusterSpec

        Raises
        ------
        InputError
            If these workers cannot use the kernel.
        """
        model = None if self.model is None else model_named(self.model)
        device: Literal["cpu", "cuda"] = "cpu" if model is None else "cuda"
        choice = kernel_choice.KernelChoice(device, dtype, precision, kernel)
        # Bytes that blocks may use: the pool of a GPU, or what a CPU worker has beside its own process.
        pool, rest = POOL_FRACTION * self.memory, PAUSE_FRACTION * self.memory - WORKER_BYTES
        facts: dict[str, Any] = {
            "threads": self.threads,
            "memory": int(max(0.0, rest) if model is None else pool),
            "host_memory": self.host_memory,
            "cores": max(self.threads, self.cores or 0),
        }
        absent = None if model is None else (model.measured or self.model or "", model.capability)
        facts |= kernel_choice.kernel_facts(choice, reproducible, absent)
        if "no kernel" in facts:
            raise InputError(facts["no kernel"])
        if model is not None and model.measured is None:
            for kernel_facts in facts["kernels"].values():
                share = share_of_measured(model, kernel_facts["unit"], accumulator_dtype(dtype).str[1:])
                share /= kernel_facts["relative"]
                kernel_facts["rate"] *= share
                kernel_facts["cost"] /= share
        spec = replace(cluster.spec(device, [facts], dtype), workers=self.workers)
        if model is not None:
            load = PCIE_5 / 2.0 ** (5 - model.pcie)
            spec = replace(spec, load=load, link=spec.link if model.nvlink else load)
        return spec if self.link is None else replace(spec, link=self.link)


def gpus(
    count: int,
    model: str,
    *,
    memory: Size | None = None,
    link: Size | None = None,
    host_memory: Size | None = None,
) -> Hardware:
    """Describe GPUs, which may not exist, for ``distmm.plan(A, B, cluster=...)``.

    Kernels were measured on the H100 and the H200. For other models the planned rates are those of the H200 times the
    ratio of the peaks in NVIDIA's data sheets.

    Parameters
    ----------
    count : int
        Total number of GPUs.
    model : str
        "V100", "T4", "A100", "A30", "A10", "A40", "L4", "L40S", "H100", "H100-PCIe", "H200", "GH200" or "B200".
    memory : int or str, optional
        Memory of each GPU, in bytes or as in "80GB"; by default that of the model's largest variant. Blocks get 80 % of
        it, as on clusters that distmm starts.
    link : int or str, optional
        Bytes per second that a GPU receives from others, as in "25GB". The default is for GPUs of one host: 100 GB/s
        over NVLink through Dask, or the rate of PCI Express. For several hosts give the network's rate for each GPU.
    host_memory : int or str, optional
        Host memory for each GPU; no limit by default.

    Returns
    -------
    Hardware

    Raises
    ------
    InputError
        For an unknown model, a count below 1 or above 100,000, and a size that is invalid or below a MiB.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A = np.broadcast_to(np.float32(0), (200_000, 200_000))  # a shape and a type, without memory
    >>> plan = distmm.plan(A, A, cluster=distmm.gpus(8, "A100"))
    >>> dict(plan.rows())["fits"]
    'yes'
    """
    of_model = model_named(model).memory  # refuses an unknown model, also if its memory is given
    nbytes = of_model if memory is None else _size("memory", memory)
    speed = None if link is None else _size("link", link)
    host = None if host_memory is None else _size("host_memory", host_memory)
    return Hardware(_count("count", count), nbytes, model, THREADS, speed, host)


def cpus(workers: int, *, threads: int = 1, memory: Size, link: Size | None = None) -> Hardware:
    """Describe CPU workers, which may not exist, for ``distmm.plan(A, B, cluster=...)``.

    The planned rates are those of one core of a Xeon with AVX-512, times the threads.

    Parameters
    ----------
    workers : int
        Total number of worker processes.
    threads : int
        Tasks that each worker runs at the same time, each on one core.
    memory : int or str
        Memory of each worker, in bytes or as in "64GB". Blocks get 80 % of it, minus 200 MB for the worker itself.
    link : int or str, optional
        Bytes per second that a worker receives from others, as in "10GB"; 1 GB by default.

    Returns
    -------
    Hardware

    Raises
    ------
    InputError
        For a number of workers or threads below 1 or above 100,000, and a size that is invalid or below a MiB.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A = np.broadcast_to(np.float32(0), (200_000, 200_000))
    >>> plan = distmm.plan(A, A, cluster=distmm.cpus(2, threads=16, memory="64GB"))
    >>> dict(plan.rows())["fits"][:3]
    'no:'
    """
    nbytes, speed = _size("memory", memory), None if link is None else _size("link", link)
    return Hardware(_count("workers", workers), nbytes, None, _count("threads", threads), speed)


def _count(name: str, value: object) -> int:
    count = units.whole(value)
    if count is None or not 1 <= count <= MOST_WORKERS:
        raise InputError(f"{name} is {value!r}: give a whole number from 1 to {MOST_WORKERS:,}")
    return count


def _size(name: str, value: Size) -> int:
    """Return a number of bytes from an integer or text."""
    try:
        size = parse_bytes(value if isinstance(value, str) else float(value))
    except (ValueError, TypeError, AttributeError, OverflowError):
        size = 0
    if size < LEAST_SIZE or isinstance(value, bool):
        raise InputError(f"{name} is {value!r}: give bytes, at least a MiB, or a size with its unit, such as '80GB'")
    return int(size)
