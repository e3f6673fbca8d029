"""The caller's choices of how a product is computed. The configuration has the defaults."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from distributed import Client

from distmm import config
from distmm.api.scalars import check_flags
from distmm.clusters import cluster
from distmm.clusters.hardware import Hardware
from distmm.errors import InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision, check_precision

__all__ = ["Wishes"]


@dataclass(frozen=True)
class Wishes:
    """The caller's choices: arguments of `distmm.matmul`. `absent` is the argument `cluster` of `distmm.plan`."""

    precision: Precision = "highest"
    kernel: str | None = None
    device: cluster.Device = "auto"
    blocks: tuple[int, ...] | None = None
    plan: Plan | str | None = None
    absent: Hardware | None = None
    reproducible: bool = False

    @classmethod
    def chosen(
        cls,
        precision: Precision | None,
        kernel: str | None,
        device: cluster.Device | None,
        blocks: tuple[int, ...] | None,
        plan: Plan | str | None,
        absent: Hardware | None = None,
        reproducible: bool | None = None,
    ) -> Wishes:
        """Take a caller's arguments. None means the configured default, or, with a `Plan`, the choice of that plan.

        Raises
        ------
        InputError
            For an unknown precision, a `reproducible` that is not a bool, and an invalid configured value. For a `Plan`
            that was made with other choices.
        """
        accuracy = check_precision(config.chosen("precision", precision))
        where, named = config.chosen("device", device), config.chosen("kernel", kernel)
        promised = config.chosen("reproducible", reproducible)
        check_flags(reproducible=promised)
        if not isinstance(plan, Plan):
            return cls(accuracy, named, where, blocks, plan, absent, promised)
        planned: cluster.Device = "cpu" if plan.cluster.device == "cpu" else "gpu"
        for name, given, value, has in (
            ("precision", precision, accuracy, plan.precision),
            ("kernel", kernel, named, plan.kernel or plan.cluster.kernel),
            ("device", device, where, "auto" if where == "auto" else planned),
            ("reproducible", reproducible, promised, plan.cluster.promises_bits if promised else promised),
        ):
            if value != has and (given is not None or value != config.DEFAULTS[name]):
                raise InputError(
                    f"{name} is {value!r}, and the plan was made with {name}={has!r}: leave one of them out, or make a "
                    f"plan with distmm.plan(..., {name}={value!r})"
                )
        return cls(plan.precision, plan.kernel, planned, blocks, plan, absent, promised)

    def described(self, client: Client | None, dtype: np.dtype, on_gpu: bool) -> ClusterSpec:
        """Describe the cluster for products of a type; for operands `on_gpu`, with the GPUs of all workers."""
        if self.absent is not None:
            return self.absent.spec(dtype, self.kernel, self.precision, self.reproducible)
        device: cluster.Device = "gpu" if on_gpu else self.device
        return cluster.describe(client, dtype, device, on_gpu, self.kernel, self.precision, self.reproducible)
