"""Which arrays of this process the workers of a cluster can use in its memory, and the tickets that they get."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from distmm.all_workers import everywhere
from distmm.transfer import gpu_allocations, process_memory
from distmm.transfer.client_array import MOST_PITCH, ClientArray

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

# Arrays of fewer bytes are sent with lazy graphs: the end of a loan costs more messages.
SMALLEST = 1 << 20


def share(array: Any, client: Client, name: str | None = None, writable: bool = False) -> ClientArray | None:
    """Describe an array of this process so that the workers of a cluster on this machine can use it.

    Parameters
    ----------
    array : numpy.ndarray or cupy.ndarray of at least two dimensions
        Copied only if neither of its last two dimensions is contiguous, or if its GPU memory cannot be lent. Work that
        the current stream has for it is waited for.
    client : distributed.Client
        Client of the cluster.
    name : str, optional
        The array is kept alive under this name as long as the result, or a task that has received it, may read it
        (`distmm.transfer.loans`). By default the caller keeps it alive.
    writable : bool
        Whether workers will write to it. Such an array is never copied.

    Returns
    -------
    ClientArray or None
        None for a small array with a name, for foreign byte order, and if a worker cannot reach this process's memory:
        on another machine, as another user, or because the system forbids it. With `writable`, also None for an array
        with gaps between elements in host memory. In GPU memory, such an array is not written to itself: `loan` has
        another array, to copy from afterwards.
    """
    if (name and array.nbytes < SMALLEST) or array.ndim < 2 or not array.dtype.isnative or not _within_reach(client):
        return None
    if gpu_allocations.is_on_gpu(array):
        return ClientArray.of(_lendable(array, writable), name or "") if _gpu_within_reach(client, array) else None
    if has_gaps(array):
        if writable:
            return None
        array = np.ascontiguousarray(array)
    return ClientArray.of(array, name or "")


def has_gaps(array: np.ndarray) -> bool:
    """Whether neither of the last two dimensions is contiguous, so that the array cannot be read by rows."""
    return all(s != array.itemsize and n > 1 for s, n in zip(array.strides[-2:], array.shape[-2:], strict=True))


def ascends(array: Any) -> bool:
    """Whether the elements come in ascending order, each once. GPUs copy others, as of ``X[::-1]``, row by row."""
    return all(stride > 0 for stride, n in zip(array.strides, array.shape, strict=True) if n > 1)


def _lendable(array: Any, writable: bool) -> Any:
    """Return a CuPy array when the work on it is done. Memory that workers cannot copy by rows is replaced by other."""
    import cupy

    with array.device:
        cupy.cuda.get_current_stream().synchronize()
        pitch = array.strides[-1] if array.strides[-2] == array.itemsize else array.strides[-2]
        by_rows = not has_gaps(array) and ascends(array) and pitch <= MOST_PITCH
        if by_rows and gpu_allocations.behind(array) is not None:
            return array
        other = gpu_allocations.plain(array.shape, array.dtype)
        if not writable:
            other[...] = array
        cupy.cuda.get_current_stream().synchronize()
        return other


# Whether all workers reach this process's memory, and that of each of its GPUs, until `forget_reach`.
_tried: weakref.WeakKeyDictionary[Client, dict[int | None, bool]] = weakref.WeakKeyDictionary()


def note_reach(client: Client, reached: bool) -> None:
    """Note whether all workers reach this process's memory, until `forget_reach`."""
    _tried.setdefault(client, {})[None] = reached


def forget_reach(client: Client) -> None:
    """Note that there may be other workers."""
    _tried.pop(client, None)


def _within_reach(client: Client) -> bool:
    """Whether every worker reaches this process's memory. The workers are asked if it has not been noted."""
    reached = _tried.get(client, {}).get(None)
    if reached is None:
        process_memory.allow()
        answers = everywhere(client, process_memory.can_read, *process_memory.proof())
        reached = bool(answers) and all(answers.values())
    return bool(reached)


def _gpu_within_reach(client: Client, array: Any) -> bool:
    """Whether the GPU of every worker reaches the memory of a CuPy array's GPU. The first answer is kept and logged."""
    known, device = _tried.setdefault(client, {}), array.device.id
    if device not in known:
        allocation, *proof = gpu_allocations.secret(device)
        answers = {} if allocation is None else everywhere(client, gpu_allocations.can_map, allocation, *proof)
        known[device] = bool(answers) and all(answers.values())
        if not known[device]:
            logger.warning(
                "workers do not reach this process's memory on GPU %d: its arrays go through host memory, which is "
                "slower. Reasons may be MIG, a worker without a GPU, GPUs without peer access, another user or host, "
                "or a container with an IPC namespace of its own",
                device,
            )
    return known[device]
