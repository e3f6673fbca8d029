"""Products into arrays that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import distmm
from distmm.errors import InputError
from distmm.host import attach, lent


def operands(m: int = 500, k: int = 300, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m)
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


@pytest.mark.parametrize("order", ["C", "F"])
def test_workers_write_into_a_numpy_array(client: Client, order: Any) -> None:
    a, b = operands()
    out = np.full((500, 400), np.nan, order=order)
    assert distmm.matmul(a, b, out=out, client=client, blocks=(128, 100, 150)) is out
    np.testing.assert_allclose(out, a @ b)


def test_a_view_with_gaps_is_filled_too(client: Client) -> None:
    a, b = operands()
    whole = np.zeros((500, 800))
    distmm.gemm(2, a, b, 3, np.ones((500, 400)), out=whole[:, ::2], client=client)
    np.testing.assert_allclose(whole[:, ::2], 2 * (a @ b) + 3)
    assert not whole[:, 1::2].any()


def test_blocks_come_to_the_client_where_workers_do_not_reach_it(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "allow", lambda: False)
    monkeypatch.delitem(lent._tried, client, raising=False)
    a, b = operands()
    out = np.zeros((500, 400))
    distmm.matmul(a, b, out=out, client=client, blocks=(128, 100, 150))
    np.testing.assert_allclose(out, a @ b)
    monkeypatch.delitem(lent._tried, client)


def test_without_a_cluster_this_process_writes() -> None:
    a, b = operands(30, 20, 10)
    out = np.zeros((30, 10))
    distmm.matmul(a, b, out=out)
    np.testing.assert_allclose(out, a @ b)
    vector = np.zeros(30)
    distmm.matmul(a, b[:, 0], out=vector)
    np.testing.assert_allclose(vector, a @ b[:, 0])


def test_workers_write_into_a_zarr_array(client: Client, tmp_path: Path) -> None:
    a, b = operands()
    out = zarr.create_array(tmp_path / "c.zarr", shape=(500, 400), chunks=(128, 150), dtype="f8")
    distmm.matmul(a, b, out=out, client=client, blocks=(128, 100, 150))
    np.testing.assert_allclose(out[:], a @ b)


def test_an_out_that_cannot_take_the_product_is_refused_before_work() -> None:
    a, b = operands(30, 20, 20)
    read_only = np.zeros((30, 20))
    read_only.flags.writeable = False
    for out, reason in (
        (np.zeros((20, 30)), "make out like the product"),
        (np.zeros((30, 20), "i4"), "make out like the product"),
        (read_only, "read-only"),
        ([1, 2], "list without"),
        (a[:, ::-1], "shares memory with A"),
    ):
        with pytest.raises(InputError, match=reason):
            distmm.matmul(a, b, out=out)
