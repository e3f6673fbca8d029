"""Options of a cluster that make its GPUs slow are named once, with what mends them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from distributed import Client

from distmm.clusters import advice


def fact(**more: Any) -> dict[str, Any]:
    return {"ucx": True, "spills_at": int(0.8 * 80e9), "total": int(80e9), **more}


@pytest.mark.parametrize(
    ("facts", "kinds"),
    [
        ({"tcp://10.0.0.1:1": fact(), "tcp://10.0.0.1:2": fact(spills_at=None)}, set()),
        ({"tcp://10.0.0.1:1": fact(), "tcp://10.0.0.2:1": fact()}, {"protocol"}),
        ({"tcp://10.0.0.1:1": fact(ucx=False), "tcp://10.0.0.2:1": fact(ucx=False)}, set()),
        ({"ucx://10.0.0.1:1": fact(), "ucx://10.0.0.2:1": fact()}, set()),
        ({"ucx://10.0.0.1:1": fact(), "ucx://10.0.0.2:1": fact(spills_at=10**9)}, {"device_memory_limit"}),
        ({"tcp://a:1": fact(spills_at=10**9), "tcp://b:1": fact()}, {"protocol", "device_memory_limit"}),
    ],
)
def test_only_options_that_cost_much_are_named(facts: dict[str, Any], kinds: set[str]) -> None:
    texts = advice.found(facts)
    assert set(texts) == kinds
    assert all(f"{kind}=" in text for kind, text in texts.items())


def test_each_is_said_once(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=advice.logger.name):
        for port in (1, 2, 3):
            advice.say(client, {f"tcp://10.0.0.1:{port}": fact(spills_at=10**9)})
    (message,) = caplog.messages
    assert message.startswith("tcp://10.0.0.1:1 moves blocks to host memory when they take more than 1 GB of its GPU's")
