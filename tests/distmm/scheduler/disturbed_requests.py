"""Products for `disturbed_cluster.py`: as graphs that a client sends one after another. Their tasks are never run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from dask._expr import HLGExpr
from dask.core import flatten
from dask.highlevelgraph import HighLevelGraph
from distributed.protocol import Serialized, serialize, to_serialize

from distmm.planning.plan import Plan
from tests.distmm.scheduler.drawn_products import Drawn, graphs, planned

__all__ = ["Graph", "Request", "request"]


@dataclass(frozen=True)
class Graph:
    """A graph as a client sends it, and the keys whose results it waits for."""

    expr: Serialized
    keys: tuple[Any, ...]


@dataclass
class Request:
    """What a client asks for.

    Attributes
    ----------
    graphs : list of Graph
        Sent in this order, at most two at a time.
    """

    drawn: Drawn
    graphs: list[Graph]
    waits: list[set[Any]] = field(default_factory=list)  # for each graph that is sent: keys without a result

    @property
    def plan(self) -> Plan:
        """The plan of the product."""
        return planned(self.drawn)


def request(drawn: Drawn) -> Request:
    """Return a request whose names are its own; but for those of A and B, which it may share with others."""
    return Request(drawn, list(_sent(drawn)))


@lru_cache(100)
def _sent(drawn: Drawn) -> tuple[Graph, ...]:
    return tuple(_serialized(keys, graph) for keys, graph in graphs(drawn))


def _serialized(keys: list[Any], graph: HighLevelGraph) -> Graph:
    return Graph(Serialized(*serialize(to_serialize(HLGExpr(graph)), on_error="raise")), tuple(flatten([keys])))
