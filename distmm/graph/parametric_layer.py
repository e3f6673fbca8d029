"""Layers of a Dask graph that travel as their parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from dask.highlevelgraph import Layer

from distmm.graph.dask_tasks import Task
from distmm.graph.placement import Key

__all__ = ["ParametricLayer"]


class ParametricLayer(Layer):  # type: ignore[misc]
    """A layer that makes its tasks on the scheduler, where Dask optimises and expands graphs.

    It travels there as its parameters, some hundred bytes. For 100,000 tasks this saves seconds on the client
    and 70 MB on the connection.
    """

    @abstractmethod
    def _parameters(self) -> tuple[Any, ...]:
        """Return the arguments that make this layer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parameters(), {"annotations": self.annotations}

    @abstractmethod
    def _tasks(self) -> Iterator[Task]:
        """Make the tasks."""

    @cached_property
    def made(self) -> Mapping[Key, Task]:
        """The tasks."""
        return {task.key: task for task in self._tasks()}

    def is_materialized(self) -> bool:
        """Whether the tasks have been made."""
        return "made" in self.__dict__

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.made)

    def __getitem__(self, key: Key) -> Task:
        return self.made[key]
