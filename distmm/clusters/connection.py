"""Connections to clusters: one that runs already, or a new one on this machine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from distributed import Client, Security
from distributed import comm as comms

from distmm.clusters.local_cluster import local
from distmm.errors import InputError
from distmm.submit.tls import security

# How to wait longer, for messages.
LONGER = "--connect-timeout, or timeout= of distmm.clusters.connect"


@contextmanager
def connect(where: str = "local", *, timeout: float = 10, tls: str = "none", **options: Any) -> Iterator[Client]:
    """Connect to a running cluster, or start one.

    Parameters
    ----------
    where : str
        ``"local"`` (also ``"local-gpu"``, ``"local-cpu"``), the address of a scheduler such as
        ``"tcp://10.0.0.1:8786"``, or the path of its scheduler file.
    timeout : float
        Seconds to wait for the scheduler, and then for its first worker.
    tls : str
        As for `local`; for a running cluster, the folder with its certificates.
    **options
        Options of `local`. A running cluster accepts no ``workers`` and ``memory_limit``.

    Yields
    ------
    distributed.Client

    Raises
    ------
    InputError
        If the cluster does not answer in time or has no workers, and for options that it does not accept.

    Examples
    --------
    >>> from distmm import clusters
    >>> with clusters.connect("tcp://10.0.0.1:8786", timeout=30) as client:  # doctest: +SKIP
    ...     client.wait_for_workers(8)
    """
    if where in ("local", "local-gpu", "local-cpu"):
        if where != "local":
            options["device"] = where.removeprefix("local-")
        with local(tls=tls, **options) as client:
            yield client
        return
    if tls == "temporary":
        raise InputError(
            f"--tls temporary is for clusters that distmm starts, not for {where}: give the folder with its "
            f"certificates"
        )
    given = " and ".join(name for name in ("workers", "memory_limit") if options.get(name) is not None)
    if given:
        raise InputError(f"{given} can be set for a local cluster only, not for {where}: leave out {given}")
    address, secured = _address(where), security(tls) or Security()
    if address.startswith("tls://") and secured.get_connection_args("client").get("ssl_context") is None:
        raise InputError(f"{where} is encrypted: give the folder with its certificates (ca.pem, ...) with --tls FOLDER")
    try:
        _check_answer(address, secured, timeout)
        # Not as Dask's default: a client that cannot connect would stay the default until it is garbage-collected.
        client = Client(address, timeout=timeout, security=secured, set_as_default=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"no scheduler answers at {where} within {timeout:g} s ({str(error) or type(error).__name__}); is it "
            f"running (dask scheduler), does it speak {address.partition(':')[0]}, has the address a port, as in "
            f"tcp://10.0.0.1:8786, and can this machine reach it? A longer timeout may help: {LONGER}"
        ) from error
    with client, client.as_current():
        try:
            client.wait_for_workers(1, timeout=timeout)
        except TimeoutError as error:
            raise InputError(
                f"the cluster at {where} has no workers after {timeout:g} s; start some with dask worker, or on GPUs "
                f"with dask cuda worker, or wait longer for those that start: {LONGER}"
            ) from error
        yield client


def _check_answer(address: str, secured: Security, timeout: float) -> None:
    """Raise OSError if no Dask process answers. A client that cannot connect would need 20 s more to close."""

    async def ask() -> None:
        arguments = secured.get_connection_args("client")
        comm = await asyncio.wait_for(comms.connect(address, timeout=timeout, **arguments), timeout)
        comm.abort()

    with ThreadPoolExecutor(1) as thread:  # in notebooks this thread already runs an event loop
        thread.submit(asyncio.run, ask()).result()


def _address(where: str) -> str:
    """Return the scheduler's address; `where` is the address, or a scheduler file."""
    if "://" in where:
        return where
    if not os.path.isfile(where):
        raise InputError(
            f"cluster {where!r} is neither local, local-gpu, local-cpu, an address such as tcp://10.0.0.1:8786, nor "
            f"an existing scheduler file"
        )
    try:
        with open(where) as file:
            return str(json.load(file)["address"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{where}: not a scheduler file ({type(error).__name__}: {error}); write one with "
            f"dask scheduler --scheduler-file"
        ) from error
