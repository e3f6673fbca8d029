"""Choice of the network: runs on a node before workers start, and prints protocol and interface.

``python -m distmm.submit.fabric DEVICE TRANSPORT [INTERFACE]``; batch scripts contain this module's name.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def choose(device: str, transport: str, interface: str = "", *, system: Path = Path("/sys/class/net")) -> str:
    """Choose the protocol and the network interface of all links.

    Parameters
    ----------
    device : {"gpu", "cpu"}
        UCX is for GPUs: it moves their memory over NVLink and InfiniBand, while TCP copies it through the host.
    transport : {"auto", "ucx", "tcp", "tls"}
        ``"auto"`` means UCX for GPUs if its package is installed, and TCP otherwise.
    interface : str
        The user's choice. If empty: the first InfiniBand interface that is up, else the one of the host name.
    system : Path
        Folder in which Linux lists the interfaces.

    Returns
    -------
    str
        Protocol, and after a space the interface, if there is one to set.

    Raises
    ------
    SystemExit
        If `transport` is ``"ucx"`` and UCX is not installed.
    """
    has_ucx = importlib.util.find_spec("distributed_ucxx") is not None
    if transport == "ucx" and not has_ucx:
        raise SystemExit("transport = 'ucx' needs distributed-ucxx on the nodes: pip install '.[cuda13]', or use tcp")
    if transport == "auto":
        transport = "ucx" if device == "gpu" and has_ucx else "tcp"
    if not interface:
        fast = [path.name for path in sorted(system.glob("ib*")) if (path / "operstate").read_text().strip() == "up"]
        interface = fast[0] if fast else ""
    return f"{transport} {interface}".strip()


if __name__ == "__main__":
    print(choose(*sys.argv[1:]))  # noqa: T201
