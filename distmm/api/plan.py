"""The public function `plan`: plans a product without computing it."""

from __future__ import annotations

from typing import Any, Unpack

from distmm.clusters.hardware import Hardware
from distmm.errors import InputError
from distmm.planning.plan import Plan
from distmm.product.choices import BlockKeywords, Choices, takes
from distmm.product.operand_pair import pair, symmetry_of
from distmm.product.out_target import elements_of
from distmm.product.product import Gemm
from distmm.product.scalars import check_flags


@takes(BlockKeywords)
def plan(
    A: Any,
    B: Any = None,
    *,
    transa: bool = False,
    transb: bool = False,
    hermitian: bool = True,
    out: Any = None,
    cluster: Hardware | None = None,
    **choices: Unpack[BlockKeywords],
) -> Plan:
    """Plan a product without computing it: blocks, owners, memory, bytes moved and time.

    Parameters
    ----------
    A : array-like of shape (..., m, k), or (..., k, m) with `transa`
        As in `matmul`. The plan depends on its shape, type, chunks and place (host, GPU, file); its elements are not
        read. If there is no matrix yet, give ``numpy.broadcast_to(numpy.float32(0), (m, k))``: it takes no memory.
    B : array-like of shape (..., k, n), or (..., n, k) with `transb`, optional
        As `A`. Without it, the plan is that of ``distmm.gram(A)``.
    transa, transb : bool
        As in `gemm`. Without `B`, `transa` is the `trans` of `gram`.
    hermitian : bool
        Without `B`: as in `gram`.
    out : array-like, optional
        The array that will receive the product. Finished blocks of C are then planned to be written to it, and not to
        stay on the workers.
    cluster : Hardware, optional
        A description of a cluster by `distmm.gpus` or `distmm.cpus`, instead of `client` and `device`. The cluster need
        not exist. The table then also has the smallest number of such workers that the product fits on.
    precision, kernel, reproducible, device
        As in `matmul`.
    client : distributed.Client, optional
        Cluster to plan for. By default as in `matmul`, and without a client this machine.
    blocks : tuple of int, optional
        Block edges (m, k, n), or (m, k) without `B`. By default the chunks of Dask arrays; else the planner chooses.
    plan : str, optional
        The text of a plan. That plan is returned with its figures, and no search is made.

    Returns
    -------
    Plan
        `Plan.rows` is a table, notebooks show a picture, and ``str`` is one line that `matmul` takes as its `plan`.

    Raises
    ------
    InputError
        If the operands cannot be multiplied, or an argument has a value that is not allowed.

    See Also
    --------
    Plan.validate : Refuses a plan whose C does not fit into memory. `distmm.plan` returns such plans, too.

    Examples
    --------
    >>> import numpy as np, distmm
    >>> A, B = np.ones((300, 400)), np.ones((400, 500))
    >>> plan = distmm.plan(A, B, blocks=(300, 200, 250))
    >>> str(plan).split()[1]
    'b300x200x250'
    >>> distmm.matmul(A, B, plan=plan).shape
    (300, 500)
    """
    check_flags(hermitian=hermitian)
    a, b, symmetry = pair(A, B, transa, transb, hermitian)
    _check_hardware(cluster, choices.get("client"), choices.get("device"))
    chosen = Choices.of(hardware=cluster, symmetric=B is None, **choices)
    product = Gemm.of(a, b, symmetry=symmetry or symmetry_of(a, b, chosen))
    return product.plan(chosen, elements_of(out))


def _check_hardware(hardware: Any, client: Any, device: str | None) -> None:
    """Refuse a `cluster` that is not a description of one, and a client or device given together with it."""
    if not isinstance(hardware, Hardware | None):
        raise InputError(
            f"cluster is {hardware!r}: describe one with distmm.gpus(64, 'H100') or distmm.cpus(8, memory='64GB'); for "
            "a cluster that runs give client="
        )
    if hardware is not None and (client is not None or device not in (None, "auto")):
        given = "a client" if client is not None else f"device={device!r}"
        raise InputError(f"cluster and {given} are given: the cluster says where to multiply, so leave out the other")
