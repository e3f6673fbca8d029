"""Memory that several processes share: arrays of the client, shared segments, memory-mapped files, write leases.

On a local cluster, an operand of `distmm.matmul` in memory is not sent through the scheduler: workers read its blocks
from the client's memory, on the host or on a GPU. README.md describes the modules.
"""

from distmm.transfer.client_array import ClientArray
from distmm.transfer.lending import has_gaps, share
from distmm.transfer.shared_memory import drop_freed, empty

__all__ = ["ClientArray", "drop_freed", "empty", "has_gaps", "share"]
