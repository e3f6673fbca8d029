"""Products that add to a C: `gram(..., beta, C)` as SYRK and HERK do, and C itself as `out`."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client
from hypothesis import given, settings
from hypothesis import strategies as st

import distmm
from distmm.errors import InputError
from distmm.product.chains import Chains
from tests.distmm.api.symmetric import mirrored, truth
from tests.exact_sums import whole_numbers
from tests.tables import later, number_of

pytestmark = pytest.mark.usefixtures("synchronous")


def square(size: int, dtype: str, batch: tuple[int, ...] = (), hermitian: bool = True) -> np.ndarray:
    """A symmetric or Hermitian C."""
    x = whole_numbers((*batch, size, size), dtype, 7)
    return x + mirrored(x, hermitian)


@settings(max_examples=number_of(40))
@given(
    st.lists(st.integers(1, 3), max_size=1),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(["f8", "i4", "c16"]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    *[st.booleans()] * 4,
)
def test_c_is_added_to_a_symmetric_product(
    batch: list[int],
    shape: tuple[int, int],
    dtype: str,
    chunks: tuple[int, int],
    trans: bool,
    hermitian: bool,
    lazy: bool,
    broadcast: bool,
) -> None:
    a = whole_numbers((*batch, *shape), dtype)
    size = shape[1] if trans else shape[0]
    c = square(size, dtype, () if broadcast else tuple(batch), hermitian)
    C = da.from_array(c, chunks=3) if lazy else c
    found = distmm.gram(
        a, alpha=3, beta=-2, C=C, trans=trans, hermitian=hermitian, blocks=chunks[::-1] if trans else chunks
    ).compute()
    expected = 3 * truth(a, trans, hermitian) - 2 * c
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_only_the_lower_triangle_of_c_is_read() -> None:
    a = whole_numbers((9, 5), "f8")
    c = np.where(np.tri(9, dtype=bool), square(9, "f8"), np.nan)
    found = distmm.gram(a, beta=1, C=c, blocks=(4, 3)).compute()
    np.testing.assert_array_equal(found, truth(a) + square(9, "f8"))


@pytest.mark.parametrize(
    ("dtype", "trans"), later([("c16", True), ("f4", False), ("f8", True), ("c16", False)], first=2)
)
def test_sums_of_products_are_made_in_place(dtype: str, trans: bool, client: Client) -> None:
    batches = [whole_numbers((40, 24) if trans else (24, 40), dtype, seed) for seed in range(3)]
    start = square(24, dtype)
    for more in ({}, {"client": client}):
        total = start.copy()
        for x in batches:
            edges = (10, 16) if trans else (16, 10)
            assert distmm.gram(x, trans=trans, beta=1, C=total, out=total, blocks=edges, **more) is total
        np.testing.assert_array_equal(total, start + sum(truth(x, trans) for x in batches))
        np.testing.assert_array_equal(total, mirrored(total))


@pytest.fixture
def addends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The C that each product reads."""
    seen: list[Any] = []
    begin = Chains.__init__

    def noting(self: Chains, *fields: Any, **more: Any) -> None:
        begin(self, *fields, **more)
        seen.append(self.product.c.source if self.product.c is not None else None)

    monkeypatch.setattr(Chains, "__init__", noting)
    return seen


def test_c_is_copied_only_where_a_task_may_run_twice(addends: list[Any], client: Client) -> None:
    a, b = whole_numbers((6, 9), "f8"), whole_numbers((9, 7), "f8", 1)
    c = whole_numbers((6, 7), "f8", 2)
    for more, shared in (({}, True), ({"client": client}, False)):
        z = c.copy()
        distmm.gemm(2, a, b, -1, z, out=z, blocks=(4, 4, 4), **more)
        assert np.shares_memory(addends.pop(), z) is shared
        np.testing.assert_array_equal(z, 2 * (a @ b) - c)


@pytest.mark.parametrize("waves", ["w1", "w2"])
def test_waves_add_in_place(client: Client, waves: str) -> None:
    a, c = whole_numbers((600, 40), "f4"), square(600, "f4")  # more than a megabyte: workers write
    out = c.copy()
    distmm.gram(a, beta=1, C=out, out=out, plan=f"g2x2x1 b150x20x150 p1 {waves} l2", client=client)
    np.testing.assert_array_equal(out, truth(a) + c)


def test_vectors_are_added_in_place() -> None:
    a, x, y = whole_numbers((6, 9), "f8"), whole_numbers((9,), "f8", 1), whole_numbers((6,), "f8", 2)
    z = y.copy()
    distmm.gemm(1, a, x, 1, z, out=z)
    np.testing.assert_array_equal(z, a @ x + y)


def test_a_lazy_c_becomes_the_sum() -> None:
    a, c = whole_numbers((9, 5), "f8"), square(9, "f8")
    C = da.from_array(c, chunks=4)
    assert distmm.gram(a, beta=1, C=C, out=C) is C
    np.testing.assert_array_equal(C.compute(), truth(a) + c)


def test_a_c_that_is_only_in_part_out_is_refused(tmp_path: Any) -> None:
    a, z = np.ones((4, 4)), np.zeros((5, 4))
    for c, out in ((z[1:], z[:4]), (z[:4].T, z[:4])):
        with pytest.raises(InputError, match="out shares memory with C"):
            distmm.gemm(1, a, a, 1, c, out=out)
    with pytest.raises(InputError, match="out shares memory with A"):
        distmm.gram(a, beta=1, C=a, out=a)
    mapped = np.lib.format.open_memmap(tmp_path / "c.npy", "w+", np.float64, (4, 4))
    with pytest.raises(InputError, match="out shares memory with C"):
        distmm.gram(a, beta=1, C=mapped, out=mapped)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"beta": 1}, "beta is 1, but there is no C"),
        ({"beta": 1, "C": np.ones((3, 4))}, r"C has shape \(3, 4\), the product is 3 x 3: give a symmetric C"),
        ({"beta": 1, "C": np.ones(3)}, r"C has shape \(3,\), the product is 3 x 3"),
        ({"beta": 1j, "C": np.ones((3, 3))}, "beta is 1j, and a Hermitian product needs a real beta"),
        ({"beta": "1", "C": np.ones((3, 3))}, "beta is '1', a str"),
    ],
)
def test_addends_that_do_not_suit_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        distmm.gram(np.ones((3, 4), "c8"), **more)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "f8", "c8"])
def test_gpus_add_in_place(dtype: str) -> None:
    a, c = whole_numbers((300, 200), dtype), square(200, dtype)
    out = c.copy()
    distmm.gram(a, trans=True, beta=1, C=out, out=out, device="gpu", blocks=(128, 96))
    np.testing.assert_array_equal(out, truth(a, trans=True) + c)
