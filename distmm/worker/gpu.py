"""The worker's GPU as tasks use it: streams, and another try when its memory is full.

A process has one non-blocking stream for each kind of work, so that copies and products overlap. Each task waits with
an event for the end of its own work. Work of several threads on one stream runs without a gap: with two tasks at a time
on a GPU, the next product is queued while one runs.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import numpy

from distmm import units
from distmm.errors import DeviceMemoryError
from distmm.worker import prepared_operands
from distmm.worker.dask_internals import in_task
from distmm.worker.gpu_room import Turns, empty_pools, figures, is_full

logger = logging.getLogger(__name__)

# Topic of Dask's events that report a task to telemetry for which the GPU's memory was full at first, and which
# succeeded when it was tried again.
HEALED_TOPIC = "distmm-memory"

Work = Literal["product", "merge", "upload", "download"]
Returned = TypeVar("Returned")

# Seconds to wait for memory before another try: the scheduler frees blocks by messages, which take milliseconds.
PAUSES = (0.0, 0.1, 1.0)


@functools.cache
def _stream(work: Work, device: int) -> Any:
    import cupy

    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)


# A thread holds `product_lock` while it enqueues a product and its reduction, and `merge_lock` while it merges parts.
#
# Memory: a plan counts the workspace of one reduction and of one merge, although several threads may run them.
# Speed: all kernels of a task follow each other on the stream. When the kernels of two tasks alternated, both tasks
# ended at the same time, and the GPU idled 22 ms until the next two came (`topk` on an H200, blocks of 30 ms). The lock
# costs the GPU no time, because the stream runs one kernel after the other anyway.
#
# There are two locks because products must not wait for merges. A reduction within a product takes its lock again.
product_lock, merge_lock = threading.RLock(), threading.Lock()

# Work that found no memory is tried again while no other task of this process uses the GPU. Transfers to other workers
# go on.
_turns = Turns()


@contextmanager
def working(work: Work) -> Iterator[Any]:
    """Run the CuPy calls and kernels of the ``with`` block on the stream for this work, and wait for their end.

    The work starts after all work that is now on the default stream and on the thread's current stream. Blocks that
    other libraries made there, or an enclosing ``with`` block, may not be complete, and a non-blocking stream does not
    wait for them by itself. After each allocation the stream waits for the default stream again: the memory may have
    belonged to a block that a task of another thread has freed, and kernels of that task may still read it.

    Yields
    ------
    cupy.cuda.Stream
    """
    import cupy

    stream = _stream(work, cupy.cuda.runtime.getDevice())
    done = cupy.cuda.Event(block=True, disable_timing=True)  # block: waiting threads use no core
    before = cupy.cuda.Stream.null, cupy.cuda.get_current_stream()
    allocate = cupy.cuda.get_allocator()

    def wait_for(earlier: Any) -> None:
        done.record(earlier)
        stream.wait_event(done)

    def allocated(size: int) -> Any:
        memory = allocate(size)
        wait_for(cupy.cuda.Stream.null)
        return memory

    with _turns.turn(), stream, cupy.cuda.using_allocator(allocated):
        for earlier in before:
            wait_for(earlier)
        try:
            yield stream
        finally:  # also after an error: memory that is then freed must not be in use
            done.record(stream)
            done.synchronize()


@contextmanager
def multiplying() -> Iterator[None]:
    """Do as `working` for a product, and enqueue all kernels of the ``with`` block without those of other products."""
    with working("product"), product_lock:
        yield


def completed(work: Callable[[], Returned], what: str, needs: int | None = None) -> Returned:
    """Return ``work()`` when it has ended on the stream for products. A full memory is handled as by `retrying`."""

    def on_stream() -> Returned:
        with working("product"):
            return work()

    return retrying(on_stream, what, needs)


def retrying(work: Callable[[], Returned], what: str, needs: int | None = None, peak: int | None = None) -> Returned:
    """Return ``work()``; if the GPU's memory is full, free what can be freed, wait a little, and try again, alone.

    Prepared operands and the free memory of CuPy's pools are released. Each further try runs while no other task of
    this process uses the GPU. Between two tries other tasks go on, because products that end free memory.

    Parameters
    ----------
    work : callable
        It may run several times.
    what : str
        What needs the memory, for the message.
    needs : int, optional
        Bytes that it needs, for the message.
    peak : int, optional
        Bytes that the plan expects on a worker at the peak, for the message.

    Raises
    ------
    DeviceMemoryError
        If the memory stays full. The worker goes on: nothing that the failed task allocated is kept.
    """
    reason = ""  # of the last try
    for number, pause in enumerate((None, *PAUSES), 1):
        if pause is not None:
            prepared_operands.prepared.clear()
            gc.collect()
            empty_pools()
            time.sleep(pause)
        try:
            with nullcontext() if pause is None else _turns.turn(alone=True):
                made = work()
        except Exception as error:
            if not is_full(error):
                raise
            reason = str(error) or type(error).__name__
        else:
            if reason:
                _tell_healed(what, reason, number)
            return made
    known = [
        f"{what} found no room ({reason})",
        "" if needs is None else f"it needs {units.size(needs)}",
        "" if peak is None else f"the plan expects {units.size(peak)} on a worker at the peak",
        figures(),
    ]
    raise DeviceMemoryError(
        f"the GPU's memory is full: {'; '.join(filter(None, known))}. Use smaller blocks, more GPUs, or free what "
        f"other arrays and programs hold there"
    )


def _tell_healed(what: str, reason: str, number: int) -> None:
    """Say in the log, and to telemetry, that the memory was full for a while."""
    logger.warning(
        "the GPU's memory was full (%s): %s was made at try %d, alone on the GPU", reason, what.rstrip(","), number
    )
    if in_task():
        from distributed import get_worker

        worker = get_worker()
        worker.log_event(HEALED_TOPIC, {"task": worker.get_current_task(), "what": what.rstrip(",")})


def namespace(block: Any) -> Any:
    """Return the library that a block belongs to: CuPy or NumPy."""
    if not hasattr(block, "__cuda_array_interface__"):
        return numpy
    import cupy

    return cupy


def carrier(dtype: numpy.dtype[Any]) -> numpy.dtype[Any]:
    """Return the type of CuPy arrays that hold elements of this type; it differs for 8-bit floats."""
    from distmm_kernels.layout.float8 import carrier

    return carrier(dtype)


def numbers(block: Any) -> Any:
    """Return a block of a type from `carrier` as float16, which has all 8-bit floats. Others are returned unchanged."""
    from distmm_kernels.layout.float8 import widened

    return widened(block) if block.dtype.names else block


def from_dlpack(source: Any) -> Any:
    """Return a CuPy view of another package's GPU memory, when that package's work there is done.

    It is exported by DLPack, or by CUDA's array interface, which does not always name the stream of that work.
    """
    import cupy

    if not hasattr(source, "__dlpack__"):
        view = cupy.asarray(source)
        view.device.synchronize()
        return view
    view = cupy.from_dlpack(source)
    with view.device:  # the view waits for that work on this stream only, and tasks run on other streams
        cupy.cuda.get_current_stream().synchronize()
    return view


def wait_for_current_stream(array: Any) -> None:
    """Wait for the work of this thread's current stream on the GPU of an array; nothing for arrays in host memory."""
    if hasattr(array, "__cuda_array_interface__"):
        import cupy

        with array.device:
            cupy.cuda.get_current_stream().synchronize()


def device_name() -> str:
    """Return the product name of the worker's GPU."""
    import cupy

    name: bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"]
    return name.decode()
