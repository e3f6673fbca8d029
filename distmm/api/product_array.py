"""Lazy products whose `compute` fills an array of this process, as ``out=`` does.

Dask's own way joins all blocks on one worker, and sends the result to the scheduler, which sends it to this process.
Workers of this process's machine write each block to its place instead (`distmm.api.out_array`). Dask's way stays for
what is not computed by `compute` alone, as ``dask.compute(C, C.sum())``, and for workers that do not reach this
process's memory. It stays for ``dask.compute(C)``, too. Of Dask's hooks (2026.7) none runs in this process when the
blocks are there: what `__dask_postcompute__` returns is a task of a worker, and `__dask_optimize__` changes the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np
import psutil
from dask.base import get_scheduler
from dask.core import flatten
from distributed import Client, futures_of, get_worker

from distmm.api import out_array

__all__ = ["ProductArray"]

Fill = Callable[[np.ndarray, Client], bool]  # computes a product into an array; False where Dask is to do it


class ProductArray(da.Array):  # type: ignore[misc]  # Dask's classes are untyped
    """A product, lazy or persisted, with blocks in host memory; what is made from it are Dask arrays as usual."""

    _fill: Fill | None
    _made_as: str

    @classmethod
    def of(cls, array: da.Array, fill: Fill | None = None) -> ProductArray:
        """Take over a Dask array; `fill` computes a lazy one, and a persisted one needs none."""
        self = cls(array.dask, array.name, array.chunks, meta=array)
        self._fill, self._made_as = fill, array.name
        return self

    def compute(self, **kwargs: Any) -> Any:
        """Compute the array as `dask.array.Array.compute` does; blocks come here directly where workers reach `out`.

        Parameters
        ----------
        **kwargs
            Dask's; with any of them, the computation is Dask's too.

        Returns
        -------
        numpy.ndarray
            In this process's own memory, and writable.
        """
        changed = self.name != self._made_as  # by C[0] = 1, and as `out` of a function of NumPy
        client = None if kwargs or changed or self.nbytes > psutil.virtual_memory().available else _client(self)
        if client is not None:
            out = np.empty(self.shape, self.dtype)
            if self._filled(out, client):
                return out
        return super().compute(**kwargs)

    def _filled(self, out: np.ndarray, client: Client) -> bool:
        """Compute into `out`; return False if that is left to Dask."""
        if self._fill is not None and next(flatten(self.__dask_keys__())) not in client.futures:
            return self._fill(out, client)
        if self._fill is None and not futures_of(self):
            return False
        to = out_array.target(out, client)  # the blocks are there
        if to is not None:
            out_array.store([(self, [None])], out, to, client)
        return to is not None

    def __dask_postpersist__(self) -> tuple[Callable[..., ProductArray], tuple[Any, ...]]:
        return _rebuilt, super().__dask_postpersist__()


def _rebuilt(graph: Any, rebuild: Callable[..., da.Array], more: tuple[Any, ...], **how: Any) -> ProductArray:
    return ProductArray.of(rebuild(graph, *more, **how))


def _client(array: da.Array) -> Client | None:
    """Return the client that Dask would compute with; None for other schedulers, and in a task."""
    client = getattr(get_scheduler(collections=[array]), "__self__", None)
    if not isinstance(client, Client) or client.status != "running":
        return None
    try:
        get_worker()
    except ValueError:
        return client
    return None  # Dask lets another task have the thread of one that waits
