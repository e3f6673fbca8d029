"""Memory that several processes share: arrays of the client, shared segments, memory-mapped files, write leases.

A NumPy array that is given to `distmm.matmul` on a local cluster does not travel through the scheduler: workers read
its blocks from the client's memory. README.md names the modules.
"""

from distmm.transfer.client_array import FORGOTTEN_TOPIC, ClientArray, has_gaps, release, share
from distmm.transfer.shared_memory import drop_freed, empty

__all__ = ["FORGOTTEN_TOPIC", "ClientArray", "drop_freed", "empty", "has_gaps", "release", "share"]
