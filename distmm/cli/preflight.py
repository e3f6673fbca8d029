"""Checks of ``distmm submit`` before it requests machines from a batch system."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING

from distmm.cli import options
from distmm.errors import InputError

if TYPE_CHECKING:
    from distmm.clusters.hardware import Hardware
    from distmm.submit.schema import Job

# Packages that the workers need.
NEEDED = {"gpu": ("distmm", "dask_cuda", "cupy", "rmm"), "cpu": ("distmm",)}

# Prints the packages that a Python lacks. It does not import them, because CUDA's libraries take seconds to import.
LACKING = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"


def check_product(job: Job, say: Callable[[str], None]) -> None:
    """Refuse a product for which this machine can find that the job would fail.

    Parameters
    ----------
    job : Job
    say : callable
        Called with a line for each fact that could not be checked.

    Raises
    ------
    InputError, DoesNotFitError
        See `distmm.job.job.preflight`.
    """
    from distmm.job.job import preflight
    from distmm.product.choices import Choices

    if (product := job.product) is None:
        say("not checked: the arguments of the command")
        return
    seconds = float(job.seconds("walltime") - job.seconds("grace"))
    choices = Choices(
        precision=product.precision, kernel=product.kernel or None, plan=product.plan or None, hardware=_machines(job),
        blocks=options.edges(product.blocks) if product.blocks else None,
    )  # fmt: skip
    unknown = preflight(
        product.a, product.b, product.c, choices=choices, overwrite=product.overwrite, check=product.check,
        run_seconds=seconds, transa=product.transa, transb=product.transb,
    )  # fmt: skip
    for what in unknown:
        say(f"not checked: {what}")


def check_packages(job: Job, python: str) -> None:
    """Refuse a job whose workers would lack a package.

    Parameters
    ----------
    job : Job
    python : str
        Interpreter that the nodes start. Nothing is checked if it is not on this machine.

    Raises
    ------
    InputError
        If a package is missing; the message names it.
    """
    if shutil.which(python) is None:
        return
    command = [python, "-c", LACKING, *NEEDED[job.workers.device]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{python}: is not a working Python here: {done.stderr.strip()[-200:]}; give another --python")
    if lacking := done.stdout.split():
        raise InputError(
            f"workers.device = {job.workers.device!r}, but {python}, which the nodes start, lacks "
            f"{', '.join(lacking)}: install distmm there by pip install '.[cuda13]' (or cuda12), give another "
            f"--python, or set workers.device = 'cpu'"
        )


def _machines(job: Job) -> Hardware | None:
    """Return the workers of a job file; None for GPUs without a model in ``slurm.gres``."""
    from dataclasses import replace

    from distmm.clusters.gpu_models import MODELS
    from distmm.clusters.hardware import cpus, gpus

    workers = job.workers
    if workers.device == "cpu":
        found = cpus(workers.count, threads=workers.threads, memory=workers.memory_each)
        return replace(found, cores=max(1, workers.cpus // workers.per_node))
    named = {part.casefold() for part in job.slurm.gres.split(":")}
    model = next((name for name in MODELS if name.casefold() in named), None)
    return None if model is None else gpus(workers.count, model, host_memory=workers.memory_each)
