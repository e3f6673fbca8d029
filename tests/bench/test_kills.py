"""A few kills in the test suite; `tests/bench/kills.py` makes hundreds."""

from __future__ import annotations

import pytest

from distmm import clusters
from tests import forked
from tests.bench import kills


@pytest.mark.bits
@pytest.mark.minutes
def test_products_keep_their_bits_while_workers_are_killed() -> None:
    with (
        forked.workers(),
        clusters.local(device="cpu", workers=3, memory_limit="2GiB", dashboard=None, quiet=True) as client,
    ):
        outcome = kills.run(client, kills=4, seed=1, pause=(0.1, 1.0), patience=60)
    assert outcome.kills >= 4
    assert (outcome.wrong, outcome.hung) == ([], [])
