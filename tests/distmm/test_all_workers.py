"""Questions to all workers, some of which die."""

from __future__ import annotations

from typing import Any

import pytest

from distmm.all_workers import everywhere


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
