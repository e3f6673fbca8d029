"""A few kills in the test suite; `tests/bench/kills.py` makes hundreds."""

from __future__ import annotations

import pytest

from distmm import clusters
from tests.bench import kills


@pytest.mark.parametrize("seed", [1, 2])
def test_products_keep_their_bits_while_workers_are_killed(seed: int) -> None:
    with clusters.local(device="cpu", workers=3, memory_limit="2GiB", dashboard=None, quiet=True) as client:
        outcome = kills.run(client, kills=2, seed=seed, pause=(0.1, 1.0), patience=60)
    assert outcome.kills >= 2
    assert (outcome.wrong, outcome.hung) == ([], [])
