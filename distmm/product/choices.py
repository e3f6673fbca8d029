"""The caller's choices of how a product is computed: keywords of all functions. The configuration has the defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, cast

import dask
import numpy as np

from distmm import config
from distmm.clusters import cluster
from distmm.clusters.hardware import Hardware
from distmm.errors import InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.plan import Plan
from distmm.planning.precision import Precision
from distmm.product.context import computing
from distmm.product.scalars import check_flags

if TYPE_CHECKING:
    from distributed import Client

Function = TypeVar("Function", bound=Callable[..., Any])


class Keywords(TypedDict, total=False):
    """The keywords of every function that multiplies. None means the configured default. See `distmm.matmul`."""

    precision: Precision | None
    kernel: str | None
    reproducible: bool | None
    device: cluster.DeviceChoice | None
    client: Client | None


class BlockKeywords(Keywords, total=False):
    """The keywords of functions that compute one product. They include its blocks and its plan."""

    blocks: tuple[int, ...] | None
    plan: Plan | str | None


def takes(keywords: type) -> Callable[[Function], Function]:
    """Decorate a function that takes ``**choices: Unpack[keywords]``. Its signature then names each of the keywords."""

    def named(function: Function) -> Function:
        plain = signature(function)
        own = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        common = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind.__forward_arg__)
            for name, kind in keywords.__annotations__.items()
        ]
        names = {each.name for each in (*own, *common) if each.kind is not Parameter.VAR_POSITIONAL}

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            if unknown := given.keys() - names:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {min(unknown)!r}")
            return function(*args, **given)

        checked.__signature__ = plain.replace(parameters=[*own, *common])  # type: ignore[attr-defined]
        return cast("Function", checked)

    return named


@dataclass(frozen=True)
class Choices:
    """The caller's choices: the keywords, with defaults filled in.

    `hardware` is the `cluster` of `distmm.plan`. `named` tells whether the caller has said where to multiply: by the
    client, or by Dask's annotations.
    """

    precision: Precision = "highest"
    kernel: str | None = None
    device: cluster.DeviceChoice = "auto"
    blocks: tuple[int, ...] | None = None
    plan: Plan | str | None = None
    hardware: Hardware | None = None
    reproducible: bool = False
    client: Client | None = None
    named: bool = False

    @classmethod
    def of(
        cls,
        *,
        hardware: Hardware | None = None,
        now: bool = False,
        symmetric: bool = False,
        **given: Unpack[BlockKeywords],
    ) -> Choices:
        """Take a caller's keywords. None means the configured default, or, with a `Plan`, the choice of that plan.

        Parameters
        ----------
        hardware : Hardware, optional
        now : bool
            Whether the caller waits for results, as in `computing`.
        symmetric : bool
            Whether `blocks` are those of a symmetric product: (m, k).
        **given

        Raises
        ------
        InputError
            For an unknown precision, a `reproducible` that is not a bool, a client that cannot be used, and an invalid
            configured value. For a `Plan` that was made with other choices.
        """
        plan, blocks = given.get("plan"), given.get("blocks")
        if isinstance(blocks, np.ndarray):
            blocks = blocks.tolist()
        accuracy = config.chosen("precision", given.get("precision"))
        where, kernel = config.chosen("device", given.get("device")), config.chosen("kernel", given.get("kernel"))
        promised = config.chosen("reproducible", given.get("reproducible"))
        check_flags(reproducible=promised)
        if symmetric and blocks is not None:
            if not isinstance(blocks, Sequence) or len(blocks) != 2:
                raise InputError(f"blocks is {blocks!r}: give two positive edges, those of m and k")
            blocks = (*blocks, blocks[0])
        client = None if hardware is not None else computing(given.get("client"), now)
        at = client, given.get("client") is not None or bool(dask.get_annotations())
        if not isinstance(plan, Plan):
            return cls(accuracy, kernel, where, blocks, plan, hardware, promised, *at)
        of_plan: cluster.DeviceChoice = "cpu" if plan.cluster.device == "cpu" else "gpu"
        for name, value, has in (
            ("precision", accuracy, plan.precision),
            ("kernel", kernel, plan.kernel or plan.cluster.kernel),
            ("device", where, "auto" if where == "auto" else of_plan),
            ("reproducible", promised, plan.cluster.promises_bits if promised else promised),
        ):
            if value != has and (given.get(name) is not None or value != config.DEFAULTS[name]):
                raise InputError(
                    f"{name} is {value!r}, and the plan was made with {name}={has!r}: leave one of them out, or make a "
                    f"plan with distmm.plan(..., {name}={value!r})"
                )
        return cls(plan.precision, plan.kernel, of_plan, blocks, plan, hardware, promised, *at)

    def described(
        self, client: Client | None, dtype: np.dtype, on_gpu: bool, old: bool = False, flops: float = math.inf
    ) -> ClusterSpec:
        """Describe the cluster for products of a type; for operands `on_gpu`, with the GPUs of all workers.

        `old` is as in `distmm.clusters.view.ask`, `flops` as in `distmm.clusters.cluster.describe`.
        """
        if self.hardware is not None:
            return self.hardware.spec(dtype, self.kernel, self.precision, self.reproducible)
        device: cluster.DeviceChoice = "gpu" if on_gpu else self.device
        how = self.kernel, self.precision, self.reproducible, old, flops
        return cluster.describe(client, dtype, device, on_gpu, *how)
