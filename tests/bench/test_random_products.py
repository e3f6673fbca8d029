"""The program of random products."""

from __future__ import annotations

import pytest

import distmm
from tests.bench.random_products import Draws, run


def test_random_products_are_those_of_numpy() -> None:
    count, wrong, refused = run(Draws(3, on_gpu=False, large=0.0), seconds=100, most=60)
    assert (count, wrong) == (60, [])
    assert not refused


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = distmm.matmul
    monkeypatch.setattr(distmm, "matmul", lambda *args, **how: right(*args, **how) + 1)
    _, wrong, _ = run(Draws(3, on_gpu=False, large=0.0), seconds=100, most=20)
    assert wrong
