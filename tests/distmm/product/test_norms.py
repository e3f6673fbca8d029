"""Where the norms of rows are computed that `nearest` needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import dask.array as da
import numpy as np
import pytest

from distmm.product import reduced_product
from distmm.product.choices import Choices
from distmm.product.operand import Operand, wrap
from distmm.product.product import Gemm
from distmm.product.reduced_product import norms_of
from tests.distmm.api.reduced import operands


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_norms_of_arrays_are_computed_where_products_are_and_those_of_chunks_where_the_chunks_are(
    device: Literal["cpu", "cuda"], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, blocked = [], reduced_product.blocked

    def recorded(operand: Operand, chunks: Any, where: Any, client: Any) -> da.Array:
        devices.append(where)
        return blocked(operand, chunks, "cpu", client)

    monkeypatch.setattr(reduced_product, "blocked", recorded)
    a, b = operands()
    product = Gemm.of(wrap(da.from_array(a, 10), "A"), wrap(b, "B"))
    plan = product.plan(Choices.of())
    norms = norms_of(product, replace(plan, cluster=replace(plan.cluster, device=device)), None)
    assert devices == ["cpu", device]
    for squares, rows in zip(norms, (a, b.T), strict=True):
        np.testing.assert_allclose(squares.compute(), (rows.astype("f8") ** 2).sum(axis=1))
