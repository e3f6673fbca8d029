"""Descriptions of the workers of a Dask cluster for the planner, from what the workers say."""

from __future__ import annotations

import math
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm.all_workers import everywhere, in_thread
from distmm.clusters import advice, view
from distmm.clusters.measured import measured_once
from distmm.errors import InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.precision import Precision
from distmm.planning.search import TILE
from distmm.worker.tasks import kernel_choice
from distmm.worker.tasks.kernel_choice import KernelChoice
from distmm.worker.tasks.probe import local_gpu, probe

if TYPE_CHECKING:
    from distributed import Client

    from distmm_kernels.device import Device

DeviceChoice = Literal["auto", "cpu", "gpu"]

# Rate of a GPU over several seconds, divided by the rate of single products (`distmm_kernels/rates.toml`): 0.92 to 1.0
# on an H200 for five types.
SUSTAINED = 0.95

# Highest bytes/s between workers: NVLink, by UCX or by tickets, where a block of 537 MB takes 4 to 5 ms; loopback TCP
# between processes. `distmm.clusters.measured` measures slower links.
LINKS = {"cuda": 1e11, "cpu": 1e9}

# Bytes/s of loads from the client's memory: a GPU that copies from pinned memory, a GPU with staging buffers that
# threads fill, a GPU that copies from the client's array in its own memory or in that of another GPU (half of what CUDA
# IPC copies alone), and a CPU thread that reads another process's memory. Measured on two H200 at once, and on two
# cores.
LOADS = {"cuda": 5e10, "cuda, pageable": 1.5e10, "cuda, its own": 1e12, "cuda, others": 2e11, "cpu": 3e9}


def describe(
    client: Client | None,
    dtype: np.dtype,
    device: DeviceChoice = "auto",
    any_gpu: bool = False,
    kernel: str | None = None,
    precision: Precision = "highest",
    reproducible: bool = False,
    old: bool = False,
    flops: float = math.inf,
) -> ClusterSpec:
    """Describe the workers of a cluster for the planner; without a client, describe this process.

    Parameters
    ----------
    client : distributed.Client or None
    dtype : numpy.dtype
        Result type of the product, for the kernel's rate.
    device : {"auto", "cpu", "gpu"}
        "auto": GPUs if every worker owns one; the CPU without a client.
    any_gpu : bool
        Also count a GPU that a worker can use but does not own. CuPy operands need this.
    kernel : str, optional
        Name of the kernel to use.
    precision : Precision
        Least accuracy of float32 products.
    reproducible : bool
        Without `kernel`: use only kernels with reproducible bits.
    old : bool
        As in `view.ask`. Without a client, what was found in this second is enough.
    flops : float
        Operations of the product. On a new machine, where kernels are still being built, a library multiplies if the
        kernels would not save as much time.

    Returns
    -------
    ClusterSpec

    Raises
    ------
    InputError
        Without workers, if `device` is "gpu" and a worker has none, or if a worker cannot use the kernel.
    """
    asked = dtype, precision, kernel, reproducible
    gpus = "none" if device == "cpu" else "any" if any_gpu else "own"

    def of_all(old: bool) -> dict[str, dict[str, Any]]:
        if client is None:
            from distmm_kernels.device import current

            now, gpu = time.monotonic(), current() if device == "gpu" else None
            return {"this process": _this_process(int(now) if old else now, gpu, device, *asked)}
        return view.ask(client, (probe, (gpus, *asked)), old)

    facts = of_all(old)
    on_gpus = all(fact["device"] == "cuda" for fact in facts.values())
    building = any(fact.get("build") for fact in facts.values())  # a measurement would wait for the kernels
    if on_gpus and not building and any(fact.get("unmeasured") for fact in facts.values()):
        _measure(client, frozenset(facts), KernelChoice("cuda", dtype, precision))
        if client:
            view.forget(client)
        facts = of_all(old=False)
    if not facts:
        raise InputError(
            "the cluster has no workers, and a plan needs their memory and devices: start some, and wait for them with "
            "client.wait_for_workers(1). An adaptive cluster starts workers only when there are tasks: use "
            "cluster.adapt(minimum=1)"
        )
    without = {address: fact for address, fact in facts.items() if fact["device"] != "cuda"}
    if device == "gpu" and without:
        address, fact = next(iter(without.items()))
        raise InputError(
            f"a GPU is asked for, but {len(without)} of {len(facts)} workers have none ({address}: {fact['problem']}); "
            "start the workers with dask-cuda (LocalCUDACluster or 'dask cuda worker'), or use device='cpu'"
        )
    use: Literal["cpu", "cuda"] = "cpu" if device == "cpu" or without else "cuda"
    if use == "cuda" and client is not None:
        advice.say(client, facts)
    if use == "cpu" and client and len(without) < len(facts):  # some workers have described their GPUs
        facts = view.ask(client, (probe, ("none", *asked)), old)
    problem = next((fact["no kernel"] for fact in facts.values() if "no kernel" in fact), None)
    if problem:
        raise InputError(problem)
    return spec(use, list(facts.values()), dtype, flops)


@lru_cache(maxsize=16)
def _this_process(
    at: float, gpu: Device | None, device: DeviceChoice, dtype: np.dtype, precision: Precision, kernel: str | None,
    reproducible: bool,
) -> dict[str, Any]:  # fmt: skip
    """Describe this process and, if asked for, its current GPU. The answer for a time `at` (seconds) is kept."""
    import psutil

    facts: dict[str, Any] = local_gpu() if device == "gpu" else {"problem": "not asked for"}
    if "problem" in facts:
        facts |= {"device": "cpu", "threads": psutil.cpu_count() or 1, "memory": psutil.virtual_memory().available}
    choice = KernelChoice(facts["device"], dtype, precision, kernel)
    return {**facts, **kernel_choice.kernel_facts(choice, reproducible)}


def _measure(client: Client | None, workers: frozenset[str], choice: KernelChoice) -> None:
    """Measure the kernels for a type on each worker whose GPU model has no rates; done once for these workers."""

    def measure() -> float:
        if client is None:
            kernel_choice.measure(choice)
        else:
            everywhere(client, in_thread, kernel_choice.measure, choice)
        return 1.0

    measured_once(client, f"the rates of kernels for {choice.dtype}", (workers, choice), measure)


def spec(
    device: Literal["cpu", "cuda"], facts: list[dict[str, Any]], dtype: np.dtype, flops: float = math.inf
) -> ClusterSpec:
    """Combine the descriptions of all workers, and choose one kernel for all. The smallest value of each figure counts.

    Parameters
    ----------
    device : {"cpu", "cuda"}
    facts : list of dict
        By worker, as `distmm.worker.tasks.probe` returns them.
    dtype : numpy.dtype
        Result type of the product.
    flops : float
        As in `describe`.

    Returns
    -------
    ClusterSpec

    Raises
    ------
    InputError
        If the workers have no kernel in common.
    """
    threads = min(fact["threads"] for fact in facts)
    # A kernel's cost is its time for large blocks on one worker. This product has `flops / of_large` times as many
    # operations, on all workers.
    of_large = (8 if dtype.kind == "c" else 2) * kernel_choice.LARGE**3
    wait = max(fact.get("build", 0.0) for fact in facts) * of_large * len(facts) / max(1, flops)
    kernel = _kernel_of_all([fact["kernels"] for fact in facts], dtype, wait)
    kernels = [fact["kernels"][kernel] for fact in facts]
    granules, cores = [each["granule"] for each in kernels], min(fact.get("cores", threads) for fact in facts)
    host = [fact["host_memory"] for fact in facts if fact.get("host_memory") is not None]  # 0: nothing is free
    return ClusterSpec(
        workers=len(facts),
        memory=_rounded_down(max(0, min(fact["memory"] for fact in facts))),
        device=device,
        rate=min(each["rate"] for each in kernels) * (SUSTAINED if device == "cuda" else cores),
        link=LINKS[device],
        load=LOADS[device],
        host_memory=_rounded_down(min(host)) if host else None,
        threads=threads,
        prepared=max(each["prepared"] for each in kernels),
        copied=max(each["copied"] for each in kernels),
        workspace=max(each["workspace"] for each in kernels),
        one_launch=all(each["one_launch"] for each in kernels),
        triangles=all(each["triangles"] for each in kernels),
        granule=max(TILE, *(granule or 1 for granule in granules)),
        kernel=kernel,
        promises_bits=None not in granules,
    )


def _kernel_of_all(kernels: list[dict[str, dict[str, Any]]], dtype: np.dtype, wait: float) -> str:
    """Return the kernel, among those that all workers have, for which the slowest worker is fastest.

    All workers use the same kernel. Otherwise the bits of a block would depend on the worker that computes it. Compiled
    kernels cost `wait` seconds more: the time to compile them, divided by a worker's number of large blocks.
    """
    common = [name for name in kernels[0] if all(name in others for others in kernels)]
    if not common:
        have = " and ".join(sorted({", ".join(each) for each in kernels}))
        raise InputError(
            f"no kernel multiplies {dtype} on all workers, which have {have}: use workers with GPUs of one model"
        )
    return min(common, key=lambda name: max(each[name]["cost"] + wait * each[name]["compiled"] for each in kernels))


def _rounded_down(nbytes: int) -> int:
    """Round down to 7 bits, by at most 1.6 %, so that small differences in memory do not change the plan."""
    step = 1 << max(0, int(nbytes).bit_length() - 7)
    return int(nbytes) // step * step
