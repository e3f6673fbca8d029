"""Decisions of the scheduler's plugin, without a scheduler; and questions to workers that die."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distmm.all_workers import everywhere
from distmm.scheduler.plugin import PlacementPlugin


def test_one_copy_of_a_block_stays_when_its_home_has_died() -> None:
    workers = {name: SimpleNamespace(address=name) for name in ("first", "second")}
    block = SimpleNamespace(state="memory", who_has=list(workers.values()), waiters=())
    removed: list[tuple[str, object]] = []
    plugin = PlacementPlugin()
    plugin.scheduler = SimpleNamespace(
        tasks={"A[0,0]": block},
        workers=workers,
        request_remove_replicas=lambda address, keys, stimulus_id: removed.extend((address, key) for key in keys),
    )
    plugin.ranks = list(workers)
    plugin.home = {"A[0,0]": "third, which is dead"}
    plugin.used_up = {("A[0,0]", 0), ("A[0,0]", 1)}  # both copies have seen their last use at the same time
    plugin._drop_copies()
    assert len(removed) == 1


class Asked:
    """A client whose workers give these answers."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def run(self, function: object, *args: object, on_error: str) -> dict[str, Any]:
        assert on_error == "return"
        return self.answers


def test_a_worker_that_dies_while_it_is_asked_is_left_out() -> None:
    client: Any = Asked({"one": 1, "two": ConnectionResetError("it died")})
    assert everywhere(client, len) == {"one": 1}


def test_an_error_of_the_question_itself_is_raised() -> None:
    client: Any = Asked({"one": 1, "two": ZeroDivisionError("a mistake")})
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        everywhere(client, len)
