"""``distmm plan A B``."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distmm import clusters
from distmm.cli import options, session

if TYPE_CHECKING:
    from distmm.clusters.hardware import Hardware
    from distmm.planning.plan import Plan


@dataclass(frozen=True)
class Machines:
    """Machines to plan for, in place of a cluster."""

    gpus: Annotated[int | None, typer.Option(help="Plan for so many GPUs instead of a cluster.")] = None
    model: Annotated[str | None, typer.Option(help="With --gpus: their model, such as H100.")] = None
    gpu_memory: Annotated[
        str | None, typer.Option(help="With --gpus: memory of each, as in 80GB; by default that of the model.")
    ] = None
    threads: Annotated[int | None, typer.Option(help="With --memory: threads of each CPU worker.")] = None
    memory: Annotated[
        str | None, typer.Option(help="Plan for CPU workers instead of a cluster: memory of each, as in 64GB.")
    ] = None
    link: Annotated[
        str | None, typer.Option(help="With --gpus or --memory: bytes per second that a worker receives, as in 25GB.")
    ] = None

    def hardware(self, workers: int | None) -> Hardware | None:
        """Return the cluster that the options describe; None if they describe none."""
        import distmm

        if self.gpus is not None:
            if self.model is None:
                raise typer.BadParameter("--gpus needs --model, such as --model H100: rates and memory are the model's")
            if (workers, self.threads, self.memory) != (None, None, None):
                raise typer.BadParameter(
                    "--workers, --threads and --memory describe CPU workers: leave them out, or --gpus"
                )
            return distmm.gpus(self.gpus, self.model, memory=self.gpu_memory, link=self.link)
        if self.model is not None or self.gpu_memory is not None:
            raise typer.BadParameter("--model and --gpu-memory describe GPUs: say how many with --gpus")
        if self.memory is not None:
            count, threads = (1 if given is None else given for given in (workers, self.threads))
            return distmm.cpus(count, threads=threads, memory=self.memory, link=self.link)
        if self.threads is not None or self.link is not None:
            raise typer.BadParameter("--threads and --link describe CPU workers: give their --memory too")
        return None


def plan(
    ctx: typer.Context,
    a: Annotated[
        str, typer.Argument(metavar="A", help="Matrix (m, k) on disk; ROWSxCOLUMNS:TYPE for a plan without one.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Matrix (k, n), in the same way.")],
    *,
    transposes: options.Transposes,
    where: options.Where,
    machines: Machines,
    method: options.Method,
    reproducible: options.Reproducible = None,
    as_json: options.Json = False,
) -> None:
    """Show how A @ B would be computed, with memory and time, without computing it.

    The plan is that of **distmm multiply**, for a C on disk. If it does not fit in memory, the exit code is 2, and the
    error says how much is missing. The last line is the plan in the form of --plan. With --gpus or --memory no cluster
    starts: the plan is for the GPUs or CPU workers that the options describe, and says how many would be enough.

    ```text
    distmm plan A.zarr B.npy
    distmm plan A.zarr B.npy --cluster tcp://10.0.0.1:8786 --blocks 8192
    distmm plan A.zarr B.npy --gpus 64 --model H100 --gpu-memory 80GB
    distmm plan 2000000x768:float32 768x2000000:float32 --workers 8 --threads 16 --memory 64GB
    ```
    """
    from distmm.job import planning
    from distmm.job.spec import Spec
    from distmm.product.choices import Choices
    from distmm.product.request import WORTH_MEASURING_SECONDS

    hardware = machines.hardware(where.workers)
    choices = Choices.of(**method.arguments(), reproducible=reproducible)
    spec, on = Spec.of(_matrix(a), _matrix(b), None, choices, **asdict(transposes)), choices.device
    session.tell_missing(*spec.inputs)
    if hardware is not None:
        excluded = {
            "--cluster": where.cluster != "local", "--device": method.device not in (None, "auto"),
            "--memory-limit": where.memory_limit is not None, "--tls": where.tls != "none",
        }  # fmt: skip
        if given := [name for name, is_given in excluded.items() if is_given]:
            raise typer.BadParameter(f"{' and '.join(given)} is for an existing cluster: leave it out, or --gpus")
    elif where.cluster in ("local", "local-cpu") and on != "gpu" and where.tls == "none":
        session.tell_device(where.cluster, on)
        kind: options.Device = "cpu" if where.cluster == "local-cpu" else on
        hardware = clusters.cpu_workers(kind, where.workers, where.memory_limit)
    if hardware is not None:
        there = replace(spec, choices=replace(choices, hardware=hardware))
        made = planning.plan(spec, planning.request(there), None)
    # Rates of links are measured between workers that run.
    if hardware is None or (hardware.here and hardware.workers > 1 and made.cost.seconds >= WORTH_MEASURING_SECONDS):
        with session.cluster(ctx, where, on) as client:
            made = planning.plan(spec, planning.request(spec), client)
    if as_json:
        session.print_json(_facts(made))
    else:
        typer.echo(session.table(made.rows(), "Plan"))
    made.validate()


def _facts(made: Plan) -> dict[str, Any]:
    """Return a plan as plain values: bytes, seconds and operations."""
    problem = made.problem
    return {
        "plan": str(made),
        "m": problem.m,
        "k": problem.k,
        "n": problem.n,
        "dtype": str(problem.dtype),
        "operations": problem.flops,
        "kernel": made.kernel or made.cluster.kernel,
        "precision": made.precision,
        "device": "gpu" if made.cluster.device == "cuda" else "cpu",
        "workers": made.cluster.workers,
        "waves": len(made.waves),
        **asdict(made.cost),
        "free_bytes": made.cluster.memory,
        "fits": made.fits,
        "shortfall_bytes": made.shortfall,
    }


def _matrix(text: str) -> Any:
    """Return an array without memory for text such as ``1000x500:float32``; other text is a path and is returned."""
    import numpy as np

    found = re.fullmatch(r"(\d+)x(\d+)(?::(\w+))?", text)
    if found is None or os.path.exists(text):
        return text
    if found[3] is None:
        raise typer.BadParameter(f"{text}: no such file; for a plan without one add the type, as in {text}:float32")
    shape, dtype = (int(found[1]), int(found[2])), options.element(found[3])
    if max(1, shape[0]) * max(1, shape[1]) * dtype.itemsize > sys.maxsize:
        raise typer.BadParameter(f"{text}: no array has so many elements: give one of less than 9.2 EB")
    return np.broadcast_to(np.zeros((), dtype), shape)
