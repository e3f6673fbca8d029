"""Errors of tasks reach the client as what they are: by their kind the command line knows what to say."""

from __future__ import annotations

import pytest
from distributed import Client

from distmm import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_arrive_from_workers_as_they_were_raised(name: str, client: Client) -> None:
    kind = getattr(errors, name)

    def task() -> None:
        try:
            [][0]
        except IndexError as error:
            raise kind("what is wrong") from error

    with pytest.raises(kind, match="what is wrong") as caught:
        client.submit(task, pure=False).result()
    assert caught.type is kind
