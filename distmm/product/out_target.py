"""The user's `out`: which arrays may receive a product, and who writes its blocks.

- Workers write into a NumPy or CuPy array of this process if they can access its memory.
- Workers write into a Zarr array in a folder that all of them see, or in an object store, and into other objects with
  ``chunks`` or ``shards`` whose elements are not in memory.
- This process writes one block after the other in all other cases: HDF5 datasets, arrays without chunks, and memory
  and files that the workers cannot access.
- A Dask array has no memory to write to: it becomes the lazy product.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distmm import units
from distmm.all_workers import everywhere
from distmm.errors import DoesNotFitError, InputError
from distmm.planning.cluster_spec import ClusterSpec
from distmm.planning.write_units import unit_of
from distmm.product.aliasing import overlap, repeats
from distmm.product.array_types import check_like_array, is_dask, kind_of, package_of
from distmm.product.context import tasks_share_memory
from distmm.product.dlpack import as_writable, is_foreign
from distmm.transfer import ClientArray, share
from distmm.transfer.gpu_allocations import is_on_gpu
from distmm.worker.copied_output import CopiedOutput, is_light

if TYPE_CHECKING:
    from distributed import Client


def check_out(
    out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], kind: Literal["numpy", "cupy"], operands: Mapping[str, Any]
) -> None:
    """Refuse an `out` that cannot receive the product. `operands` maps names to arrays.

    Raises
    ------
    InputError
        If `out` has another shape, or a type that would change values. If it is read-only, has a hard mask or elements
        that share memory, or shares memory or storage with an operand. If it is a Dask array with blocks of another
        kind (NumPy, CuPy) than the product.
    """
    check_like_array(out, "out", "__setitem__")
    to = np.dtype(out.dtype)  # NumPy casts numbers to objects, strings and raw bytes, too; bfloat16 has their kind "V"
    is_number = to.kind in "biufcV" and to.type is not np.void
    if tuple(out.shape) != shape or not is_number or not np.can_cast(dtype, to, "same_kind"):
        raise InputError(
            f"out is {tuple(out.shape)} {out.dtype}, the product {shape} {dtype}: give an out of that shape and type"
        )
    if is_dask(out) and (given := kind_of(out, "out")) != kind:
        raise InputError(f"out has {given} blocks, the operands have {kind} blocks: give an out with {kind} blocks")
    if is_dask(out):
        return  # it may also be an operand: the product keeps the old tasks of `out`
    of_file = package_of(out) == "h5py" and out.file.mode == "r"
    if (isinstance(out, np.ndarray) and not out.flags.writeable) or getattr(out, "read_only", False) or of_file:
        raise InputError("out is read-only: give a writable array")
    if getattr(out, "hardmask", False):
        raise InputError("out has a hard mask, below which nothing is written: call its soften_mask() first")
    if repeats(out):
        raise InputError(f"elements of out share memory (shape {out.shape}, strides {out.strides}): give a copy of it")
    for name, operand in operands.items():
        if overlap(out, operand):
            what = "memory" if package_of(out) in ("numpy", "cupy") else "storage"
            raise InputError(f"out shares {what} with {name}, which is read while out is written: use another array")


def elements_of(out: Any) -> Any:
    """Return the array with the elements of `out`: a view of a DLPack array, the data of an xarray object, or `out`.

    Raises
    ------
    InputError
        For a DLPack array as `distmm.product.dlpack.as_native`. For an xarray object whose elements are not in
        memory, as it reads them again at each access.
    """
    if is_foreign(out):
        return as_writable(out, "out")
    if package_of(out) != "xarray" or not hasattr(out, "data") or not hasattr(out, "dims"):
        return out
    if out.data is not out.data:
        raise InputError(
            f"out is a {type(out).__name__} of xarray that is not in memory: load it first (out.load()), or give the "
            "array or file that it is made of"
        )
    return elements_of(out.data)


def is_written(out: Any) -> bool:
    """Whether blocks of C are written to `out`. A Dask array is not written to: it becomes the lazy product."""
    return out is not None and (is_foreign(out) or not is_dask(elements_of(out)))


def check_unit(out: Any, cluster: ClusterSpec) -> None:
    """Refuse an `out` whose chunks, or shards, are larger than the memory of a worker.

    Raises
    ------
    DoesNotFitError
        With the size of a chunk and the free memory.
    """
    unit = unit_of(out)
    memory = cluster.memory if cluster.device == "cpu" else cluster.host_memory
    if unit is not None and memory is not None and (nbytes := math.prod(unit) * out.dtype.itemsize) > memory:
        raise DoesNotFitError(
            f"out is written in chunks of {' x '.join(map(str, unit))}, {units.size(nbytes)} each, and a worker has "
            f"{units.size(memory)} free: make out with smaller chunks (or shards)"
        )


def target(out: Any, client: Client | None) -> Any:
    """Return the object that tasks write to: `out`, or a handle of its memory. None if this process has to write.

    Raises
    ------
    InputError
        If Dask's scheduler runs tasks in other processes, and these cannot access `out`.
    """
    if client is None and tasks_share_memory():
        return out
    if package_of(out) in ("numpy", "cupy"):
        to = None if client is None else share(out, client, writable=True)
    else:
        to = _for_copies(out, client)
    if to is None and client is None:
        raise InputError(
            f"Dask's scheduler runs tasks in other processes, which cannot write into this {type(out).__name__}: use "
            "scheduler='threads', or a cluster"
        )
    return to


def takes_gpu_blocks(out: Any, to: Any) -> bool:
    """Whether blocks in GPU memory may be written. `to` is that of `target`.

    Workers write them to memory of this process. As they are, only arrays in GPU memory take them.
    """
    return isinstance(to, ClientArray) or is_on_gpu(out)


def _for_copies(out: Any, client: Client | None) -> Any:
    """Return what tasks of several processes write to at the same time: different chunks (or shards) of `out`, or None.

    This includes Zarr arrays in folders and object stores. Zarr's other stores may be in memory. An object of another
    package may be, too: if a task finds that, `distmm.product.sinks.store` begins again in this process.
    """
    if unit_of(out) is None or package_of(out) == "h5py":
        return None
    import zarr

    from distmm.storage.opened import in_memory
    from distmm.storage.zarr_internals import store_of

    if not isinstance(out, zarr.Array):
        return CopiedOutput(out) if is_light(out) else None
    store = store_of(out)
    if isinstance(store, zarr.storage.LocalStore):
        return _in_folder(out, store.root, client)
    remote = isinstance(store, (zarr.storage.FsspecStore, zarr.storage.ObjectStore)) and not in_memory(store)
    return out if remote else None


def _in_folder(out: Any, folder: Path, client: Client | None) -> Any:
    """Return a Zarr array in a folder for processes with another working folder; None if a worker does not see it."""
    import zarr

    root = folder.absolute()
    metadata = [root / out.path / name for name in ("zarr.json", ".zarray")]
    here = _stamps(metadata)
    if client is not None and any(there != here for there in everywhere(client, _stamps, metadata).values()):
        return None
    return out if root == folder else zarr.open_array(str(root), path=out.path, mode="r+")


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int] | None]:
    """Return the size and the time of the last change of files, as far as this process sees them."""
    found = (path.stat() if path.is_file() else None for path in paths)
    return [None if one is None else (one.st_size, one.st_mtime_ns) for one in found]
