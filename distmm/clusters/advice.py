"""Options of a user's cluster that cost its GPUs more than a quarter of their rate: said once, with the remedy."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

from distmm import units

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

# Blocks that exceed dask-cuda's limit are copied to the host and back. Its default is 0.8 of the GPU's memory.
LEAST_SHARE = 0.5

_said: weakref.WeakKeyDictionary[Client, set[str]] = weakref.WeakKeyDictionary()


def say(client: Client, facts: dict[str, dict[str, Any]]) -> None:
    """Warn of such options in the description of each GPU worker, by address: of each kind once for a client."""
    said = _said.setdefault(client, set())
    for kind, text in found(facts).items():
        if kind not in said:
            logger.warning(text)
            said.add(kind)


def found(facts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return what is to be said, by the option that mends it."""
    from distributed.comm import get_address_host

    texts = {}
    tcp = [address for address, fact in facts.items() if fact["ucx"] and address.startswith("tcp://")]
    if tcp and len(set(map(get_address_host, facts))) > 1:
        texts["protocol"] = (
            f"workers on several hosts, such as {tcp[0]}, send blocks by TCP, though UCX is installed there, which is "
            "several times faster: start scheduler and workers with protocol='ucx'"
        )
    for address, fact in facts.items():
        if fact["spills_at"] is not None and fact["spills_at"] < LEAST_SHARE * fact["total"]:
            texts["device_memory_limit"] = (
                f"{address} moves blocks to host memory when they take more than {units.size(fact['spills_at'])} of "
                f"its GPU's {units.size(fact['total'])}: start the workers with device_memory_limit=None, since plans "
                "keep within the GPU's memory"
            )
    return texts
