"""Run on a node before workers start, to print protocol and interface to use.

``python -m distmm.submit.fabric DEVICE TRANSPORT [INTERFACE]``; batch scripts name this module.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["choose"]


def choose(device: str, transport: str, interface: str = "", *, system: Path = Path("/sys/class/net")) -> str:
    """Choose the protocol and the network interface of all links.

    Parameters
    ----------
    device : {"gpu", "cpu"}
        UCX is for GPUs: it moves their memory over NVLink and InfiniBand, where TCP copies it through the host.
    transport : {"auto", "ucx", "tcp", "tls"}
        ``"auto"`` takes UCX if its package is installed, and TCP otherwise.
    interface : str
        What the user chose; empty: the first InfiniBand interface that is up, else what the host name resolves to.
    system : Path
        Where Linux lists interfaces.

    Returns
    -------
    str
        Protocol, and interface where one is to be given.

    Raises
    ------
    SystemExit
        For UCX asked for where it is not installed.
    """
    has_ucx = importlib.util.find_spec("distributed_ucxx") is not None
    if transport == "ucx" and not has_ucx:
        raise SystemExit("transport = 'ucx' needs distributed-ucxx on the nodes: install distmm[cuda13], or use tcp")
    if transport == "auto":
        transport = "ucx" if device == "gpu" and has_ucx else "tcp"
    if not interface:
        fast = [path.name for path in sorted(system.glob("ib*")) if (path / "operstate").read_text().strip() == "up"]
        interface = fast[0] if fast else ""
    return f"{transport} {interface}".strip()


if __name__ == "__main__":
    print(choose(*sys.argv[1:]))  # noqa: T201
