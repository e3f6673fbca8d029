"""Questions to all workers, some of which die."""

from __future__ import annotations

from typing import Any

import pytest
from distributed import Client, LocalCluster

from distmm.all_workers import everywhere, workers_of


class Asked:
    """A client whose workers give these answers."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def run(self, function: object, *args: object, on_error: str, callback_timeout: float | None) -> dict[str, Any]:
        assert on_error == "return"
        assert callback_timeout is None
        return self.answers


def test_all_workers_are_listed_though_the_client_replaces_its_own_list() -> None:
    with LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as cluster, Client(cluster) as client:

        class Renewed(Client):
            """A client that has replaced its list before its owner can read it, as it does every two seconds."""

            async def _update_scheduler_info(self, n_workers: int = 0) -> None:
                await super()._update_scheduler_info(n_workers)
                await super()._update_scheduler_info(0)

        with Renewed(cluster.scheduler_address) as renewed:
            assert renewed.scheduler_info(n_workers=-1)["workers"] == {}
            assert workers_of(renewed).keys() == workers_of(client).keys() == cluster.scheduler.workers.keys()


def test_a_worker_that_dies_while_it_is_asked_is_left_out() -> None:
    client: Any = Asked({"one": 1, "two": ConnectionResetError("it died")})
    assert everywhere(client, len) == {"one": 1}


def test_an_error_of_the_question_itself_is_raised() -> None:
    client: Any = Asked({"one": 1, "two": ZeroDivisionError("a mistake")})
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        everywhere(client, len)
