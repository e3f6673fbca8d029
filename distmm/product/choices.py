"""The caller's choices of how a product is computed. The configuration has the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from distributed import Client

from distmm import config
from distmm.clusters import cluster
from distmm.clusters.hardware import Hardware
from distmm.errors import InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision, check_precision
from distmm.product.scalars import check_flags

__all__ = ["Choices", "square"]


@dataclass(frozen=True)
class Choices:
    """The caller's choices: arguments of `distmm.matmul`. `hardware` is the argument `cluster` of `distmm.plan`."""

    precision: Precision = "highest"
    kernel: str | None = None
    device: cluster.Device = "auto"
    blocks: tuple[int, ...] | None = None
    plan: Plan | str | None = None
    hardware: Hardware | None = None
    reproducible: bool = False

    @classmethod
    def chosen(
        cls,
        precision: Precision | None,
        kernel: str | None,
        device: cluster.Device | None,
        blocks: tuple[int, ...] | None,
        plan: Plan | str | None,
        hardware: Hardware | None = None,
        reproducible: bool | None = None,
    ) -> Choices:
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
            return cls(accuracy, named, where, blocks, plan, hardware, promised)
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
        return cls(plan.precision, plan.kernel, planned, blocks, plan, hardware, promised)

    def described(self, client: Client | None, dtype: np.dtype, on_gpu: bool) -> ClusterSpec:
        """Describe the cluster for products of a type; for operands `on_gpu`, with the GPUs of all workers."""
        if self.hardware is not None:
            return self.hardware.spec(dtype, self.kernel, self.precision, self.reproducible)
        device: cluster.Device = "gpu" if on_gpu else self.device
        return cluster.describe(client, dtype, device, on_gpu, self.kernel, self.precision, self.reproducible)


def square(blocks: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the block edges (m, k, m) of a symmetric product for the caller's (m, k)."""
    if blocks is None:
        return None
    if not isinstance(blocks, Sequence) or len(blocks) != 2:
        raise InputError(f"blocks is {blocks!r}: give two positive edges, those of m and k")
    return blocks[0], blocks[1], blocks[0]
