"""Arrays in the memory of the client's process, which workers on the same machine read and write where they lie.

A NumPy array given to `distmm.matmul` on a local cluster does not travel through the scheduler: its blocks go from
where they lie to the workers. `lent` says which array and which part, `lease` how long it may be written, `segments`
is memory made to be shared, `attach` reads and writes any other memory, `device` takes it to a GPU and back.
"""

from distmm.transfer.client_array import TOPIC, Lent, has_gaps, lend, release
from distmm.transfer.shared_memory import drop_freed, empty

__all__ = ["TOPIC", "Lent", "drop_freed", "empty", "has_gaps", "lend", "release"]
