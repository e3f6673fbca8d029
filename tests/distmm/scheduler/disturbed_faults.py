"""Which faults happen in one schedule of `disturbed_cluster.py`, and how often."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Faults"]


@dataclass
class Faults:
    """How many of each happen in one schedule, at most; `fail`: the share of tasks that fail."""

    late: bool = False
    kill: int = 0
    join: int = 0
    pause: int = 0
    cancel: int = 0
    leave: int = 0
    again: int = 0
    retry: int = 0
    restart: int = 0
    fail: float = 0.0

    @classmethod
    def draw(cls, rng: random.Random) -> Faults:
        """Draw some kinds of faults; one schedule in six has none."""
        if rng.random() < 1 / 6:
            return cls(late=rng.random() < 0.5)
        drawn: dict[str, Any] = {one.name: rng.randint(1, 3) for one in fields(cls) if rng.random() < 0.35}
        fail = rng.choice([0.01, 0.05]) if "fail" in drawn else 0.0
        return cls(**{**drawn, "late": "late" in drawn, "fail": fail, "restart": drawn.get("restart", 0) // 3})

    def __str__(self) -> str:
        return ", ".join(f"{one.name} {at}" for one in fields(self) if (at := getattr(self, one.name))) or "none"
