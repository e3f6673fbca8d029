"""Errors of tasks reach the client as what they are: by their kind the command line knows what to say."""

from __future__ import annotations

import pytest
from distributed import Client

from distmm import errors


def failing(name: str) -> None:
    try:
        [][0]
    except IndexError as error:
        raise getattr(errors, name)("what is wrong") from error


@pytest.mark.parametrize("name", [name for name, kind in vars(errors).items() if isinstance(kind, type)])
def test_errors_arrive_from_workers_as_they_were_raised(name: str, client: Client) -> None:
    kind = getattr(errors, name)
    with pytest.raises(kind, match="what is wrong") as caught:
        client.submit(failing, name, pure=False).result()
    assert caught.type is kind
