"""A graph that is made when something reads it. Many products are computed by a call in this process, and need none."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import dask.array as da
from dask.highlevelgraph import HighLevelGraph


class LaterGraph(HighLevelGraph):  # type: ignore[misc]
    """A graph that `make` makes when its layers or dependencies are first read."""

    def __init__(self, make: Callable[[], HighLevelGraph]) -> None:
        self._make, self._lock = make, Lock()

    def __getattr__(self, name: str) -> Any:
        # Python calls this for what the instance does not have yet. Each thread that asks finds the same graph.
        if name not in ("layers", "dependencies", "key_dependencies"):
            raise AttributeError(name)
        with self._lock:
            if "layers" not in self.__dict__:
                made = self._make()
                super().__init__(made.layers, made.dependencies, made.key_dependencies)
                del self._make  # it holds the operands
        return self.__dict__[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return HighLevelGraph, (self.layers, self.dependencies, self.key_dependencies)


def with_graph(graph: HighLevelGraph, kind: type[da.Array], *how: Any, **more: Any) -> da.Array:
    """Make a Dask array of a class `kind` with a graph. Its constructor would read the layers of the graph."""
    made = kind(HighLevelGraph({}, {}), *how, **more)
    made.dask = graph
    return made
