"""The caller's choices of how a product is computed. The configuration has the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from distmm import config
from distmm.api.scalars import check_flags
from distmm.clusters import cluster
from distmm.clusters.hardware import Hardware
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
        """Take a caller's arguments. None means the configured default.

        Raises
        ------
        InputError
            For an unknown precision, a `reproducible` that is not a bool, and an invalid configured value.
        """
        accuracy = check_precision(config.chosen("precision", precision))
        where, named = config.chosen("device", device), config.chosen("kernel", kernel)
        promised = config.chosen("reproducible", reproducible)
        check_flags(reproducible=promised)
        return cls(accuracy, named, where, blocks, plan, absent, promised)
