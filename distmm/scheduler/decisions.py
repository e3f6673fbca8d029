"""What the state machine decides, and the plugin carries out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from distmm.graph.placement import Key
from distmm.scheduler.replicas import Replica


@dataclass(slots=True)
class Arrangement:
    """What happens to the tasks of a graph that has just arrived, before any of them runs.

    `order` is added to the priority of a task: tasks of early steps start first, whatever their chains.
    """

    hold: list[tuple[Key, int]] = field(default_factory=list)  # task, order: it waits for its step
    place: list[tuple[Key, int, int]] = field(default_factory=list)  # task, rank, order: it may run


@dataclass(slots=True)
class Decisions:
    """What to do now. Drops come first: they make room. Tasks and blocks that are gone by then are left out."""

    drop: list[Replica] = field(default_factory=list)
    start: list[tuple[Key, int]] = field(default_factory=list)  # held tasks that may run now, at these ranks
    copy: list[Replica] = field(default_factory=list)
    busy: bool | None = None  # whether a product has unfinished steps, where that may have changed
