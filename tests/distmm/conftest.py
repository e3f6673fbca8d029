"""What tests of several folders need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distmm.clusters import cluster


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let plans find so many bytes on each worker."""
    described = cluster.describe

    def limit(size: int) -> None:
        monkeypatch.setattr(cluster, "describe", lambda *args, **how: replace(described(*args, **how), memory=size))

    return limit
