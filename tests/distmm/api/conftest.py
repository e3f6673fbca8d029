"""What several tests of this folder need: Dask without threads, and a look at the products that are planned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dask
import pytest

from distmm.product.product import Gemm


@pytest.fixture
def synchronous() -> Iterator[None]:
    """Dask computes in this thread, unless a test says where."""
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Gemm]:
    """The matrix products that become lazy arrays."""
    seen: list[Gemm] = []
    array = Gemm.array

    def noting(self: Gemm, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return array(self, *args, **kwargs)

    monkeypatch.setattr(Gemm, "array", noting)
    return seen
